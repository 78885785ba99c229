"""What a step communicates, counted where torch is called, must be what the plan says.

``python -m tests.worker.test_traffic`` prints both.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import pytest

from launcher import deepspeed_json, traffic
from launcher.batch import Cut
from launcher.parameters import Sizes
from launcher.ranks import Rank
from launcher.schema import Call, Config, Device, Dtype, Offload, Precision, Sync, Zero
from tests.ranks import on_ranks
from tests.worker import runs

pytestmark = pytest.mark.ranks

RANKS = 2

BUCKET = 6000
"""Elements; less than the model has, so that reductions take more than one."""

WHOLE = {
    "all_reduce": "tensor",
    "reduce_scatter_tensor": "input",
    "all_gather_into_tensor": "output_tensor",
}
"""The argument of each operation that holds a whole tensor."""

CALLED = {
    "all_reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_gather": "all_gather_into_tensor",
}
"""torch's names of the plan's."""

OTHERS = (
    "all_gather",
    "all_gather_coalesced",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
)
"""What else could move data; DeepSpeed compares a few numbers with it at stage 3."""

SMALL = 256
"""Bytes; norms, flags and losses."""


@dataclass(frozen=True)
class Cell:
    stage: int
    accumulation: int
    sync: Sync
    dtype: Dtype = Dtype.FP32
    states: Device = Device.NONE
    small_stay: bool = False

    def __str__(self) -> str:
        kept = "-small-stay" if self.small_stay else ""
        offloaded = "-offloaded" if self.states is Device.CPU else ""
        return f"stage{self.stage}-{self.sync.value}-gas{self.accumulation}-{self.dtype.value}{offloaded}{kept}"

    @property
    def config(self) -> Config:
        return replace(
            runs.cut(runs.BASE, RANKS, self.accumulation),
            model=Call("tests.worker.plain.Net"),
            zero=Zero(
                stage=self.stage,
                reduce_bucket_size=BUCKET,
                stage3_param_persistence_threshold=600 if self.small_stay else 0,
            ),
            precision=Precision(dtype=self.dtype, grad_accum_dtype=self.sums),
            accumulation=replace(runs.BASE.accumulation, sync=self.sync),
            offload=Offload(self.states),
        )

    @property
    def sums(self) -> Dtype:
        return self.dtype if self.stage == 0 else Dtype.FP32


CELLS = [
    *(
        Cell(stage, accumulation, sync, dtype)
        for stage in range(4)
        for accumulation in (1, 4, 16)
        for sync in Sync
        for dtype in (Dtype.FP32, Dtype.BF16)
        if stage >= 2 or sync is Sync.ONCE_PER_WINDOW
    ),
    *(Cell(stage, 4, Sync.ONCE_PER_WINDOW, states=Device.CPU) for stage in (1, 2, 3)),
    Cell(3, 4, Sync.EVERY_MICRO_BATCH, small_stay=True),
]

Seen = list[tuple[str, int]]
"""Operations, and the bytes of the whole tensor."""


def bytes_of(value: Any) -> int:
    if isinstance(value, list | tuple):
        return sum(map(bytes_of, value))
    return value.numel() * value.element_size() if hasattr(value, "element_size") else 0


@contextmanager
def watched(seen: Seen) -> Iterator[None]:
    """Note every collective: DeepSpeed and this program call torch's functions, some of which DeepSpeed keeps."""
    import deepspeed.comm.comm as comm
    import torch.distributed as dist

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @wraps(function)
        def wrapper(*arguments: Any, **options: Any) -> Any:
            bound = signature.bind(*arguments, **options).arguments
            if name in WHOLE:
                seen.append((name, bytes_of(bound[WHOLE[name]])))
            else:
                assert sum(map(bytes_of, bound.values())) <= SMALL, f"{name} is not counted"
            return function(*arguments, **options)

        return wrapper

    with pytest.MonkeyPatch.context() as patch:
        for name in (*WHOLE, *OTHERS):
            patch.setattr(dist, name, noting(name, getattr(dist, name)))
        for name, kept in (
            ("all_gather_into_tensor", "all_gather_function"),
            ("reduce_scatter_tensor", "reduce_scatter_function"),
        ):
            patch.setattr(comm.cdb, kept, noting(name, getattr(comm.cdb, kept)))
        yield


