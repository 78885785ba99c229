"""The largest micro-batch that fits into the memory of the ranks, tried out in processes of their own."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from launcher import plan, traffic
from launcher.batch import Cut
from launcher.ranks import Rank
from launcher.rundir import RunDir
from launcher.schema import Checkpointing, Config
from launcher.worker import distributed, models, step
from launcher.worker.data import Task
from launcher.worker.engine import Engine
from launcher.worker.objectives import Weight
from launcher.worker.windows import Share, Shares

PASSES = 2
"""Micro-batches of a trial: gradients lie there when the second one is computed."""


def run(
    config: Config,
    cut: Cut,
    values: dict[str, Any],
    sizes: Sequence[int],
    rank: Rank,
    run_dir: RunDir,
    task: Task,
    tell: Callable[[str], None],
) -> str | None:
    """Take steps with micro-batches of ``sizes``, in order; each that fits on all ranks is written to status.json.

    Returns the signal that has stopped it, and the rank that this came to, or None where all sizes fit. Every sequence
    of a data set takes the same memory: those of a genome are padded to ``data.sequence_length``.
    Raises OutOfMemoryError, or what the allocator raises, at the first that does not fit.
    """
    model = models.build(config.model, config.seed, values, config.train.batch_norm)
    if config.activation.checkpointing is Checkpointing.FULL:
        models.checkpoint_activations(model)
    engine = Engine(model, values, config.optimizer, traffic.sync(config))
    steps = plan.steps_of(config, cut, len(task.train))
    for size in sizes:
        tell(f"trying micro-batches of {size}")
        pieces = cut.micro_batch_size * cut.gradient_accumulation_steps // size
        tried = replace(cut, micro_batch_size=size, gradient_accumulation_steps=pieces)
        engine.set_accumulation_steps(pieces)
        share = Shares(task.train, task.objective, steps, tried, rank.rank)[0]
        # With a weight also where the batch happens to have no target: it is to be computed.
        share = Share(share.micro_batches[:PASSES], share.weight + Weight(1.0), share.num_sequences)
        # The first step of all makes the optimizer states, which the passes of a later one have to leave room for.
        for _ in range(2 if size == sizes[0] else 1):
            step.train_step(engine, task.objective, share, config.optimizer.lr)
        dist.barrier()
        if rank.is_first:
            run_dir.write_status(micro_batch_size=size)
        if (stopped_by := distributed.agreed_signal()) is not None:
            return stopped_by
    return None
