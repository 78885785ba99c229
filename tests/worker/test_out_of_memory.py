"""A rank that is out of memory: the step is done again in smaller pieces on all ranks, and nothing else changes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.errors import OutOfMemoryError
from launcher.ranks import Rank
from launcher.schema import Accumulation, Batch, Call, Config, Device, Dtype, Offload, Precision, Sync, Train
from tests.ranks import on_ranks
from tests.worker import plain, runs

pytestmark = pytest.mark.ranks

RANKS, BATCH, MICRO = 2, 16, 4
NUM_STEPS = 6


class Tight(plain.WrappedNet):
    """Is out of memory on one rank, from one of its passes on, where a micro-batch has more than so many sequences."""

    def __init__(self, rank: int = 0, from_pass: int = 1, most: int = MICRO, in_backward: bool = False) -> None:
        super().__init__()
        self.rank, self.from_pass, self.most, self.in_backward = rank, from_pass, most, in_backward
        self.passes = 0

    def forward(self, tokens: torch.Tensor) -> Any:
        output = super().forward(tokens)
        if not self.training or torch.distributed.get_rank() != self.rank:
            return output
        self.passes += 1
        if self.passes >= self.from_pass and len(tokens) > self.most:
            if not self.in_backward:
                raise torch.OutOfMemoryError("tried to allocate too much")
            output.logits.register_hook(_run_out)
        return output


def _run_out(_: torch.Tensor) -> None:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")


BASE = replace(
    runs.BASE,
    model=Call("tests.worker.test_out_of_memory.Tight"),
    batch=Batch(BATCH, train_micro_batch_size_per_gpu=MICRO),
    cluster=replace(runs.BASE.cluster, ranks_per_node=RANKS),
    train=Train(max_steps=NUM_STEPS, gradient_clipping=1.0),
)


def at(stage: int) -> Config:
    sync = Sync.ONCE_PER_WINDOW
    return replace(BASE, zero=replace(BASE.zero, stage=stage), accumulation=Accumulation(sync=sync))


def tight(config: Config, **arguments: Any) -> Config:
    return replace(config, model=Call(BASE.model.target, arguments))


STAGES = {
    **{f"stage{stage}": at(stage) for stage in (0, 1, 2)},
    **{f"stage{stage}-bf16": replace(at(stage), precision=Precision(dtype=Dtype.BF16)) for stage in (1, 2)},
    **{f"stage{stage}-cpu": replace(at(stage), offload=Offload(Device.CPU)) for stage in (1, 2)},
}
MOMENTS: dict[str, dict[str, Any]] = {
    # Two micro-batches a step: the first pass of all, the second of the third step, and the backward pass of it.
    "at the first step": {"rank": 1, "from_pass": 1, "most": 2},
    "in the middle of a window": {"rank": 0, "from_pass": 6, "most": 2},
    "in a backward pass": {"rank": 1, "from_pass": 6, "most": 2, "in_backward": True},
    "twice": {"rank": 1, "from_pass": 5, "most": 1},
}
CELLS = {
    f"{stage}, {moment}": tight(STAGES[stage], **MOMENTS[moment])
    for stage in STAGES
    for moment in MOMENTS
    if "-" not in stage or moment == "in the middle of a window"
}


def train_all(rank: Rank, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, config in (STAGES | CELLS).items():
        found[name] = runs.train(rank, config, folder / name)
    with pytest.raises(OutOfMemoryError) as raised:
        runs.train(rank, tight(at(1), rank=1, most=0), folder / "hopeless")
    return found | {"hopeless": str(raised.value)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(RANKS, train_all, tmp_path_factory.mktemp("tight"), timeout=1200)


@pytest.mark.parametrize("cell", CELLS)
def test_the_trajectory_is_that_of_a_run_with_enough_memory(trained: list[dict[str, Any]], cell: str) -> None:
    stage, moment = cell.split(", ")
    ours, whole = trained[0][cell], trained[0][stage]
    rounded = CELLS[cell].precision.dtype is Dtype.BF16
    assert runs.relative_error(ours["weights"], whole["weights"]) <= (1e-3 if rounded else 1e-6)
    for field, bound in (("loss", 1e-3), ("grad_norm", 1e-2)):
        series = [[line[field] for line in run["lines"] if line["kind"] == "train"] for run in (ours, whole)]
        assert runs.series_error(*series) <= (bound if rounded else 1e-6)
    lines = [line for line in ours["lines"] if line["kind"] == "train"]
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    assert [line["lr"] for line in lines] == [line["lr"] for line in whole["lines"] if line["kind"] == "train"]
    finer = 1 if MOMENTS[moment]["from_pass"] == 1 else 3
    left = MOMENTS[moment]["most"]
    assert [line["micro_batch_size"] for line in lines] == [MICRO] * (finer - 1) + [left] * (NUM_STEPS + 1 - finer)
    for line in lines:
        assert line["micro_batch_size"] * line["gradient_accumulation_steps"] * RANKS == BATCH


def test_a_single_sequence_that_does_not_fit_ends_the_run_on_all_ranks_with_the_reason(
    trained: list[dict[str, Any]],
) -> None:
    assert [found["hopeless"] for found in trained] == ["another rank was out of memory", "tried to allocate too much"]
