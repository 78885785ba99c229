"""FASTA files, read one record at a time: plain, gzip or bgzip, told apart by content, from files or pipes."""

import gzip
import io
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import dnaio

from launcher.errors import RequestError, nearest
from launcher.genome import alphabet

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

Tap = Callable[[memoryview], object]
"""Is given every block of a file as it lies on disk."""

KEY = "data.fasta"

GZIP_MAGIC = b"\x1f\x8b"
BGZF_EOF = bytes.fromhex("1f8b08040000000000ff0600424302001b0003000000000000000000")
"""The empty block that ends every whole bgzip file (SAM specification, section 4.1.2)."""

OTHER_FORMATS = {
    b"BZh": "bzip2 data",
    b"\xfd7zX": "xz data",
    b"\x28\xb5\x2f\xfd": "zstandard data",
    b"PK\x03\x04": "a zip archive",
}
BLOCK_BYTES = 1 << 18
LONGEST_CHUNK = 1 << 20
"""Letters of a line looked at together when the line of a fault is searched for: some genomes have no line breaks."""

DECOMPRESSION_ERRORS = (EOFError, gzip.BadGzipFile, zlib.error)


class Record(NamedTuple):
    name: str
    """The header up to its first blank."""
    codes: alphabet.Codes
    """(bases,) uint8"""


class FormatError(Exception):
    """What is wrong with the text that was read so far, and what to do about it."""


def records(path: Path, tap: Tap | None = None) -> Iterator[Record]:
    """The records of a FASTA file, in order; one is held at a time.

    ``tap`` is given every block of the file as it lies on disk, all of them by the time that the iterator ends.
    Raises RequestError with one line that names the file and the line, if the file cannot be read to its end as DNA.
    """
    name: str | None = None
    num_letters = num_ambiguous = num_records = 0
    try:
        with open_input(path, tap) as stream:
            pairs = cast(Iterable[tuple[str, str]], dnaio.FastaReader(stream, sequence_class=_pair))
            for header, sequence in pairs:
                name, codes, ambiguous = _record(header, sequence)
                num_records += 1
                num_letters += len(codes)
                num_ambiguous += ambiguous
                yield Record(name, codes)
        if num_records == 0:
            raise FormatError(NO_RECORD)
        if 2 * num_ambiguous > num_letters:
            raise FormatError(AMBIGUOUS)
    except (FormatError, dnaio.FileFormatError, OSError, *DECOMPRESSION_ERRORS) as error:
        raise RequestError(f"{KEY}={path}{_locate(path, name, error)}") from None


def open_input(path: Path, tap: Tap | None = None) -> io.BufferedReader:
    """The text of a plain, gzip or bgzip file, as ASCII bytes; the magic bytes decide, not the name.

    Reading it raises EOFError for compressed data that end early (also for a bgzip file without its last block),
    another of DECOMPRESSION_ERRORS for damaged ones, and FormatError for bytes that are no text. Characters outside
    ASCII, which some headers have, are read as '?'.
    """
    raw = _Raw(open(path, "rb"), tap or (lambda block: None))  # noqa: SIM115 - the caller closes it
    return io.BufferedReader(_Text(raw), BLOCK_BYTES)


def line_of_record(path: Path, name: str, occurrence: int) -> int | None:
    """The line of the header of a record, by its name and the number (from 0) of records so named before it.

    None where the file cannot be read a second time.
    """
    if not is_regular(path):
        return None
    lines = _Lines(path)
    for starts_line, text in lines:
        if starts_line and text.startswith(">") and _name(text[1:]) == name:
            if occurrence == 0:
                return lines.number
            occurrence -= 1
    return None


def is_regular(path: Path) -> bool:
    """Whether a file can be read twice; a pipe cannot."""
    return stat.S_ISREG(os.stat(path).st_mode)


