"""Checkpoints of real engines on gloo ranks: what one cut has saved goes on at any other as if nothing had happened.

``python -m tests.worker.test_checkpoint`` prints the table of ranks 1, 2 and 4.
"""

import itertools
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from launcher import checkpoints, plan
from launcher.ranks import Rank
from launcher.schema import Batch, Call, Config, Device, Dtype, LrSchedule, LrScheduleType, OptimizerType, Train
from tests.ranks import asked_for, on_ranks
from tests.worker import runs

pytestmark = pytest.mark.ranks

BEFORE, AFTER = range(3), range(3, 13)
"""Steps before the checkpoint, and those after it which are compared."""
BOUND = 1e-6
"""Of parameters, losses and norms in fp32 at a learning rate of 1e-3."""
DOCUMENTED = Path(__file__).parents[2] / "docs" / "checkpoints.md"


class Cell(NamedTuple):
    ranks: int
    stage: int
    accumulation: int
    optimizer: OptimizerType = OptimizerType.ADAMW
    dtype: Dtype = Dtype.FP32
    offload: Device = Device.NONE


def configure(cell: Cell) -> Config:
    return replace(
        runs.BASE,
        model=Call("tests.worker.test_checkpoint.PartlyFrozen"),
        zero=replace(
            runs.BASE.zero,
            stage=cell.stage,
            reduce_scatter=cell.optimizer is not OptimizerType.MUON or cell.stage < 3,
        ),
        batch=Batch(train_batch_size=8, gradient_accumulation_steps=cell.accumulation),
        cluster=replace(runs.BASE.cluster, ranks_per_node=cell.ranks),
        lr_schedule=LrSchedule(type=LrScheduleType.CONSTANT),
        optimizer=replace(runs.BASE.optimizer, type=cell.optimizer),
        precision=replace(runs.BASE.precision, dtype=cell.dtype),
        offload=replace(runs.BASE.offload, optimizer=cell.offload),
        # DeepSpeed would clip what Muon has made of the gradient.
        train=Train(max_steps=20, gradient_clipping=None if cell.optimizer is OptimizerType.MUON else 1.0),
    )


