"""Step arithmetic against counting by hand, and the shuffle against what a permutation is."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.errors import RequestError
from launcher.schema import Tail, Train
from launcher.steps import Steps, count, permute, sequence_keys, steps_in_epochs, steps_in_sequences

tails = st.sampled_from(list(Tail))


def by_hand(num_sequences: int, batch_size: int, tail: Tail, epochs: int) -> list[list[tuple[int, int]]]:
    """The batches of E epochs as lists of (epoch, place), dealt out one sequence at a time."""
    batches: list[list[tuple[int, int]]] = []
    batch: list[tuple[int, int]] = []
    for epoch in range(epochs):
        for place in range(num_sequences):
            batch.append((epoch, place))
            if len(batch) == batch_size:
                batches.append(batch)
                batch = []
        if tail is Tail.FLUSH and batch:
            batches.append(batch)
        if tail is not Tail.CARRY:
            batch = []
    return batches


@pytest.mark.parametrize(("tail", "steps"), [(Tail.FLUSH, 8), (Tail.DROP, 6), (Tail.CARRY, 6)])
def test_13_sequences_at_batch_4_for_2_epochs(tail: Tail, steps: int) -> None:
    assert count(Train(epochs=2), tail, 4, 13, None) == steps
    assert len(by_hand(13, 4, tail, 2)) == steps


@given(st.integers(1, 40), st.integers(1, 50), tails, st.integers(1, 5), st.integers(0, 2**62))
@settings(deadline=None)
def test_batches_are_those_dealt_out_by_hand(n: int, size: int, tail: Tail, epochs: int, seed: int) -> None:
    expected = by_hand(n, size, tail, epochs)
    assert steps_in_epochs(epochs, n, size, tail) == len(expected)
    run = Steps(n, size, tail, len(expected), seed)
    consumed = 0
    for step, batch in enumerate(expected):
        places = {
            epoch: permute(np.array([p for e, p in batch if e == epoch]), n, seed, epoch).tolist()
            for epoch in dict.fromkeys(e for e, _ in batch)
        }
        assert run.sequences(step).tolist() == [index for indices in places.values() for index in indices]
        assert run.sequences_before(step) == consumed
        consumed += len(batch)


@given(st.integers(1, 40), st.integers(1, 50), tails, st.integers(0, 300))
def test_a_budget_is_never_exceeded_and_one_more_step_would_exceed_it(
    n: int, size: int, tail: Tail, budget: int
) -> None:
    if tail is Tail.DROP and n < size:
        return
    batches = [len(batch) for batch in by_hand(n, size, tail, 1 + (budget + size) // n * 2 + 1)]
    steps = steps_in_sequences(budget, n, size, tail)
    assert sum(batches[:steps]) <= budget < sum(batches[: steps + 1])


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
    assert count(train, Tail.CARRY, 4, 13, 100) == steps


def test_what_only_the_job_can_know_is_left_open() -> None:
    assert count(Train(max_steps=5), Tail.CARRY, 4, None, None) == 5
    assert count(Train(max_steps=5, epochs=1), Tail.CARRY, 4, None, None) is None
    assert count(Train(max_steps=5), Tail.DROP, 4, None, None) is None


def refusal(*arguments: object) -> str:
    with pytest.raises(RequestError) as refused:
        count(*arguments)  # type: ignore[arg-type]
    (line,) = refused.value.faults
    return line


def test_a_run_without_end_or_without_a_step_is_refused() -> None:
    assert refusal(Train(), Tail.CARRY, 4, 13, 100) == (
        "train.max_steps=null: set it, or train.max_tokens, or train.epochs"
    )
    assert refusal(Train(epochs=1), Tail.CARRY, 32, 13, 100) == (
        "train.epochs=1: 13 sequences do not fill one global batch of 32; set train.epochs=3 or more, or "
        "accumulation.tail=flush"
    )
    assert refusal(Train(max_tokens=399), Tail.CARRY, 4, 13, 100) == (
        "train.max_tokens=399: one optimizer step takes 400 bases; set at least that"
    )
    assert refusal(Train(epochs=1), Tail.DROP, 14, 13, 100).startswith("accumulation.tail=drop: the 13 sequences")
    assert refusal(Train(max_tokens=400), Tail.CARRY, 4, None, None).startswith("train.max_tokens=400: it needs")
