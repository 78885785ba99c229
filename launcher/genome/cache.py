"""The bases of a genome as one file of codes, made once from its FASTA files and found again by their content."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.errors import RequestError
from launcher.genome.progress import Progress
from launcher.genome.store import FORMAT, Entry, Store, read

if TYPE_CHECKING:
    from launcher.genome.fasta import Record

CODES = "codes.bin"
"""One byte a base (``launcher.genome.alphabet``), contig after contig, nothing between them."""
CONTIGS = "contigs.json"
"""``names`` and ``lengths`` (bases) of the contigs, in order."""
KIND = "bases"

DIGEST_BYTES = 16
BLOCK_BYTES = 1 << 20


def resolve(fasta: str | Sequence[str]) -> list[Path]:
    """The files that ``data.fasta`` names: variables expanded, globs matched, in order.

    Raises RequestError with a line for every glob that matches no file.
    """
    files: list[Path] = []
    faults = []
    for name in [fasta] if isinstance(fasta, str) else fasta:
        pattern = os.path.expandvars(name)
        if os.path.lexists(pattern) or not any(character in pattern for character in "*?["):
            files.append(Path(pattern))
            continue
        import glob

        matches = [Path(match) for match in sorted(glob.glob(pattern, recursive=True)) if not os.path.isdir(match)]
        if not matches:
            faults.append(f"data.fasta={pattern}: no file matches")
        files += matches
    if faults:
        raise RequestError(*faults)
    return files


def open_bases(files: Sequence[Path], store: Store) -> Entry:
    """The cached bases of the files, read anew if their content has no entry yet.

    Regular files are hashed whole on every call, so that a change is seen whatever the time stamps say. A pipe can
    be read only once: it is always read into an entry, and whoever reads the same bases after that gives the folder
    of the entry in the place of the pipe.

    Raises RequestError with one line for every file that cannot be read as DNA, or if nowhere can be written.
    """
    if len(files) == 1 and files[0].is_dir():
        entry = read(files[0])
        if entry is not None and entry.meta.get("kind") == KIND:
            return entry
    name = _content_name(files) if store.exists else None
    entry = store.find(name) if name is not None else None
    return entry or store.make(lambda folder: _write(files, folder))


def file_digest(path: Path, progress: Progress | None = None) -> bytes:
    """BLAKE2b of a file as it lies on disk. Raises OSError."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    with open(path, "rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            if progress:
                progress.advance(len(block))
    return digest.digest()


def is_pipe(path: Path) -> bool:
    """Whether there is something at ``path`` that can be read only once."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _content_name(files: Sequence[Path]) -> str | None:
    """The entry of the files by their content; None if they cannot be read, or not twice."""
    if any(is_pipe(file) for file in files):
        return None
    try:
        with Progress("looking at", files) as progress:
            return _entry_name([file_digest(file, progress) for file in files])
    except OSError:
        return None  # reading the records tells why


def _entry_name(digests: Sequence[bytes]) -> str:
    return hashlib.blake2b(FORMAT.encode() + b"".join(digests), digest_size=DIGEST_BYTES).hexdigest()


def _write(files: Sequence[Path], folder: Path) -> tuple[str, dict[str, object]]:
    """Fill an entry; the name is that of exactly the bytes that were read, even if a file changes meanwhile."""
    from launcher.genome import fasta  # not needed, and slow to import, where the genome is cached

    contigs = _Contigs()
    bases = hashlib.blake2b(digest_size=DIGEST_BYTES)
    digests = []
    with Progress("reading", files) as progress, open(folder / CODES, "wb") as out:
        for file in files:
            content = hashlib.blake2b(digest_size=DIGEST_BYTES)

            def tap(block: memoryview, content: "hashlib.blake2b" = content) -> None:
                content.update(block)
                progress.advance(len(block))

            try:
                for record in fasta.records(file, tap):
                    contigs.add(record, file)
                    bases.update(record.codes.data)
                    out.write(record.codes.data)
            except RequestError as error:
                contigs.faults += error.faults
            digests.append(content.digest())
    faults = contigs.faults + contigs.duplicates()
    if faults:
        raise RequestError(*faults)
    (folder / CONTIGS).write_text(
        json.dumps({"names": list(contigs.origins), "lengths": contigs.lengths}), encoding="ascii"
    )
    meta = {"kind": KIND, "num_bases": sum(contigs.lengths), "bases": bases.hexdigest()}
    return _entry_name(digests), meta


class _Contigs:
    """The contigs read so far; a name may be used once."""

    def __init__(self) -> None:
        self.origins: dict[str, Path] = {}
        self.lengths: list[int] = []
        self.faults: list[str] = []
        self._used_twice: dict[Path, list[str]] = {}

    def add(self, record: "Record", file: Path) -> None:
        if record.name in self.origins:
            self._used_twice.setdefault(file, []).append(record.name)
        else:
            self.origins[record.name] = file
            self.lengths.append(len(record.codes))

    def duplicates(self) -> list[str]:
        """One line for each file that uses a name again."""
        from launcher.genome import fasta

        faults = []
        for file, names in self._used_twice.items():
            name, origin = names[0], self.origins[names[0]]
            line = fasta.line_of_record(file, name, 1 if origin == file else 0)
            first = fasta.line_of_record(origin, name, 0)
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            faults.append(
                f"data.fasta={file}{f', line {line}' if line else ''}: contig {name} is there already, in {origin}"
                f"{f', line {first}' if first else ''}{more}; a name may be used once: rename it, or leave the file out"
            )
        return faults
