"""One run from its composed configuration to its end: prepared, shown, or started."""

import contextlib
import dataclasses
import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher import (
    checkpoints,
    decode,
    micro_batch,
    nodes,
    placement,
    plan,
    resume,
    rundir,
    salvage,
    slurm,
)
from launcher.batch import Cut
from launcher.compose import Composed, shipped
from launcher.errors import OutOfMemoryError, RequestError, RunError
from launcher.micro_batch import Trial
from launcher.output import say
from launcher.plan import Plan
from launcher.resume import Origin
from launcher.rundir import SUBMITTED, RunDir
from launcher.schema import ClusterType, Config, MicroBatch, Mode

ENDED = ("completed", "failed")
"""States of a run that no job in the queue of Slurm goes on with by itself."""


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
    faults += rundir.check(composed.run_dir, may_continue(config))
    if config.cluster.type is ClusterType.SLURM:
        faults += slurm.check_folder(composed.run_dir)
    origin = None
    try:
        if not faults and may_continue(config):
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


def may_continue(config: Config) -> bool:
    return config.mode is not Mode.VERIFY and config.checkpoint.resume != resume.NEVER


def show(job: Job) -> None:
    """Print the plan of a job, and the script that would be submitted; writes nothing."""
    plan.render(job.plan, job.run_dir)
    if job.config.cluster.type is ClusterType.SLURM:
        print(script(job))


def run(job: Job, worker: Sequence[str] | None = None) -> RunDir:
    """Make the run directory, freeze the configuration and the plan in it, and train, verify, or submit it.

    ``worker`` is the command of a rank, if another than this program's own. Raises RequestError if the directory cannot
    be had, RunError if a cut does not pass, and whatever ``local.run`` raises.
    """
    from launcher import local, progress  # not needed to plan, which has to be quick

    submits = job.config.cluster.type is ClusterType.SLURM
    done = job.origin.folder if job.origin is not None and resume.is_done(job.config, job.origin) else None
    if done is not None and done.parent != RunDir(job.run_dir).checkpoints:  # there is nothing for a new directory
        _say_done(job)
        return RunDir(done.parent.parent)
    if submits:
        slurm.check(script(job), job.run_dir)
    elif shutil.which("squeue") is not None and RunDir(job.run_dir).read_status().get("state") not in ENDED:
        check_free([job.run_dir])
    run_dir = RunDir.create(job.run_dir, may_continue(job.config))
    try:
        if done is not None:
            _say_done(job)
            if run_dir.read_status().get("state") != "completed":  # it was killed after its last checkpoint
                rundir.write_text(run_dir.checkpoints / checkpoints.LATEST, done.name + "\n")
                run_dir.write_status(state="completed", step=run_dir.last_step(), reason=None, activity=None)
            progress.print_summary(run_dir)
            return run_dir
        say(f"run directory {run_dir.path}")
        if submits:
            _submit(job, run_dir)
        elif job.config.mode is Mode.VERIFY:
            _begin_attempt(job, run_dir)
            freeze(job.plan, run_dir)
            local.run(job.config, groups(job.plan), None, run_dir, worker)
            judge(job.config, run_dir)
        else:
            with local.stoppable(run_dir):
                _train(job, run_dir, worker)
            progress.print_summary(run_dir)
        return run_dir
    except OSError as error:  # a full disk, as a rule
        raise RunError(f"the run in {run_dir.path} cannot go on: {error}") from error
    finally:
        run_dir.release()


def _say_done(job: Job) -> None:
    assert job.origin is not None
    is_last = job.origin.checkpoint is not None and job.origin.checkpoint.state["is_last"]
    place = "its last step" if is_last else f"past train.max_steps={job.config.train.max_steps}"
    say(f"this run is done: {job.origin.folder} is {place} (the checksums of its files were not compared)")


def _begin_attempt(job: Job, run_dir: RunDir) -> None:
    run_dir.write_status(attempt=run_dir.begin_attempt(), micro_batch_size=None, job=None)
    if (wanted := placement.num_ranks(job.config)) != job.plan.num_ranks:
        say(f"{job.plan.num_ranks} of {wanted} ranks are used (cluster.allow_fewer_ranks)")
    if job.origin is not None:
        changes = resume.changes(job.plan, job.origin)
        say("; ".join([resume.describe(job.origin), *job.origin.notes, *([changes] if changes else [])]))


