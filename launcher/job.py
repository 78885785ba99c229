"""One run from its composed configuration to its end: prepared, shown, or started."""

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher import checkpoints, decode, micro_batch, nodes, plan, resume, rundir, salvage
from launcher.compose import Composed
from launcher.errors import OutOfMemoryError, RequestError, RunError
from launcher.output import say
from launcher.plan import Plan
from launcher.resume import Origin
from launcher.rundir import RunDir
from launcher.schema import Config, MicroBatch, Mode


@dataclass(frozen=True)
class Job:
    config: Config
    plan: Plan
    run_dir: Path
    origin: Origin | None = None
    """What it goes on from."""


def prepare(composed: Composed) -> Job:
    """Decode, check and plan one run. Raises RequestError with every fault; nothing has been started then."""
    config, faults = salvage.salvage(composed.node)
    config = decode.with_absolute_paths(config, Path.cwd())
    faults += nodes.secrets(decode.encode(config), os.environ)
    faults += rundir.check(composed.run_dir, _may_continue(config))
    origin = None
    try:
        if not faults and _may_continue(config):
            origin = resume.origin(config, composed.run_dir)
    except RequestError as error:
        faults += error.faults
    try:
        # Planning alone keeps nothing, not even the cache of a genome.
        made = plan.make(dataclasses.replace(config, mode=Mode.PLAN) if faults else config)
    except RequestError as error:
        raise RequestError(*faults, *salvage.unrelated(error.faults, faults)) from None
    if not faults and origin is not None:
        faults += resume.check(made, origin)
    if faults:
        raise RequestError(*faults)
    return Job(config, made, composed.run_dir, origin)


def _may_continue(config: Config) -> bool:
    return config.mode is not Mode.VERIFY and config.checkpoint.resume != resume.NEVER


def show(job: Job) -> None:
    """Print the plan of a job; writes nothing."""
    plan.render(job.plan, job.run_dir)


def run(job: Job, worker: Sequence[str] | None = None) -> RunDir:
    """Make the run directory, freeze the configuration and the plan in it, and train, or verify.

    ``worker`` is the command of a rank, if another than this program's own. Raises RequestError if the directory cannot
    be had, RunError if a cut does not pass, and whatever ``local.run`` raises.
    """
    from launcher import local, progress  # not needed to plan, which has to be quick

    run_dir = RunDir.create(job.run_dir, _may_continue(job.config))
    try:
        if job.origin is not None and resume.is_done(job.config, job.origin):
            say(
                f"this run is done: {job.origin.folder} is its last step (the checksums of its files were not compared)"
            )
            if run_dir.read_status().get("state") != "completed":  # it was killed after its last checkpoint
                rundir.write_text(run_dir.checkpoints / checkpoints.LATEST, job.origin.folder.name + "\n")
                run_dir.write_status(state="completed", step=run_dir.last_step(), reason=None, activity=None)
            progress.print_summary(run_dir)
            return run_dir
        say(f"run directory {run_dir.path}")
        if job.config.mode is Mode.VERIFY:
            _begin_attempt(job, run_dir)
            _freeze(job, run_dir)
            # One rank first: it computes the whole batch, which the others are held against.
            local.run(job.config, sorted({1, job.plan.num_ranks}), None, run_dir, worker)
            _judge(job.config, run_dir)
        else:
            _train(job, run_dir, worker)
            progress.print_summary(run_dir)
        return run_dir
    except OSError as error:  # a full disk, as a rule
        raise RunError(f"{error.filename or run_dir.path} cannot be written ({error.strerror or error})") from error
    finally:
        run_dir.release()


def _begin_attempt(job: Job, run_dir: RunDir) -> None:
    run_dir.write_status(attempt=run_dir.begin_attempt(), micro_batch_size=None)
    if (wanted := plan.num_ranks(job.config)) != job.plan.num_ranks:
        say(f"{job.plan.num_ranks} of {wanted} ranks are used (cluster.allow_fewer_ranks)")
    if job.origin is not None:
        changes = resume.changes(job.plan, job.origin)
        say("; ".join([resume.describe(job.origin), *job.origin.notes, *([changes] if changes else [])]))


def _freeze(job: Job, run_dir: RunDir, **facts: Any) -> None:
    """What the ranks go by; ``facts`` are added to the plan."""
    run_dir.write_files({run_dir.config.name: decode.dump(job.plan.config), **plan.files(job.plan, **facts)})


