"""Markov models of the bases: what a network has to beat."""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from launcher.genome import alphabet
from launcher.genome.windows import Windows

CHUNK_BASES = 1 << 20

Counts = NDArray[np.int64]


def markov_bits_per_base(train: Windows, validation: Windows, order: int) -> float:
    """Mean bits a valid target of the validation windows, under the Markov model of the training windows.

    The probability of base b after the ``order`` bases c is (n(c, b) + 1) / (n(c) + 4), case ignored. Counted and
    judged are the bases of each window after its first, as far as they and the bases they depend on lie in the window
    and are A, C, G or T. NaN if validation has no such base.
    """
    counts = transitions(train, order).reshape(-1, 4)
    bits = -np.log2((counts + 1) / (counts.sum(axis=1, keepdims=True) + 4))
    seen = transitions(validation, order).reshape(-1, 4)
    return float((seen * bits).sum() / seen.sum()) if seen.any() else math.nan


def transitions(windows: Windows, order: int) -> Counts:
    """(4 ** (order + 1),) how often each run of ``order`` bases and the base after it occurs in the windows."""
    counts = np.zeros(4 ** (order + 1), dtype=np.int64)
    for rows in _chunks(windows):
        bases = _BASE[rows]
        # At order 0 too, the first base of a window is no target.
        first = max(order, 1)
        num_targets = bases.shape[1] - first
        if num_targets < 1:
            return counts
        runs = np.zeros((len(rows), num_targets), dtype=np.int64)
        is_valid = np.ones(runs.shape, dtype=bool)
        for place in range(first - order, first + 1):
            base = bases[:, place : place + num_targets]
            runs = runs * 4 + base
            is_valid &= base < 4
        counts += np.bincount(runs[is_valid], minlength=len(counts))
    return counts


def _chunks(windows: Windows) -> Iterator[alphabet.Codes]:
    size = max(1, CHUNK_BASES // windows.sequence_length)
    for first in range(0, len(windows), size):
        yield windows.read_many(np.arange(first, min(first + size, len(windows))))


_BASE = np.where(alphabet.IS_TARGET, alphabet.TOKEN - np.uint8(alphabet.A), np.uint8(4))
"""(256,) code to 0..3 for A, C, G, T, and 4 for everything else."""
