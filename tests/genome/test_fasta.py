"""Reading FASTA: every way to write it down, and the line of everything that is not DNA."""

import bz2
import gzip
import lzma
import os
import threading
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from launcher.errors import RequestError
from launcher.genome import alphabet, fasta
from tests.genome.files import CONTIGS, ECOLI, LAMBDA, bgzip, faults_of, ordinary_user, text_of


def read(path: Path) -> dict[str, str]:
    return {name: alphabet.decode(codes) for name, codes in fasta.records(path)}


@pytest.mark.parametrize("path", [LAMBDA, ECOLI, CONTIGS], ids=lambda path: path.name)
def test_real_genomes_are_read_base_for_base(path: Path) -> None:
    assert read(path) == text_of(path)


def test_the_content_decides_how_a_file_is_read_and_not_its_name(tmp_path: Path) -> None:
    expected = text_of(LAMBDA)
    plain = gzip.decompress(LAMBDA.read_bytes())
    halves = gzip.compress(plain[:20_000]) + gzip.compress(plain[20_000:])
    for name, content in [
        ("plain.fa.gz", plain),
        ("packed.fa", gzip.compress(plain)),
        ("bgzip.fa", bgzip(plain)[0]),
        ("members.fa.gz", halves),
        ("padded.fa.gz", gzip.compress(plain) + bytes(512)),
    ]:
        (tmp_path / name).write_bytes(content)
        assert read(tmp_path / name) == expected, name


@pytest.mark.parametrize("line_break", ["\n", "\r\n", "\r"], ids=["LF", "CRLF", "CR"])
def test_line_breaks_blank_lines_comments_and_trailing_blanks_are_no_bases(tmp_path: Path, line_break: str) -> None:
    lines = ["", "# made by hand", ">one a description", "ACgt", "", "NNry\t ", "#", "A", "", ">two", "aU", "", ""]
    path = tmp_path / "x.fa"
    path.write_bytes(line_break.join(lines).encode())
    assert read(path) == {"one": "ACgtNNryA", "two": "aT"}


def test_a_description_may_hold_any_character(tmp_path: Path) -> None:
    path = tmp_path / "x.fa"
    path.write_bytes(b">one C\xf4te d'Ivoire > \xe2\x82\xac\nACGT\n")
    assert read(path) == {"one": "ACGT"}


def test_a_name_may_be_set_off_by_a_blank(tmp_path: Path) -> None:
    path = tmp_path / "x.fa"
    path.write_bytes(b"> one two\nACGT\n")
    assert read(path) == {"one": "ACGT"}


@given(
    st.lists(st.text("ACGTNRYSWKMBDHVacgtn", min_size=1, max_size=90), min_size=1, max_size=6),
    st.integers(1, 40),
    st.sampled_from(["plain", "gzip", "bgzip"]),
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, sequences: list[str], width: int, packing: str
) -> None:
    # Enough plain bases that nothing here looks like protein.
    named = {f"c{number}": "ACGT" * 25 + sequence for number, sequence in enumerate(sequences)}
    lines = []
    for name, sequence in named.items():
        lines += [f">{name}", *(sequence[start : start + width] for start in range(0, len(sequence), width))]
    text = "\n".join(lines).encode()
    path = tmp_path_factory.mktemp("written") / "x.fa"
    path.write_bytes(
        {"plain": lambda: text, "gzip": lambda: gzip.compress(text), "bgzip": lambda: bgzip(text, 50)[0]}[packing]()
    )
    assert read(path) == named


def test_the_tap_is_given_the_whole_file(tmp_path: Path) -> None:
    for content in (gzip.decompress(LAMBDA.read_bytes()), LAMBDA.read_bytes(), LAMBDA.read_bytes() + bytes(1000)):
        path, seen = tmp_path / "x", bytearray()
        path.write_bytes(content)
        list(fasta.records(path, seen.extend))
        assert seen == content


def test_a_pipe_is_read_like_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for content in (gzip.decompress(LAMBDA.read_bytes()), LAMBDA.read_bytes()):
        writer = threading.Thread(target=pipe.write_bytes, args=(content,))
        writer.start()
        assert read(pipe) == text_of(LAMBDA)
        writer.join()


def test_one_record_is_held_at_a_time(tmp_path: Path) -> None:
    record = b">%d\n" + b"ACGTACGTAC" * 10_000 + b"\n"
    one, many = tmp_path / "one", tmp_path / "many"
    one.write_bytes(record % 0)
    many.write_bytes(b"".join(record % number for number in range(40)))

    def peak(path: Path) -> int:
        tracemalloc.start()
        for _ in fasta.records(path):
            continue
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak(one)  # imports are not counted
    assert peak(many) < 1.5 * peak(one)


