"""The gradient noise scale that real ranks measure, of a problem whose own is known, and against plain torch.

A sample x has the loss theta . x, so that x is its gradient. Where x has D independent normal elements of mean mu and
deviation sigma, the noise scale is D sigma^2 / (D mu^2) samples, whatever theta is.
"""

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from launcher import deepspeed_json, noise_scale, plan
from launcher.batch import Cut
from launcher.ranks import Rank
from launcher.schema import (
    Accumulation,
    Batch,
    Call,
    Config,
    Data,
    Dtype,
    LrSchedule,
    LrScheduleType,
    Optimizer,
    OptimizerType,
    Precision,
    Sync,
    Tail,
    Train,
    Zero,
)
from tests.ranks import on_ranks
from tests.worker import plain, runs

pytestmark = pytest.mark.ranks

DIMENSIONS, MEAN, DEVIATION, MICRO = 8_000, 0.05, 0.15, 2
NOISE_SCALE = DEVIATION**2 / MEAN**2
"""9 samples."""

RANKS = (1, 2)
NUM_STEPS = {2: 30, 8: 12}
"""By accumulation."""
ONCE = Sync.ONCE_PER_WINDOW


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Linear(DIMENSIONS, 1, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        products: torch.Tensor = self.theta(inputs.to(self.theta.weight.dtype)).squeeze(-1)
        return products


class Sum:
    """Samples have weights, in ``labels``."""

    def __call__(self, logits: torch.Tensor, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        return logits.float().sum(), batch["labels"].sum()

    def weight(self, batch: dict[str, Any]) -> float:
        return float(batch["labels"].sum())


@dataclass(frozen=True)
class Cell:
    stage: int
    sync: Sync | None = None
    dtype: Dtype = Dtype.FP32
    clipping: float | None = None
    weighted: bool = False
    """A sample of weight w is the sum of w draws."""

    def __str__(self) -> str:
        parts = [f"stage{self.stage}", self.dtype.value]
        parts += ["once"] * (self.sync is ONCE) + ["clipped"] * (self.clipping is not None)
        return "-".join(parts + ["weighted"] * self.weighted)


CELLS = [
    Cell(0),
    Cell(1),
    Cell(2, ONCE),
    Cell(3, ONCE),
    Cell(1, dtype=Dtype.BF16),
    Cell(2, ONCE, Dtype.BF16),
    Cell(1, clipping=1e-3),
    Cell(1, weighted=True),
]


def batches(rank: int, ranks: int, accumulation: int, weighted: bool) -> list[list[dict[str, torch.Tensor]]]:
    """One rank's micro-batches of every step."""
    generator = torch.Generator().manual_seed(100 * ranks + 10 * rank + weighted)
    steps = []
    for _ in range(NUM_STEPS[accumulation]):
        window = []
        for _ in range(accumulation):
            weights = torch.randint(1, 5, (MICRO,), generator=generator) if weighted else torch.ones(MICRO)
            noise = torch.randn(MICRO, DIMENSIONS, generator=generator) * DEVIATION
            inputs = weights[:, None] * MEAN + weights[:, None].sqrt() * noise
            window.append({"inputs": inputs, "labels": weights.float()})
        steps.append(window)
    return steps


def measure(rank: Rank, cell: Cell, windows: list[list[dict[str, torch.Tensor]]]) -> dict[str, Any]:
    from launcher.worker import models, step
    from launcher.worker.engine import Engine
    from launcher.worker.objectives import Custom
    from launcher.worker.windows import MicroBatch, Share

    accumulation = len(windows[0])
    cut = Cut(MICRO * accumulation * rank.world_size, MICRO, accumulation, rank.world_size)
    config = Config(
        zero=Zero(stage=cell.stage),
        precision=Precision(dtype=cell.dtype),
        optimizer=Optimizer(OptimizerType.SGD, momentum=0.0, weight_decay=0.0),
        train=Train(gradient_clipping=cell.clipping),
    )
    values = deepspeed_json.build(config, cut).values
    model = models.build(Call("tests.worker.test_noise_scale.Linear"), 0, values)
    engine, objective = Engine(model, values, config.optimizer, cell.sync or ONCE), Custom(Sum())
    average, estimates, num_samples, total = noise_scale.Average(0.95), [], 0, 0.0
    for window in windows:
        micro_batches = [MicroBatch(batch, False, 0, objective.weigh(batch)) for batch in window]
        weight = sum((one.weight for one in micro_batches[1:]), micro_batches[0].weight)
        outcome = step.train_step(
            engine, objective, Share(micro_batches, weight, cut.train_batch_size), 1e-6, measure_noise=True
        )
        assert outcome.noise is not None
        average.add(outcome.noise)
        estimates.append((outcome.noise.signal, outcome.noise.noise))
        num_samples += cut.train_batch_size
        total += outcome.weight.weight
    engine.deepspeed.destroy()
    signal, noise = np.mean(estimates, axis=0)
    return {"average": average.sequences, "of means": noise / signal, "mean weight": total / num_samples}


LENGTH = 60
"""Contigs are cut to it, and some much shorter: each is one sequence."""

LEARNING_RATE = 1e-12
"""The weights stay, so that every step measures the same model."""

REAL = replace(
    runs.BASE,
    model=Call("tests.worker.plain.WrappedNet"),
    batch=Batch(16, train_micro_batch_size_per_gpu=4),
    cluster=replace(runs.BASE.cluster, ranks_per_node=2),
    optimizer=Optimizer(lr=LEARNING_RATE),
    lr_schedule=LrSchedule(LrScheduleType.CONSTANT),
    train=Train(max_steps=6, noise_scale_decay=0.8),
)


def real(stage: int = 1, sync: Sync | None = None, tail: Tail = Tail.CARRY, **train: Any) -> Config:
    return replace(
        REAL,
        zero=replace(REAL.zero, stage=stage),
        accumulation=Accumulation(sync, tail),
        train=replace(REAL.train, **train),
    )


MEASURED = {
    **{f"stage{stage}": real(stage) for stage in (0, 1)},
    **{f"stage{stage}-once": real(stage, ONCE) for stage in (2, 3)},
    "flush": real(tail=Tail.FLUSH, max_steps=None, epochs=2),
}
UNMEASURED = {
    **{f"stage{stage}": real(stage, max_steps=2) for stage in (2, 3)},
    "stage1-alone": replace(real(max_steps=2), batch=Batch(8, train_micro_batch_size_per_gpu=4)),
    "stage1-off": real(noise_scale=False, max_steps=2),
}


def work(rank: Rank, configs: dict[str, Config], folder: Path) -> dict[Any, Any]:
    """All cells on so many ranks, and whole runs on two."""
    results: dict[Any, Any] = {}
    for accumulation, weighted in itertools.product(NUM_STEPS, (False, True)):
        windows = batches(rank.rank, rank.world_size, accumulation, weighted)
        for cell in (cell for cell in CELLS if cell.weighted is weighted):
            results[cell, accumulation] = measure(rank, cell, windows)
    if rank.world_size == 2:
        results |= {name: runs.train(rank, config, folder / name)["lines"] for name, config in configs.items()}
    return results


@dataclass
class Worked:
    by_ranks: dict[int, dict[Any, Any]]
    configs: dict[str, Config]

    def scales(self, name: str) -> list[float | None]:
        return [line["noise_scale"] for line in self.by_ranks[2][name] if line["kind"] == "train"]


@pytest.fixture(scope="module")
def worked(tmp_path_factory: pytest.TempPathFactory) -> Worked:
    folder = tmp_path_factory.mktemp("runs")
    contigs = list(plain.contigs(runs.CONTIGS).items())[:34]
    fasta = folder / "genome.fa"
    fasta.write_text("".join(f">{name}\n{bases[: LENGTH - 17 * (i % 4)]}\n" for i, (name, bases) in enumerate(contigs)))
    data = Data(fasta=str(fasta), sequence_length=LENGTH, validation=None)
    configs = {
        **{f"measured {name}": replace(config, data=data) for name, config in MEASURED.items()},
        **{f"unmeasured {name}": replace(config, data=data) for name, config in UNMEASURED.items()},
    }
    return Worked({ranks: on_ranks(ranks, work, configs, folder)[0] for ranks in RANKS}, configs)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("accumulation", NUM_STEPS)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_the_noise_scale_is_that_of_the_closed_form(worked: Worked, cell: Cell, accumulation: int, ranks: int) -> None:
    """In samples of mean weight: one of weight w stands for w draws."""
    found = worked.by_ranks[ranks][cell, accumulation]
    expected = NOISE_SCALE / found["mean weight"]
    assert found["mean weight"] == 1.0 if not cell.weighted else 2 < found["mean weight"] < 3
    assert found["average"] == pytest.approx(expected, rel=0.1)
    assert found["of means"] == pytest.approx(expected, rel=0.1)


def measured_by_torch(config: Config) -> list[float | None]:
    """The noise scale that each step of a run tells, from gradients of the first model in one process."""
    from launcher import genome
    from launcher.worker import models

    assert isinstance(config.data, Data)
    windows, micro, size = genome.load(config.data).train, 4, 16  # on two ranks
    model = models.build(config.model, config.seed, {"zero_optimization": {"stage": 0}})
    steps = plan.steps_of(config, Cut(size, micro, 2, 2), len(windows))

    def square_and_targets(sequences: Any) -> tuple[float, int]:
        """|sum of gradients|^2 over all targets, and how many there are."""
        inputs = torch.from_numpy(np.stack([runs._ids(windows, int(index)) for index in sequences]))
        targets = inputs[:, 1:].masked_fill((inputs[:, 1:] < 2) | (inputs[:, 1:] > 5), -100)
        loss = F.cross_entropy(model(inputs).logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="sum")
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        return sum(float(gradient.double().square().sum()) for gradient in gradients), int((targets != -100).sum())

    signal = noise = 0.0
    scales: list[float | None] = []
    for step in range(steps.num_steps):
        sequences = steps.sequences(step)
        # The first micro-batch of each rank, one behind the other.
        parts = [square_and_targets(part) for part in (sequences[:micro], sequences[micro : 2 * micro]) if len(part)]
        square, weight = square_and_targets(sequences)
        small = np.mean([square / count for square, count in parts])
        small_weight = np.mean([count for _, count in parts])
        measures = small_weight < weight  # a part that is the whole tells nothing
        if measures:
            a = (square / weight - small) / (weight - small_weight)
            b = (small - small_weight * a) * len(sequences) / weight
            signal, noise = 0.8 * signal + 0.2 * a, 0.8 * noise + 0.2 * b
        scales.append(noise / signal if measures and signal > 0 and noise > 0 else None)
    return scales


@pytest.mark.parametrize("name", MEASURED)
def test_a_run_tells_the_noise_scale_of_its_unequal_sequences(worked: Worked, name: str) -> None:
    """Under flush the last batch of an epoch has two sequences, all in the first micro-batch of the first rank."""
    scales = worked.scales(f"measured {name}")
    expected = measured_by_torch(worked.configs[f"measured {name}"])
    assert len(scales) == 6
    assert any(scale is not None for scale in scales)
    assert scales == [None if scale is None else pytest.approx(scale, rel=1e-3) for scale in expected]
    if name == "flush":
        assert [line["train_batch_size"] for line in worked.by_ranks[2]["measured flush"]] == [16, 16, 2] * 2
        assert (scales[2], scales[5]) == (None, None)


@pytest.mark.parametrize("name", UNMEASURED)
def test_where_the_noise_scale_cannot_be_measured_it_is_null(worked: Worked, name: str) -> None:
    assert worked.scales(f"unmeasured {name}") == [None, None]
