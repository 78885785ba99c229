"""One run from its composed configuration to its end: prepared, shown, or started."""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher import decode, nodes, plan, resume, rundir, salvage
from launcher.compose import Composed
from launcher.errors import RequestError, RunError
from launcher.output import say
from launcher.plan import Plan
from launcher.resume import Origin
from launcher.rundir import RunDir
from launcher.schema import Config, Mode


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

    if job.origin is not None and resume.is_done(job.config, job.origin):
        run_dir = RunDir(job.run_dir)
        say(f"this run is done: {job.origin.folder} is its last step")
        progress.print_summary(run_dir)
        return run_dir
    run_dir = RunDir.create(job.run_dir, _may_continue(job.config))
    try:
        say(f"run directory {run_dir.path}")
        run_dir.write_status(attempt=run_dir.begin_attempt())
        if job.origin is not None:
            say("; ".join([resume.describe(job.origin), *job.origin.notes]))
        run_dir.write_files({run_dir.config.name: decode.dump(job.plan.config), **plan.files(job.plan)})
        if job.config.mode is Mode.VERIFY:
            # One rank first: it computes the whole batch, which the others are held against.
            local.run(job.config, sorted({1, job.plan.num_ranks}), None, run_dir, worker)
            _judge(job.config, run_dir)
        else:
            local.run(job.config, [job.plan.num_ranks], job.plan.num_steps, run_dir, worker)
            progress.print_summary(run_dir)
        return run_dir
    finally:
        run_dir.release()


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