def PartlyFrozen() -> Any:  # noqa: N802 - it is called as a model class is
    """A model with all that a checkpoint must not forget: frozen and tied parameters, and a buffer."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(17, 32)
            self.mix = nn.Conv1d(32, 32, kernel_size=4)
            self.head = nn.Linear(32, 17)
            self.head.weight = self.embed.weight
            self.shift = nn.Parameter(torch.randn(17), requires_grad=False)
            self.register_buffer("scale", 0.5 + torch.rand(17))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            embedded = F.pad(self.embed(tokens).transpose(1, 2), (3, 0))
            return self.head(torch.tanh(self.mix(embedded)).transpose(1, 2)) * self.scale + self.shift

    return Model()


def start(rank: Rank, cell: Cell) -> tuple[Any, Any, Any]:
    """A new engine, the task and the plan."""
    from launcher import traffic
    from launcher.worker import build, models
    from launcher.worker.data import open_task
    from launcher.worker.engine import Engine

    config = configure(cell)
    planned = plan.make(config)
    values = planned.deepspeed.values
    build.build(build.needed(values), print)
    task = open_task(config, plan.summary(planned)["data"])
    return (
        Engine(models.build(config.model, config.seed, values), values, config.optimizer, traffic.sync(config)),
        task,
        planned,
    )


def train(rank: Rank, started: tuple[Any, Any, Any], numbers: Sequence[int]) -> dict[str, Any]:
    from launcher.worker import states, step
    from launcher.worker.windows import Shares

    engine, task, planned = started
    steps = plan.steps_of(planned.config, planned.cut, len(task.train))
    shares = Shares(task.train, task.objective, steps, planned.cut, rank.rank)
    outcomes = [step.train_step(engine, task.objective, shares[number], 1e-3) for number in numbers]
    return {
        "loss": [outcome.loss for outcome in outcomes],
        "norm": [outcome.update.grad_norm for outcome in outcomes],
        "weights": {name: weight.numpy() for name, weight in states.weights(engine.deepspeed).items()},
    }


def save(rank: Rank, cells: Sequence[Cell], folder: Path) -> dict[Cell, Any]:
    """Train, save and go on; what the steps after the checkpoint gave, and the weights and the rest in it."""
    from launcher.worker import checkpoint, slices

    found = {}
    for cell in cells:
        started = start(rank, cell)
        before = train(rank, started, BEFORE)
        texts = {"config.yaml": "seed: 0\n", "plan.json": "{}\n"}
        saver = checkpoint.Saver(started[0], folder_of(folder, cell), texts, None, None)
        saver.begin(len(BEFORE), {"is_last": False})
        saved = saver.finish()
        assert saved.fault is None, saved.fault
        rest = {name: tensor.numpy() for name, tensor in slices.rest(started[0].deepspeed.module).items()}
        found[cell] = {"saved": before["weights"], "rest": rest, **train(rank, started, AFTER)}
        started[0].deepspeed.destroy()
    return found


def go_on(rank: Rank, pairs: Sequence[tuple[Cell, Cell]], folder: Path) -> dict[tuple[Cell, Cell], Any]:
    """Load what one cell has saved into a new engine of another, and train on."""
    import torch

    from launcher.worker import checkpoint, slices

    found = {}
    for saved, cell in pairs:
        started = start(rank, cell)
        with torch.no_grad():
            started[0].deepspeed.module.scale.fill_(7.0)  # to be restored
        whole, notes = checkpoint.find(folder_of(folder, saved))
        assert whole is not None, notes
        checkpoint.load(started[0], whole)
        rest = {name: tensor.numpy() for name, tensor in slices.rest(started[0].deepspeed.module).items()}
        found[saved, cell] = {"rest": rest, **train(rank, started, AFTER)}
        started[0].deepspeed.destroy()
    return found


def folder_of(folder: Path, cell: Cell) -> Path:
    return folder / "-".join(str(getattr(part, "value", part)) for part in cell)


def errors(ours: dict[str, Any], whole: dict[str, Any]) -> dict[str, float]:
    """Relative, against the run that went on by itself."""
    return {
        "weights": runs.relative_error(ours["weights"], whole["weights"]),
        "loss": runs.series_error(ours["loss"], whole["loss"]),
        "norm": 0.0 if None in whole["norm"] else runs.series_error(ours["norm"], whole["norm"]),
    }


def run(
    cells: Sequence[Cell], pairs: Sequence[tuple[Cell, Cell]], folder: Path
) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """What the cells gave that saved, and those that went on."""
    saved: dict[Any, Any] = {}
    others: dict[Any, Any] = {}
    for ranks in sorted({cell.ranks for cell in cells}):
        saved |= on_ranks(ranks, save, [cell for cell in cells if cell.ranks == ranks], folder, timeout=3600)[0]
    for ranks in sorted({cell.ranks for _, cell in pairs}):
        others |= on_ranks(ranks, go_on, [pair for pair in pairs if pair[1].ranks == ranks], folder, timeout=3600)[0]
    return saved, others


CELLS = [
    Cell(1, 0, 2),
    Cell(2, 0, 1),
    Cell(1, 1, 4),
    Cell(2, 1, 2),
    Cell(1, 2, 8),
    Cell(2, 2, 4),
    Cell(1, 3, 2),
    Cell(2, 3, 1),
]
PAIRS = [(saved, cell) for saved, cell in itertools.product(CELLS, CELLS) if saved.ranks != cell.ranks or saved == cell]

SLOW = [(saved, cell) for saved, cell in PAIRS if saved != cell and (saved.stage + cell.stage) % 2]
"""Left to make test-full."""

OPTIMIZERS = [
    (Cell(2, 1, 2, kind), Cell(2, 3, 2, kind)) for kind in (OptimizerType.LAMB, OptimizerType.LARS, OptimizerType.SGD)
] + [
    (Cell(2, 3, 2, OptimizerType.LAMB), Cell(2, 0, 2, OptimizerType.LAMB)),
    (Cell(2, 1, 2, OptimizerType.MUON), Cell(2, 1, 4, OptimizerType.MUON)),
    (Cell(2, 1, 2, OptimizerType.MUON), Cell(2, 3, 2, OptimizerType.MUON)),
    (Cell(2, 3, 2, OptimizerType.MUON), Cell(2, 2, 2, OptimizerType.MUON)),
    (Cell(2, 2, 2), Cell(2, 2, 2, offload=Device.CPU)),
    (Cell(2, 2, 2, offload=Device.CPU), Cell(2, 3, 2)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def fp32(request: pytest.FixtureRequest, folder: Path) -> tuple[dict[Any, Any], dict[Any, Any]]:
    pairs = asked_for(request, "pair")
    return run(list(dict.fromkeys(CELLS + [saved for saved, _ in OPTIMIZERS])), pairs, folder)


def marked(pairs: Sequence[tuple[Cell, Cell]]) -> list[Any]:
    return [pytest.param(pair, marks=[pytest.mark.slow] * (pair in SLOW), id=str(pair)) for pair in pairs]


@pytest.mark.parametrize("pair", marked(PAIRS + OPTIMIZERS))
def test_training_goes_on_at_another_cut_as_if_it_had_never_stopped(fp32: Any, pair: tuple[Cell, Cell]) -> None:
    saved, others = fp32
    whole = saved[pair[0]]
    assert runs.relative_error(whole["saved"], whole["weights"]) > 1e-4, "the steps have to move the weights"
    for name, error in errors(others[pair], whole).items():
        assert error <= BOUND, name


@pytest.mark.parametrize("pair", marked(PAIRS))
def test_frozen_parameters_and_buffers_come_back(fp32: Any, pair: tuple[Cell, Cell]) -> None:
    saved, others = fp32
    assert sorted(saved[pair[0]]["rest"]) == ["scale", "shift"]
    for name, value in saved[pair[0]]["rest"].items():
        assert (others[pair]["rest"][name] == value).all()


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_the_documented_lines_read_the_weights_without_this_program(fp32: Any, folder: Path, cell: Cell) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", DOCUMENTED.read_text(), re.DOTALL)
    names: dict[str, Any] = {"folder": folder_of(folder, cell) / checkpoints.name(len(BEFORE))}
    exec(program, names)
    read = {name: weight.numpy() for name, weight in names["weights"].items()}
    assert runs.relative_error(read, fp32[0][cell]["saved"]) == 0


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_the_manifest_accounts_for_every_element_once(fp32: Any, folder: Path, cell: Cell) -> None:
    manifest = json.loads((folder_of(folder, cell) / checkpoints.name(len(BEFORE)) / checkpoints.MANIFEST).read_text())
    for name, entry in manifest["parameters"].items():
        numel = fp32[0][cell]["saved"][name].size
        for kind in ("weight", "exp_avg", "exp_avg_sq"):
            runs_of_kind = [(start, stop) for _, start, stop in entry["kinds"][kind]]
            covered = [element for start, stop in runs_of_kind for element in range(start, stop)]
            assert covered == list(range(numel)), (name, kind)
        assert entry["count"] == len(BEFORE)


def main() -> None:
    """Ranks 1, 2, 4 x ZeRO 1, 2, 3 x every accumulation of a batch of 8, saved at one cut and resumed at others."""
    import tempfile

    cells = [
        Cell(ranks, stage, 8 // ranks // micro)
        for ranks in (1, 2, 4)
        for stage in (1, 2, 3)
        for micro in (1, 2, 4, 8)
        if ranks * micro <= 8
    ]
    savers = [Cell(ranks, stage, 2) for ranks in (1, 2, 4) for stage in (1, 2, 3)]
    pairs = list(itertools.product(savers, cells))
    with tempfile.TemporaryDirectory() as folder:
        saved, others = run(savers, pairs, Path(folder))
    worst = 0.0
    for pair in pairs:
        found = errors(others[pair], saved[pair[0]])
        worst = max(worst, *found.values())
        names = [f"{c.ranks} ranks ZeRO {c.stage} GAS {c.accumulation}" for c in pair]
        print(" -> ".join(names), *(f"{name} {error:.1e}" for name, error in found.items()))
    print(f"{len(pairs)} changes, largest error {worst:.1e}")
    sys.exit(worst > BOUND)


if __name__ == "__main__":
    main()
