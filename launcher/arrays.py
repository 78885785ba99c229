"""Points of a sweep in the queue of Slurm: one array of jobs for all that ask for the same resources."""

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from launcher import job, rundir, slurm
from launcher.errors import RequestError
from launcher.job import Job
from launcher.ledger import Ledger, Point
from launcher.output import say
from launcher.rundir import PREEMPTED, SUBMITTED, RunDir
from launcher.schema import ClusterType

LOOK_S = 2.0
"""Between two looks at the files that runs write."""

ASK_S = 15.0
"""Between two questions to Slurm, whose controller serves a whole cluster."""


@dataclass
class Array:
    points: list[Point]
    folder: Path
    """What is submitted is there, and what Slurm says of it."""
    number: str | None = field(default=None, init=False)

    @property
    def jobs(self) -> list[Job]:
        return [point.job for point in self.points if point.job is not None]

    def check(self) -> None:
        """Raises RequestError where Slurm would not take it, or somebody is at work on one of its runs."""
        slurm.check(job.array_script(self.jobs), self.folder)
        for one in self.jobs:
            if RunDir(one.run_dir).holds_a_run():
                RunDir.create(one.run_dir, job.may_continue(one.config)).release()
        job.check_free([one.run_dir for one in self.jobs])

    def submit(self, ledger: Ledger) -> None:
        """Freeze the runs and put them into the queue; returns at once.

        Raises RequestError where Slurm refuses; the ledger and the runs then tell that they have failed.
        """
        with ExitStack() as locks:
            run_dirs = []
            for one in self.jobs:
                run_dirs.append(RunDir.create(one.run_dir, job.may_continue(one.config)))
                locks.callback(run_dirs[-1].release)
            for one, run_dir in zip(self.jobs, run_dirs, strict=True):
                job.set_up(one, run_dir)
            self.folder.mkdir()
            script = job.array_script(self.jobs)
            rundir.write_text(self.folder / slurm.SCRIPT, script)
            try:
                self.number = slurm.submit(script, self.folder)
            except RequestError as error:
                for point, run_dir in zip(self.points, run_dirs, strict=True):
                    run_dir.write_status(state="failed", reason=str(error))
                    ledger.record(point, "failed", reason=str(error))
                raise
            for index, (point, run_dir) in enumerate(zip(self.points, run_dirs, strict=True)):
                run_dir.write_status(job=f"{self.number}_{index}")
                ledger.record(point, SUBMITTED, job=f"{self.number}_{index}")
        many = "1 point" if len(self.points) == 1 else f"{len(self.points)} points"
        say(f"{many} submitted as array {self.number}; to cancel them: scancel {self.number}{job.waits(self.number)}")


def is_queued(point: Point) -> bool:
    """It is for Slurm, and not done already."""
    return point.job is not None and point.job.config.cluster.type is ClusterType.SLURM and not point.is_done


def of(points: Iterable[Point], folder: Path) -> list[Array]:
    """The arrays of a sweep in ``folder``; none where all its points run here."""
    shapes: defaultdict[str, list[Point]] = defaultdict(list)
    for point in points:
        if point.job is not None and is_queued(point):
            shapes[job.shape(point.job)].append(point)
    first = len(list(folder.glob("array_*")))
    return [Array(alike, folder / f"array_{number}") for number, alike in enumerate(shapes.values(), start=first)]


class Outcome(NamedTuple):
    state: str
    eval_loss: float | None
    """The last; nats a valid token."""
    reason: str | None
    """Why it is not completed."""

    @property
    def is_failure(self) -> bool:
        return self.state != "completed"


def wait(arrays: Sequence[Array], ledger: Ledger) -> dict[int, Outcome]:
    """Until no job of the arrays is left; by the number of the point what has become of it."""
    left = {
        f"{array.number}_{index}": (point, array.folder) for array in arrays for index, point in enumerate(array.points)
    }
    outcomes: dict[int, Outcome] = {}
    alive, asked = set(left), time.monotonic()
    while left:
        for name, (point, folder) in list(left.items()):
            outcome = _outcome(point, name in alive, folder / "logs" / f"slurm_{name}.log")
            if outcome is not None:
                outcomes[point.index] = outcome
                ledger.record(point, outcome.state, outcome.reason, outcome.eval_loss, job=name)
                del left[name]
                say(f"{point} {outcome.state}{f': {outcome.reason}' if outcome.reason else ''}; {len(left)} to go")
        if not left:
            break
        time.sleep(LOOK_S)
        if time.monotonic() - asked >= ASK_S:
            try:
                alive = slurm.alive([array.number for array in arrays if array.number is not None])
            except RequestError as error:  # the jobs go on without their controller, and it comes back as a rule
                say(f"{error}; waiting on")
            asked = time.monotonic()
    return outcomes


def _outcome(point: Point, is_alive: bool, log: Path) -> Outcome | None:
    """None as long as its job may still go on, also after a failure of this attempt."""
    assert point.job is not None
    run_dir = RunDir(point.job.run_dir)
    status = run_dir.read_status()
    state = status.get("state")
    if state == "completed":
        return Outcome("completed", run_dir.last_eval_loss(), None)
    if is_alive:
        return None
    if state in ("failed", PREEMPTED):
        return Outcome(state, None, status.get("reason"))
    # Nobody lived to write what happened: it was cancelled, its time was up, or its node is lost.
    return Outcome("failed", None, f"its job has ended, and the run has not (log: {log})")
