"""What a rank runs: ``python -m launcher.worker RUN_DIR``, with its rank in the environment."""

import contextlib
import json
import logging
import os
import socket
import sys
import time
import traceback
from dataclasses import fields
from pathlib import Path

from launcher import decode, devices, ranks, rundir
from launcher.batch import Cut
from launcher.errors import EXIT_FAILED, EXIT_REFUSED, OutOfMemoryError, RequestError
from launcher.rundir import FAILURE, MEMORY, PREEMPTED, REQUEST, RunDir
from launcher.schema import Mode
from launcher.worker import stop

LONGEST = 500
"""Characters of a reason; the log has all of it."""


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    run_dir, rank = RunDir(Path(sys.argv[1])), ranks.from_environment()
    try:
        if rank.attempt is not None:
            run_dir = _begin_task(run_dir, rank)
        run(run_dir, rank)
    except RequestError as error:
        _report(run_dir, rank, REQUEST, str(error))
        return _leave(EXIT_REFUSED)
    except BaseException as error:  # whatever it is, the launcher must learn which rank failed first, and why
        traceback.print_exc()
        message = " ".join(str(error).split())
        _report(run_dir, rank, _kind(error), f"{type(error).__name__}: {message[:LONGEST]}")
        return _leave(EXIT_FAILED)
    return 0


def run(run_dir: RunDir, rank: ranks.Rank) -> None:
    """Train the run that ``run_dir`` has frozen, or verify it."""
    config = decode.load(run_dir.config)
    values = json.loads(run_dir.deepspeed.read_text())
    planned = json.loads(run_dir.plan.read_text())
    cut = Cut(**{field.name: planned["batch"][field.name] for field in fields(Cut)})
    if config.mode is Mode.TRAIN and rank.world_size != cut.data_parallel_size:
        raise RequestError(
            f"the run was planned for {cut.data_parallel_size} ranks, but {rank.world_size} were started"
        )

    tried = planned.get("micro_batch_sizes")
    if config.mode is Mode.TRAIN:
        stop.listen()

    def tell(activity: str | None) -> None:
        if rank.is_first:
            run_dir.write_status(activity=activity)

    tell("loading torch and DeepSpeed")
    import torch.distributed as dist

    from launcher.worker import build, data, distributed, engine, fit, verify
    from launcher.worker.train import Trainer
    from launcher.worker.watchdog import Watchdog

    engine.check_precision(values)
    build.build(build.needed(values), tell)
    task = data.open_task(config, planned["data"])
    distributed.start(rank)
    stopped_by = None
    if config.mode is Mode.VERIFY:
        verify.run(config, planned["verify"], rank, run_dir, task, tell)
    elif tried is not None:
        stopped_by = fit.run(config, cut, values, tried, rank, run_dir, task, tell)
    else:
        tell("building the model")
        with Watchdog(config.train.step_timeout, lambda reason: _report(run_dir, rank, FAILURE, reason)) as watchdog:
            trainer = Trainer(config, cut, values, rank, run_dir, task, watchdog)
            summary = trainer.train()
        if summary is None:
            stopped_by = trainer.stopped_by
        elif rank.is_first:
            run_dir.write_status(summary=summary)
    if config.mode is Mode.TRAIN:
        stop.ignore()  # nothing is left to stop, and while Python takes itself apart a signal would kill it
    if rank.is_first and stopped_by is not None:
        run_dir.write_status(state=PREEMPTED, reason=stopped_by, activity=None)
    dist.barrier()
    dist.destroy_process_group()


def _begin_task(run_dir: RunDir, rank: ranks.Rank) -> RunDir:
    """What a local launcher does for its ranks, a task of Slurm does for itself."""
    assert rank.attempt is not None
    if not run_dir.seal(rank.attempt).exists():
        raise RequestError(
            f"{run_dir.path} on {socket.gethostname()} is not that of the job's first node: a run directory must be "
            "on a file system that all nodes share"
        )
    log = os.open(run_dir.log(rank.rank), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    if devices.visible_gpus() == 0:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Rank 0 keeps other launchers off.
    return RunDir.create(run_dir.path, may_continue=True) if rank.is_first else run_dir


def _report(run_dir: RunDir, rank: ranks.Rank, kind: str, reason: str) -> None:
    """Leave word of a failure for the launcher, which tells the first of them."""
    failure = {"rank": rank.rank, "time": time.time(), "kind": kind, "reason": reason, "signal": stop.wanted()}
    try:
        rundir.write_text(run_dir.failure(rank.rank), json.dumps(failure))
    except OSError as error:  # it stands in the log, if that takes it
        print(f"{reason} ({error.strerror})", file=sys.stderr, flush=True)


def _kind(error: BaseException) -> str:
    """A run that was out of memory may do with smaller micro-batches; any other failure stands."""
    if "torch" not in sys.modules:
        return FAILURE
    from launcher.worker import step

    return MEMORY if isinstance(error, OutOfMemoryError) or step.is_out_of_memory(error) else FAILURE


def _leave(code: int) -> int:
    """At once: the threads of a process group whose peers wait for this rank would keep the interpreter alive."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
