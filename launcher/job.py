"""One run from its composed configuration to its end: prepared, shown, or started."""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher import decode, nodes, plan, rundir, salvage
from launcher.compose import Composed
from launcher.errors import RequestError, RunError
from launcher.output import say
from launcher.plan import Plan
from launcher.rundir import RunDir
from launcher.schema import Config, Mode


@dataclass(frozen=True)
class Job:
    config: Config
    plan: Plan
    run_dir: Path


def prepare(composed: Composed) -> Job:
    """Decode, check and plan one run. Raises RequestError with every fault; nothing has been started then."""
    config, faults = salvage.salvage(composed.node)
    config = decode.with_absolute_paths(config, Path.cwd())
    faults += nodes.secrets(decode.encode(config), os.environ) + rundir.check(composed.run_dir)
    try:
        # Planning alone keeps nothing, not even the cache of a genome.
        made = plan.make(dataclasses.replace(config, mode=Mode.PLAN) if faults else config)
    except RequestError as error:
        raise RequestError(*faults, *salvage.unrelated(error.faults, faults)) from None
    if faults:
        raise RequestError(*faults)
    return Job(config, made, composed.run_dir)


def show(job: Job) -> None:
    """Print the plan of a job; writes nothing."""
    plan.render(job.plan, job.run_dir)


def run(job: Job, worker: Sequence[str] | None = None) -> RunDir:
    """Make the run directory, freeze the configuration and the plan in it, and train, or verify.

    ``worker`` is the command of a rank, if another than this program's own. Raises RequestError if the directory cannot
    be had, RunError if a cut does not pass, and whatever ``local.run`` raises.
    """
    from launcher import local, progress  # not needed to plan, which has to be quick

    run_dir = RunDir.create(job.run_dir)
    try:
        say(f"run directory {run_dir.path}")
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
