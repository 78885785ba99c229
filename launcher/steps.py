"""Which sequences make up optimizer step s: arithmetic, not state.

The global batch of a step is a function of (number of sequences N, batch schedule, tail policy, seed, s) alone, so that
micro-batches, ranks and restarts cannot change it. The loop's boundaries, the plan's counts and the learning-rate
horizon all come from here.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from launcher.batch_schedule import Levels
from launcher.errors import RequestError
from launcher.schema import Tail, Train

Int64s = NDArray[np.int64]
UInt64s = NDArray[np.uint64]

ROUNDS = 8
"""Feistel rounds of the shuffle; four make a pseudo-random permutation (Luby and Rackoff 1988), eight leave room."""

MANY = range(2**62)
"""More steps than any run has, to search in."""


@dataclass(frozen=True)
class Limits:
    """Where a run ends: at the earliest of those that are set."""

    max_steps: int | None = None
    max_sequences: int | None = None
    """Never exceeded: a global batch that would is not begun."""
    epochs: int | None = None

    @property
    def only_steps(self) -> bool:
        return self.max_sequences is None and self.epochs is None


@dataclass(frozen=True)
class Segment:
    """Steps in a row with one batch size."""

    first_step: int
    batch_size: int
    sequences_before: int
    """Read by the steps before its first."""
    place: int
    """Where it goes on, right behind the last sequence that was read: epoch x N + position in that epoch's order."""


