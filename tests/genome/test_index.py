"""Stretches and the windows on them, against the same worked out base by base."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.genome import bed, index
from launcher.genome.index import Contigs, Stretches


def stretches(*pairs: tuple[int, int]) -> Stretches:
    return Stretches(*np.array(pairs, dtype=np.int64).reshape(-1, 2).T)


def pairs_of(found: Stretches) -> list[tuple[int, int]]:
    return list(zip(found.starts.tolist(), found.ends.tolist(), strict=True))


def windows_of(found: Stretches, sequence_length: int, stride: int) -> list[tuple[int, int]]:
    """(start, length) of all windows, whatever the chunks."""
    chunks = list(index.tile(found, sequence_length, stride))
    return [pair for starts, lengths in chunks for pair in zip(starts.tolist(), lengths.tolist(), strict=True)]


@st.composite
def apart(draw: st.DrawFn) -> Stretches:
    """Stretches that may touch, as two contigs do."""
    sizes = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), max_size=8))
    pairs, position = [], 0
    for gap, size in sizes:
        pairs.append((position + gap, position + gap + size))
        position += gap + size
    return stretches(*pairs)


@pytest.mark.parametrize(
    ("bases", "length", "stride", "expected"),
    [
        (8, 4, 4, [(0, 4), (4, 4)]),
        (10, 4, 4, [(0, 4), (4, 4), (8, 2)]),
        (9, 4, 4, [(0, 4), (4, 4)]),  # one base predicts nothing
        (10, 4, 2, [(0, 4), (2, 4), (4, 4), (6, 4)]),  # a tail would read nothing new
        (11, 4, 2, [(0, 4), (2, 4), (4, 4), (6, 4), (8, 3)]),
        (11, 4, 5, [(0, 4), (5, 4)]),
        (12, 4, 5, [(0, 4), (5, 4), (10, 2)]),
        (3, 4, 1, [(0, 3)]),
        (2, 8192, 4096, [(0, 2)]),
        (1, 4, 4, []),
        (4, 4, 10**12, [(0, 4)]),
    ],
)
def test_windows_of_a_stretch(bases: int, length: int, stride: int, expected: list[tuple[int, int]]) -> None:
    assert windows_of(stretches((0, bases)), length, stride) == expected


@given(apart(), st.integers(2, 20), st.integers(1, 25))
def test_windows_never_leave_their_stretch_nor_repeat_one_another(found: Stretches, length: int, stride: int) -> None:
    windows = windows_of(found, length, stride)
    for start, size in windows:
        (home,) = [pair for pair in pairs_of(found) if pair[0] <= start < pair[1]]
        assert 2 <= size <= length
        assert start + size <= home[1]
        assert (start - home[0]) % stride == 0
    for (start, size), (next_start, next_size) in itertools.pairwise(windows):
        assert start < next_start
        assert start + size < next_start + next_size


@given(apart(), st.integers(2, 20), st.data())
def test_windows_cover_every_base_when_they_are_not_too_far_apart(
    found: Stretches, length: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, length))
    covered = {base for start, size in windows_of(found, length, stride) for base in range(start, start + size)}
    for start, end in pairs_of(found):
        missed = set(range(start, end)) - covered
        # A last base by itself predicts nothing and is predicted by nothing.
        assert missed <= {end - 1}
        assert not missed or (end - 1 - start) % stride == 0


@given(apart(), st.integers(2, 20), st.integers(1, 25), st.integers(1, 7))
def test_chunks_do_not_change_the_windows(found: Stretches, length: int, stride: int, chunk: int) -> None:
    whole = windows_of(found, length, stride)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "CHUNK_WINDOWS", chunk)
        assert windows_of(found, length, stride) == whole


@given(apart(), apart())
def test_what_is_left_outside_holes(found: Stretches, holes: Stretches) -> None:
    left = pairs_of(index.subtract(found, holes))
    gone = {base for start, end in pairs_of(holes) for base in range(start, end)}
    kept = [base for start, end in pairs_of(found) for base in range(start, end) if base not in gone]
    assert [base for start, end in left for base in range(start, end)] == kept
    assert all(any(start >= home[0] and end <= home[1] for home in pairs_of(found)) for start, end in left)


@given(apart(), st.floats(0.001, 0.999))
def test_the_end_of_every_stretch_is_held_out(found: Stretches, fraction: float) -> None:
    train, validation = (pairs_of(part) for part in index.split_ends(found, fraction))
    ends = dict(validation)
    for (start, cut), (whole_start, end) in zip(train, pairs_of(found), strict=True):
        held_out = round((end - start) * fraction)
        assert start == whole_start
        if min(held_out, end - start - held_out) < 2:
            assert cut == end
        else:
            assert cut == end - held_out
            assert ends.pop(cut) == end
    assert not ends


def test_regions_that_overlap_or_touch_are_one_but_not_over_the_end_of_a_contig() -> None:
    contigs = Contigs.of(["a", "b"], [10, 20])
    regions = [("b", 0, 5), ("a", 7, 10), ("a", 0, 3), ("a", 2, 5), ("a", 5, 6), ("b", 1, 2), ("b", 19, 20)]
    placed = index.place([bed.Region(0, *region) for region in regions], contigs)
    assert pairs_of(placed) == [(0, 6), (7, 10), (10, 15), (29, 30)]
