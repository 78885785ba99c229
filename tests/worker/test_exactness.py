"""The heart: every cut of one global batch gives the update of one process that sees the whole batch at once.

``python -m tests.worker.test_exactness`` prints the table of docs/exactness.md.
"""

import itertools
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from launcher.ranks import Rank
from launcher.schema import Config, Device, Dtype, Offload, Precision
from tests.ranks import asked_for, on_ranks
from tests.worker import runs

pytestmark = pytest.mark.ranks

STAGES, ACCUMULATIONS, RANKS = (0, 1, 2, 3), (1, 2, 4, 8), (1, 2)

Errors = dict[str, float]

BOUNDS: dict[Dtype, Errors] = {
    # Rounding of fp32 alone.
    Dtype.FP32: {"parameters": 1e-6, "loss": 1e-6, "grad_norm": 1e-6},
    Dtype.BF16: {"parameters": 1e-3, "loss": 1e-3, "grad_norm": 5e-3},
}
"""Relative errors: of the parameters after 10 steps, and the largest of the loss and gradient-norm series."""


@dataclass(frozen=True)
class Cell:
    ranks: int
    stage: int
    accumulation: int
    clipping: float | None = 1.0
    dtype: Dtype = Dtype.FP32
    optimizer: Device = Device.NONE
    parameters: Device = Device.NONE

    def __str__(self) -> str:
        offloaded = [device.value for device in (self.optimizer, self.parameters) if device is not Device.NONE]
        return "-".join(
            [
                f"stage{self.stage}",
                f"gas{self.accumulation}",
                f"ranks{self.ranks}",
                "clipped" if self.clipping else "unclipped",
                *(["bf16"] if self.dtype is Dtype.BF16 else []),
                *offloaded,
            ]
        )

    def config(self, nvme: Path) -> Config:
        config = runs.cut(runs.BASE, self.ranks, self.accumulation)
        offload = Offload(self.optimizer, self.parameters, str(nvme) if self.optimizer is Device.NVME else None)
        # What DeepSpeed sums bf16 gradients in at stage 0.
        sums = self.dtype if self.stage == 0 else Dtype.FP32
        return replace(
            config,
            zero=replace(config.zero, stage=self.stage),
            train=replace(config.train, gradient_clipping=self.clipping),
            offload=offload,
            precision=Precision(dtype=self.dtype, grad_accum_dtype=sums),
        )


CELLS = [
    *(
        Cell(ranks, stage, accumulation, clipping)
        for stage, accumulation, ranks, clipping in itertools.product(STAGES, ACCUMULATIONS, RANKS, (1.0, None))
    ),
    Cell(2, 2, 4, optimizer=Device.CPU),
    *(Cell(2, stage, 4, dtype=Dtype.BF16, optimizer=Device.CPU) for stage in (1, 2, 3)),
    Cell(2, 3, 4, optimizer=Device.CPU, parameters=Device.CPU),
    Cell(2, 3, 4, optimizer=Device.NVME, parameters=Device.NVME),
    *(Cell(ranks, stage, 4, dtype=Dtype.BF16) for stage in STAGES for ranks in RANKS),
]

SLOW = {
    cell
    for cell in CELLS
    if cell.accumulation == 2
    or (cell.ranks == 1 and (cell.accumulation != 4 or cell.dtype is Dtype.BF16))
    or (cell.clipping is None and (cell.ranks == 1 or cell.accumulation != 4))
}
"""Left to make test-full: on one rank, and where nothing is clipped, the steps have less to get wrong."""


def train_cells(rank: Rank, cells: list[Cell], folder: Path) -> list[dict[str, Any]]:
    """All the cells one after another in one process group; starting one costs more than training."""
    return [runs.train(rank, cell.config(folder), folder / str(cell)) for cell in cells]


