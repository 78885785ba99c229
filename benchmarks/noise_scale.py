"""What it costs to measure the gradient noise scale: time of a step, operations, and what the ranks send.

    python benchmarks/noise_scale.py
    python benchmarks/noise_scale.py --pairs 10 zero=stage2 accumulation.sync=once_per_window    # overrides of dna_8k

Steps of one engine with and without it take turns, on one and on two gloo ranks; which of the two is first in a pair
changes from pair to pair. Then one step of each is counted as torch dispatches it: every operator with the elements
that it reads, and every collective with its bytes. Every rank has one thread. The processor time of a step is told
too: of a machine that others use, it says what measuring adds, and what is left is waiting.
"""

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from launcher import job, plan, traffic  # noqa: E402 - runs from a checkout without installation
from launcher.compose import Composer  # noqa: E402
from launcher.ranks import Rank  # noqa: E402
from tests.ranks import on_ranks  # noqa: E402

OVERRIDES = (
    "+experiment=dna_8k",
    "model=llama_1m",
    "data.sequence_length=256",
    "data.validation=null",
    "train.max_steps=100",
    "optimizer.lr=1e-3",
    "logging=none",
)
WARM_UP = 2
"""Pairs that are not counted."""


@dataclass
class Count:
    """What one step of one rank did."""

    operations: int = 0
    elements: int = 0
    """Read by the operations."""
    collectives: int = 0
    sent: int = 0
    """Bytes handed to the collectives."""

    def __sub__(self, other: "Count") -> "Count":
        return Count(*(a - b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass
class Measured:
    wall: list[tuple[float, float]]
    """Seconds of neighbouring steps, with and without."""
    processor: list[tuple[float, float]]
    """The same in processor time of this rank."""
    without: Count
    extra: Count
    parameters: int


def counted(step: Any) -> Count:
    """What torch dispatches, in forward and backward passes, the optimizer and the process group."""
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    found = Count()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            if function.namespace == "c10d":
                found.collectives += 1
                found.sent += sum(tensor.nbytes for tensor in tensors)
            elif not function.is_view:
                found.operations += 1
                found.elements += sum(tensor.numel() for tensor in tensors)
            return function(*args, **(kwargs or {}))

    with Counting():
        step()
    return found


def measure(rank: Rank, accumulation: int, pairs: int, overrides: Sequence[str]) -> Measured:
    import torch.distributed as dist

    from launcher.worker import models
    from launcher.worker.data import open_task
    from launcher.worker.engine import Engine
    from launcher.worker.step import train_step
    from launcher.worker.windows import Shares

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    cut = [
        f"batch.train_batch_size={rank.world_size * accumulation}",
        f"batch.gradient_accumulation_steps={accumulation}",
        f"cluster.ranks_per_node={rank.world_size}",
    ]
    composer = Composer([*OVERRIDES, *cut, *overrides])
    made = job.prepare(composer.single(composer.compose())).plan
    config, values = made.config, made.deepspeed.values
    task = open_task(config, plan.summary(made)["data"])
    steps = plan.steps_of(config, made.cut, len(task.train))
    share = Shares(task.train, task.objective, steps, made.cut, rank.rank)[0]
    model = models.build(config.model, config.seed, values)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    engine = Engine(model, values, config.optimizer, traffic.sync(config))

    def step(measure_noise: bool) -> None:
        outcome = train_step(engine, task.objective, share, config.optimizer.lr, measure_noise)
        assert (outcome.noise is not None) == measure_noise

    def timed(measure_noise: bool) -> tuple[float, float]:
        dist.barrier()
        wall, processor = time.perf_counter(), time.process_time()
        step(measure_noise)
        dist.barrier()
        return time.perf_counter() - wall, time.process_time() - processor

    times = []
    for number in range(WARM_UP + pairs):
        first = number % 2 == 0
        taken = {first: timed(first), (not first): timed(not first)}
        times.append(tuple(zip(taken[True], taken[False], strict=True)))
    without = counted(lambda: step(False))
    extra = counted(lambda: step(True)) - without
    wall, processor = zip(*times[WARM_UP:], strict=True)
    return Measured(list(wall), list(processor), without, extra, parameters)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40, help="of steps, for each row; default: 40")
    parser.add_argument("overrides", nargs="*", help="more overrides, for all that runs")
    options = parser.parse_args()
    rows: dict[str, Measured] = {}
    for ranks in (1, 2):
        for accumulation in (2, 8):
            found = on_ranks(ranks, measure, accumulation, options.pairs, options.overrides, timeout=3600)
            rows[f"ranks: {ranks}, GAS {accumulation}"] = found[0]
    title = f"ms a step, {options.pairs} pairs"
    print(f"{title:<30}{'with':>10}{'without':>10}{'ratio':>9}  quartiles{'':9}processor time")
    for name, row in rows.items():
        # Of neighbours in time, so that a busy machine slowed both.
        low, middle, high = statistics.quantiles([with_it / without for with_it, without in row.wall], n=4)
        processor = statistics.median(with_it / without for with_it, without in row.processor)
        medians = [statistics.median(one) * 1000 for one in zip(*row.wall, strict=True)]
        quartiles = f"{low:.3f} to {high:.3f}"
        print(f"  {name:<28}{medians[0]:10.1f}{medians[1]:10.1f}{middle:9.3f}  {quartiles}{processor:12.3f}")
    print("\ncounted in a step of one rank      without            of it for the noise scale")
    print(f"{'':<30}{'operations':>12}{'collectives':>13}{'bytes':>12}    ", end="")
    print(f"{'operations':>12}{'passes over the gradients':>28}{'collectives':>13}{'bytes':>8}")
    for name, row in rows.items():
        base, extra = row.without, row.extra
        print(f"  {name:<28}{base.operations:12,}{base.collectives:13,}{base.sent:12,}    ", end="")
        passes = extra.elements / row.parameters
        print(f"{extra.operations:12,}{passes:28.3f}{extra.collectives:13,}{extra.sent:8,}")


if __name__ == "__main__":
    main()
