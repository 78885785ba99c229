"""Reading windows: from any process, on either strand, base for base what the genome says."""

import multiprocessing
import os
import pickle
import random
from multiprocessing.context import ForkContext, SpawnContext
from pathlib import Path

import numpy as np
import pytest

from launcher import genome
from launcher.errors import RunError
from launcher.genome import alphabet
from launcher.genome.windows import Windows
from launcher.schema import Data
from tests.genome.files import CONTIGS, text_of

LENGTH = 1000


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Windows:
    folder = tmp_path_factory.mktemp("cache")
    return genome.load(Data(fasta=str(CONTIGS), sequence_length=LENGTH, stride=700, cache_dir=str(folder))).train


@pytest.fixture(scope="module")
def sequences() -> dict[str, str]:
    return text_of(CONTIGS)


def letters(windows: Windows, sequences: dict[str, str], index: int) -> str:
    """A window as it should read, padded."""
    contig, start, end = windows.locate(index)
    return sequences[contig][start:end].ljust(LENGTH, "_")


def test_every_window_reads_its_place(windows: Windows, sequences: dict[str, str]) -> None:
    lengths = set()
    for index in range(len(windows)):
        codes = windows.read(index)
        assert codes.shape == (LENGTH,)
        assert codes.dtype == np.uint8
        assert alphabet.decode(codes) == letters(windows, sequences, index)
        lengths.add(np.count_nonzero(codes))
    assert len(lengths) > 20, "contigs end where they like"


def test_the_opposite_strand_is_padded_on_the_right_too(windows: Windows, sequences: dict[str, str]) -> None:
    opposite = str.maketrans("ACGT", "TGCA")
    for index in range(0, len(windows), 7):
        bases = letters(windows, sequences, index).rstrip("_")
        assert alphabet.decode(windows.read(index, reverse=True)) == bases[::-1].translate(opposite).ljust(LENGTH, "_")


def test_many_windows_are_the_rows_of_one_array(windows: Windows) -> None:
    generator = random.Random(0)
    indices = [generator.randrange(len(windows)) for _ in range(50)]
    reverse = [generator.random() < 0.5 for _ in indices]
    rows = windows.read_many(np.array(indices), np.array(reverse))
    assert rows.shape == (50, LENGTH)
    assert rows.flags.writeable
    expected = [windows.read(index, flag) for index, flag in zip(indices, reverse, strict=True)]
    assert np.array_equal(rows, expected)
    assert np.array_equal(windows.read_many(indices), [windows.read(index) for index in indices])


def test_a_window_that_is_not_there_is_an_index_error(windows: Windows) -> None:
    with pytest.raises(IndexError):
        windows.read(len(windows))
    with pytest.raises(IndexError):
        windows.read_many([0, len(windows)])


def _read_at_random(windows: Windows, seed: int, results: "multiprocessing.Queue[tuple[int, bool]]") -> None:
    generator = random.Random(seed)
    sequences, is_right = text_of(CONTIGS), True
    for _ in range(400):
        index = generator.randrange(len(windows))
        is_right &= alphabet.decode(windows.read(index)) == letters(windows, sequences, index)
    results.put((seed, is_right))


@pytest.mark.parametrize("context", [multiprocessing.get_context("fork"), multiprocessing.get_context("spawn")])
def test_processes_that_share_open_windows_read_right_bases(
    windows: Windows, context: ForkContext | SpawnContext
) -> None:
    windows.read(0)  # the files are open before the processes part
    results = context.Queue()
    processes = [context.Process(target=_read_at_random, args=(windows, seed, results)) for seed in range(3)]
    for process in processes:
        process.start()
    assert sorted(results.get(timeout=60) for _ in processes) == [(seed, True) for seed in range(3)]
    for process in processes:
        process.join()


def test_a_pickle_holds_paths_and_no_bases(windows: Windows, sequences: dict[str, str]) -> None:
    windows.read(0)
    windows.locate(0)
    assert windows.codes.size
    packed = pickle.dumps(windows)
    assert len(packed) < 2000
    again = pickle.loads(packed)
    assert again == windows
    assert alphabet.decode(again.read(3)) == letters(windows, sequences, 3)


def test_open_files_are_closed_with_the_windows(windows: Windows) -> None:
    def num_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = num_open()
    copies = [pickle.loads(pickle.dumps(windows)) for _ in range(10)]
    for copy in copies:
        copy.read(0)
    assert num_open() >= before + 10
    del copies, copy
    assert num_open() == before


def test_a_cache_cut_short_behind_an_open_window_is_an_error_and_not_padding(tmp_path: Path) -> None:
    found = genome.load(Data(fasta=str(CONTIGS), sequence_length=LENGTH, cache_dir=str(tmp_path))).train
    found.read(len(found) - 1)
    os.truncate(found.codes_path, 5000)
    with pytest.raises(RunError, match="ends early"):
        found.read(len(found) - 1)
