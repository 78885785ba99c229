"""Step arithmetic against counting by hand, and the shuffle against what a permutation is."""

import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher import lr, steps
from launcher.batch_schedule import Levels
from launcher.errors import RequestError
from launcher.schema import LrSchedule, LrScheduleType, Scaling, Tail, Train
from launcher.steps import Limits, Steps, count, permute, sequence_keys

tails = st.sampled_from(list(Tail))
SizeAt = Callable[[int, int], int]
"""The batch in force at a step, before which so many sequences were read."""


def by_hand(num_sequences: int, size_at: SizeAt, tail: Tail, epochs: int) -> list[list[tuple[int, int]]]:
    """The batches of E epochs as lists of (epoch, place), dealt out one sequence at a time."""
    batches: list[list[tuple[int, int]]] = []
    batch: list[tuple[int, int]] = []
    read, size = 0, size_at(0, 0)

    def close() -> None:
        nonlocal batch, read, size
        batches.append(batch)
        read += len(batch)
        batch, size = [], size_at(len(batches), read)

    for epoch in range(epochs):
        for place in range(num_sequences):
            batch.append((epoch, place))
            if len(batch) == size:
                close()
        if tail is Tail.FLUSH and batch:
            close()
        if tail is not Tail.CARRY:
            batch = []
    return batches


def size_at(levels: Levels) -> SizeAt:
    def at(step: int, read: int) -> int:
        counted = read if levels.by_sequences else step
        return [size for start, size in zip(levels.starts, levels.sizes, strict=True) if start <= counted][-1]

    return at


@st.composite
def schedules(draw: st.DrawFn, largest: int = 20) -> Levels:
    """A few batches that rise and fall, in steps or sequences."""
    gaps = draw(st.lists(st.integers(0, 12), max_size=4))
    starts = (0, *np.cumsum(gaps, dtype=int).tolist())
    sizes = tuple(draw(st.integers(1, largest)) for _ in starts)
    return Levels(sizes, starts, draw(st.booleans()))


def constant(size: int) -> Levels:
    return Levels((size,))


@pytest.mark.parametrize(("tail", "steps"), [(Tail.FLUSH, 8), (Tail.DROP, 6), (Tail.CARRY, 6)])
def test_13_sequences_at_batch_4_for_2_epochs(tail: Tail, steps: int) -> None:
    assert count(Train(epochs=2), tail, constant(4), 13, None) == steps
    assert len(by_hand(13, lambda step, read: 4, tail, 2)) == steps


@pytest.mark.parametrize(
    ("tail", "batches", "epochs"),
    [
        # 13 sequences; the first three batches are 5, the others 2. Two of 5 leave 3 sequences of the first epoch.
        (Tail.CARRY, [5, 5, 5, 2, 2, 2, 2, 2], 25 / 13),
        (Tail.DROP, [5, 5, 5, 2, 2, 2, 2], 2.0),
        (Tail.FLUSH, [5, 5, 3, 2, 2, 2, 2, 2, 2, 1], 2.0),
    ],
)
def test_two_epochs_of_batches_that_shrink_on_the_way(tail: Tail, batches: list[int], epochs: float) -> None:
    run = steps.of(Train(epochs=2), tail, Levels((5, 2), (0, 3)), 13, None)
    assert [len(run.sequences(step)) for step in range(run.num_steps)] == batches
    assert run.epochs() == epochs
    assert [run.batch_size(step) for step in (0, 2, 3)] == [5, 5, 2]


@given(st.integers(1, 40), schedules(), tails, st.integers(1, 5), st.integers(0, 2**62))
@settings(deadline=None)
def test_batches_are_those_dealt_out_by_hand(n: int, levels: Levels, tail: Tail, epochs: int, seed: int) -> None:
    if tail is Tail.DROP and n < max(levels.sizes):
        return
    expected = by_hand(n, size_at(levels), tail, epochs)
    if not expected:
        with pytest.raises(RequestError):
            steps.of(Train(epochs=epochs), tail, levels, n, None, seed)
        return
    run = steps.of(Train(epochs=epochs), tail, levels, n, None, seed)
    assert run.num_steps == len(expected)
    consumed = 0
    for step, batch in enumerate(expected):
        places = {
            epoch: permute(np.array([p for e, p in batch if e == epoch]), n, seed, epoch).tolist()
            for epoch in dict.fromkeys(e for e, _ in batch)
        }
        assert run.sequences(step).tolist() == [index for indices in places.values() for index in indices]
        assert run.batch_size(step) == size_at(levels)(step, consumed)
        assert run.sequences_before(step) == consumed
        assert all(
            run.first_step_after(consumed - less) == step for less in range(len(expected[step - 1]) * (step > 0))
        )
        consumed += len(batch)
    if tail is Tail.DROP:
        in_last = [step for step, batch in enumerate(expected) if batch[0][0] == epochs - 1]
        assert run.epochs() == epochs - 1 + (len(expected) - in_last[0]) / len(in_last)
    else:
        assert run.epochs() == consumed / n
    assert pickle.loads(pickle.dumps(run)) == run