PROTEIN = "so this looks like protein; give the DNA sequence"
NO_TEXT = "the file holds bytes that are no text; plain text is needed, alone or packed with gzip or bgzip"
NO_RECORD = "there is no record; a FASTA file has a line '>name' and then lines of bases"

WRONG = {
    "blank": (b"\n\n", 1, NO_RECORD),
    "comment": (b"# x\n", 1, NO_RECORD),
    "no header": (b"\nACGT\n", 2, "a FASTA file starts with '>', not with 'ACGT'"),
    "no sequence": (b">a\nACGT\n>b\n\n>c\nAC\n", 3, "record b has no sequence; remove it, or add its bases"),
    "no sequence at the end": (b">a\nACGT\n>b\n", 3, "record b has no sequence; remove it, or add its bases"),
    "no name": (b">a\nAC\n>\nAC\n", 3, "a record without a name; write one after '>'"),
    "protein": (b">a\nACGT\n>p\nMKVLAAGIE\n", 4, f"'L' is not an IUPAC code of DNA, {PROTEIN}"),
    "protein's stop": (b">p\nMKVR*\n", 2, f"'*' is not an IUPAC code of DNA, {PROTEIN}"),
    "protein of IUPAC letters": (
        b">a\nACGTN\n>p\nMKVRMSKD\nWHSVKR\n",
        4,
        "most letters are not A, C, G, T or N, so this looks like protein, although all are IUPAC codes of DNA; "
        "give the DNA sequence",
    ),
    "gap": (b">a\r\nAC\r\nAC--GT\r\n", 3, "'-' is a gap of an alignment; remove the gaps"),
    "dot": (b">a\rAC\rAC..GT\r", 3, "'.' is a gap of an alignment; remove the gaps"),
    "X": (b">a\nAC\n\nACXX\n", 4, "'X' is not an IUPAC code of DNA; write N for an unknown base"),
    "NUL": (b">a\nAC\nA\0C\n", 3, NO_TEXT),
    "zeros": (bytes(4096), 1, NO_TEXT),
    "control": (b">a\nAC\nAC\x07\n", 3, NO_TEXT),
    "program": (b"\x7fELF\x02\x01\x01" + bytes(range(200)), 1, NO_TEXT),
    "FASTQ": (b"@read\nACGT\n+\nIIII\n", 1, "this is FASTQ; turn it into FASTA"),
    "comment in a record": (b">a\n;x\nAC\n", 2, "comment lines that start with ';' are not read; remove them"),
    "comment at the top": (b";x\n>a\nAC\n", 1, "comment lines that start with ';' are not read; remove them"),
    "numbered": (b">a\n1 ACGT\n", 2, "'1' stands between bases; lines of bases hold only bases"),
    "spaced": (b">a\nACGT ACGT\n", 2, "' ' stands between bases; lines of bases hold only bases"),
    "two lines in one": (b">a\nAC>b\nACGT\n", 2, "'>' stands inside a line; put a line break before it"),
    "accent": (b">a\nAC\xe9\n", 2, "'?' or a character outside ASCII is not a base; write N for an unknown base"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("packing", ["plain", "gzip"])
def test_what_is_no_dna_is_refused_with_its_line(tmp_path: Path, name: str, packing: str) -> None:
    content, line, what = WRONG[name]
    path = tmp_path / "x.fa"
    path.write_bytes(gzip.compress(content) if packing == "gzip" else content)
    assert faults_of(path) == [f"data.fasta={path}, line {line}: {what}"]


@given(st.one_of(st.binary(max_size=300), st.binary(max_size=300).map(lambda content: b">a\nACGT\n" + content)))
@example(b"Z05n\xc4x\0y")
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_bytes_a_file_holds_it_is_read_or_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.fa"
    path.write_bytes(content)
    try:
        read(path)
    except RequestError as error:
        (line,) = error.faults
        assert line.startswith(f"data.fasta={path}")
        assert "\n" not in line


def test_a_file_is_no_protein_while_half_of_its_letters_are_plain(tmp_path: Path) -> None:
    path = tmp_path / "x.fa"
    path.write_bytes(b">a\nRYSW\n>b\nACgt\n")
    assert read(path) == {"a": "RYSW", "b": "ACgt"}
    path.write_bytes(b">a\nACGT\n>b\nRYSWK\n")
    assert faults_of(path)[0].startswith(f"data.fasta={path}, line 4: most letters are not A, C, G, T or N")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (bz2.compress(b">a\nACGT\n"), "bzip2 data"),
        (lzma.compress(b">a\nACGT\n"), "xz data"),
        (b"\x28\xb5\x2f\xfd\x04", "zstandard data"),
        (b"PK\x03\x04", "a zip archive"),
    ],
)
def test_other_ways_of_packing_are_named(tmp_path: Path, content: bytes, what: str) -> None:
    path = tmp_path / "x.fa.gz"
    path.write_bytes(content)
    assert faults_of(path) == [f"data.fasta={path}, line 1: this is {what}; unpack it, or pack it with gzip or bgzip"]


