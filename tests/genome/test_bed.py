"""BED files: what is read, and the line of everything that is no region of the genome."""

import gzip
import os
from pathlib import Path

import pytest

from launcher.errors import RequestError
from launcher.genome import bed

LENGTHS = {"chr1": 100, "chr2": 50}


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def refusal(path: Path) -> list[str]:
    with pytest.raises(RequestError) as refused:
        bed.read("data.regions", path)
    return refused.value.faults


def test_regions_are_read_past_comments_and_further_columns(tmp_path: Path) -> None:
    text = "# made by hand\nbrowser position chr1\ntrack name=x\n\nchr1\t0\t10\tgene one\t0\t+\r\nchr2 5 50\n"
    path = write(tmp_path / "x.bed", text)
    expected = [bed.Region(5, "chr1", 0, 10), bed.Region(6, "chr2", 5, 50)]
    assert bed.read("data.regions", path).regions == expected
    path.write_bytes(gzip.compress(text.encode()))
    assert bed.read("data.regions", path).regions == expected


def test_a_contig_may_be_named_like_a_track(tmp_path: Path) -> None:
    assert bed.read("data.regions", write(tmp_path / "x.bed", "track1 0 5\n")).regions[0].contig == "track1"


def test_every_wrong_line_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "x.bed", "chr1 1\nchr1 0 10\nchr1 a 5\nchr1 -1 5\nchr1 5 5\nchr1 9 5\nchr1 1.5 3\n")
    assert refusal(path) == [
        f"data.regions={path}, line 1: 'chr1 1' is no region; a line is 'contig start end'",
        f"data.regions={path}, line 3: start 'a' and end '5' must be whole numbers",
        f"data.regions={path}, line 4: start -1 is below 0; positions count from 0",
        f"data.regions={path}, line 5: start 5 must be below end 5; regions are 0-based and half-open",
        f"data.regions={path}, line 6: start 9 must be below end 5; regions are 0-based and half-open",
        f"data.regions={path}, line 7: start '1.5' and end '3' must be whole numbers",
    ]


def test_of_many_wrong_lines_the_first_are_told(tmp_path: Path) -> None:
    path = write(tmp_path / "x.bed", "chr1 x y\n" * 25)
    faults = refusal(path)
    assert len(faults) == 11
    assert faults[-1] == f"data.regions={path}: 15 more lines are wrong"
    path = write(tmp_path / "x.bed", "chr9 0 1\n" * 25)
    assert bed.check(bed.read("data.regions", path), LENGTHS)[10:] == [f"data.regions={path}: 15 more lines are wrong"]


def test_regions_off_the_contigs_are_told(tmp_path: Path) -> None:
    path = write(tmp_path / "x.bed", "chr1 0 100\nchr1 90 101\nch2 0 5\n1 0 5\n")
    assert bed.check(bed.read("data.validation", path), LENGTHS) == [
        f"data.validation={path}, line 2: the region ends at 101, but contig chr1 at 100; end it there",
        f"data.validation={path}, line 3: there is no contig ch2; nearest: chr2",
        f"data.validation={path}, line 4: there is no contig 1; there are: chr1, chr2",
    ]


def test_files_that_hold_no_regions_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.bed", "# nothing\n\n")
    assert refusal(path) == [f"data.regions={path}: it holds no region; a line is 'contig start end'"]
    path.write_bytes(b"chr1 0 5\nchr1\0 5 6\n")
    assert refusal(path) == [
        f"data.regions={path}, line 2: the file holds bytes that are no text; "
        "plain text is needed, alone or packed with gzip or bgzip"
    ]
    path.write_bytes(gzip.compress(b"chr1 0 5\n")[:-3])
    assert refusal(path)[0].endswith(
        "the compressed data end early, so the file is cut short; copy or download it again"
    )
    assert refusal(tmp_path / "y.bed") == [f"data.regions={tmp_path}/y.bed: there is no such file; nearest: x.bed"]
    os.mkfifo(tmp_path / "pipe")
    assert refusal(tmp_path / "pipe") == [
        f"data.regions={tmp_path}/pipe: every rank reads it, and a pipe can be read only once; give a file"
    ]