def count(cell: Cell) -> tuple[Seen, Sizes]:
    """The collectives of the third step; by then DeepSpeed knows the order of the parameters."""
    import torch

    from launcher.worker import models
    from launcher.worker.engine import Engine

    cut = Cut(cell.accumulation * RANKS, 1, cell.accumulation, RANKS)
    values = deepspeed_json.build(cell.config, cut).values
    model = models.build(cell.config.model, 0, values)
    sizes = models.sizes(model)
    engine = Engine(model, values, cell.config.optimizer, traffic.sync(cell.config))
    seen: Seen = []
    with watched(seen):
        for _ in range(3):
            seen.clear()
            engine.begin_window(cell.accumulation)
            for _ in range(cell.accumulation):
                logits = engine.module(torch.randint(2, 6, (1, 32)))
                engine.backward(logits.float().logsumexp(-1).sum(), 1.0)
            assert engine.end_window().applied
    engine.deepspeed.destroy()
    return seen, sizes


def work(rank: Rank) -> dict[str, tuple[Seen, Sizes]]:
    from launcher.worker import build

    build.build(["CPUAdamBuilder"], print)
    return {str(cell): count(cell) for cell in CELLS}


@pytest.fixture(scope="module")
def counted() -> dict[str, tuple[Seen, Sizes]]:
    return on_ranks(RANKS, work)[0]


def large(seen: Seen, operation: str) -> list[int]:
    return [size for name, size in seen if name == operation and size > SMALL]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_gradients_are_reduced_as_often_as_planned(counted: dict[str, tuple[Seen, Sizes]], cell: Cell) -> None:
    seen, sizes = counted[str(cell)]
    planned = traffic.per_step(cell.config, sizes, cell.accumulation).gradients
    found = large(seen, CALLED[planned.operation])
    padding = RANKS * 4 * len(sizes.parameters) * len(found)
    assert planned.bytes <= sum(found) <= planned.bytes + padding
    assert len(found) == planned.calls


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_parameters_are_gathered_as_planned(counted: dict[str, tuple[Seen, Sizes]], cell: Cell) -> None:
    seen, sizes = counted[str(cell)]
    planned = traffic.per_step(cell.config, sizes, cell.accumulation).parameters
    found = [size for name, size in seen if name == CALLED["all_gather"]]
    if planned is None:
        assert found == []
        return
    padding = RANKS * 8 * len(sizes.parameters) * len(found)
    assert planned.bytes <= sum(found) <= planned.bytes + padding
    assert planned.calls in (None, len(found))


@pytest.mark.parametrize("dtype", [Dtype.FP32, Dtype.BF16])
@pytest.mark.parametrize("stage", range(4))
def test_once_per_window_gradient_traffic_does_not_grow_with_accumulation(
    counted: dict[str, tuple[Seen, Sizes]], stage: int, dtype: Dtype
) -> None:
    operation = "reduce_scatter_tensor" if stage == 3 else "all_reduce"
    by_steps = [large(counted[str(Cell(stage, n, Sync.ONCE_PER_WINDOW, dtype))][0], operation) for n in (1, 4, 16)]
    assert sum(by_steps[0]) > 0
    assert by_steps[0] == by_steps[1] == by_steps[2]


def print_table() -> None:
    """Of each cell: bytes and calls as planned, and as counted."""
    print("| cell | gradients: planned | counted | parameters: planned | counted |\n|---|---|---|---|---|")
    for cell, (seen, sizes) in zip(CELLS, on_ranks(RANKS, work)[0].values(), strict=True):
        step = traffic.per_step(cell.config, sizes, cell.accumulation)
        columns = []
        for planned in (step.gradients, step.parameters):
            found = large(seen, CALLED[planned.operation]) if planned else []
            told = f"{planned.bytes} in {planned.calls or '?'}" if planned else "-"
            columns += [told, f"{sum(found)} in {len(found)}"]
        print(f"| {cell} | {' | '.join(columns)} |")


if __name__ == "__main__":
    print_table()