def _train(job: Job, run_dir: RunDir, worker: Sequence[str] | None) -> None:
    """To the end; where ranks were out of memory and could not cut finer by themselves, anew from the last checkpoint
    with smaller micro-batches."""
    from launcher import local

    while True:
        _begin_attempt(job, run_dir)
        if job.config.batch.train_micro_batch_size_per_gpu is MicroBatch.AUTO:
            job = _fitted(job, run_dir, worker)
            run_dir.write_status(micro_batch_size=None)
        _freeze(job, run_dir)
        try:
            local.run(job.config, [job.plan.num_ranks], job.plan.num_steps, run_dir, worker)
            return
        except OutOfMemoryError as error:
            finer = _finer(job, run_dir.read_status().get("micro_batch_size"))
            if finer is None:
                local.fail(run_dir, error)
                raise
            batch = finer.config.batch.train_micro_batch_size_per_gpu
            say(f"{error}; the run goes on with batch.train_micro_batch_size_per_gpu={batch}")
            job = finer


def _finer(job: Job, reached: int | None) -> Job | None:
    """The same steps in smaller micro-batches, from the newest checkpoint; None where they are of one sequence.

    ``reached`` is what ranks have come down to by themselves.
    """
    whole = job.plan.cut.micro_batch_size * job.plan.cut.gradient_accumulation_steps
    micro = reached or job.plan.cut.micro_batch_size
    cut = replace(job.plan.cut, micro_batch_size=micro, gradient_accumulation_steps=whole // micro).finer()
    if cut is None:
        return None
    # Also where an earlier run's checkpoints were not wanted, it goes on from its own.
    own = dataclasses.replace(job.config.checkpoint, resume=resume.AUTO)
    config = dataclasses.replace(job.config, checkpoint=own)
    finer = _with_micro_batches(dataclasses.replace(job, config=config), cut.micro_batch_size)
    return dataclasses.replace(finer, origin=resume.origin(config, job.run_dir))


def _with_micro_batches(job: Job, size: int) -> Job:
    """The same steps cut into micro-batches of ``size``."""
    by_tokens = job.config.batch.train_batch_tokens is not None
    batch = dataclasses.replace(
        job.config.batch,
        train_batch_size=None if by_tokens else job.plan.cut.train_batch_size,
        train_micro_batch_size_per_gpu=size,
        gradient_accumulation_steps=None,
    )
    config = dataclasses.replace(job.config, batch=batch)
    return dataclasses.replace(job, config=config, plan=plan.make(config))


def _fitted(job: Job, run_dir: RunDir, worker: Sequence[str] | None) -> Job:
    """The same steps in the largest micro-batches that fit, which ranks of their own try out; remembered."""
    from launcher import local

    config, sizes = job.config, plan.micro_batch_sizes(job.config, job.plan.cut)
    key = micro_batch.key(config, job.plan.num_ranks)
    size = micro_batch.remembered(key, sizes)
    if size is None:

        def trial(tried: Sequence[int]) -> int | None:
            run_dir.write_status(micro_batch_size=None)
            _freeze(job, run_dir, micro_batch_sizes=list(tried))
            with contextlib.suppress(OutOfMemoryError):
                local.run(config, [job.plan.num_ranks], None, run_dir, worker, is_all=False)
            found = run_dir.read_status()["micro_batch_size"]
            return None if found is None else int(found)

        size = micro_batch.largest(sizes, trial)
        if size is None:
            error = RunError("a micro-batch of one sequence does not fit into memory")
            local.fail(run_dir, error)
            raise error
        micro_batch.remember(key, size)
    say(f"batch.train_micro_batch_size_per_gpu=auto: {size}, of {', '.join(map(str, sizes))}")
    return _with_micro_batches(job, size)


def _judge(config: Config, run_dir: RunDir) -> None:
    """Write ``verify.json`` from what the ranks left, and print it; raises RunError if a cut does not pass."""
    from launcher import verify

    found = verify.collect(config, run_dir)
    verify.render(found)
    failed = [row for row in found["cuts"] if not row["passed"]]
    if failed:
        reason = f"{len(failed)} of {len(found['cuts'])} cuts give another update than the whole batch"
        run_dir.write_status(state="failed", reason=reason)
        raise RunError(f"{reason} (see {run_dir.verify})")
