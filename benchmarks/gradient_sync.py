"""What a step of this program costs beside torch's own DistributedDataParallel that communicates once a window.

    python benchmarks/gradient_sync.py
    python benchmarks/gradient_sync.py --pairs 10 model=lfm2_tiny      # overrides of dna_8k, for both

The peer is a bare loop: ``no_sync`` for all micro-batches but the last, clipping, AdamW. Both train the same model on
the same micro-batches, which are in memory, in one process group of two gloo ranks, and take turns step by step; which
of them is first in a pair changes from pair to pair. Every rank has one thread. The processor time of a step is told
too: of a machine that others use, it says what the program adds, and what is left is waiting.
"""

import argparse
import functools
import logging
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from launcher import job, plan, traffic  # noqa: E402 - runs from a checkout without installation
from launcher.compose import Composer  # noqa: E402
from launcher.plan import Plan  # noqa: E402
from launcher.ranks import Rank  # noqa: E402
from launcher.schema import Sync  # noqa: E402
from tests.ranks import on_ranks  # noqa: E402

if TYPE_CHECKING:
    from launcher.worker.windows import Share

RANKS = 2
ACCUMULATION = 8
OVERRIDES = (
    "+experiment=dna_8k",
    "model=llama_1m",
    "data.sequence_length=256",
    "data.validation=null",
    f"batch.train_batch_size={RANKS * ACCUMULATION}",
    f"batch.gradient_accumulation_steps={ACCUMULATION}",
    f"cluster.ranks_per_node={RANKS}",
    "train.max_steps=100",
    "optimizer.lr=1e-3",
    "logging=none",
)
WARM_UP = 2
"""Pairs that are not counted."""
LIMIT = 0.97
"""Of stage 0 that communicates once a window, the cut in which both send the same."""
CUTS = (
    (0, Sync.ONCE_PER_WINDOW),
    (1, Sync.ONCE_PER_WINDOW),
    (2, Sync.ONCE_PER_WINDOW),
    (2, Sync.EVERY_MICRO_BATCH),
    (3, Sync.ONCE_PER_WINDOW),
    (3, Sync.EVERY_MICRO_BATCH),
)
"""ZeRO stage, and when gradients are communicated; below stage 2 there is no choice."""


class Distributed:
    """The peer: torch's DistributedDataParallel around the model of a run."""

    def __init__(self, made: Plan) -> None:
        import torch

        from launcher.worker import models, optimizers

        chosen = made.config.optimizer
        model = models.build(made.config.model, made.config.seed, {"zero_optimization": {"stage": 0}})
        groups = optimizers.arguments(model, chosen)["model_parameters"]
        self.model = torch.nn.parallel.DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(groups, lr=chosen.lr, betas=chosen.betas, eps=chosen.eps)
        self.clip = torch.nn.utils.clip_grad_norm_
        self.clipping = made.config.train.gradient_clipping
        self.loss = torch.nn.functional.cross_entropy

    def step(self, batches: Sequence[tuple[Any, Any]]) -> None:
        for number, (inputs, labels) in enumerate(batches, start=1):
            with self.model.no_sync() if number < len(batches) else nullcontext():
                logits = self.model(inputs).logits
                loss = self.loss(logits.flatten(0, 1), labels)
                (loss / len(batches)).backward()
        self.clip(self.model.parameters(), self.clipping)
        self.optimizer.step()
        self.optimizer.zero_grad()


def prepare(overrides: Sequence[str]) -> Plan:
    composer = Composer([*OVERRIDES, *overrides])
    return job.prepare(composer.single(composer.compose())).plan


def batches(share: "Share") -> list[tuple[Any, Any]]:
    """The micro-batches as token ids and labels."""
    import torch
    import torch.nn.functional as F

    from launcher.genome import alphabet

    tokens = torch.from_numpy(alphabet.TOKEN).long()
    found = []
    for micro_batch in share.micro_batches:
        inputs = tokens[micro_batch.batch["codes"].long()]
        labels = F.pad(inputs[:, 1:], (0, 1), value=alphabet.PAD).flatten()
        found.append((inputs, labels.masked_fill(labels == alphabet.PAD, -100)))
    return found


class Seconds(NamedTuple):
    wall: float
    processor: float
    """Of this rank."""


def timed(step: Callable[[], object]) -> Seconds:
    import torch.distributed as dist

    dist.barrier()
    wall, processor = time.perf_counter(), time.process_time()
    step()
    dist.barrier()
    return Seconds(time.perf_counter() - wall, time.process_time() - processor)


def take_turns(
    rank: Rank, cuts: Sequence[tuple[int, Sync]], pairs: int, overrides: Sequence[str]
) -> tuple[int, list[list[tuple[Seconds, Seconds]]]]:
    """Tokens of a step, and for each cut the times of the program's steps and of the peer's beside them."""
    from launcher.worker import models
    from launcher.worker.data import open_task
    from launcher.worker.engine import Engine
    from launcher.worker.step import train_step
    from launcher.worker.windows import Shares

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    made = prepare(overrides)
    task = open_task(made.config, plan.summary(made)["data"])
    steps = plan.steps_of(made.config, made.cut, len(task.train))
    share = Shares(task.train, task.objective, steps, made.cut, rank.rank)[0]
    in_memory = batches(share)
    assert len({int((labels >= 0).sum()) for _, labels in in_memory}) == 1, "the peer's means are exact"
    theirs = functools.partial(Distributed(made).step, in_memory)
    measured = []
    for stage, sync in cuts:
        made = prepare([*overrides, f"zero=stage{stage}", f"accumulation.sync={sync.value}"])
        config, values = made.config, made.deepspeed.values
        model = models.build(config.model, config.seed, values)
        engine = Engine(model, values, config.optimizer, traffic.sync(config))
        ours = functools.partial(train_step, engine, task.objective, share, config.optimizer.lr)
        turns: list[Callable[[], object]] = [ours, theirs]
        times = []
        for number in range(WARM_UP + pairs):
            order = turns if number % 2 else turns[::-1]
            found = {turn: timed(turn) for turn in order}
            times.append((found[ours], found[theirs]))
        measured.append(times[WARM_UP:])
        engine.deepspeed.destroy()
    return RANKS * sum(labels.numel() - 1 for _, labels in in_memory), measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="of steps, for each row; default: 20")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("overrides", nargs="*", help="more overrides, for all that runs")
    options = parser.parse_args()
    cuts = [cut for cut in CUTS if cut[0] in options.stages]
    tokens, measured = on_ranks(RANKS, take_turns, cuts, options.pairs, options.overrides, timeout=3600)[0]
    title = f"tokens/s, {RANKS} ranks, GAS {ACCUMULATION}, {options.pairs} pairs"
    print(
        f"{title:<40}{'program':>10}{'DDP':>10}{'ratio':>9}  quartiles{'':9}processor time (limit {LIMIT} at stage 0)"
    )
    for (stage, sync), pairs in zip(cuts, measured, strict=True):
        # Of neighbours in time, so that a busy machine slowed both.
        low, middle, high = statistics.quantiles([peer.wall / program.wall for program, peer in pairs], n=4)
        processor = statistics.median(peer.processor / program.processor for program, peer in pairs)
        rates = [tokens / statistics.median(one.wall for one in turns) for turns in zip(*pairs, strict=True)]
        name = f"ZeRO stage {stage}, {sync.value}"
        print(f"  {name:<38}{rates[0]:10,.0f}{rates[1]:10,.0f}{middle:9.3f}  {low:.3f} to {high:.3f}{processor:12.3f}")


if __name__ == "__main__":
    main()