def train_all(cells: Iterable[Cell], folder: Path) -> dict[Cell, dict[str, Any]]:
    results = {}
    for ranks in RANKS:
        chosen = [cell for cell in cells if cell.ranks == ranks]
        results |= dict(zip(chosen, on_ranks(ranks, train_cells, chosen, folder, timeout=1200)[0], strict=True))
    return results


def references(folder: Path) -> dict[tuple[float | None, Dtype], dict[str, Any]]:
    wholes = ((1.0, Dtype.FP32), (None, Dtype.FP32), (1.0, Dtype.BF16))
    return {
        (clipping, dtype): runs.reference(Cell(1, 1, 1, clipping, dtype).config(folder)) for clipping, dtype in wholes
    }


def errors(ours: dict[str, Any], whole: dict[str, Any]) -> Errors:
    return {
        "parameters": runs.relative_error(ours["weights"], whole["weights"]),
        "loss": runs.series_error([line["loss"] for line in train_lines(ours)], whole["loss"]),
        "grad_norm": runs.series_error([line["grad_norm"] for line in train_lines(ours)], whole["grad_norm"]),
    }


def train_lines(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [line for line in result["lines"] if line["kind"] == "train"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[float | None, Dtype], dict[str, Any]]:
    return references(tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, dict[str, Any]]:
    return train_all(asked_for(request, "cell"), tmp_path_factory.mktemp("cells"))


@pytest.mark.parametrize(
    "cell", [pytest.param(cell, marks=[pytest.mark.slow] * (cell in SLOW), id=str(cell)) for cell in CELLS]
)
def test_a_cut_gives_the_update_of_the_whole_batch(
    trained: dict[Cell, dict[str, Any]], whole: dict[tuple[float | None, Dtype], dict[str, Any]], cell: Cell
) -> None:
    ours, reference = trained[cell], whole[cell.clipping, cell.dtype]
    found, bounds = errors(ours, reference), BOUNDS[cell.dtype]
    assert all(found[name] <= bounds[name] for name in bounds), found
    assert [line["tokens"] for line in train_lines(ours)] == reference["tokens"]
    assert {line["gradient_accumulation_steps"] for line in train_lines(ours)} == {cell.accumulation}


def test_the_reference_moves_and_the_batches_are_unequal(
    whole: dict[tuple[float | None, Dtype], dict[str, Any]],
) -> None:
    """Otherwise agreement would prove nothing: weights must move, clipping must bite, token counts must differ."""
    clipped, unclipped, bf16 = whole[1.0, Dtype.FP32], whole[None, Dtype.FP32], whole[1.0, Dtype.BF16]
    assert runs.relative_error(unclipped["weights"], unclipped["initial"]) > 1e-2
    assert runs.relative_error(bf16["weights"], bf16["initial"]) > 1e-2
    assert min(clipped["grad_norm"]) > 1.0
    assert len(set(clipped["tokens"])) > 5
    assert runs.relative_error(clipped["weights"], unclipped["weights"]) > 1e-5


def print_table() -> None:
    """The largest errors over the cells that a row sums up."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trained, whole = train_all(CELLS, folder), references(folder)
    found = {cell: errors(trained[cell], whole[cell.clipping, cell.dtype]) for cell in CELLS}
    rows: dict[str, list[Cell]] = {}
    for cell in CELLS:
        offloaded = "".join(
            f", {what} on {device.value}"
            for what, device in (("states", cell.optimizer), ("parameters", cell.parameters))
            if device is not Device.NONE
        )
        ranks = f"{cell.ranks} rank{'s' * (cell.ranks > 1)}"
        row = f"{cell.dtype.value}, stage {cell.stage}, {ranks}, accumulation {cell.accumulation}{offloaded}"
        rows.setdefault(row, []).append(cell)
    print("| cut | parameters | loss | gradient norm |\n|---|---|---|---|")
    for row, cells in rows.items():
        largest = [max(found[cell][name] for cell in cells) for name in ("parameters", "loss", "grad_norm")]
        print(f"| {row} | {' | '.join(f'{error:.1e}' for error in largest)} |")


if __name__ == "__main__":
    print_table()
