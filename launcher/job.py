"""One run from its composed configuration to its end: prepared, shown, or started."""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

from launcher import decode, plan, rundir, salvage
from launcher.compose import Composed
from launcher.errors import RequestError
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
    faults += decode.secrets(decode.encode(config), os.environ) + rundir.check(composed.run_dir)
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


def run(job: Job) -> RunDir:
    """Make the run directory, freeze the configuration and the plan in it, and train.

    Raises RequestError if the directory cannot be had, and whatever ``local.run`` raises.
    """
    from launcher import local, progress  # not needed to plan, which has to be quick

    run_dir = RunDir.create(job.run_dir)
    try:
        say(f"run directory {run_dir.path}")
        run_dir.write_files({run_dir.config.name: decode.dump(job.plan.config), **plan.files(job.plan)})
        local.run(job.config, job.plan.num_ranks, job.plan.num_steps, run_dir)
        progress.print_summary(run_dir)
        return run_dir
    finally:
        run_dir.release()