def test_the_line_is_found_deep_in_a_genome_without_line_breaks(tmp_path: Path) -> None:
    path = tmp_path / "x.fa"
    path.write_bytes(b">a\n" + b"ACGT" * 700_000 + b"\n>b\n" + b"ACGT" * 700_000 + b"E\n")
    (fault,) = faults_of(path)
    assert fault.startswith(f"data.fasta={path}, line 4: 'E' is not")


def test_files_that_cannot_be_opened_are_refused(tmp_path: Path) -> None:
    (tmp_path / "genome.fa").write_bytes(b"")
    assert faults_of(tmp_path / "genom.fa") == [
        f"data.fasta={tmp_path}/genom.fa: there is no such file; nearest: genome.fa"
    ]
    assert faults_of(tmp_path / "genome.fa") == [f"data.fasta={tmp_path}/genome.fa: the file is empty"]
    assert faults_of(tmp_path) == [f"data.fasta={tmp_path}: this is a folder, and a file is needed"]
    assert faults_of(tmp_path / "genome.fa" / "x") == [
        f"data.fasta={tmp_path}/genome.fa/x: it cannot be read: Not a directory"
    ]


def test_a_file_without_permission_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.fa"
    path.write_bytes(b">a\nAC\n")
    path.chmod(0)
    with ordinary_user():
        (fault,) = faults_of(path)
    assert fault == f"data.fasta={path}: it cannot be read: Permission denied"


DAMAGED = "the compressed data are damaged; copy or download the file again"
CUT_SHORT = "the compressed data end early, so the file is cut short; copy or download it again"


def test_gzip_that_is_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = LAMBDA.read_bytes()
    path = tmp_path / "x.fa.gz"
    last_line = 0
    for size in [*range(2, len(whole), 379), *range(len(whole) - 9, len(whole))]:
        path.write_bytes(whole[:size])
        (fault,) = faults_of(path)
        line = int(fault.removeprefix(f"data.fasta={path}, line ").split(":")[0])
        assert fault.endswith(CUT_SHORT)
        assert last_line <= line <= 48_502 / 70 + 2
        last_line = line
    assert last_line > 600


def test_bgzip_that_is_cut_anywhere_is_refused_also_between_two_blocks(tmp_path: Path) -> None:
    whole, ends = bgzip(gzip.decompress(LAMBDA.read_bytes()), 4000)
    path = tmp_path / "x.fa.gz"
    for size in sorted({*ends[:-1], *range(2, len(whole), 997), *range(len(whole) - 28, len(whole))}):
        path.write_bytes(whole[:size])
        (fault,) = faults_of(path)
        # One byte of a block cannot be told from rubbish.
        assert fault.endswith(DAMAGED if size - 1 in ends else CUT_SHORT), size


@pytest.mark.parametrize("place", [-8, -1, 7000])
def test_damaged_gzip_is_refused(tmp_path: Path, place: int) -> None:
    content = bytearray(LAMBDA.read_bytes())
    content[place] ^= 0x10
    path = tmp_path / "x.fa.gz"
    path.write_bytes(content)
    (fault,) = faults_of(path)
    assert fault.endswith(DAMAGED)


def test_a_fault_in_a_pipe_is_told_by_the_record_before_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for content, what in [
        (b">a\nACGT\n>b\nELF\n", f", after record a: 'E' is not an IUPAC code of DNA, {PROTEIN}"),
        (LAMBDA.read_bytes()[:5000], f": {CUT_SHORT}"),
        (b"", f": {NO_RECORD}"),
    ]:
        writer = threading.Thread(target=pipe.write_bytes, args=(content,))
        writer.start()
        assert faults_of(pipe) == [f"data.fasta={pipe}{what}"]
        writer.join()


def test_the_line_of_a_record_is_found_by_name_and_occurrence(tmp_path: Path) -> None:
    path = tmp_path / "x.fa"
    path.write_bytes(b">a x\nAC\n>ab\nAC\n>a\nAC\n")
    assert fasta.line_of_record(path, "a", 0) == 1
    assert fasta.line_of_record(path, "a", 1) == 5