def freeze(made: Plan, run_dir: RunDir, **facts: Any) -> None:
    """What the ranks go by; ``facts`` are added to the plan."""
    run_dir.write_files({run_dir.config.name: decode.dump(made.config), **plan.files(made, **facts)})


def script(job: Job) -> str:
    """What is given to sbatch for one run."""
    return slurm.script(_template(), job.plan, [job.run_dir], _measured_lead(job.run_dir))


def array_script(jobs: Sequence[Job]) -> str:
    """The same for several runs of one shape."""
    return slurm.script(_template(), jobs[0].plan, [job.run_dir for job in jobs], None, is_array=True)


def shape(job: Job) -> str:
    """The same for runs that can be in one array: they ask for the same resources, in the same environment."""
    return slurm.script(_template(), job.plan, [], None)


def _template() -> str:
    return (shipped("slurm") / slurm.SCRIPT).read_text(encoding="utf-8")


def _measured_lead(run_dir: Path) -> float | None:
    """Seconds that an earlier attempt needed to save itself."""
    return rundir.number(RunDir(run_dir).read_status().get("signal_lead_s"))


def check_free(run_dirs: Sequence[Path]) -> None:
    """Raises RequestError where jobs of Slurm are at work on runs already, or wait to be."""
    found = {path: RunDir(path).read_status().get("job") for path in run_dirs}
    numbers = {path: str(number) for path, number in found.items() if number is not None}
    alive = slurm.alive(list(numbers.values())) if numbers else set()
    faults = [
        f"{rundir.KEY}={path}: job {number} is at work on it; wait, or scancel {number}, or give another {rundir.KEY}"
        for path, number in numbers.items()
        if number in alive
    ]
    if faults:
        raise RequestError(*faults)


def set_up(job: Job, run_dir: RunDir) -> None:
    """Freeze a run that a Slurm job is to do."""
    _begin_attempt(job, run_dir)
    freeze(job.plan, run_dir)
    run_dir.write_files({slurm.SCRIPT: script(job)})
    run_dir.write_status(state=SUBMITTED, reason=None, activity=None, step=run_dir.last_step())
    run_dir.write_status(begun=False, requeues=0, trials=[], groups_done=0, ports_taken=0)


def waits(number: str) -> str:
    """What to add to the number of a job that Slurm holds back."""
    reason = slurm.held_back(number)
    return "" if reason is None else f"; it waits, says Slurm: {reason}"


def _submit(job: Job, run_dir: RunDir) -> None:
    """Put a run into the queue of Slurm; returns at once."""
    check_free([run_dir.path])
    set_up(job, run_dir)
    try:
        number = slurm.submit(script(job), run_dir.path)
    except RequestError as error:
        run_dir.write_status(state="failed", reason=str(error))
        raise
    run_dir.write_status(job=number)
    where = shlex.quote(str(run_dir.path))
    say(f"submitted as job {number}{waits(number)}")
    say(f"  follow:  tail -F {where}/logs/slurm_{number}.log {where}/logs/rank_00000.log")
    say(f"  cancel:  scancel {number}; what the ranks can save before Slurm kills them is kept")
    say(f"  go on:   the same command with {rundir.KEY}={where}")


def _train(job: Job, run_dir: RunDir, worker: Sequence[str] | None) -> None:
    """To the end; where ranks were out of memory and could not cut finer by themselves, anew from the last checkpoint
    with smaller micro-batches."""
    from launcher import local

    while True:
        _begin_attempt(job, run_dir)
        if job.config.batch.train_micro_batch_size_per_gpu is MicroBatch.AUTO:
            job = _fitted(job, run_dir, worker)
            run_dir.write_status(micro_batch_size=None)
        freeze(job.plan, run_dir)
        try:
            local.run(job.config, [job.plan.num_ranks], job.plan.num_steps, run_dir, worker)
            learn(job.plan, run_dir)
            return
        except OutOfMemoryError as error:
            made = finer(job.plan, run_dir.read_status().get("micro_batch_size"))
            if made is None:
                local.fail(run_dir, error)
                raise
            say(f"{error}; the run goes on with micro-batches of {made.cut.micro_batch_size}")
            origin = resume.origin(made.config, job.run_dir)
            job = dataclasses.replace(job, config=made.config, plan=made, origin=origin)


