"""Batches that change during a run, on two ranks, against one process of plain torch that is told what they are."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launcher.ranks import Rank
from launcher.schema import (
    Accumulation,
    Batch,
    BatchSchedule,
    BatchScheduleType,
    Call,
    Config,
    Data,
    Growth,
    LrSchedule,
    Scaling,
    Sync,
    Tail,
    Train,
)
from launcher.steps import Steps
from tests.ranks import on_ranks
from tests.worker import plain, runs

pytestmark = pytest.mark.ranks

RANKS, LENGTH, NUM_SEQUENCES = 2, 60, 88
"""Each contig is cut to one window."""

RAMP, NOISE_SCALE = BatchScheduleType.RAMP, BatchScheduleType.NOISE_SCALE

BASE = replace(
    runs.BASE,
    seed=3,
    model=Call("tests.worker.plain.WrappedNet"),
    cluster=replace(runs.BASE.cluster, ranks_per_node=RANKS),
    lr_schedule=LrSchedule(warmup_steps=3),
)

LONG = replace(
    BASE,
    batch=Batch(64, train_micro_batch_size_per_gpu=4),
    batch_schedule=BatchSchedule(
        RAMP, initial_batch_size=8, over=40, growth=Growth.LINEAR, increment=8, lr_scaling=Scaling.SQRT
    ),
    train=Train(max_steps=42),
)
LONG_SIZES = [size for size, steps in zip(range(8, 65, 8), (5, 6, 6, 5, 6, 6, 6, 2), strict=True) for _ in range(steps)]
"""Seven batches below 64 in 40 steps: number k begins at step floor(k x 40 / 7), 0 5 11 17 22 28 34, and 64 at 40."""

SHORT = replace(
    LONG,
    batch=Batch(32, train_micro_batch_size_per_gpu=4),
    batch_schedule=replace(LONG.batch_schedule, over=6),
    train=Train(max_steps=8),
)
SHORT_SIZES = [8, 8, 16, 16, 24, 24, 32, 32]

GROWING = replace(
    BASE,
    batch=Batch(32, train_micro_batch_size_per_gpu=2),
    batch_schedule=BatchSchedule(
        NOISE_SCALE, initial_batch_size=8, patience=3, threshold=1e-6, lr_scaling=Scaling.SQRT
    ),
    # 250 sequences: what the batches in force leave over of them depends on when they grow.
    train=Train(max_tokens=250 * LENGTH + 7, noise_scale_decay=0.5),
)


def at(stage: int, config: Config, sync: Sync | None = None) -> Config:
    return replace(config, zero=replace(config.zero, stage=stage), accumulation=Accumulation(sync=sync))


RAMPS = {
    "stage1": (at(1, LONG), LONG_SIZES),
    **{f"stage{stage}": (at(stage, SHORT), SHORT_SIZES) for stage in (0, 2, 3)},
    **{f"stage{stage}-once": (at(stage, SHORT, Sync.ONCE_PER_WINDOW), SHORT_SIZES) for stage in (2, 3)},
}

GROWN = {
    "here": GROWING,
    "ahead": replace(GROWING, data=replace(GROWING.data, num_workers=2)),
    "partitioned": at(3, GROWING, Sync.ONCE_PER_WINDOW),
    "steps": replace(GROWING, train=replace(GROWING.train, max_tokens=None, max_steps=12)),
}


def train_all(rank: Rank, configs: dict[str, Config], folder: Path) -> dict[str, dict[str, Any]]:
    return {name: runs.train(rank, config, folder / name) for name, config in configs.items()}


@dataclass
class Trained:
    configs: dict[str, Config]
    results: dict[str, dict[str, Any]]

    def column(self, name: str, field: str) -> list[Any]:
        return [line[field] for line in self.results[name]["lines"] if line["kind"] == "train"]

    def check(self, name: str, sizes: Sequence[int], rates: Sequence[float]) -> None:
        """The run is that of one process with these batches and learning rates."""
        config = self.configs[name]
        assert self.column(name, "train_batch_size") == sizes
        assert self.column(name, "sequences_seen") == np.cumsum(sizes).tolist()
        assert self.column(name, "lr") == pytest.approx(rates, rel=1e-12)
        micro = config.batch.train_micro_batch_size_per_gpu
        assert micro is not None
        assert self.column(name, "gradient_accumulation_steps") == [size // (micro * RANKS) for size in sizes]
        whole = runs.reference(config, course=list(zip(batches(sizes, config.seed), rates, strict=True)))
        assert runs.relative_error(whole["weights"], whole["initial"]) > 1e-3
        assert self.column(name, "tokens") == whole["tokens"]
        assert runs.relative_error(self.results[name]["weights"], whole["weights"]) <= 1e-6
        assert runs.series_error(self.column(name, "loss"), whole["loss"]) <= 1e-6
        assert runs.series_error(self.column(name, "grad_norm"), whole["grad_norm"]) <= 1e-6


def batches(sizes: Sequence[int], seed: int) -> list[list[int]]:
    """The shuffled epochs, one after another, cut into batches of these sizes."""
    epochs = Steps(NUM_SEQUENCES, NUM_SEQUENCES, Tail.CARRY, 100, seed)
    order = list(
        itertools.chain(*(epochs.sequences(epoch).tolist() for epoch in range(sum(sizes) // NUM_SEQUENCES + 1)))
    )
    starts = np.cumsum([0, *sizes])
    return [order[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def cosine(done: float, total: float, warmup: float) -> float:
    if done <= warmup:
        return done / warmup
    return 0.1 + 0.9 * (1 + math.cos(math.pi * (done - warmup) / (total - warmup))) / 2


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("runs")
    contigs = {
        name: bases[: LENGTH - 4 * (i % 3)] for i, (name, bases) in enumerate(plain.contigs(runs.CONTIGS).items())
    }
    assert len(contigs) == NUM_SEQUENCES
    fasta = folder / "genome.fa"
    fasta.write_text("".join(f">{name}\n{bases}\n" for name, bases in contigs.items()))
    data = Data(fasta=str(fasta), sequence_length=LENGTH, validation=None)
    configs = {name: config for name, (config, _) in RAMPS.items()} | GROWN
    configs = {
        name: replace(config, data=replace(data, num_workers=config.data.num_workers))  # type: ignore[arg-type]
        for name, config in configs.items()
    }
    return Trained(configs, on_ranks(RANKS, train_all, configs, folder)[0])


@pytest.mark.parametrize("name", RAMPS)
def test_a_ramp_is_that_of_one_process_with_the_same_batches(trained: Trained, name: str) -> None:
    config, sizes = RAMPS[name]
    largest, warmup, num_steps = sizes[-1], 3, len(sizes)
    assert num_steps == config.train.max_steps
    rates = [1e-3 * math.sqrt(size / largest) * cosine(k, num_steps, warmup) for k, size in enumerate(sizes, start=1)]
    trained.check(name, sizes, rates)
    assert trained.column(name, "gradient_accumulation_steps")[0] == 1
    assert trained.column(name, "gradient_accumulation_steps")[-1] == largest // 8


def decided(scales: Sequence[float | None]) -> list[int]:
    """The batches of a run with these noise scales: after three in a row above a millionth of a batch, twice that."""
    sizes, size, above = [], 8, 0
    for scale in scales:
        sizes.append(size)
        above = above + 1 if scale is not None and scale > 1e-6 * size else 0
        if above >= 3 and size < 32:
            size, above = 2 * size, 0
    return sizes


@pytest.mark.parametrize("name", GROWN)
def test_a_batch_that_grows_by_the_noise_scale_is_that_of_one_process_given_the_decisions(
    trained: Trained, name: str
) -> None:
    sizes = decided(trained.column(name, "noise_scale"))
    assert {*sizes} == {8, 16, 32}
    if name == "steps":
        rates = [cosine(k, 12, 3) for k in range(1, 13)]
    else:
        # Progress is in sequences: those that were read when the step is done, of those that would be read in all if no
        # batch grew any more.
        read, rates = 0, []
        assert sizes[:3] == [8, 8, 8], "within the warm-up, else it is as long as three steps of a larger batch"
        for size in sizes:
            total = read + (250 - read) // size * size
            rates.append(cosine(read + size, total, 24))
            read += size
        assert read == total
        assert rates[-1] == 0.1
    trained.check(name, sizes, [1e-3 * math.sqrt(size / 32) * rate for size, rate in zip(sizes, rates, strict=True)])


def test_processes_that_read_ahead_change_nothing_when_a_batch_grows(trained: Trained) -> None:
    for field in ("noise_scale", "train_batch_size", "sequences_seen", "tokens", "loss", "grad_norm", "lr"):
        assert trained.column("ahead", field) == trained.column("here", field), field
    for weight in trained.results["here"]["weights"]:
        np.testing.assert_array_equal(
            trained.results["ahead"]["weights"][weight], trained.results["here"]["weights"][weight]
        )
