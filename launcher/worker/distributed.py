"""The process group of a run and the few sums over it that are not DeepSpeed's."""

import datetime
import gc
from collections.abc import Sequence

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from launcher.ranks import Rank
from launcher.worker import stop

TIMEOUT = datetime.timedelta(minutes=30)


def start(rank: Rank) -> torch.device:
    """Join the process group of the run and return this rank's device.

    The store is made here and not from the environment, because rank 0 of a local run is handed a socket that already
    listens. DeepSpeed takes over the group that it finds.
    """
    store = dist.TCPStore(
        rank.master_addr,
        rank.master_port,
        rank.world_size,
        is_master=rank.is_first,
        timeout=TIMEOUT,
        master_listen_fd=rank.store_fd,
    )
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        device = torch.device("cpu")
    else:
        # A task that sees one device of several finds it at index 0, whatever its local rank is.
        device = torch.device(accelerator.device_name(), rank.local_rank % accelerator.device_count())
        accelerator.set_device(device.index)
    dist.init_process_group(
        accelerator.communication_backend_name() if device.type != "cpu" else "gloo",
        store=store,
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=TIMEOUT,
    )
    deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    return device


def empty_cache(device: torch.device) -> None:
    """Give back what the allocator of an accelerator keeps for later."""
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def sum_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    """Element-wise sums over all ranks, in double precision."""
    return _all_reduce(values, device, dist.ReduceOp.SUM)


def max_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    """Element-wise maxima over all ranks, in double precision."""
    return _all_reduce(values, device, dist.ReduceOp.MAX)


def agreed_signal() -> str | None:
    """The signal to stop that came to the first of the ranks that got one, and which rank that is; collective."""
    everyones: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, stop.wanted())
    return next((f"{name} to rank {rank}" for rank, name in enumerate(everyones) if name is not None), None)


def _all_reduce(values: Sequence[float], device: torch.device, op: "dist.ReduceOp.RedOpType") -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=op)
    return tensor.tolist()