@given(st.integers(1, 40), st.integers(1, 50), tails, st.integers(1, 300))
def test_the_epochs_of_a_run_of_one_batch_size(n: int, size: int, tail: Tail, num_steps: int) -> None:
    if tail is Tail.DROP and n < size:
        return
    batches = by_hand(n, lambda step, read: size, tail, 1 + num_steps * size // n * 2 + 1)[:num_steps]
    in_epoch = n // size
    expected = num_steps / in_epoch if tail is Tail.DROP else sum(map(len, batches)) / n
    assert Steps(n, size, tail, num_steps, 0).epochs() == expected


@given(st.integers(1, 40), schedules(), tails, st.integers(0, 300))
def test_a_budget_is_never_exceeded_and_one_more_step_would_exceed_it(
    n: int, levels: Levels, tail: Tail, budget: int
) -> None:
    if tail is Tail.DROP and n < max(levels.sizes):
        return
    batches = [len(batch) for batch in by_hand(n, size_at(levels), tail, 1 + (budget + 20) // n * 2 + 1)]
    if budget < batches[0]:
        with pytest.raises(RequestError, match=f"one optimizer step takes {batches[0] * 7} bases"):
            steps.of(Train(max_tokens=budget * 7), tail, levels, n, 7)
        return
    number = steps.of(Train(max_tokens=budget * 7 + 6), tail, levels, n, 7).num_steps
    assert sum(batches[:number]) <= budget < sum(batches[: number + 1])


@given(st.integers(1, 40), schedules(), tails, st.integers(1, 30), st.integers(1, 20))
@settings(deadline=None)
def test_a_batch_that_grows_during_the_run_is_that_of_a_schedule_that_knew_it(
    n: int, levels: Levels, tail: Tail, later: int, size: int
) -> None:
    if levels.by_sequences or (tail is Tail.DROP and n < max(*levels.sizes, size)):
        return
    known = levels.starts[-1] + later
    train = Train(max_tokens=300, epochs=20)
    try:
        planned = steps.of(train, tail, Levels((*levels.sizes, size), (*levels.starts, known)), n, 1, 3)
    except RequestError:
        return
    grown = steps.of(train, tail, levels, n, 1, 3).grown(known, size)
    assert grown == planned
    assert grown.num_steps == planned.num_steps


def test_a_run_that_grows_twice_keeps_its_past_and_counts_its_end_anew() -> None:
    run = steps.of(Train(max_tokens=100), Tail.CARRY, Levels((4, 8, 16)), 1000, 1)
    assert run.num_steps == 25
    once = run.grown(5, 8)
    assert (once.num_steps, once.sequences_before(5), once.sequences_before(6)) == (15, 20, 28)
    twice = once.grown(10, 16)
    assert [twice.batch_size(step) for step in (4, 5, 9, 10)] == [4, 8, 8, 16]
    assert twice.num_steps == 12
    assert twice.sequences_before(12) == 92
    assert all((run.sequences(step) == twice.sequences(step)).all() for step in range(5))
    assert twice.grown(12, 32).num_steps == 12, "no such batch fits into what is left"


def test_two_levels_that_begin_at_one_step_leave_the_later() -> None:
    run = steps.of(Train(max_steps=9), Tail.CARRY, Levels((1, 2, 4, 8), (0, 0, 5, 5)), 100, None)
    assert [run.batch_size(step) for step in range(9)] == [2] * 5 + [8] * 4


@given(st.integers(1, 5000), st.integers(0, 2**63 - 1), st.integers(0, 10**6))
@settings(deadline=None)
def test_the_shuffle_of_an_epoch_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    assert sorted(permute(np.arange(n), n, seed, epoch).tolist()) == list(range(n))


def test_every_sequence_comes_once_an_epoch() -> None:
    run = Steps(1000, 8, Tail.FLUSH, 3 * 125, seed=7)
    for epoch in range(3):
        seen = Counter(int(i) for step in range(epoch * 125, (epoch + 1) * 125) for i in run.sequences(step))
        assert seen == Counter(range(1000))


def test_epochs_and_seeds_shuffle_differently_and_evenly() -> None:
    n = 10_000
    orders = [permute(np.arange(n), n, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    for i, a in enumerate(orders):
        assert (np.corrcoef(np.arange(n), a)[0, 1]) ** 2 * n < 16  # four standard deviations
        for b in orders[:i]:
            assert np.corrcoef(a, b)[0, 1] ** 2 * n < 16
            assert np.count_nonzero(a == b) < 10  # one is expected


def test_where_a_sequence_lands_is_uniform() -> None:
    """Chi-squared over 64 cells of where place 0 lands in 6,400 epochs of 64 sequences; 99.99 % quantile of 63 df."""
    landed = np.bincount([int(permute(np.array([0]), 64, 5, epoch)[0]) for epoch in range(6400)], minlength=64)
    assert ((landed - 100.0) ** 2 / 100.0).sum() < 113.0


def test_billions_of_sequences_cost_no_memory() -> None:
    indices = permute(np.arange(10**12, 10**12 + 1000), 3 * 10**12, 0, 0)
    assert len(set(indices.tolist())) == 1000
    assert 0 <= indices.min() <= indices.max() < 3 * 10**12


def test_keys_of_sequences_differ_by_seed_step_and_place() -> None:
    keys = np.concatenate([sequence_keys(seed, step, np.arange(500)) for seed in range(4) for step in range(4)])
    assert len(np.unique(keys)) == len(keys)


@pytest.mark.parametrize(
    ("train", "steps"),
    [
        (Train(max_steps=5, epochs=2), 5),
        (Train(max_steps=50, epochs=2), 6),
        (Train(max_steps=50, max_tokens=2000, epochs=9), 5),
        (Train(max_tokens=1999), 4),
    ],
)
def test_the_earliest_limit_ends_the_run(train: Train, steps: int) -> None:
    assert count(train, Tail.CARRY, constant(4), 13, 100) == steps


def test_what_only_the_job_can_know_is_left_open() -> None:
    assert count(Train(max_steps=5), Tail.CARRY, constant(4), None, None) == 5
    assert count(Train(max_steps=5, epochs=1), Tail.CARRY, constant(4), None, None) is None
    assert count(Train(max_steps=5), Tail.DROP, constant(4), None, None) is None


def refusal(*arguments: object) -> str:
    with pytest.raises(RequestError) as refused:
        count(*arguments)  # type: ignore[arg-type]
    (line,) = refused.value.faults
    return line


def test_a_run_without_end_or_without_a_step_is_refused() -> None:
    assert refusal(Train(), Tail.CARRY, constant(4), 13, 100) == (
        "train.max_steps=null: set it, or train.max_tokens, or train.epochs"
    )
    assert refusal(Train(epochs=1), Tail.CARRY, constant(32), 13, 100) == (
        "train.epochs=1: 13 sequences do not fill one global batch of 32; set train.epochs=3 or more, or "
        "accumulation.tail=flush"
    )
    assert refusal(Train(max_tokens=399), Tail.CARRY, constant(4), 13, 100) == (
        "train.max_tokens=399: one optimizer step takes 400 bases; set at least that"
    )
    assert refusal(Train(epochs=1), Tail.DROP, constant(14), 13, 100).startswith(
        "accumulation.tail=drop: the 13 sequences"
    )
    assert refusal(Train(max_tokens=400), Tail.CARRY, constant(4), None, None).startswith(
        "train.max_tokens=400: it needs"
    )
    assert refusal(Train(epochs=1), Tail.DROP, Levels((2, 14), (0, 9)), 13, 100).startswith(
        "accumulation.tail=drop: the 13"
    )
    assert "one optimizer step takes 200 bases" in refusal(Train(max_tokens=199), Tail.CARRY, Levels((2, 4)), 13, 100)


def one_by_one(num_sequences: int, size_at: SizeAt, tail: Tail, limits: Limits) -> Iterator[tuple[int, int]]:
    """(place, sequences) of one batch after another until a limit ends the run; places count over all epochs."""
    step = read = place = 0
    while limits.max_steps is None or step < limits.max_steps:
        size, left = size_at(step, read), num_sequences - place % num_sequences
        if tail is Tail.FLUSH:
            size = min(size, left)
        if tail is Tail.DROP and size > left:
            place += left
        if limits.max_sequences is not None and read + size > limits.max_sequences:
            return
        if limits.epochs is not None and place + size > limits.epochs * num_sequences:
            return
        yield place, size
        step, read, place = step + 1, read + size, place + size


N, LENGTH = 3_000_017, 8192
"""A prime number of sequences."""

LEVELS = {
    "constant": constant(2311),
    "ramp": Levels((96, 192, 384, 768, 1536), (0, 1001, 2002, 3003, 4004)),
    "ramp by bases": Levels((113, 1130, 2147, 3164), (0, 1_000_000, 5_000_000, 20_000_001), by_sequences=True),
    "milestones": Levels((4096, 1000, 7, 2047), (0, 333, 700, 20_011)),
    "noise scale": Levels((250, 500, 1000, 2000)),
}

LIMITS = {
    "max_steps": Train(max_steps=12_345),
    "max_tokens": Train(max_tokens=23_456_789 * LENGTH + 8191),
    "epochs": Train(epochs=11),
    "all": Train(max_steps=30_000, max_tokens=40_000_000 * LENGTH, epochs=13),
}


@pytest.mark.parametrize("tail", Tail)
@pytest.mark.parametrize("schedule", LEVELS)
@pytest.mark.parametrize("limit", LIMITS)
def test_planned_steps_are_the_samplers_and_the_rate_ends_where_it_should(
    schedule: str, limit: str, tail: Tail
) -> None:
    """Millions of sequences, many epochs, awkward divisors; the noise scale decides at two steps to grow."""
    levels, train = LEVELS[schedule], LIMITS[limit]
    run = steps.of(train, tail, levels, N, LENGTH, seed=1)
    if schedule == "noise scale":
        run = run.grown(2222, 500).grown(7777, 1000)
        levels = Levels((250, 500, 1000), (0, 2222, 7777))
    limits = run.limits
    assert limits is not None
    bounds = list(zip(levels.starts, levels.sizes, strict=True))

    def at(step: int, read: int) -> int:
        counted, size = read if levels.by_sequences else step, levels.sizes[0]
        for start, new in bounds:
            if counted >= start:
                size = new
        return size

    batches = list(one_by_one(N, at, tail, limits))
    assert run.num_steps == len(batches)
    places, taken = np.array(batches, dtype=np.int64).T
    before = np.concatenate([[0], np.cumsum(taken)])
    assert run.sequences_before(run.num_steps) == before[-1]
    # What the sampler hands out, at both ends of every epoch and of every batch size, and elsewhere.
    epochs = places // N
    edges = np.flatnonzero(np.diff(epochs)) + 1
    changes = [segment.first_step for segment in run.segments if segment.first_step < len(batches)]
    chosen = {0, len(batches) - 1, *edges.tolist(), *(edges - 1).tolist(), *changes, *range(0, len(batches), 997)}
    for step in sorted(chosen):
        positions = np.arange(places[step], places[step] + taken[step])
        expected = [int(permute(np.array([p % N]), N, 1, int(p // N))[0]) for p in positions[[0, -1]]]
        indices = run.sequences(step)
        assert len(indices) == taken[step]
        assert [int(indices[0]), int(indices[-1])] == expected
        assert run.sequences_before(step) == before[step]
        assert run.batch_size(step) == at(step, int(before[step]))
    _check_the_end_of_the_learning_rate(run, grows=schedule == "noise scale")


def _check_the_end_of_the_learning_rate(run: Steps, *, grows: bool) -> None:
    """Exactly the floor in the last step, in every unit, with and without skipped steps."""
    last, size = run.num_steps - 1, run.batch_size(run.num_steps - 1)
    for kind in (LrScheduleType.COSINE, LrScheduleType.LINEAR, LrScheduleType.WSD):
        rates = lr.Rates(
            LrSchedule(kind, min_lr_ratio=0.125),
            run,
            peak=3e-4,
            train_batch_size=4096,
            batch_scaling=Scaling.SQRT,
            grows=grows,
            warmup_sequences=1_000_003,
        )
        end = 3e-4 * (size / 4096) ** 0.5 * 0.125
        assert rates.of(last) == rates.of(last, skipped_steps=3, skipped_sequences=1234) == end
        assert rates.of(last - 1) > end or run.batch_size(last - 1) < size
        warmup = rates.warmup_steps
        assert run.sequences_before(warmup - 1) < 1_000_003 <= run.sequences_before(warmup)
        assert rates.of(warmup - 1) == 3e-4 * (run.batch_size(warmup - 1) / 4096) ** 0.5


def test_a_plan_of_a_long_run_takes_no_time() -> None:
    """A thousand levels over 10^11 steps: arithmetic for each batch size, never a loop over steps."""
    sizes = tuple(range(1, 1001))
    start = time.perf_counter()
    for tail in Tail:
        run = steps.of(
            Train(epochs=10**6), tail, Levels(sizes, tuple(10**7 * k for k in range(1000)), True), 10**9 + 7, 512
        )
        assert run.epochs() == pytest.approx(10**6, rel=1e-9)
    assert time.perf_counter() - start < 5
