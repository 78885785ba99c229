"""Ranks whose micro-batches use different parameters: exact where they are reduced once, ended elsewhere."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import RunError
from launcher.ranks import Rank
from launcher.schema import Accumulation, Batch, Call, Config, Sync, Train
from tests.ranks import on_ranks
from tests.worker import runs

pytestmark = pytest.mark.ranks

RANKS = 2
BASE = replace(
    runs.BASE,
    model=Call("tests.worker.plain.Branching"),
    batch=Batch(8, train_micro_batch_size_per_gpu=1),
    cluster=replace(runs.BASE.cluster, ranks_per_node=RANKS),
    train=Train(max_steps=10, gradient_clipping=1.0),
)
SYNCS = {0: Sync.ONCE_PER_WINDOW, 1: Sync.ONCE_PER_WINDOW, 2: Sync.ONCE_PER_WINDOW}
EVERY = Sync.EVERY_MICRO_BATCH


def at(stage: int, sync: Sync) -> Config:
    return replace(BASE, zero=replace(BASE.zero, stage=stage), accumulation=Accumulation(sync=sync))


def train_all(rank: Rank, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {
        f"stage{stage}": runs.train(rank, at(stage, sync), folder / f"stage{stage}") for stage, sync in SYNCS.items()
    }
    with pytest.raises(RunError) as raised:
        runs.train(rank, at(2, EVERY), folder / "every")
    return found | {"every": str(raised.value)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(RANKS, train_all, tmp_path_factory.mktemp("branching"))


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    return runs.reference(BASE)


@pytest.mark.parametrize("stage", SYNCS)
def test_the_update_is_that_of_one_process_where_gradients_are_reduced_once(
    trained: list[dict[str, Any]], whole: dict[str, Any], stage: int
) -> None:
    ours = trained[0][f"stage{stage}"]
    assert runs.relative_error(ours["weights"], whole["weights"]) <= 1e-6
    assert runs.series_error([line["loss"] for line in ours["lines"]], whole["loss"]) <= 1e-6
    assert runs.series_error([line["grad_norm"] for line in ours["lines"]], whole["grad_norm"]) <= 1e-6


def test_a_run_ends_on_all_ranks_before_it_makes_an_update_of_gradients_that_do_not_belong_together(
    trained: list[dict[str, Any]],
) -> None:
    first, second = (found["every"] for found in trained)
    assert first == second
    assert first.startswith("ranks use different parameters, or use them in another order, in one micro-batch (rank 0 ")
    assert "head." in first
    assert "other." in first
