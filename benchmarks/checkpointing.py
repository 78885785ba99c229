"""How long training stands still for a checkpoint, against a bare ``engine.save_checkpoint`` of DeepSpeed.

    python benchmarks/checkpointing.py
    python benchmarks/checkpointing.py --ranks 2 --stages 1 --repeats 3 --width 1024    # a smaller model

A stack of linear layers in fp32 under AdamW with random weights, trained on random numbers. The three ways to save take
turns on one engine in one process group: the program's with and without ``checkpoint.asynchronous``, and DeepSpeed's.
Training goes on while the asynchronous one writes, and its stall is what ``metrics.jsonl`` tells as ``stall_s``: the
copy, and the finish. What is written is on disk in the program's cases (fsync, checksums); DeepSpeed leaves it to the
page cache, so the table has a fourth line with an fsync of what it wrote. Every rank has one thread.
"""

import argparse
import logging
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from launcher.ranks import Rank  # noqa: E402 - runs from a checkout without installation
from launcher.schema import Optimizer, Sync  # noqa: E402
from tests.ranks import on_ranks  # noqa: E402

if TYPE_CHECKING:
    from launcher.worker.engine import Engine

WAYS = ("asynchronous", "synchronous", "engine.save_checkpoint", "the same, and fsync")
BARE = WAYS[2]
BATCH = 4
"""Rows of a step of a rank."""

Times = dict[str, list[float]]


def make_engine(stage: int, width: int, layers: int, ranks: int) -> "Engine":
    import torch
    from torch import nn

    from launcher.worker.engine import Engine

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    values = {
        "train_batch_size": BATCH * ranks,
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    return Engine(model, values, Optimizer(), Sync.EVERY_MICRO_BATCH)


def train(engine: "Engine", width: int) -> float:
    """One step; the seconds that it took."""
    import torch

    start = time.perf_counter()
    engine.set_learning_rate(1e-5)
    engine.begin_window(1)
    outputs = engine.module(torch.randn(BATCH, width))
    engine.backward(outputs.square().sum(), float(outputs.numel()))
    engine.end_window()
    return time.perf_counter() - start


def measure(rank: Rank, stage: int, width: int, layers: int, repeats: int, folder: Path) -> dict[str, Any]:
    """Seconds for which training stood still, seconds until all was written, and those of steps meanwhile; by way."""
    import torch.distributed as dist

    from launcher.worker import distributed
    from launcher.worker.checkpoint import Saver

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    engine = make_engine(stage, width, layers, rank.world_size)
    quiet = [train(engine, width) for _ in range(3)][1:]
    stalls: Times = {way: [] for way in WAYS}
    totals: Times = {way: [] for way in WAYS}
    busy: list[float] = []
    num_bytes = {}
    for number in range(repeats + 1):  # the first of each is not counted
        for way in WAYS[:2]:
            saver = Saver(engine, folder, {"config.yaml": "", "plan.json": ""}, 1, None)
            saver.begin(number, {"is_last": False})
            while way == "asynchronous" and distributed.max_over_ranks([saver.busy], engine.device)[0]:
                busy.append(train(engine, width))
            saved = saver.finish()
            assert saved.fault is None, saved.fault
            stalls[way].append(saved.stall_s if way == "asynchronous" else saved.total_s)
            totals[way].append(saved.total_s)
            num_bytes[way] = saved.num_bytes
            _clear(rank, folder)
        dist.barrier()
        start = time.perf_counter()
        engine.deepspeed.save_checkpoint(str(folder), tag="bare")
        dist.barrier()
        took = time.perf_counter() - start
        _sync(folder, rank)
        dist.barrier()
        synced = time.perf_counter() - start
        for way, seconds in ((WAYS[2], took), (WAYS[3], synced)):
            stalls[way].append(seconds)
            totals[way].append(seconds)
        num_bytes[BARE] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        _clear(rank, folder)
        quiet.append(train(engine, width))
    parameters = sum(parameter.numel() for parameter in engine.module.parameters())
    return {
        "stall": {way: times[1:] for way, times in stalls.items()},
        "total": {way: times[1:] for way, times in totals.items()},
        "step": statistics.median(quiet),
        "step while writing": statistics.median(busy) if busy else math.nan,
        "parameters": parameters,
        "bytes": num_bytes,
    }


def _sync(folder: Path, rank: Rank) -> None:
    """Put this rank's part of the files on disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files[rank.rank :: rank.world_size]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _clear(rank: Rank, folder: Path) -> None:
    import torch.distributed as dist

    dist.barrier()
    if rank.is_first:
        shutil.rmtree(folder)
        folder.mkdir()
    dist.barrier()


def show(ranks: int, stage: int, found: dict[str, Any]) -> None:
    size = found["bytes"][BARE] / 1e9
    print(
        f"\n{found['parameters'] / 1e6:.0f} M parameters, {ranks} rank{'s' * (ranks > 1)}, ZeRO stage {stage}: "
        f"{found['bytes'][WAYS[0]] / 1e9:.2f} GB, DeepSpeed's {size:.2f} GB; "
        f"a step takes {found['step']:.2f} s, {found['step while writing']:.2f} s while a checkpoint is written"
    )
    print(f"  {'':<26}{'stands still':>14}{'ratio':>8}{'complete after':>17}{'ratio':>8}")
    for way in WAYS:
        # Of neighbours in time, so that a busy machine slowed both.
        columns = []
        for kind, wide in (("stall", 14), ("total", 17)):
            ours, bare = found[kind][way], found[kind][BARE]
            ratio = statistics.median(a / b for a, b in zip(ours, bare, strict=True))
            columns.append(f"{statistics.median(ours):{wide - 2}.2f} s{ratio:8.2f}")
        print(f"  {way:<26}{''.join(columns)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--width", type=int, default=2500)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--folder", type=Path, help="a folder on the disk to write to; default: a temporary one")
    options = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    for ranks in options.ranks:
        for stage in options.stages:
            with tempfile.TemporaryDirectory(dir=options.folder) as name:
                arguments = (stage, options.width, options.layers, options.repeats, Path(name))
                show(ranks, stage, on_ranks(ranks, measure, *arguments, timeout=3600)[0])


if __name__ == "__main__":
    main()
