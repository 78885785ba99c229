"""Small real runs on E. coli contigs of very different lengths, and the plain torch program they must equal."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from launcher import decode, genome, plan
from launcher.ranks import Rank
from launcher.rundir import RunDir
from launcher.schema import (
    Batch,
    Call,
    Checkpoint,
    Config,
    Data,
    Dtype,
    LrSchedule,
    Optimizer,
    Train,
    Zero,
)

Parameters = list[torch.nn.Parameter]

CONTIGS = Path(__file__).parents[1] / "data" / "ecoli_short_contigs.fa.gz"

TINY_LLAMA = Call(
    "launcher.worker.models.hugging_face",
    {
        "model_type": "llama",
        "vocab_size": 17,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "use_cache": False,
    },
)

BASE = Config(
    name="tiny",
    model=TINY_LLAMA,
    # Windows longer than many contigs, so that sequences hold very different numbers of targets.
    data=Data(fasta=str(CONTIGS), sequence_length=300, validation=None),
    batch=Batch(train_batch_size=16),
    optimizer=Optimizer(lr=1e-3),
    lr_schedule=LrSchedule(warmup_steps=3),
    zero=Zero(stage3_param_persistence_threshold=500),
    train=Train(max_steps=10, gradient_clipping=1.0),
    checkpoint=Checkpoint(),
)


def cut(config: Config, ranks: int, accumulation: int) -> Config:
    """The same run, cut otherwise."""
    return replace(
        config,
        batch=replace(config.batch, gradient_accumulation_steps=accumulation),
        cluster=replace(config.cluster, ranks_per_node=ranks),
    )


def train(rank: Rank, config: Config, folder: Path) -> dict[str, Any]:
    """One rank of a whole run in an existing process group: metrics, final fp32 weights, buffers, summary."""
    import torch.distributed as dist

    from launcher.worker import build
    from launcher.worker.data import open_task
    from launcher.worker.train import Trainer

    run_dir = RunDir(folder)
    planned = plan.make(config)
    if rank.is_first:
        folder.mkdir(parents=True)
        run_dir.logs.mkdir()
        run_dir.write_files({"config.yaml": decode.dump(config), **plan.files(planned)})
    build.build(build.needed(planned.deepspeed.values), print)
    dist.barrier()
    task = open_task(config, plan.summary(planned)["data"])
    trainer = Trainer(config, planned.cut, planned.deepspeed.values, rank, run_dir, task)
    summary = trainer.train()
    told = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()] if rank.is_first else []
    lines = [line for line in told if line["kind"] in ("train", "eval")]
    buffers = {name: buffer.float().numpy() for name, buffer in trainer.engine.deepspeed.module.named_buffers()}
    return {"lines": lines, "weights": _masters(trainer.engine.deepspeed), "buffers": buffers, "summary": summary}


def _masters(engine: Any) -> dict[str, np.ndarray]:
    """The fp32 weights of an engine by name, gathered from wherever DeepSpeed keeps them."""
    import deepspeed.utils

    def master(parameter: torch.nn.Parameter) -> torch.Tensor:
        if engine.zero_optimization():
            return deepspeed.utils.safe_get_full_fp32_param(parameter)
        if engine.bfloat16_enabled():
            optimizer = engine.optimizer
            pairs = zip(chain(*optimizer.fp16_groups), chain(*optimizer.fp32_groups), strict=True)
            return next(full for half, full in pairs if half is parameter)
        return parameter

    return {name: master(parameter).detach().clone().numpy() for name, parameter in engine.module.named_parameters()}


def adamw(config: Config, matrices: Parameters, embeddings: Parameters, vectors: Parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": config.optimizer.weight_decay},
            {"params": embeddings + vectors, "weight_decay": 0.0},
        ],
        lr=config.optimizer.lr,
        betas=config.optimizer.betas,
        eps=config.optimizer.eps,
    )


def reference(
    config: Config,
    make_optimizer: Callable[..., torch.optim.Optimizer] = adamw,
    course: Sequence[tuple[Sequence[int], float]] | None = None,
) -> dict[str, Any]:
    """The same run as one process that sees every global batch whole, in plain torch.

    Shares with the program only the initial weights, which sequences make up a step, and the windows' bytes. For a
    run in bf16 the weights start rounded, and all else is fp32 still: what the run would be without rounding.

    ``course``: the sequences and the learning rate of each step, for runs other than of ``max_steps`` constant batches
    and a cosine.
    """
    from launcher.worker import models

    assert isinstance(config.data, Data)
    read = genome.load(config.data)
    model = models.build(config.model, config.seed, {"zero_optimization": {"stage": 0}})
    if config.precision.dtype is Dtype.BF16:
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
    initial = {name: parameter.detach().clone().numpy() for name, parameter in model.named_parameters()}
    vectors = [p for p in model.parameters() if p.dim() == 1]
    embeddings = [p for n, p in model.named_parameters() if "embed" in n]
    matrices = [p for n, p in model.named_parameters() if not (p.dim() == 1 or "embed" in n)]
    optimizer = make_optimizer(config, matrices, embeddings, vectors)
    losses, norms, tokens = [], [], []
    for sequences, learning_rate in _constant(config, len(read.train)) if course is None else course:
        ids = np.stack([_ids(read.train, int(index)) for index in sequences])
        inputs = torch.from_numpy(ids)
        targets = inputs[:, 1:].clone()
        targets[(targets < 2) | (targets > 5)] = -100
        logits = model(inputs).logits[:, :-1]
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))  # the mean over valid targets
        optimizer.zero_grad()
        loss.backward()
        clipping = config.train.gradient_clipping or math.inf
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clipping)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
        tokens.append(int((targets != -100).sum()))
    weights = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    return {"loss": losses, "grad_norm": norms, "tokens": tokens, "weights": weights, "initial": initial}


def relative_error(ours: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> float:
    """|a - b| / |b| over all parameters as one vector."""
    assert ours.keys() == reference.keys()
    difference = sum(float(((ours[n].astype(np.float64) - reference[n]) ** 2).sum()) for n in reference)
    return math.sqrt(difference / sum(float((reference[n].astype(np.float64) ** 2).sum()) for n in reference))


def series_error(ours: Sequence[float], reference: Sequence[float]) -> float:
    assert len(ours) == len(reference)
    return max(abs(a - b) / abs(b) for a, b in zip(ours, reference, strict=True))


def _ids(windows: Any, index: int) -> np.ndarray:
    """Token ids spelled out: padding 0, A 2, C 3, G 4, T 5, N 6."""
    return np.array([code & 0x1F for code in windows.read(index).tolist()])


def _constant(config: Config, num_sequences: int) -> list[tuple[Sequence[int], float]]:
    """The course of ``max_steps`` constant batches and a cosine."""
    size = config.batch.train_batch_size
    assert size is not None
    assert config.train.max_steps is not None
    steps = plan.steps_of(config, plan.batch.Cut(size, size, 1, 1), num_sequences)
    return [
        (steps.sequences(step).tolist(), config.optimizer.lr * _cosine(config, step))
        for step in range(config.train.max_steps)
    ]


def _cosine(config: Config, step: int) -> float:
    warmup, total = config.lr_schedule.warmup_steps, config.train.max_steps
    assert total is not None
    if step < warmup:
        return (step + 1) / warmup
    floor = config.lr_schedule.min_lr_ratio
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * (step + 1 - warmup) / (total - warmup)))
