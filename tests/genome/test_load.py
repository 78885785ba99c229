"""From the keys of ``data`` to windows: regions, splits and filters, against the same worked out base by base."""

import dataclasses
import gzip
import itertools
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher import genome
from launcher.errors import RequestError
from launcher.genome import alphabet, cache
from launcher.genome.windows import Windows
from launcher.schema import Data
from tests.genome.files import CONTIGS, ECOLI, LAMBDA, text_of

Place = tuple[str, int]
"""A base: contig and position."""


def places_of(windows: Windows | None) -> list[tuple[str, int, int]]:
    return [windows.locate(index) for index in range(len(windows))] if windows else []


def bases_of(windows: Windows | None) -> set[Place]:
    return {(contig, base) for contig, start, end in places_of(windows) for base in range(start, end)}


def write_bed(path: Path, regions: Sequence[tuple[str, int, int]]) -> str:
    path.write_text("".join(f"{contig}\t{start}\t{end}\n" for contig, start, end in regions))
    return str(path)


def refusal(data: Data) -> list[str]:
    with pytest.raises(RequestError) as refused:
        genome.load(data)
    return refused.value.faults


@st.composite
def genomes(draw: st.DrawFn) -> dict[str, str]:
    sequences = draw(st.lists(st.text("ACGTacgtN", min_size=1, max_size=60), min_size=1, max_size=4))
    return {f"c{number}": sequence for number, sequence in enumerate(sequences)}


def regions_of(contigs: dict[str, str]) -> st.SearchStrategy[list[tuple[str, int, int]]]:
    def region(contig: str) -> st.SearchStrategy[tuple[str, int, int]]:
        ends = st.tuples(st.integers(0, len(contigs[contig])), st.integers(0, len(contigs[contig])))
        return ends.filter(lambda pair: pair[0] != pair[1]).map(lambda pair: (contig, min(pair), max(pair)))

    return st.lists(st.sampled_from(sorted(contigs)).flatmap(region), min_size=1, max_size=5)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(genomes(), st.integers(2, 12), st.integers(1, 15), st.sampled_from([0.0, 0.2, 0.5, 1.0]), st.data())
