"""The batch algebra: exact, or refused with the nearest values that work."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.batch import Cut, solve, solve_for_fewer
from launcher.errors import RequestError
from launcher.schema import Batch, BatchSchedule, BatchScheduleType

small = st.integers(1, 64)
maybe = st.none() | small


def refusal(batch: Batch, ranks: int = 1, length: int | None = None) -> str:
    with pytest.raises(RequestError) as refused:
        solve(batch, ranks, length)
    (line,) = refused.value.faults
    return line


@given(small, small, small)
def test_micro_and_accumulation_give_each_other(micro: int, accumulation: int, ranks: int) -> None:
    size = micro * accumulation * ranks
    cut = Cut(size, micro, accumulation, ranks)
    assert solve(Batch(size, train_micro_batch_size_per_gpu=micro), ranks, None) == cut
    assert solve(Batch(size, gradient_accumulation_steps=accumulation), ranks, None) == cut
    both = Batch(None, train_micro_batch_size_per_gpu=micro, gradient_accumulation_steps=accumulation)
    assert solve(both, ranks, None) == cut


@given(st.builds(Batch, small, st.none(), maybe, maybe, small), small)
def test_a_cut_is_exact_or_refused(batch: Batch, ranks: int) -> None:
    try:
        cut = solve(batch, ranks, None)
    except RequestError:
        assert batch.train_batch_size is not None
        possible = [
            (micro, batch.train_batch_size // (micro * ranks))
            for micro in range(1, batch.train_batch_size + 1)
            if batch.train_batch_size % (micro * ranks) == 0
            and batch.train_micro_batch_size_per_gpu in (None, micro)
            and batch.gradient_accumulation_steps in (None, batch.train_batch_size // (micro * ranks))
        ]
        assert not possible
        return
    assert cut.micro_batch_size * cut.gradient_accumulation_steps * ranks == batch.train_batch_size
    assert batch.train_micro_batch_size_per_gpu in (None, cut.micro_batch_size)
    assert batch.gradient_accumulation_steps in (None, cut.gradient_accumulation_steps)


@given(small, small, small)
def test_without_a_cut_the_largest_exact_micro_batch_not_above_the_maximum_is_taken(
    share: int, ranks: int, maximum: int
) -> None:
    cut = solve(Batch(share * ranks, max_micro_batch_size_per_gpu=maximum), ranks, None)
    assert cut.micro_batch_size == max(m for m in range(1, maximum + 1) if share % m == 0)


@given(st.integers(1, 500), small, small)
def test_the_nearest_batches_that_a_refusal_names_work_and_are_the_nearest(size: int, micro: int, ranks: int) -> None:
    batch = Batch(size, train_micro_batch_size_per_gpu=micro)
    if size % (micro * ranks) == 0:
        return
    named = [int(word) for word in refusal(batch, ranks).split("nearest: ")[1].split(", ")]
    working = [n for n in range(1, size + micro * ranks + 1) if n % (micro * ranks) == 0]
    assert named == [
        n for n in (max((n for n in working if n < size), default=0), min(n for n in working if n > size)) if n
    ]


def test_an_indivisible_batch_names_the_rule_and_the_nearest() -> None:
    assert refusal(Batch(100, train_micro_batch_size_per_gpu=4), ranks=8) == (
        "batch.train_batch_size=100 cannot be cut into micro-batches of 4 over 8 ranks: it must be a multiple of 32; "
        "nearest: 96, 128"
    )
    assert refusal(Batch(256, train_micro_batch_size_per_gpu=2), ranks=7) == (
        "batch.train_batch_size=256 cannot be cut into micro-batches of 2 over 7 ranks: it must be a multiple of 14; "
        "nearest: 252, 266"
    )


def test_an_impossible_accumulation_names_those_that_divide_the_batch_as_well() -> None:
    assert refusal(Batch(8, gradient_accumulation_steps=3)) == (
        "batch.train_batch_size=8 cannot be cut into 3 accumulation steps over 1 rank: it must be a multiple of 3; "
        "nearest: 6, 9; or batch.gradient_accumulation_steps=2 or 4"
    )


def test_three_numbers_that_disagree_are_refused() -> None:
    batch = Batch(64, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=2)
    assert refusal(batch, ranks=4) == (
        "batch.train_batch_size=64 is not micro-batches of 4 x 2 accumulation steps x 4 ranks = 32: set one of the "
        "three to null, or batch.train_batch_size=32"
    )


def test_a_token_budget_counts_sequences_times_their_length() -> None:
    tokens = Batch(None, train_batch_tokens=65536, gradient_accumulation_steps=2)
    assert solve(tokens, 2, 8192) == Cut(8, 2, 2, 2)
    assert refusal(Batch(None, train_batch_tokens=65000), length=8192) == (
        "batch.train_batch_tokens=65000 cannot be cut into sequences of 8192 bases: it must be a multiple of 8192; "
        "nearest: 57344, 65536"
    )
    assert refusal(Batch(None, train_batch_tokens=8192 * 3), ranks=2, length=8192) == (
        "batch.train_batch_tokens=24576 cannot be cut into equal parts over 2 ranks: it must be a multiple of 16384; "
        "nearest: 16384, 32768"
    )
    assert "both set" in refusal(Batch(8, train_batch_tokens=65536), length=8192)


def test_no_batch_at_all_and_numbers_below_one_are_refused() -> None:
    assert refusal(Batch(None, train_micro_batch_size_per_gpu=2)).startswith("batch.train_batch_size=null: set it")
    assert refusal(Batch(0)) == "batch.train_batch_size=0: it must be at least 1"


def ramp(initial: int, factor: int = 2) -> BatchSchedule:
    return BatchSchedule(BatchScheduleType.RAMP, initial_batch_size=initial, over=10, growth_factor=factor)


@given(small, small, st.integers(0, 4), st.integers(2, 3), small)
def test_the_micro_batch_is_the_largest_that_cuts_every_batch_of_a_schedule(
    share: int, ranks: int, doublings: int, factor: int, maximum: int
) -> None:
    levels = [share * ranks * factor**k for k in range(doublings + 2)]
    batch = Batch(levels[-1], max_micro_batch_size_per_gpu=maximum)
    cut = solve(batch, ranks, None, ramp(levels[0], factor))
    assert cut.micro_batch_size == max(
        m for m in range(1, maximum + 1) if all(level % (m * ranks) == 0 for level in levels)
    )
    assert cut.train_batch_size == levels[-1]
    for level in levels:
        assert cut.micro_batch_size * cut.accumulation_steps(level) * ranks == level


def test_milestones_share_one_micro_batch() -> None:
    schedule = BatchSchedule(BatchScheduleType.MILESTONES, milestones=[[0, 12], [5, 20], [9, 32]])
    batch = Batch(32, max_micro_batch_size_per_gpu=8)
    assert solve(batch, 1, None, schedule) == Cut(32, 4, 8, 1)
    assert solve(batch, 2, None, schedule) == Cut(32, 2, 8, 2)
    with pytest.raises(RequestError) as refused:
        solve(batch, 8, None, schedule)
    assert refused.value.faults == [
        "batch_schedule.milestones[0]: 12 sequences cannot be cut into equal parts over 8 ranks: they must be a "
        "multiple of 8; nearest: 8, 16",
        "batch_schedule.milestones[1]: 20 sequences cannot be cut into equal parts over 8 ranks: they must be a "
        "multiple of 8; nearest: 16, 24",
    ]


def test_a_schedule_that_the_given_cut_does_not_fit_is_refused() -> None:
    def refused(batch: Batch, ranks: int) -> list[str]:
        with pytest.raises(RequestError) as error:
            solve(batch, ranks, None, ramp(4))
        return error.value.faults

    line = "it must be a multiple of 16; nearest: 16"
    assert refused(Batch(64, train_micro_batch_size_per_gpu=8), 2) == [
        f"batch_schedule.initial_batch_size=4 cannot be cut into micro-batches of 8 over 2 ranks: {line}"
    ]
    assert refused(Batch(64, gradient_accumulation_steps=4), 1) == [
        f"batch_schedule.initial_batch_size=4 cannot be cut into micro-batches of 16 over 1 rank: {line}"
    ]
    triple = Batch(None, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=8)
    assert solve(triple, 2, None, ramp(4)) == Cut(32, 2, 8, 2)
    assert refused(triple, 4) == [
        "batch_schedule.initial_batch_size=4 cannot be cut into micro-batches of 2 over 4 ranks: it must be a "
        "multiple of 8; nearest: 8"
    ]


@given(st.builds(Batch, small, st.none(), maybe, maybe, small), small)
def test_the_most_ranks_that_can_share_a_batch_are_found(batch: Batch, most: int) -> None:
    def cut(ranks: int) -> Cut | None:
        try:
            return solve(batch, ranks, None)
        except RequestError:
            return None

    possible = [found for ranks in range(1, most + 1) if (found := cut(ranks)) is not None]
    if possible:
        assert solve_for_fewer(batch, most, None) == possible[-1]
        return
    with pytest.raises(RequestError) as refused:
        solve_for_fewer(batch, most, None)
    assert refused.value.faults == [refusal(batch, most)], "it is told of the ranks that there are"