class _Raw(io.RawIOBase):
    """The bytes of a file as they lie on disk; every block goes to ``tap`` too."""

    def __init__(self, file: io.BufferedReader, tap: Tap) -> None:
        self._file, self._tap = file, tap
        self.head = self._pending = file.read(16)
        self.tail = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        view = memoryview(buffer)
        if self._pending:
            size = min(len(view), len(self._pending))
            view[:size], self._pending = self._pending[:size], self._pending[size:]
        else:
            size = self._file.readinto(view)
        if size:
            block = view[:size]
            self._tap(block)
            self.tail = (self.tail + bytes(block[-len(BGZF_EOF) :]))[-len(BGZF_EOF) :]
        return size

    def close(self) -> None:
        self._file.close()
        super().close()


class _Text(io.RawIOBase):
    """The decompressed text of a file as ASCII; see ``open_input`` for what reading it raises."""

    def __init__(self, raw: _Raw) -> None:
        self._raw = raw
        self._is_gzip = raw.head.startswith(GZIP_MAGIC)
        self._is_bgzip = self._is_gzip and bool(raw.head[3:4] and raw.head[3] & 4) and raw.head[12:14] == b"BC"
        buffered = io.BufferedReader(raw, BLOCK_BYTES)
        self._stream: io.BufferedIOBase = gzip.GzipFile(fileobj=buffered, mode="rb") if self._is_gzip else buffered
        self._broken: FormatError | None = None
        for magic, format_name in OTHER_FORMATS.items():
            if raw.head.startswith(magic):
                self._broken = FormatError(f"this is {format_name}; unpack it, or pack it with gzip or bgzip")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        if self._broken:
            raise self._broken
        view = memoryview(buffer)
        size = self._stream.readinto(view)
        if size == 0 and self._is_bgzip and self._raw.tail != BGZF_EOF:
            raise EOFError
        block = bytes(view[:size])
        if not block.isascii():
            view[:size] = block.translate(_TO_ASCII)
        nul = block.find(0)
        if nul >= 0:
            # What stands before it is handed on, so that the line can be told.
            self._broken = FormatError(BINARY)
            return self.readinto(buffer) if nul == 0 else nul
        return size

    def close(self) -> None:
        self._stream.close()
        self._raw.close()
        super().close()


_TO_ASCII = bytes(range(128)) + b"?" * 128

BINARY = "the file holds bytes that are no text; plain text is needed, alone or packed with gzip or bgzip"
NO_RECORD = "there is no record; a FASTA file has a line '>name' and then lines of bases"
AMBIGUOUS = (
    "most letters are not A, C, G, T or N, so this looks like protein, although all are IUPAC codes of DNA; "
    "give the DNA sequence"
)
NO_NAME = "a record without a name; write one after '>'"
CUT_SHORT = "the compressed data end early, so the file is cut short; copy or download it again"
DAMAGED = "the compressed data are damaged; copy or download the file again"


def _pair(name: str, sequence: str, _: None) -> tuple[str, str]:
    return name, sequence


def _name(header: str) -> str:
    return next(iter(header.split(maxsplit=1)), "")


def _record(header: str, sequence: str) -> tuple[str, alphabet.Codes, int]:
    """Name, codes and the number of letters that are neither A, C, G, T, U nor N."""
    name = _name(header)
    if not name:
        raise FormatError(NO_NAME)
    if not sequence:
        raise FormatError(_no_sequence(name))
    text = sequence.encode("ascii")
    try:
        codes = alphabet.encode(text)
    except ValueError:
        raise FormatError(_wrong_letter(text.decode("ascii"))) from None
    return name, codes, len(text.translate(None, b"ACGTUNacgtun"))


def _no_sequence(name: str) -> str:
    return f"record {name} has no sequence; remove it, or add its bases"


