"""The search for the largest micro-batch that fits, on sizes of which it is known."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from launcher import micro_batch
from launcher.schema import Accumulation, Batch, Config, Data, Sync, Train, Zero

CONFIG = Config(data=Data("genome.fa"))


def trial_of(limit: int, tried: list[list[int]]) -> micro_batch.Trial:
    def trial(sizes: Sequence[int]) -> int | None:
        tried.append(list(sizes))
        return max((size for size in sizes if size <= limit), default=None)

    return trial


@pytest.mark.parametrize("sizes", [[1], [1, 2, 4, 8, 16], [1, 2, 3, 5, 6, 10, 15, 30], [1, 7], list(range(1, 40))])
def test_the_largest_size_that_fits_is_found_whatever_fits(sizes: list[int]) -> None:
    for limit in range(45):
        fitting = [size for size in sizes if size <= limit]
        assert micro_batch.largest(sizes, trial_of(limit, [])) == (fitting[-1] if fitting else None)


def test_sizes_are_doubled_in_one_trial_and_then_halved() -> None:
    tried: list[list[int]] = []
    assert micro_batch.largest([1, 2, 3, 4, 6, 8, 12, 24], trial_of(11, tried)) == 8
    assert tried == [[1, 2, 4, 8, 24], [12]]


def test_a_size_is_remembered_for_what_it_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    key = micro_batch.key(CONFIG, 2)
    assert micro_batch.remembered(key, [1, 2, 4]) is None
    micro_batch.remember(key, 4)
    assert micro_batch.remembered(key, [1, 2, 4]) == 4
    assert micro_batch.remembered(key, [1, 2]) is None, "the batch cannot be cut so any more"
    same = replace(CONFIG, batch=Batch(64), train=Train(max_steps=9), name="another")
    assert micro_batch.key(same, 2) == key
    assert isinstance(CONFIG.data, Data)
    for other in (
        replace(CONFIG, zero=Zero(stage=3)),
        replace(CONFIG, accumulation=Accumulation(sync=Sync.ONCE_PER_WINDOW)),
        replace(CONFIG, data=replace(CONFIG.data, sequence_length=99)),
    ):
        assert micro_batch.key(other, 2) != key
    assert micro_batch.key(CONFIG, 4) != key


def test_without_a_cache_folder_nothing_is_remembered_and_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    micro_batch.remember("key", 4)
    assert micro_batch.remembered("key", [4]) is None


@pytest.mark.parametrize(
    "text", ["{}", "[4]", '{"micro_batch_size": 4.0}', '{"micro_batch_size": true}', '{"micro_batch_size": NaN}',
             "[" * 100_000]
)  # fmt: skip
def test_a_file_that_somebody_has_changed_is_as_if_it_were_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    micro_batch.remember("key", 4)
    (file,) = tmp_path.rglob("*.json")
    file.write_text(text)
    assert micro_batch.remembered("key", [1, 2, 4]) is None
    micro_batch.lower("key", 2)
    assert file.read_text() == text


def test_a_size_that_has_become_too_large_is_not_remembered_any_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    micro_batch.lower("key", 8)
    assert micro_batch.remembered("key", [8]) is None, "nobody has looked for one"
    micro_batch.remember("key", 4)
    for size in (8, 2):
        micro_batch.lower("key", size)
    assert micro_batch.remembered("key", [1, 2, 4, 8]) == 2
