"""Which sequences make up optimizer step s: arithmetic, not state.

The global batch of a step is a function of (number of sequences N, global batch B, tail policy, seed, s) alone, so that
micro-batches, ranks and restarts cannot change it. The loop's boundaries, the plan's counts and the learning-rate
horizon all come from here.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from launcher.errors import RequestError
from launcher.schema import Tail, Train

Int64s = NDArray[np.int64]
UInt64s = NDArray[np.uint64]

ROUNDS = 8
"""Feistel rounds of the shuffle; four make a pseudo-random permutation (Luby and Rackoff 1988), eight leave room."""


@dataclass(frozen=True)
class Steps:
    """The optimizer steps of one run: ``num_steps`` global batches over N sequences."""

    num_sequences: int
    batch_size: int
    tail: Tail
    num_steps: int
    seed: int

    def sequences(self, step: int) -> Int64s:
        """Indices of the sequences of step ``step`` (from 0), in their order in the global batch.

        ``batch_size`` of them; fewer in the last batch of an epoch under ``flush``.
        """
        epochs, positions = self._epochs_and_positions(step)
        indices = np.empty(len(positions), dtype=np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            indices[here] = permute(positions[here], self.num_sequences, self.seed, int(epoch))
        return indices

    def sequences_before(self, step: int) -> int:
        """How many sequences the steps before ``step`` consumed."""
        if self.tail is not Tail.FLUSH:
            return step * self.batch_size
        epoch, batch = divmod(step, self._steps_in_epoch())
        return epoch * self.num_sequences + min(batch * self.batch_size, self.num_sequences)

    def epochs(self) -> float:
        """Epochs that the whole run passes over; under ``drop`` one counts although its tail is left out."""
        if self.tail is Tail.DROP:
            return self.num_steps / self._steps_in_epoch()
        return self.sequences_before(self.num_steps) / self.num_sequences

    def _steps_in_epoch(self) -> int:
        return steps_in_epochs(1, self.num_sequences, self.batch_size, self.tail)

    def _epochs_and_positions(self, step: int) -> tuple[Int64s, Int64s]:
        """For every sequence of a step: its epoch, and its place in that epoch's order."""
        if self.tail is Tail.CARRY:
            places = np.arange(step * self.batch_size, (step + 1) * self.batch_size, dtype=np.int64)
            return places // self.num_sequences, places % self.num_sequences
        epoch, batch = divmod(step, self._steps_in_epoch())
        first = batch * self.batch_size
        positions = np.arange(first, min(first + self.batch_size, self.num_sequences), dtype=np.int64)
        return np.full_like(positions, epoch), positions


def steps_in_epochs(epochs: int, num_sequences: int, batch_size: int, tail: Tail) -> int:
    """Optimizer steps of E epochs of N sequences at global batch B.

    carry: floor(E*N/B); drop: E*floor(N/B); flush: E*ceil(N/B).
    """
    if tail is Tail.CARRY:
        return epochs * num_sequences // batch_size
    if tail is Tail.DROP:
        return epochs * (num_sequences // batch_size)
    return epochs * -(-num_sequences // batch_size)


def steps_in_sequences(budget: int, num_sequences: int, batch_size: int, tail: Tail) -> int:
    """The most optimizer steps that consume no more than ``budget`` sequences."""
    if tail is not Tail.FLUSH:
        return budget // batch_size
    epochs, rest = divmod(budget, num_sequences)
    return steps_in_epochs(epochs, num_sequences, batch_size, tail) + rest // batch_size


def count(
    train: Train, tail: Tail, batch_size: int, num_sequences: int | None, sequence_length: int | None
) -> int | None:
    """Optimizer steps of a run: the earliest of ``max_steps``, ``max_tokens`` and ``epochs``, of those that are set.

    ``num_sequences`` or ``sequence_length`` (bases) is None where only the job can know it; the answer is None if it
    depends on that, or if a limit is below 1, which ``launcher.validate`` tells.

    Raises RequestError if no limit is set, or if one leaves no step at all.
    """
    if train.max_steps is None and train.max_tokens is None and train.epochs is None:
        raise RequestError("train.max_steps=null: set it, or train.max_tokens, or train.epochs")
    if any(limit is not None and limit < 1 for limit in (train.max_steps, train.max_tokens, train.epochs)):
        return None
    limits = [] if train.max_steps is None else [train.max_steps]
    if train.max_tokens is not None and sequence_length is None:
        raise RequestError(
            f"train.max_tokens={train.max_tokens}: it needs data.sequence_length; set train.max_steps or train.epochs"
        )
    if num_sequences is None:
        return None if train.max_tokens or train.epochs or tail is Tail.DROP else train.max_steps
    if tail is Tail.DROP and num_sequences < batch_size:
        raise RequestError(
            f"accumulation.tail=drop: the {num_sequences} sequences of an epoch do not fill one global batch of "
            f"{batch_size}; use carry or flush, or a global batch of at most {num_sequences}"
        )
    if train.max_tokens is not None:
        assert sequence_length is not None
        steps = steps_in_sequences(train.max_tokens // sequence_length, num_sequences, batch_size, tail)
        if steps == 0:
            least = min(batch_size, num_sequences) if tail is Tail.FLUSH else batch_size
            raise RequestError(
                f"train.max_tokens={train.max_tokens}: one optimizer step takes {least * sequence_length} bases; "
                "set at least that"
            )
        limits.append(steps)
    if train.epochs is not None:
        steps = steps_in_epochs(train.epochs, num_sequences, batch_size, tail)
        if steps == 0:
            raise RequestError(
                f"train.epochs={train.epochs}: {train.epochs * num_sequences} sequences do not fill one global batch "
                f"of {batch_size}; set train.epochs={-(-batch_size // num_sequences)} or more, "
                "or accumulation.tail=flush"
            )
        limits.append(steps)
    return min(limits)


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