def learn(made: Plan, run_dir: RunDir) -> None:
    """Where ranks had to come down to smaller micro-batches by themselves, the next search begins with that."""
    reached = run_dir.read_status().get("micro_batch_size")
    if reached is not None:
        micro_batch.lower(micro_batch.key(made.config, made.num_ranks), reached)


def finer(made: Plan, reached: int | None) -> Plan | None:
    """The same steps in smaller micro-batches, from the newest checkpoint; None where they are of one sequence.

    ``reached`` is what ranks have come down to by themselves.
    """
    whole = made.cut.micro_batch_size * made.cut.gradient_accumulation_steps
    micro = reached or made.cut.micro_batch_size
    cut = replace(made.cut, micro_batch_size=micro, gradient_accumulation_steps=whole // micro).finer()
    if cut is None:
        return None
    micro_batch.lower(micro_batch.key(made.config, made.num_ranks), cut.micro_batch_size)
    return _with_micro_batches(resume.again(made.config), made.cut, cut.micro_batch_size)


def _with_micro_batches(config: Config, cut: Cut, size: int) -> Plan:
    """The same steps cut into micro-batches of ``size``; or of less where that does not cut them, on fewer nodes."""
    by_tokens = config.batch.train_batch_tokens is not None
    batch = dataclasses.replace(
        config.batch,
        train_batch_size=None if by_tokens else cut.train_batch_size,
        train_micro_batch_size_per_gpu=None,
        gradient_accumulation_steps=None,
        max_micro_batch_size_per_gpu=size,
    )
    return plan.make(dataclasses.replace(config, batch=batch))


def _fitted(job: Job, run_dir: RunDir, worker: Sequence[str] | None) -> Job:
    """The same steps in the largest micro-batches that fit, which ranks of their own try out."""
    from launcher import local

    def trial(tried: Sequence[int]) -> int | None:
        run_dir.write_status(micro_batch_size=None)
        freeze(job.plan, run_dir, micro_batch_sizes=list(tried))
        with contextlib.suppress(OutOfMemoryError):
            local.run(job.config, [job.plan.num_ranks], None, run_dir, worker, is_all=False)
        found = run_dir.read_status()["micro_batch_size"]
        return None if found is None else int(found)

    try:
        made = fitted(job.plan, trial)
    except OutOfMemoryError as error:  # others have been noted where they came from
        local.fail(run_dir, error)
        raise
    return dataclasses.replace(job, config=made.config, plan=made)


def fitted(made: Plan, trial: Trial) -> Plan:
    """The same steps in the largest micro-batches that fit, by trials unless that is remembered.

    Raises OutOfMemoryError where none fits.
    """
    config, sizes = made.config, plan.micro_batch_sizes(made.config, made.cut)
    key = micro_batch.key(config, made.num_ranks)
    size = micro_batch.remembered(key, sizes)
    if size is None:
        size = micro_batch.largest(sizes, trial)
        if size is None:
            raise OutOfMemoryError("a micro-batch of one sequence does not fit into memory")
        micro_batch.remember(key, size)
    say(f"batch.train_micro_batch_size_per_gpu=auto: {size}, of {', '.join(map(str, sizes))}")
    return _with_micro_batches(config, made.cut, size)


def groups(made: Plan) -> list[int]:
    """Of ranks that verify a run, one after another: the single one computes the whole batch, which the others are held
    against."""
    return sorted({1, made.num_ranks})


def judge(config: Config, run_dir: RunDir) -> None:
    """Write ``verify.json`` from what the ranks left, and print it; raises RunError if a cut does not pass."""
    from launcher import verify

    found = verify.collect(config, run_dir)
    verify.render(found)
    failed = [row for row in found["cuts"] if not row["passed"]]
    if failed:
        reason = f"{len(failed)} of {len(found['cuts'])} cuts give another update than the whole batch"
        run_dir.write_status(state="failed", reason=reason)
        raise RunError(f"{reason} (see {run_dir.verify})")
