"""The data side of a rank: for each optimizer step its share of the global batch, as micro-batches.

Micro-batch k of rank r holds places (k x ranks + r) x micro ... of the global batch, whatever runs where; everything
random about a sequence is keyed by its step and place. So loader processes, ranks and restarts cannot change it.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from launcher.batch import Cut
from launcher.genome import alphabet
from launcher.genome.windows import Windows
from launcher.schema import Data, Objective
from launcher.steps import Int64s, Steps, UInt64s, sequence_keys
from launcher.worker import objectives, stop
from launcher.worker.objectives import Batch, Weight

STRANDS, MASKS = 0, 1
"""What a random draw about a sequence is for; draws for different things share no numbers."""


@dataclass(frozen=True)
class MicroBatch:
    batch: Batch
    is_empty: bool
    """It stands in for sequences that the last batch of an epoch lacks: it takes part and adds nothing."""
    dropout_seed: int
    weight: Weight = field(default_factory=Weight)


@dataclass(frozen=True)
class Share:
    """What one rank computes in one optimizer step."""

    micro_batches: list[MicroBatch] = field(default_factory=list)
    weight: Weight = field(default_factory=Weight)
    num_sequences: int = 0
    """Of the whole global batch, over all ranks."""


class Source(Protocol):
    """Sequences by index, made into a micro-batch; ``keys`` seed what is random about each."""

    def __len__(self) -> int: ...

    def fetch(self, indices: Int64s, keys: UInt64s) -> Batch: ...


class GenomeSource:
    """Windows of a genome as ``launcher.worker.objectives.Bases`` reads them."""

    def __init__(self, windows: Windows, data: Data, *, reverse_complement: bool) -> None:
        self._windows = windows
        self._reverse_complement = reverse_complement
        self._masked_fraction = data.mask_fraction if data.objective is Objective.MASKED else None

    def __len__(self) -> int:
        return len(self._windows)

    def fetch(self, indices: Int64s, keys: UInt64s) -> Batch:
        reverse = np.zeros(len(keys), dtype=bool)
        if self._reverse_complement:
            reverse = np.array([_generator(key, STRANDS).random() < 0.5 for key in keys])
        codes = self._windows.read_many(indices, reverse)
        batch = {"codes": torch.from_numpy(codes)}
        if self._masked_fraction is not None:
            inputs, targets = codes.copy(), np.zeros(codes.shape, dtype=bool)
            for row, key in enumerate(keys):
                mask_bases(inputs[row], targets[row], self._masked_fraction, _generator(key, MASKS))
            batch |= {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}
        return batch


def mask_bases(
    inputs: alphabet.Codes,
    targets: np.ndarray[Any, np.dtype[np.bool_]],
    fraction: float,
    generator: np.random.Generator,
) -> None:
    """Choose the targets of one sequence and mask them, in place; all arrays (L,).

    Of the targets, 80 % read MASK, 10 % a random base and 10 % themselves (Devlin et al. 2019, section 3.1).
    """
    targets[:] = alphabet.IS_TARGET[inputs] & (generator.random(len(inputs)) < fraction)
    draw = generator.random(len(inputs))
    inputs[targets & (draw < 0.8)] = alphabet.MASK
    replaced = targets & (draw >= 0.8) & (draw < 0.9)
    inputs[replaced] = generator.integers(alphabet.A, alphabet.T + 1, size=int(replaced.sum()), dtype=np.uint8)


class TorchSource:
    """Any torch dataset whose items are dicts with ``inputs`` (and ``labels``), or pairs of the two."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def fetch(self, indices: Int64s, keys: UInt64s) -> Batch:
        items = []
        for index, key in zip(indices, keys, strict=True):
            # A dataset that augments draws from one of these three.
            torch.default_generator.manual_seed(int(key) >> 1)
            random.seed(int(key))
            np.random.seed(int(key) & 0xFFFFFFFF)
            items.append(self._dataset[int(index)])
        batch = default_collate(items)
        if isinstance(batch, dict):
            return batch
        inputs, labels = batch
        return {"inputs": inputs, "labels": labels}


class Shares(Dataset[Share]):
    """A rank's share of every optimizer step, by the number of the step."""

    def __init__(self, source: Source, objective: objectives.Objective, steps: Steps, cut: Cut, rank: int) -> None:
        self._source, self._objective, self._steps, self._cut, self._rank = source, objective, steps, cut, rank

    def __getitem__(self, step: int) -> Share:
        sequences = self._steps.sequences(step)
        batch_size = self._steps.batch_size(step)
        keys = sequence_keys(self._steps.seed, step, np.arange(batch_size))
        micro_batches, total = [], Weight()
        for number in range(self._cut.accumulation_steps(batch_size)):
            first = (number * self._cut.data_parallel_size + self._rank) * self._cut.micro_batch_size
            places = np.arange(first, min(first + self._cut.micro_batch_size, len(sequences)))
            is_empty = len(places) == 0
            if is_empty:
                places = np.array([0])
            batch = self._source.fetch(sequences[places], keys[places])
            weight = Weight() if is_empty else self._objective.weigh(batch)
            micro_batches.append(MicroBatch(batch, is_empty, int(keys[first]) >> 1, weight))
            total += weight
        return Share(micro_batches, total, len(sequences))


def read_ahead(shares: Shares, steps: Sequence[int], num_workers: int) -> Iterable[Share]:
    """The shares of ``steps`` in order, read by ``num_workers`` processes (0: here, when asked)."""
    return DataLoader(
        shares,
        batch_size=None,
        sampler=steps,
        num_workers=num_workers,
        worker_init_fn=_in_worker,
    )


def _in_worker(_: int) -> None:
    stop.ignore()


def _generator(key: np.uint64, purpose: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[int(key), purpose]))
