"""A run that goes on at another cut is the run that one process would have made of the whole batches at once.

``python -m tests.worker.test_elastic`` prints a table of every change of ZeRO stage and number of ranks.
"""

import itertools
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import pytest

from launcher import batch, checkpoints, decode, genome, plan
from launcher.ranks import Rank
from launcher.rundir import RunDir
from launcher.schema import (
    Batch,
    BatchSchedule,
    BatchScheduleType,
    Call,
    Checkpoint,
    Config,
    Data,
    LrSchedule,
    LrScheduleType,
    Scaling,
    Train,
)
from tests.ranks import on_ranks
from tests.worker import runs

if TYPE_CHECKING:
    from launcher.worker.train import Trainer

pytestmark = pytest.mark.ranks

BEFORE, STEPS = 5, 10
"""Steps before the checkpoint, and all."""
BOUND = 1e-6
"""Of parameters and losses in fp32 at a learning rate of 1e-3."""
RANKS, STAGES, ACCUMULATIONS = (1, 2, 4), (1, 2, 3), range(1, 9)
VISITS, ALL_VISITS = (1, 2, 4, 1), (1, 2, 4, 2, 1)
"""Process groups one after another: each saves what is new at its number of ranks, and goes on from what is there. The
shorter way leaves out the change from 4 ranks to 2."""


class Cell(NamedTuple):
    ranks: int
    stage: int
    accumulation: int
    sequences: int = 32
    """In a global batch."""

    def __str__(self) -> str:
        return f"ranks{self.ranks}-stage{self.stage}-gas{self.accumulation}-batch{self.sequences}"


Pair = tuple[Cell, Cell]
"""The cut that saves and the cut that goes on."""

PAIRS: list[Pair] = [
    (Cell(1, 1, 1), Cell(2, 2, 2)),
    (Cell(2, 2, 2), Cell(4, 3, 4)),
    (Cell(4, 3, 4), Cell(1, 2, 8)),
    (Cell(1, 2, 8), Cell(4, 1, 1)),
    (Cell(2, 3, 3, 24), Cell(4, 1, 6, 24)),
    (Cell(4, 1, 6, 24), Cell(1, 3, 3, 24)),
    (Cell(2, 1, 5, 40), Cell(4, 2, 5, 40)),
    (Cell(4, 2, 7, 56), Cell(1, 3, 7, 56)),
]


def configure(cell: Cell) -> Config:
    return replace(
        runs.cut(runs.BASE, cell.ranks, cell.accumulation),
        model=Call("tests.worker.plain.WrappedNet"),
        zero=replace(runs.BASE.zero, stage=cell.stage),
        batch=Batch(train_batch_size=cell.sequences, gradient_accumulation_steps=cell.accumulation),
        lr_schedule=LrSchedule(type=LrScheduleType.CONSTANT),
        train=Train(max_steps=STEPS, gradient_clipping=1.0),
    )


def start(rank: Rank, config: Config, folder: Path) -> "Trainer":
    """A run in the process group that there is."""
    import torch.distributed as dist

    from launcher.worker.data import open_task
    from launcher.worker.train import Trainer

    run_dir, planned = RunDir(folder), plan.make(config)
    if rank.is_first:
        folder.mkdir(parents=True)
        run_dir.write_files({"config.yaml": decode.dump(config), **plan.files(planned)})
    dist.barrier()
    task = open_task(config, plan.summary(planned)["data"])
    return Trainer(config, planned.cut, planned.deepspeed.values, rank, run_dir, task)


def train(rank: Rank, config: Config, folder: Path) -> dict[str, Any]:
    """A whole run: the loss of each step that it made, and the weights in the end."""
    from launcher.worker import states

    trainer, losses = start(rank, config, folder), Losses()
    trainer.trackers.append(losses)
    trainer.train()
    weights = {name: weight.numpy() for name, weight in states.weights(trainer.engine.deepspeed).items()}
    trainer.engine.deepspeed.destroy()
    return {"losses": losses.found, "weights": weights}


