"""The heart: every cut of one global batch gives the update of one process that sees the whole batch at once."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.ranks import Rank
from launcher.schema import Config
from tests.ranks import on_ranks
from tests.worker import runs

pytestmark = pytest.mark.ranks

STAGES, ACCUMULATIONS, RANKS = (0, 1, 2, 3), (1, 2, 4, 8), (1, 2)
FP32_BOUND = 1e-6
"""Relative parameter error after 10 steps, and of the loss and gradient-norm series: rounding of fp32 alone."""

Cell = tuple[int, int, float | None]


def configure(stage: int, ranks: int, accumulation: int, clipping: float | None) -> Config:
    config = runs.cut(runs.BASE, ranks, accumulation)
    return replace(
        config,
        zero=replace(config.zero, stage=stage),
        train=replace(config.train, gradient_clipping=clipping),
    )


def train_cells(rank: Rank, cells: list[Cell], folder: Path) -> list[dict[str, Any]]:
    """All the cells one after another in one process group; starting one costs more than training."""
    return [
        runs.train(rank, configure(stage, rank.world_size, accumulation, clipping), folder / f"{number}")
        for number, (stage, accumulation, clipping) in enumerate(cells)
    ]


@pytest.fixture(scope="module")
def references() -> dict[float | None, dict[str, Any]]:
    return {clipping: runs.reference(configure(0, 1, 1, clipping)) for clipping in (1.0, None)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, Cell], dict[str, Any]]:
    cells: list[Cell] = list(itertools.product(STAGES, ACCUMULATIONS, (1.0, None)))
    return {
        (ranks, cell): result
        for ranks in RANKS
        for cell, result in zip(
            cells, on_ranks(ranks, train_cells, cells, tmp_path_factory.mktemp(f"ranks{ranks}"))[0], strict=True
        )
    }


@pytest.mark.parametrize("clipping", [1.0, None], ids=["clipped", "unclipped"])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_cut_gives_the_update_of_the_whole_batch(
    trained: dict[tuple[int, Cell], dict[str, Any]],
    references: dict[float | None, dict[str, Any]],
    stage: int,
    accumulation: int,
    ranks: int,
    clipping: float | None,
    record_property: Any,
) -> None:
    ours, whole = trained[ranks, (stage, accumulation, clipping)], references[clipping]
    errors = {
        "parameters": runs.relative_error(ours["weights"], whole["weights"]),
        "loss": runs.series_error([line["loss"] for line in train_lines(ours)], whole["loss"]),
        "grad_norm": runs.series_error([line["grad_norm"] for line in train_lines(ours)], whole["grad_norm"]),
    }
    for name, error in errors.items():
        record_property(name, error)
    assert max(errors.values()) <= FP32_BOUND, errors
    assert [line["tokens"] for line in train_lines(ours)] == whole["tokens"]
    assert {line["gradient_accumulation_steps"] for line in train_lines(ours)} == {accumulation}


def test_the_reference_moves_and_the_batches_are_unequal(references: dict[float | None, dict[str, Any]]) -> None:
    """Otherwise agreement would prove nothing: weights must move, clipping must bite, token counts must differ."""
    clipped, unclipped = references[1.0], references[None]
    assert runs.relative_error(unclipped["weights"], unclipped["initial"]) > 1e-2
    assert min(clipped["grad_norm"]) > 1.0
    assert len(set(clipped["tokens"])) > 5
    assert runs.relative_error(clipped["weights"], unclipped["weights"]) > 1e-5


def train_lines(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [line for line in result["lines"] if line["kind"] == "train"]