def _wrong_letter(text: str) -> str | None:
    """What the first character of a text that is no base says about it; None if all are bases."""
    codes = text.encode("ascii").translate(alphabet.FROM_ASCII.tobytes())
    place = codes.find(alphabet.NO_BASE)
    if place < 0:
        return None
    letter = text[place]
    if letter in "Xx":
        return f"{letter!r} is not an IUPAC code of DNA; write N for an unknown base"
    if letter.isalpha() or letter == "*":
        return f"{letter!r} is not an IUPAC code of DNA, so this looks like protein; give the DNA sequence"
    if letter in "-.":
        return f"{letter!r} is a gap of an alignment; remove the gaps"
    if letter == ";":
        return "comment lines that start with ';' are not read; remove them"
    if letter == ">":
        return "'>' stands inside a line; put a line break before it"
    if letter == "?":
        return "'?' or a character outside ASCII is not a base; write N for an unknown base"
    if letter.isspace() or letter.isdigit():
        return f"{letter!r} stands between bases; lines of bases hold only bases"
    if letter < " ":
        return BINARY
    return f"{letter!r} is not an IUPAC code of DNA; write N for an unknown base"


def _locate(path: Path, name: str | None, error: Exception) -> str:
    """What is wrong with a file that could not be read to its end, with the line if the file can be read again."""
    if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
        return cannot_open(path, error)
    if is_regular(path):
        if os.path.getsize(path) == 0:
            return ": the file is empty"
        line, what = _first_fault(path)
        return f", line {line}: {what}"
    after = f", after record {name}" if name is not None else ""
    return f"{after}: {explain(error)}"


def cannot_open(path: Path, error: OSError) -> str:
    """What an error of the operating system says about a file, after its name in a line about it."""
    if isinstance(error, FileNotFoundError):
        folder = path.parent
        return f": there is no such file{nearest(path.name, os.listdir(folder)) if os.access(folder, os.R_OK) else ''}"
    if isinstance(error, IsADirectoryError):
        return ": this is a folder, and a file is needed"
    return f": it cannot be read: {error.strerror or error}"


def explain(error: Exception) -> str:
    """What is wrong with a text whose reading raised ``error``."""
    if isinstance(error, FormatError):
        return str(error)
    if isinstance(error, EOFError):
        return CUT_SHORT
    return NO_RECORD if isinstance(error, dnaio.FileFormatError) else DAMAGED


def _first_fault(path: Path) -> tuple[int, str]:
    """The first line with a fault, and what is wrong there; the rules are those of ``records``."""
    lines = _Lines(path)
    name, header_line, num_letters = "", 0, 0
    mostly_ambiguous = None
    try:
        for starts_line, text in lines:
            if not text or (starts_line and text[0] == "#"):
                continue
            if starts_line and text[0] == ">":
                if header_line and not num_letters:
                    return header_line, _no_sequence(name)
                name, header_line, num_letters = _name(text[1:]), lines.number, 0
                if not name:
                    return lines.number, NO_NAME
                continue
            if not header_line:
                return lines.number, _no_header(text)
            if what := _wrong_letter(text):
                return lines.number, what
            num_letters += len(text)
            if mostly_ambiguous is None and 2 * len(text.translate(_WITHOUT_COMMON)) > len(text):
                mostly_ambiguous = lines.number
    except (FormatError, *DECOMPRESSION_ERRORS) as error:
        return lines.number, explain(error)
    if not header_line:
        return 1, NO_RECORD
    if not num_letters:
        return header_line, _no_sequence(name)
    return (mostly_ambiguous, AMBIGUOUS) if mostly_ambiguous else (lines.number, "the file changed while it was read")


_WITHOUT_COMMON = str.maketrans("", "", "ACGTUNacgtun")


def _no_header(text: str) -> str:
    if text[0] == "@":
        return "this is FASTQ; turn it into FASTA"
    if any(character < " " and not character.isspace() for character in text):
        return BINARY
    if text[0] == ";":
        return "comment lines that start with ';' are not read; remove them"
    return f"a FASTA file starts with '>', not with {text[:20]!r}"


class _Lines:
    """The lines of a file without line breaks and outer blanks; long ones in parts.

    Iterating gives (whether the text starts a line, text); ``number`` is the line that is being read, from 1.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.number = 1

    def __iter__(self) -> Iterator[tuple[bool, str]]:
        starts_line = True
        with io.TextIOWrapper(open_input(self._path), encoding="ascii") as text:
            while chunk := text.readline(LONGEST_CHUNK):
                yield starts_line, chunk.strip()
                starts_line = chunk.endswith("\n")
                self.number += starts_line