class Losses:
    """Of each step, by its number."""

    def __init__(self) -> None:
        self.found: dict[int, float] = {}

    def log(self, values: dict[str, Any]) -> None:
        if values["kind"] == "train":
            self.found[values["step"]] = values["loss"]

    def finish(self, summary: object) -> None:
        """Nothing is left to do."""


def visit(rank: Rank, sources: Sequence[Cell], pairs: Sequence[Pair], folder: Path) -> dict[Pair, dict[str, Any]]:
    """Save what the cells have made of the first steps, and let the runs go on for which that has been done."""
    for cell in sources:
        config = configure(cell)
        train(rank, replace(config, train=replace(config.train, max_steps=BEFORE)), folder / str(cell))
    found = {}
    for source, cell in pairs:
        origin = folder / str(source) / "checkpoints" / checkpoints.name(BEFORE)
        config = replace(configure(cell), checkpoint=Checkpoint(resume=str(origin)))
        found[source, cell] = train(rank, config, folder / f"{source}-{cell}")
    return found


def go_on(pairs: Sequence[Pair], visits: Sequence[int], folder: Path) -> dict[Pair, dict[str, Any]]:
    """What became of the runs that were saved at one cut and went on at another."""
    found: dict[Pair, dict[str, Any]] = {}
    saved: set[Cell] = set()
    for ranks in visits:
        sources = [cell for cell in dict.fromkeys(source for source, _ in pairs) if cell.ranks == ranks]
        new = [cell for cell in sources if cell not in saved]
        saved |= set(new)
        ready = [pair for pair in pairs if pair[1].ranks == ranks and pair[0] in saved and pair not in found]
        found |= quickly(ranks, visit, new, ready, folder)
    return found


def quickly(num_ranks: int, function: Callable[..., dict[Any, Any]], *arguments: Any) -> dict[Any, Any]:
    """On ranks that do not import a compiler which they have no use for: it takes a third of their start."""
    with mock.patch.dict(os.environ, TORCHDYNAMO_DISABLE="1"):
        found: dict[Any, Any] = on_ranks(num_ranks, function, *arguments, timeout=3600)[0]
    return found


def reference(sequences: int) -> dict[str, Any]:
    """The run that nothing interrupted: one process, which sees every global batch whole, in plain torch."""
    config = configure(Cell(1, 1, 1, sequences))
    assert isinstance(config.data, Data)
    whole = plan.steps_of(config, batch.Cut(sequences, sequences, 1, 1), len(genome.load(config.data).train))
    return runs.reference(config, course=[(whole.sequences(step).tolist(), 1e-3) for step in range(STEPS)])


def references(pairs: Sequence[Pair]) -> dict[int, dict[str, Any]]:
    return {size: reference(size) for size in sorted({source.sequences for source, _ in pairs})}


def errors(ours: dict[str, Any], whole: dict[str, Any]) -> dict[str, float]:
    """Relative, of the parameters in the end and of the worst loss after the change."""
    steps = range(BEFORE + 1, STEPS + 1)
    assert sorted(ours["losses"]) == list(steps), "none was repeated or left out"
    losses = [ours["losses"][step] for step in steps]
    return {
        "parameters": runs.relative_error(ours["weights"], whole["weights"]),
        "loss": runs.series_error(losses, whole["loss"][BEFORE:]),
    }


@pytest.fixture(scope="module")
def wholes() -> dict[int, dict[str, Any]]:
    return references(PAIRS)


@pytest.fixture(scope="module")
def went_on(tmp_path_factory: pytest.TempPathFactory) -> dict[Pair, dict[str, Any]]:
    return go_on(PAIRS, VISITS, tmp_path_factory.mktemp("elastic"))


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]}-to-{pair[1]}")
def test_a_run_that_goes_on_at_another_cut_is_the_run_of_one_process(went_on: Any, wholes: Any, pair: Pair) -> None:
    found = errors(went_on[pair], wholes[pair[0].sequences])
    assert all(error <= BOUND for error in found.values()), found