def test_no_base_is_in_both_splits_and_none_is_forgotten(
    tmp_path_factory: pytest.TempPathFactory,
    contigs: dict[str, str],
    length: int,
    stride: int,
    max_n_fraction: float,
    draws: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("genome")
    (folder / "x.fa").write_text("".join(f">{name}\n{sequence}\n" for name, sequence in contigs.items()))
    regions = draws.draw(st.none() | regions_of(contigs), label="regions")
    kind = draws.draw(st.sampled_from(["none", "fraction", "contigs", "bed"]), label="validation")
    validation: Any = None
    everything = {(name, base) for name, sequence in contigs.items() for base in range(len(sequence))}
    if regions is not None:
        everything &= {(contig, base) for contig, start, end in regions for base in range(start, end)}
    held_out: set[Place] = set()
    if kind == "contigs":
        validation = draws.draw(st.lists(st.sampled_from(sorted(contigs)), min_size=1, unique=True))
        held_out = {place for place in everything if place[0] in validation}
    elif kind == "bed":
        apart = draws.draw(regions_of(contigs), label="held out")
        validation = write_bed(folder / "validation.bed", apart)
        held_out = everything & {(contig, base) for contig, start, end in apart for base in range(start, end)}
    elif kind == "fraction":
        validation = draws.draw(st.floats(0.05, 0.95))
        for run in runs_of(everything):
            number = round(len(run) * validation)
            if min(number, len(run) - number) >= 2:
                held_out |= set(run[len(run) - number :])

    data = Data(
        fasta=str(folder / "x.fa"),
        regions=None if regions is None else write_bed(folder / "regions.bed", regions),
        validation=validation,
        sequence_length=length,
        stride=stride,
        max_n_fraction=max_n_fraction,
    )
    expected = {
        "train": windows_by_hand(contigs, everything - held_out, length, stride, max_n_fraction),
        "validation": windows_by_hand(contigs, held_out, length, max(stride, length), max_n_fraction),
    }
    if kind == "none":
        del expected["validation"]
    if not all(expected.values()):
        assert len(refusal(data)) == sum(not windows for windows in expected.values())
        return
    found = genome.load(data)
    assert places_of(found.train) == expected["train"]
    assert places_of(found.validation) == expected.get("validation", [])
    assert bases_of(found.train).isdisjoint(bases_of(found.validation))
    for windows in filter(None, (found.train, found.validation)):
        for index, (contig, start, end) in enumerate(places_of(windows)):
            assert alphabet.decode(windows.read(index)) == contigs[contig][start:end].ljust(length, "_")


def runs_of(bases: set[Place]) -> list[list[Place]]:
    """Runs of adjoining bases of one contig, in order."""
    runs: list[list[Place]] = []
    for contig, base in sorted(bases):
        if runs and runs[-1][-1] == (contig, base - 1):
            runs[-1].append((contig, base))
        else:
            runs.append([(contig, base)])
    return runs


def windows_by_hand(
    contigs: dict[str, str], bases: set[Place], length: int, stride: int, max_n_fraction: float
) -> list[tuple[str, int, int]]:
    windows = []
    for run in runs_of(bases):
        contig, first = run[0]
        reached = first
        for start in range(first, first + len(run), stride):
            end = min(start + length, first + len(run))
            if end - start < 2 or end <= reached:
                break
            reached = end
            text = contigs[contig][start:end]
            if sum(letter not in "ACGTacgt" for letter in text) <= max_n_fraction * len(text):
                windows.append((contig, start, end))
    return windows


def test_the_windows_of_the_shipped_genome(tmp_path: Path) -> None:
    found = genome.load(Data(fasta=str(ECOLI), sequence_length=8192, validation=0.02, cache_dir=str(tmp_path)))
    num_bases = len(text_of(ECOLI)["K-12-MG1655"])
    held_out = round(num_bases * 0.02)
    assert found.num_bases == num_bases == 4_639_675
    assert len(found.train) == math.ceil((num_bases - held_out) / 8192)
    assert found.validation is not None
    assert len(found.validation) == math.ceil(held_out / 8192)
    assert found.train.locate(0) == ("K-12-MG1655", 0, 8192)
    assert found.validation.locate(0)[1] == num_bases - held_out == found.train.locate(len(found.train) - 1)[2]


def test_short_contigs_give_short_windows(tmp_path: Path) -> None:
    found = genome.load(Data(fasta=str(CONTIGS), sequence_length=1 << 20, cache_dir=str(tmp_path)))
    assert places_of(found.train) == [(name, 0, len(sequence)) for name, sequence in text_of(CONTIGS).items()]


def test_validation_windows_do_not_overlap_whatever_the_stride(tmp_path: Path) -> None:
    data = Data(fasta=str(LAMBDA), sequence_length=500, stride=50, validation=0.1, cache_dir=str(tmp_path))
    found = genome.load(data)
    assert found.validation is not None
    assert len(found.validation) == 10
    assert len(found.train) == (48_502 - 4850 - 500) // 50 + 2


def test_bases_are_counted_right_whatever_the_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = "".join(text_of(LAMBDA).values())[:5000]
    path = tmp_path / "x.fa"
    path.write_text(">a\n" + sequence[:1000] + "N" * 300 + sequence[1000:] + "RYKM" * 10 + "\n")
    found = []
    for chunk in (1, 64, 1000, 1 << 22):
        monkeypatch.setattr("launcher.genome.index.CHUNK_BASES", chunk)
        data = Data(
            fasta=str(path), sequence_length=64, stride=16, max_n_fraction=0.25, cache_dir=str(tmp_path / str(chunk))
        )
        found.append(places_of(genome.load(data).train))
    assert found.count(found[0]) == 4
    everything = {("a", base) for base in range(5340)}
    assert found[0] == windows_by_hand({"a": path.read_text()[3:].strip()}, everything, 64, 16, 0.25)


def test_the_share_of_n_is_compared_exactly(tmp_path: Path) -> None:
    path = tmp_path / "x.fa"
    path.write_text(">a\n" + "A" * 71 + "N" * 29 + "\n>b\n" + "A" * 70 + "N" * 30 + "\n>c\n" + "A" * 100 + "\n")
    found = genome.load(Data(fasta=str(path), sequence_length=100, max_n_fraction=0.29))
    assert [contig for contig, _, _ in places_of(found.train)] == ["a", "c"]


def test_a_split_without_a_window_says_why(tmp_path: Path) -> None:
    path = tmp_path / "x.fa"
    path.write_text(">a\nACGTACGTAC\n>n\n" + "N" * 20 + "\n>s\nA\n")
    data = Data(fasta=str(path), sequence_length=5, max_n_fraction=0.1)
    assert refusal(dataclasses.replace(data, validation=["n"])) == [
        "data.max_n_fraction=0.1: no validation window is left: all 4 have a larger part of bases other than A, C, G "
        "and T; raise it, or choose other data.regions"
    ]
    assert refusal(dataclasses.replace(data, validation=["s"])) == [
        "data.sequence_length=5: there is no validation window: the 1 stretch has 1 bases in all, and a window needs 2 "
        "in one of them; choose other data.regions or data.validation"
    ]
    assert refusal(dataclasses.replace(data, validation=["a", "n", "s"])) == [
        "data.validation=['a', 'n', 's']: it leaves no base for training; choose another part"
    ]
    regions = write_bed(tmp_path / "x.bed", [("a", 0, 10)])
    assert refusal(dataclasses.replace(data, validation=["n"], regions=regions)) == [
        "data.validation=['n']: it leaves no base for validation inside data.regions; choose another part"
    ]


def test_contigs_that_are_not_there_are_told_with_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "x.fa"
    path.write_text(">chr1\nACGT\n>chr2\nACGT\n")
    bed = write_bed(tmp_path / "x.bed", [("chr3", 0, 2), ("chr1", 0, 5)])
    assert refusal(Data(fasta=str(path), validation=["chr2", "chrX"], regions=bed)) == [
        f"data.regions={bed}, line 1: there is no contig chr3; nearest: chr2, chr1",
        f"data.regions={bed}, line 2: the region ends at 5, but contig chr1 at 4; end it there",
        "data.validation=chrX: there is no contig chrX; nearest: chr2, chr1",
    ]
    assert genome.load(Data(fasta=str(path), validation="chr2")).validation is not None


def test_files_and_regions_are_told_about_at_once(tmp_path: Path) -> None:
    bed = write_bed(tmp_path / "x.bed", [("a", 5, 2)])
    assert refusal(Data(fasta=str(tmp_path / "a"), regions=bed, validation=str(tmp_path / "y.bed"))) == [
        f"data.fasta={tmp_path}/a: there is no such file",
        f"data.regions={bed}, line 1: start 5 must be below end 2; regions are 0-based and half-open",
        f"data.validation={tmp_path}/y.bed: there is no such file; nearest: x.bed",
    ]


def test_the_windows_are_found_again_by_everything_that_shapes_them(tmp_path: Path) -> None:
    regions = write_bed(tmp_path / "x.bed", [("gi|9626243|ref|NC_001416.1|", 0, 20_000)])
    data = Data(fasta=str(LAMBDA), sequence_length=100, validation=0.1, cache_dir=str(tmp_path / "cache"))
    kinds = [
        data,
        dataclasses.replace(data, sequence_length=101),
        dataclasses.replace(data, stride=99),
        dataclasses.replace(data, validation=0.2),
        dataclasses.replace(data, validation=None),
        dataclasses.replace(data, regions=regions),
    ]
    fingerprints = [genome.load(kind).fingerprint for kind in kinds]
    assert len(set(fingerprints)) == len(kinds)
    assert [genome.load(kind).fingerprint for kind in kinds] == fingerprints
    write_bed(tmp_path / "x.bed", [("gi|9626243|ref|NC_001416.1|", 0, 20_001)])
    assert genome.load(kinds[-1]).fingerprint not in fingerprints
    (tmp_path / "x.bed.gz").write_bytes(gzip.compress(b"gi|9626243|ref|NC_001416.1| 0 20000\n"))
    packed = genome.load(dataclasses.replace(data, regions=str(tmp_path / "x.bed.gz")))
    assert packed.fingerprint == fingerprints[-1], "the same windows, however they were asked for"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"sequence_length": 1}, "data.sequence_length=1: it must lie in [2, 1073741824] bases"),
        ({"sequence_length": 1 << 31}, "data.sequence_length=2147483648: it must lie in [2, 1073741824] bases"),
        ({"stride": 0}, "data.stride=0: it must be at least 1 base; null makes windows adjoin"),
        ({"validation": 0.0}, "data.validation=0.0: a fraction lies between 0 and 1; names of contigs are a list"),
        ({"validation": 2}, "data.validation=2: a fraction lies between 0 and 1; names of contigs are a list"),
        ({"validation": math.nan}, "data.validation=nan: a fraction lies between 0 and 1; names of contigs are a list"),
        ({"validation": []}, "data.validation=[]: name at least one contig; null validates nothing"),
        ({"max_n_fraction": -0.1}, "data.max_n_fraction=-0.1: it must lie in [0, 1]"),
        ({"max_n_fraction": math.nan}, "data.max_n_fraction=nan: it must lie in [0, 1]"),
        (
            {"soft_mask_weight": -1.0},
            "data.soft_mask_weight=-1.0: it must be a number of at least 0; data.soft_mask=ignore makes lower case no "
            "target",
        ),
        (
            {"soft_mask_weight": math.inf},
            "data.soft_mask_weight=inf: it must be a number of at least 0; data.soft_mask=ignore makes lower case no "
            "target",
        ),
        ({"mask_fraction": 0.0}, "data.mask_fraction=0.0: it must be above 0 and at most 1"),
        ({"num_workers": -1}, "data.num_workers=-1: it must be at least 0"),
        ({"fasta": []}, "data.fasta=[]: name at least one file"),
    ],
)
def test_values_outside_their_range_are_told(change: dict[str, Any], line: str) -> None:
    data = dataclasses.replace(Data(fasta="x.fa"), **change)
    assert genome.check(data) == [line]
    assert refusal(data) == [line]