@dataclass(frozen=True)
class Steps:
    """The optimizer steps of one run over N sequences: ``num_steps`` global batches, of one size in each segment.

    Constant batches need no more than the first five arguments; ``grown`` gives the same run with another batch size
    from some step on, and counts its steps anew where ``limits`` tells what they come from.
    """

    num_sequences: int
    first_batch_size: int
    tail: Tail
    num_steps: int
    seed: int
    later: tuple[Segment, ...] = ()
    """The segments after the first."""
    limits: Limits | None = None

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        return (Segment(0, self.first_batch_size, 0, 0), *self.later)

    def grown(self, step: int, batch_size: int) -> "Steps":
        """The same run with global batches of ``batch_size`` from ``step`` on, which no segment begins after.

        Steps before ``step`` stay what they are. Under ``drop`` the rest of an epoch is measured by the batch that is
        in force there: what a smaller batch can still fill is read.
        """
        assert step >= self.segments[-1].first_step
        if step == 0:
            changed = replace(self, first_batch_size=batch_size, later=())
        else:
            before = tuple(segment for segment in self.later if segment.first_step < step)
            segment = Segment(step, batch_size, self.sequences_before(step), self._end(step - 1))
            changed = replace(self, later=(*before, segment))
        return changed if self.limits is None else changed.limited(self.limits)

    def limited(self, limits: Limits) -> "Steps":
        """The same run with the number of steps that ``limits`` leave it."""
        counts = [] if limits.max_steps is None else [limits.max_steps]
        if limits.max_sequences is not None:
            counts.append(bisect_right(MANY, limits.max_sequences, key=lambda step: self.sequences_before(step + 1)))
        if limits.epochs is not None:
            counts.append(bisect_right(MANY, limits.epochs * self.num_sequences, key=self._end))
        return replace(self, num_steps=min(counts), limits=limits)

    def batch_size(self, step: int) -> int:
        """Sequences of the global batch that is in force at ``step``; under ``flush`` the end of an epoch has fewer."""
        return self._segment(step).batch_size

    def sequences(self, step: int) -> Int64s:
        """Indices of the sequences of step ``step`` (from 0), in their order in the global batch.

        ``batch_size(step)`` of them; fewer in the last batch of an epoch under ``flush``.
        """
        places = np.arange(self._place(step), self._end(step), dtype=np.int64)
        epochs, positions = places // self.num_sequences, places % self.num_sequences
        indices = np.empty(len(positions), dtype=np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            indices[here] = permute(positions[here], self.num_sequences, self.seed, int(epoch))
        return indices

    def sequences_before(self, step: int) -> int:
        """How many sequences the steps before ``step`` consumed."""
        if self.tail is Tail.FLUSH:
            return self._place(step)  # nothing was left out
        segment = self._segment(step)
        return segment.sequences_before + (step - segment.first_step) * segment.batch_size

    def first_step_after(self, sequences: int) -> int:
        """The first step that begins when at least so many sequences were read; it may lie beyond the run."""
        return bisect_left(MANY, sequences, key=self.sequences_before)

    def epochs(self) -> float:
        """Epochs that the whole run passes over; under ``drop`` one counts although its tail is left out."""
        if self.tail is not Tail.DROP:
            return self.sequences_before(self.num_steps) / self.num_sequences
        epoch = self._place(self.num_steps - 1) // self.num_sequences
        first, following = (bisect_left(MANY, e * self.num_sequences, key=self._place) for e in (epoch, epoch + 1))
        in_epoch = following - first
        return (epoch * in_epoch + self.num_steps - first) / in_epoch

    def _segment(self, step: int) -> Segment:
        return self.segments[bisect_right(self.segments, step, key=lambda segment: segment.first_step) - 1]

    def _place(self, step: int) -> int:
        """Where the first sequence of a step stands: epoch x N + position in that epoch's order."""
        segment = self._segment(step)
        size, number = segment.batch_size, step - segment.first_step
        if self.tail is Tail.CARRY:
            return segment.place + number * size
        epoch, position = divmod(segment.place, self.num_sequences)
        here = self._batches(self.num_sequences - position, size)
        if number < here:
            return segment.place + number * size
        epochs, number = divmod(number - here, self._batches(self.num_sequences, size))
        return (epoch + 1 + epochs) * self.num_sequences + number * size

    def _end(self, step: int) -> int:
        """The place behind the last sequence of a step."""
        place, size = self._place(step), self.batch_size(step)
        if self.tail is Tail.FLUSH:
            size = min(size, self.num_sequences - place % self.num_sequences)
        return place + size

    def _batches(self, num_sequences: int, size: int) -> int:
        """Batches that the rest of an epoch gives (drop and flush)."""
        return num_sequences // size if self.tail is Tail.DROP else -(-num_sequences // size)


def of(
    train: Train, tail: Tail, levels: Levels, num_sequences: int, sequence_length: int | None, seed: int = 0
) -> Steps:
    """The optimizer steps of a run: batches of ``levels`` up to the earliest limit of ``train``.

    Levels that only the run itself can place are left to ``Steps.grown``. ``sequence_length`` (bases) is needed for
    ``max_tokens``.

    Raises RequestError if no limit is set, or if one leaves no step at all.
    """
    limits = _limits(train, sequence_length)
    if tail is Tail.DROP and num_sequences < max(levels.sizes):
        raise RequestError(
            f"accumulation.tail=drop: the {num_sequences} sequences of an epoch do not fill one global batch of "
            f"{max(levels.sizes)}; use carry or flush, or a global batch of at most {num_sequences}"
        )
    first, *others = zip(levels.starts, levels.sizes, strict=False)
    run = Steps(num_sequences, first[1], tail, 0, seed)
    for start, size in others:
        run = run.grown(run.first_step_after(start) if levels.by_sequences else start, size)
    run = run.limited(limits)
    if limits.max_sequences is not None and limits.max_sequences < run.sequences_before(1):
        assert sequence_length is not None
        raise RequestError(
            f"train.max_tokens={train.max_tokens}: one optimizer step takes "
            f"{run.sequences_before(1) * sequence_length} bases; set at least that"
        )
    if run.num_steps == 0:
        assert train.epochs is not None
        raise RequestError(
            f"train.epochs={train.epochs}: {train.epochs * num_sequences} sequences do not fill one global batch "
            f"of {run.first_batch_size}; set train.epochs={-(-run.first_batch_size // num_sequences)} or more, "
            "or accumulation.tail=flush"
        )
    return run


def count(
    train: Train, tail: Tail, levels: Levels, num_sequences: int | None, sequence_length: int | None
) -> int | None:
    """Optimizer steps of a run: the earliest of ``max_steps``, ``max_tokens`` and ``epochs``, of those that are set.

    ``num_sequences`` or ``sequence_length`` (bases) is None where only the job can know it; the answer is None if it
    depends on that, or if a limit is below 1, which ``launcher.validate`` tells.

    Raises RequestError as ``of`` does.
    """
    limits = _limits(train, sequence_length)
    if any(limit is not None and limit < 1 for limit in (train.max_steps, train.max_tokens, train.epochs)):
        return None
    if num_sequences is None:
        return train.max_steps if limits.only_steps and tail is not Tail.DROP else None
    return of(train, tail, levels, num_sequences, sequence_length).num_steps


def _limits(train: Train, sequence_length: int | None) -> Limits:
    if train.max_steps is None and train.max_tokens is None and train.epochs is None:
        raise RequestError("train.max_steps=null: set it, or train.max_tokens, or train.epochs")
    if train.max_tokens is None:
        return Limits(train.max_steps, None, train.epochs)
    if sequence_length is None:
        raise RequestError(
            f"train.max_tokens={train.max_tokens}: it needs data.sequence_length; set train.max_steps or train.epochs"
        )
    return Limits(train.max_steps, train.max_tokens // sequence_length, train.epochs)


def permute(positions: Int64s, num_sequences: int, seed: int, epoch: int) -> Int64s:
    """Where the shuffle of epoch ``epoch`` puts each of ``positions``; all in [0, num_sequences).

    A Feistel network over the smallest square of a power of two that holds N, walked until the value falls into range
    (cycle walking: Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). So the permutation of billions of
    sequences costs no memory, and any rank finds its part of it alone.
    """
    half_bits = np.uint64(max(1, -(-(num_sequences - 1).bit_length() // 2)))
    mask = np.uint64((1 << int(half_bits)) - 1)
    keys = [mix(np.uint64(seed), np.uint64(epoch), np.uint64(number)) for number in range(ROUNDS)]
    values = positions.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        left, right = values[outside] >> half_bits, values[outside] & mask
        for key in keys:
            left, right = right, left ^ (mix(key, right) & mask)
        values[outside] = (left << half_bits) | right
        outside = values >= np.uint64(num_sequences)
    return values.astype(np.int64)


def sequence_keys(seed: int, step: int, places: Int64s) -> UInt64s:
    """The key of everything random about the sequences at ``places`` of the global batch of a step."""
    return np.asarray(mix(np.uint64(seed), np.uint64(step), places.astype(np.uint64)), dtype=np.uint64)


def mix(*words: np.uint64 | UInt64s) -> np.uint64 | UInt64s:
    """One well-mixed 64-bit word of several (the finalizer of SplitMix64: Steele, Lea and Flood 2014)."""
    state: np.uint64 | UInt64s = np.uint64(0)
    with np.errstate(over="ignore"):
        for word in words:
            state = (state ^ word) + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return state