def test_every_number_of_ranks_stage_and_accumulation_saves_and_goes_on() -> None:
    for side in (0, 1):
        cells = [pair[side] for pair in PAIRS]
        assert {cell.ranks for cell in cells} == set(RANKS)
        assert {cell.stage for cell in cells} == set(STAGES)
        assert {cell.accumulation for cell in cells} == set(ACCUMULATIONS)


def test_what_is_compared_moves_after_the_change(wholes: dict[int, dict[str, Any]]) -> None:
    """Otherwise agreement would prove nothing."""
    for whole in wholes.values():
        assert runs.relative_error(whole["weights"], whole["initial"]) > 1e-2
        assert len(set(whole["loss"])) == STEPS


SAVED, FOLLOWED = 8, 20
"""The step after which a run is saved, and the steps after it whose learning rates are compared."""
HORIZON, WARMUP, FLOOR, DECAY = 30, 4, 0.1, 0.5
PEAK, SIZE, SMALLEST = 1e-3, 8, 4

BATCHES = {
    BatchScheduleType.CONSTANT: BatchSchedule(),
    BatchScheduleType.RAMP: BatchSchedule(
        BatchScheduleType.RAMP, initial_batch_size=SMALLEST, over=12, lr_scaling=Scaling.SQRT
    ),
    BatchScheduleType.MILESTONES: BatchSchedule(
        BatchScheduleType.MILESTONES, milestones=[[0, SMALLEST], [14, SIZE]], lr_scaling=Scaling.SQRT
    ),
    BatchScheduleType.NOISE_SCALE: BatchSchedule(
        BatchScheduleType.NOISE_SCALE,
        initial_batch_size=SMALLEST,
        patience=11,
        threshold=1e-6,
        lr_scaling=Scaling.SQRT,
    ),
}

Case = tuple[LrScheduleType, BatchScheduleType]

CASES: list[Case] = list(itertools.product(LrScheduleType, BatchScheduleType))


def scheduled(case: Case) -> Config:
    kind, batches = case
    assert isinstance(runs.BASE.data, Data)
    return replace(
        runs.BASE,
        model=Call("tests.worker.plain.WrappedNet"),
        data=replace(runs.BASE.data, sequence_length=50),
        batch=Batch(train_batch_size=SIZE, train_micro_batch_size_per_gpu=2),
        lr_schedule=LrSchedule(kind, warmup_steps=WARMUP, min_lr_ratio=FLOOR, decay_fraction=DECAY),
        batch_schedule=BATCHES[batches],
        train=Train(max_steps=HORIZON),
        checkpoint=Checkpoint(every=SAVED, keep=None),
    )


class Rates:
    """The learning rates in the optimizer's groups at each step, and the sequences of its batch."""

    def __init__(self, trainer: "Trainer") -> None:
        self._optimizer = trainer.engine.deepspeed.optimizer
        self.rates: dict[int, list[float]] = {}
        self.sizes: dict[int, int] = {}

    def log(self, values: dict[str, Any]) -> None:
        if values["kind"] == "train":
            self.rates[values["step"]] = [float(group["lr"]) for group in self._optimizer.param_groups]
            self.sizes[values["step"]] = values["train_batch_size"]

    def finish(self, summary: object) -> None:
        """Nothing is left to do."""


def follow(rank: Rank, cases: Sequence[Case], folder: Path) -> dict[Case, dict[str, Any]]:
    """Each case without an interruption, and going on from what that has saved."""
    found = {}
    for case in cases:
        config, name = scheduled(case), "-".join(kind.value for kind in case)
        origin = folder / name / "checkpoints" / checkpoints.name(SAVED)
        resumed = replace(config, checkpoint=Checkpoint(resume=str(origin)))
        both = []
        for number, one in enumerate((config, resumed)):
            trainer = start(rank, one, folder / f"{name}{'-resumed' * number}")
            both.append(Rates(trainer))
            trainer.trackers.append(both[-1])
            trainer.train()
            trainer.engine.deepspeed.destroy()
        found[case] = {
            "whole": both[0].rates, "sizes": both[0].sizes, "resumed": both[1].rates, "resumed_sizes": both[1].sizes,
        }  # fmt: skip
    return found