def test_all_values_are_told_about_at_once() -> None:
    assert len(genome.check(Data(fasta="x.fa", sequence_length=0, stride=-5, max_n_fraction=2))) == 3


def test_values_at_the_ends_of_their_range_are_taken() -> None:
    for length, stride, fraction in itertools.product((2, 1 << 30), (1, None), (0, 1)):
        assert genome.check(Data(sequence_length=length, stride=stride, max_n_fraction=fraction)) == []


def test_a_planned_genome_is_opened_again_without_reading_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fasta = tmp_path / "genome.fa"
    fasta.write_bytes(b">a\n" + b"ACGT" * 20 + b"\n")
    data = Data(fasta=str(fasta), sequence_length=16, validation=0.2)
    planned = genome.load(data)
    monkeypatch.setattr(cache, "file_digest", lambda *_: pytest.fail("the file was read"))
    again = genome.reopen(data, planned.entries, planned.fingerprint)
    assert (again.train, again.validation, again.fingerprint) == (
        planned.train,
        planned.validation,
        planned.fingerprint,
    )


def test_a_genome_that_changed_since_it_was_planned_is_refused(tmp_path: Path) -> None:
    fasta = tmp_path / "genome.fa"
    fasta.write_bytes(b">a\n" + b"ACGT" * 20 + b"\n")
    data = Data(fasta=str(fasta), sequence_length=16)
    planned = genome.load(data)
    shutil.rmtree(Path(planned.entries[0]).parent)
    assert genome.reopen(data, planned.entries, planned.fingerprint).train == planned.train, "read anew"
    shutil.rmtree(Path(planned.entries[0]).parent)
    fasta.write_bytes(b">a\n" + b"ACGA" * 20 + b"\n")
    with pytest.raises(RequestError, match="no longer those that the run was planned with"):
        genome.reopen(data, planned.entries, planned.fingerprint)
