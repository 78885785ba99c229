"""Puts frozen runs on a Slurm cluster, through Slurm's own commands and without a shell."""

import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher import placement, slurm_options, slurm_script
from launcher.errors import RequestError
from launcher.plan import Plan
from launcher.schema import Cluster

SCRIPT = "submit.sbatch"

UNMEASURED_LEAD_S, MIN_LEAD_S = 120, 60
"""Slurm looks at its signals and time limits about twice a minute. When all is saved, ranks have to end, and the job
has to decide what comes next, which takes a Python of its own on a slow file system."""

MAX_LEAD_S = 65535
"""Slurm's own limit."""

TIMEOUT_S = 120.0
"""For one command. Clients give up by themselves some seconds after they could not reach the controller."""

WAITING = (
    "PENDING",
    "RUNNING",
    "CONFIGURING",
    "COMPLETING",
    "SUSPENDED",
    "REQUEUED",
    "RESIZING",
    "STOPPED",
    "SIGNALING",
)
"""States of a job that has not come to its end."""

ITS_TURN = ("None", "Priority", "Resources", "BeginTime", "Dependency", "JobArrayTaskLimit")
"""Why a job waits that will start by itself."""

UNKNOWN = re.compile("Invalid job id")


def script(
    template: str, made: Plan, run_dirs: Sequence[Path], measured_lead_s: float | None, is_array: bool = False
) -> str:
    """What is given to sbatch for one run, or for an array of several whose plans ask for the same resources."""
    cluster = made.config.cluster
    array = None
    if is_array:
        throttle = "" if cluster.max_parallel is None else f"%{cluster.max_parallel}"
        array = f"0-{len(run_dirs) - 1}{throttle}"
    return slurm_script.render(
        template,
        cluster,
        name=made.config.name,
        python=cluster.python or sys.executable,
        folder=Path.cwd(),
        run_dirs=run_dirs,
        ranks_per_node=placement.ranks_per_node(cluster),
        signal_lead=signal_lead(cluster, measured_lead_s),
        array=array,
    )


def signal_lead(cluster: Cluster, measured_s: float | None) -> int:
    """Seconds before its end at which a job is asked to save: as configured; or what was measured, with room for a
    slower day; at most half of what the job has."""
    if cluster.signal_lead is not None:
        return cluster.signal_lead
    lead = UNMEASURED_LEAD_S if measured_s is None else min(max(MIN_LEAD_S, math.ceil(2 * measured_s)), MAX_LEAD_S)
    limit = None if cluster.time is None else slurm_options.seconds(cluster.time)
    return lead if limit is None else min(lead, limit // 2)


def submit(script: str, folder: Path) -> str:
    """Submit a script from a folder, in which the job then writes its log; returns the id of the job, or of the array.

    Raises RequestError with Slurm's own words where it refuses.
    """
    (folder / "logs").mkdir(exist_ok=True)
    answer = _ask("sbatch", "--parsable", folder=folder, script=script)
    if answer.returncode != 0:
        raise RequestError(f"cluster=slurm: sbatch refuses: {_words(answer.stderr)}")
    # With several clusters the name of one follows; what plugins of a site print comes before.
    job, *_ = answer.stdout.strip().splitlines()[-1].split(";")
    return job


def check_folder(run_dir: Path) -> list[str]:
    """Fault lines for a run directory that Slurm cannot write a log into."""
    return [
        f"hydra.run.dir={run_dir}: Slurm does not take a {sign} in the path of a log as it is; give a directory without"
        for sign in "%\\"
        if sign in str(run_dir)
    ]


def check(script: str, folder: Path) -> None:
    """Ask a shell whether it can read a script, and Slurm whether it would take it.

    Raises RequestError with their own words if not.
    """
    while not folder.is_dir():
        folder = folder.parent
    answer = _ask("bash", "-n", folder=folder, script=script)
    if answer.returncode != 0 or "here-document" in answer.stderr:  # only setup can be at fault
        raise RequestError(f"cluster.setup: it is no shell that can be read: {_words(answer.stderr)}")
    answer = _ask("sbatch", "--test-only", folder=folder, script=script)
    if answer.returncode != 0:
        raise RequestError(f"cluster=slurm: sbatch refuses: {_words(answer.stderr)}")


def held_back(job: str) -> str | None:
    """Slurm's word for why a job or array waits, if it is not just for its turn: ``PartitionTimeLimit``, for instance,
    with which many clusters let a job wait for ever that they could refuse."""
    try:
        answer = _ask("squeue", "--noheader", f"--jobs={job}", "--format=%r")
    except RequestError:  # it is submitted all the same
        return None
    reasons = dict.fromkeys(line.strip() for line in answer.stdout.splitlines())
    return ", ".join(reason for reason in reasons if reason not in ITS_TURN) or None


def alive(jobs: Sequence[str]) -> set[str]:
    """Of these jobs and arrays, those that wait, run or end just now, as ``12`` or ``12_0``; by one question.

    Raises RequestError where Slurm cannot be asked.
    """
    numbers = ",".join(jobs)
    answer = _ask("squeue", "--noheader", "--states=all", "--array", f"--jobs={numbers}", "--format=%i %T")
    if answer.returncode != 0 and not UNKNOWN.search(answer.stderr):
        raise RequestError(f"cluster=slurm: squeue fails: {_words(answer.stderr)}")
    lines = (line.split() for line in answer.stdout.splitlines())
    return {job for job, state in lines if state in WAITING}


def _environment(script: str) -> dict[str, str]:
    """For Slurm's commands. sbatch lets its own variables win over the lines of a script: of those only the ones count
    that say who pays and where, which sites set, and only where the script says nothing. What an allocation around this
    process was given must not become part of a new one, and a user's habits with squeue must not hide a job."""
    kept = {
        f"SBATCH_{name.upper()}"
        for name in ("account", "partition", "qos", "reservation", "clusters", "wckey")
        if f"#SBATCH --{name}=" not in script
    }
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SBATCH_", "SLURM_", "SQUEUE_")) or name in {*kept, "SLURM_CONF", "SLURM_CLUSTERS"}
    }


def _ask(*command: str, folder: Path | None = None, script: str = "") -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            command,
            cwd=folder,
            env=_environment(script),
            input=script,
            check=False,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except FileNotFoundError:
        raise RequestError(
            f"cluster=slurm: there is no {command[0]} here; submit from a login node, or set cluster=local"
        ) from None
    except subprocess.TimeoutExpired:
        raise RequestError(f"cluster=slurm: {command[0]} did not answer within {TIMEOUT_S:.0f} s") from None


def _words(errors: str) -> str:
    """What a command of Slurm complained of, in one line."""
    lines = [re.sub(r"^\w+: (error: )?", "", line).strip() for line in errors.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line)) or "it says nothing"
