"""Run a function on real gloo ranks, each its own process, as the local runner would start them."""

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

from launcher.ranks import STORE_FD, Rank, from_environment


def on_ranks(num_ranks: int, function: Callable[..., Any], *arguments: Any, timeout: float = 600) -> list[Any]:
    """``function(rank, *arguments)`` on every rank of one process group; what each returned, in order of rank.

    Fails with the traceback of the first rank that raised.
    """
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    processes = [
        context.Process(target=_rank, args=(answers, number, num_ranks, port, function, arguments), daemon=True)
        for number in range(num_ranks)
    ]
    for process in processes:
        process.start()
    results: dict[int, Any] = {}
    try:
        while len(results) < num_ranks:
            number, error, result = answers.get()
            assert error is None, f"rank {number}:\n{error}"
            results[number] = result
        for process in processes:
            process.join(timeout)
    finally:
        for process in processes:
            process.kill()
    return [results[number] for number in range(num_ranks)]


def _rank(answers: Any, number: int, num_ranks: int, port: int, function: Callable[..., Any], arguments: Any) -> None:
    os.environ.pop(STORE_FD, None)
    os.environ.update(
        RANK=str(number),
        LOCAL_RANK=str(number),
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        DS_ACCELERATOR="cpu",
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
    )
    try:
        import torch
        import torch.distributed as dist

        from launcher.worker import distributed

        torch.set_num_threads(1)
        rank: Rank = from_environment()
        distributed.start(rank)
        result = function(rank, *arguments)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        answers.put((number, traceback.format_exc(), None))
        sys.exit(1)
    answers.put((number, None, result))