def formula(case: Case, step: int, size: int) -> float:
    """The learning rate of a step, counted from 1."""
    kind = case[0]
    progress = {
        LrScheduleType.CONSTANT: 0.0,
        LrScheduleType.COSINE: (step - WARMUP) / (HORIZON - WARMUP),
        LrScheduleType.LINEAR: (step - WARMUP) / (HORIZON - WARMUP),
        LrScheduleType.WSD: (step - HORIZON * (1 - DECAY)) / (HORIZON * DECAY),
    }[kind]
    shape = (1 + math.cos(math.pi * progress)) / 2 if kind is LrScheduleType.COSINE else 1 - progress
    factor = step / WARMUP if step <= WARMUP else 1.0 if progress <= 0 else FLOOR + (1 - FLOOR) * shape
    return PEAK * math.sqrt(size / SIZE) * factor


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, dict[str, Any]]:
    return quickly(1, follow, CASES, tmp_path_factory.mktemp("rates"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(kind.value for kind in case))
def test_the_optimizer_has_the_learning_rates_of_the_run_that_was_not_interrupted(followed: Any, case: Case) -> None:
    found = followed[case]
    assert sorted(found["whole"]) == list(range(1, HORIZON + 1))
    assert sorted(found["resumed"]) == list(range(SAVED + 1, HORIZON + 1))
    for step in range(SAVED + 1, SAVED + FOLLOWED + 1):
        assert found["resumed"][step] == found["whole"][step], step
        assert found["resumed_sizes"][step] == found["sizes"][step], step


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(kind.value for kind in case))
def test_these_learning_rates_are_those_of_the_formula(followed: Any, case: Case) -> None:
    for step, rates in followed[case]["whole"].items():
        expected = formula(case, step, followed[case]["sizes"][step])
        assert rates == pytest.approx([expected] * len(rates), rel=1e-12), step


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(kind.value for kind in case))
def test_batches_grow_and_learning_rates_change_after_the_checkpoint(followed: Any, case: Case) -> None:
    """Otherwise agreement would prove nothing."""
    later = range(SAVED + 1, SAVED + FOLLOWED + 1)
    sizes = {followed[case]["sizes"][step] for step in later}
    rates = {followed[case]["whole"][step][0] for step in later}
    assert len(sizes) > 1 or case[1] is BatchScheduleType.CONSTANT
    assert len(rates) > 1 or case == (LrScheduleType.CONSTANT, BatchScheduleType.CONSTANT)


def every_change() -> list[Pair]:
    """All changes of stage and ranks, with accumulations that go through those of a batch of 32; then the others."""
    cells = list(itertools.product(RANKS, STAGES))
    numbers = itertools.cycle(itertools.product((1, 2, 4, 8), repeat=2))
    found = [
        (Cell(*source, before), Cell(*target, after))
        for (source, target), (before, after) in zip(itertools.product(cells, repeat=2), numbers, strict=False)
    ]
    return found + [pair for pair in PAIRS if pair[0].sequences != Cell(1, 1, 1).sequences]


def main() -> None:
    pairs = every_change()
    with tempfile.TemporaryDirectory() as name:
        went_on = go_on(pairs, ALL_VISITS, Path(name))
    wholes = references(pairs)
    found = {pair: errors(went_on[pair], wholes[pair[0].sequences]) for pair in pairs}
    print("| saved: ranks, ZeRO, GAS | went on: ranks, ZeRO, GAS | batch | parameters | loss |\n|---|---|---|---|---|")
    for (source, cell), error in found.items():
        cuts = " | ".join(f"{one.ranks}, {one.stage}, {one.accumulation}" for one in (source, cell))
        print(f"| {cuts} | {cell.sequences} | {error['parameters']:.1e} | {error['loss']:.1e} |")
    worst = {name: max(error[name] for error in found.values()) for name in ("parameters", "loss")}
    print(
        f"{len(pairs)} changes; largest error: {worst['parameters']:.1e} of parameters, {worst['loss']:.1e} of a loss"
    )
    sys.exit(max(worst.values()) > BOUND)


if __name__ == "__main__":
    main()
