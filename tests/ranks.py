"""Run a function on real gloo ranks, each its own process, as the local runner would start them."""

import multiprocessing
import multiprocessing.connection
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from launcher.ranks import STORE_FD, Rank, from_environment


def on_ranks(num_ranks: int, function: Callable[..., Any], *arguments: Any, timeout: float = 600) -> list[Any]:
    """``function(rank, *arguments)`` on every rank of one process group; what each returned, in order of rank.

    Fails with the traceback of the first rank that raised, or when a rank was killed, or after ``timeout`` seconds.
    """
    context = multiprocessing.get_context("spawn")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    processes, answers = [], []
    for number in range(num_ranks):
        ours, theirs = context.Pipe(duplex=False)
        # No daemon: it could not start processes that read ahead.
        process = context.Process(target=_rank, args=(theirs, number, num_ranks, port, function, arguments))
        process.start()
        theirs.close()  # the rank's own end alone is left, so that its death ends the pipe
        processes.append(process)
        answers.append(ours)
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = {}
    try:
        while len(results) < num_ranks:
            waiting = [answers[number] for number in range(num_ranks) if number not in results]
            ready = multiprocessing.connection.wait(waiting, deadline - time.monotonic())
            assert ready, f"after {timeout} s {len(waiting)} of {num_ranks} ranks were still at work"
            for answer in ready:
                number = answers.index(answer)
                try:
                    error, result = answer.recv()
                except EOFError:
                    processes[number].join()
                    raise AssertionError(f"rank {number} ended with exit code {processes[number].exitcode}") from None
                assert error is None, f"rank {number}:\n{error}"
                results[number] = result
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [results[number] for number in range(num_ranks)]


def asked_for(request: pytest.FixtureRequest, parameter: str) -> list[Any]:
    """The values of a parameter in those tests of a module that are about to run, each once: what takes long is done
    for these alone."""
    calls = [
        item.callspec for item in request.session.items if item.parent is request.node and hasattr(item, "callspec")
    ]
    return list(dict.fromkeys(call.params[parameter] for call in calls if parameter in call.params))


def _rank(answer: Any, number: int, num_ranks: int, port: int, function: Callable[..., Any], arguments: Any) -> None:
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
    # What a rank itself starts, as in a program that was not spawned.
    multiprocessing.set_start_method("fork", force=True)
    try:
        import torch
        import torch.distributed as dist

        from launcher.worker import build, distributed

        build.build(["ShareMemCommBuilder"], print)
        torch.set_num_threads(1)
        rank: Rank = from_environment()
        distributed.start(rank)
        result = function(rank, *arguments)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        answer.send((traceback.format_exc(), None))
        sys.exit(1)
    answer.send((None, result))
