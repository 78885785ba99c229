"""What a rank holds must be what the plan says, measured as memory of the process that is in use.

``python -m tests.worker.test_memory`` prints both.
"""

import ctypes
import gc
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from launcher import deepspeed_json, traffic
from launcher.batch import Cut
from launcher.ranks import Rank
from launcher.schema import Accumulation, Call, Config, Device, Dtype, Offload, Optimizer, Precision, Sync, Zero
from tests.ranks import on_ranks

pytestmark = pytest.mark.ranks

RANKS, ACCUMULATION = 2, 3
WIDTH, LAYERS = 1024, 24
TOTAL = WIDTH * WIDTH * LAYERS
EVERY, ONCE = Sync.EVERY_MICRO_BATCH, Sync.ONCE_PER_WINDOW

TOLERANCE = 0.8
"""Bytes a parameter; a partition of fp32 on two ranks takes two. At stage 3 a few layers are gathered at any time."""


class Layers(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(inputs.to(self.layers[0].weight.dtype))
        return outputs


@dataclass(frozen=True)
class Cell:
    stage: int
    sync: Sync = ONCE
    states: Device = Device.NONE
    dtype: Dtype = Dtype.FP32

    def __str__(self) -> str:
        offloaded = "-offloaded" if self.states is Device.CPU else ""
        return f"stage{self.stage}-{self.sync.value}-{self.dtype.value}{offloaded}"

    @property
    def config(self) -> Config:
        sums = self.dtype if self.stage == 0 else Dtype.FP32
        zero = Zero(stage=self.stage, reduce_bucket_size=WIDTH * WIDTH, stage3_param_persistence_threshold=0)
        return Config(
            zero=zero,
            precision=Precision(dtype=self.dtype, grad_accum_dtype=sums),
            optimizer=Optimizer(),
            accumulation=Accumulation(sync=self.sync),
            offload=Offload(self.states),
        )


CELLS = [
    *(Cell(stage) for stage in range(4)),
    *(Cell(stage, EVERY) for stage in (2, 3)),
    *(Cell(stage, states=Device.CPU) for stage in (1, 2, 3)),
    Cell(2, EVERY, Device.CPU),
    Cell(2, EVERY, dtype=Dtype.BF16),
    Cell(2, states=Device.CPU, dtype=Dtype.BF16),
]

TESTED = [cell for cell in CELLS if cell.states is Device.CPU and cell.stage == 2] + [Cell(1), Cell(3)]
"""Those with most kinds; each takes processes of its own, and the seconds that these take to start."""

SLOW = TESTED[1:-1]


def in_use() -> int:
    """Bytes of this process that no file is behind, after everything that is free was given back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) * 1024


def measure(rank: Rank, cell: Cell) -> tuple[dict[str, int | None], int]:
    """What is planned by kind, and how much more was in use with the model than before, between two passes."""
    from launcher.worker import build, models
    from launcher.worker.engine import Engine

    build.build(["CPUAdamBuilder"], print)
    values = deepspeed_json.build(cell.config, Cut(RANKS * ACCUMULATION, 1, ACCUMULATION, RANKS)).values

    def pass_on(engine: Engine, width: int) -> None:
        logits = engine.module(torch.ones(1, width))
        engine.backward(logits.float().logsumexp(-1).sum(), 1.0)

    def built(width: int) -> tuple[Engine, nn.Module]:
        call = Call("tests.worker.test_memory.Layers", {"width": width})
        model = models.build(call, 0, values)
        return Engine(model, values, cell.config.optimizer, cell.sync), model

    def step(engine: Engine, width: int) -> None:
        engine.begin_window(ACCUMULATION)
        for _ in range(ACCUMULATION):
            pass_on(engine, width)
        engine.end_window()

    step(built(8)[0], 8)  # what is imported, and what is held for any model
    before = in_use()
    engine, model = built(WIDTH)
    sizes = models.sizes(model)
    assert sizes.total == TOTAL
    step(engine, WIDTH)  # the optimizer makes its states
    engine.begin_window(ACCUMULATION)
    pass_on(engine, WIDTH)
    pass_on(engine, WIDTH)
    return traffic.memory(cell.config, sizes, RANKS), in_use() - before


def planned_between_passes(cell: Cell, kinds: dict[str, int | None]) -> int:
    """Without the partition that stage 2 makes at the end of a window, while it gives the whole gradient back."""
    later = 4 * TOTAL // RANKS if cell.stage == 2 and cell.sync is ONCE and cell.states is Device.NONE else 0
    return sum(size or 0 for size in kinds.values()) - later


@pytest.mark.parametrize(
    "cell", [pytest.param(cell, marks=[pytest.mark.slow] * (cell in SLOW)) for cell in TESTED], ids=str
)
def test_a_rank_holds_what_is_planned(cell: Cell) -> None:
    for kinds, found in on_ranks(RANKS, measure, cell):
        assert found / TOTAL == pytest.approx(planned_between_passes(cell, kinds) / TOTAL, abs=TOLERANCE)


def print_table() -> None:
    """Bytes a parameter, of all cells."""
    print("| cell | planned | measured |\n|---|---|---|")
    for cell in CELLS:
        kinds, found = on_ranks(RANKS, measure, cell)[0]
        print(f"| {cell} | {planned_between_passes(cell, kinds) / TOTAL:.2f} | {found / TOTAL:.2f} |", flush=True)


if __name__ == "__main__":
    print_table()
