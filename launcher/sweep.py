"""Many runs from one command line, here: all of them checked first, then run one after another."""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig

from launcher import compose, decode, job
from launcher.compose import Composer
from launcher.errors import RequestError, RunError, RunPreemptedError, RunStoppedError
from launcher.job import Job
from launcher.output import say
from launcher.rundir import PREEMPTED
from launcher.schema import Mode, Sweep


@dataclass(frozen=True)
class Point:
    """One run of a sweep; without a job it cannot be run, and ``faults`` say why."""

    index: int
    overrides: tuple[str, ...]
    job: Job | None
    faults: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"point {self.index} ({' '.join(self.overrides)})"


class Ledger:
    """``sweep.jsonl``: a line each time a point changes its state; the last line of a point counts.

    Fields: ``point`` (from 0), ``overrides``, ``run_dir``, ``state`` (pending, running, completed, failed, invalid,
    stopped), ``eval_loss`` (the last; nats a valid token), ``reason``, ``time``.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "sweep.jsonl"

    def create(self) -> None:
        """Make the sweep directory; raises RequestError if it holds a sweep already or cannot be written."""
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.path.open("x").close()
        except OSError as error:
            if self.path.exists():
                fault = "it holds a sweep already, and continuing one is not there yet; give another hydra.sweep.dir"
            else:
                fault = f"it cannot be written ({error.strerror}); give another directory"
            raise RequestError(f"hydra.sweep.dir={folder}: {fault}") from error

    def record(self, point: Point, state: str, reason: str | None = None, eval_loss: float | None = None) -> None:
        line = {
            "point": point.index,
            "overrides": point.overrides,
            "run_dir": str(point.job.run_dir) if point.job else None,
            "state": state,
            "eval_loss": eval_loss,
            "reason": reason,
            "time": time.time(),
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def run(composer: Composer, cfg: DictConfig) -> None:
    """Run the sweep of a command line, or show its plans.

    Raises RequestError with every fault of every point before anything is written, and RunError at the end naming
    the points that failed.
    """
    _check_plugins(cfg)
    if not compose.is_basic_sweep(cfg):
        composer.run_sweeper(cfg)
        return
    points = _prepare(composer, cfg)
    if points[0].job is None or points[0].job.config.mode is not Mode.PLAN:
        _run_all(points, compose.sweep_folder(cfg))
        return
    for point in points:
        print(point)
        if point.job is not None:
            job.show(point.job)


def launch(
    loader: ConfigLoader, cfg: DictConfig, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
) -> list[JobReturn]:
    """Run points that a sweeper of Hydra chose; the value of each is its last ``eval_loss``.

    A point that cannot be run, or fails, is returned with its error. An interrupt is raised.
    """
    ledger = Ledger(compose.sweep_folder(cfg))
    points: list[Point | RequestError] = []
    for index, overrides in enumerate(job_overrides, start=initial_job_idx):
        try:
            prepared = job.prepare(compose.compose_point(loader, cfg, overrides, index))
            points.append(Point(index, tuple(overrides), prepared))
        except RequestError as error:
            points.append(error)
    if any(isinstance(point, Point) for point in points) and (initial_job_idx == 0 or not ledger.path.exists()):
        ledger.create()
    return [_returned(point, list(overrides), ledger) for point, overrides in zip(points, job_overrides, strict=True)]


def _returned(point: Point | RequestError, overrides: list[str], ledger: Ledger) -> JobReturn:
    """What Hydra's sweepers are given of a point: its value, or its error, which they raise or not."""
    result = JobReturn(overrides=overrides, task_name="okazaki", status=JobStatus.FAILED)
    if isinstance(point, RequestError):
        result.return_value = point
        return result
    try:
        result.return_value = _run(point, ledger)
        result.status = JobStatus.COMPLETED
    except RunStoppedError:
        raise
    except (RequestError, RunError) as error:
        result.return_value = error
    return result


def _check_plugins(cfg: DictConfig) -> None:
    choices: dict[str, Any] = cfg.hydra.runtime.choices
    if choices.get("hydra/launcher") != "okazaki":
        raise RequestError(
            f"hydra/launcher={choices.get('hydra/launcher')}: sweeps run through this program's own launcher; "
            "leave the choice out"
        )
    if not compose.is_basic_sweep(cfg) and cfg.get("mode") == Mode.PLAN.value:
        raise RequestError(
            f"mode=plan: hydra/sweeper={choices.get('hydra/sweeper')} chooses its points while it runs, "
            "so that there is no plan of them; leave one of the two out"
        )


def _prepare(composer: Composer, cfg: DictConfig) -> list[Point]:
    """All points, prepared. Raises RequestError with every fault of every point, unless those are to be left out."""
    points = []
    skip_invalid = False
    for index, overrides in enumerate(composer.points(cfg)):
        try:
            composed = composer.point(cfg, overrides, index)
            skip_invalid = decode.section(Sweep, composed.node.get("sweep", {}), "sweep").skip_invalid
            points.append(Point(index, overrides, job.prepare(composed)))
        except RequestError as error:
            points.append(Point(index, overrides, None, tuple(error.faults)))
    faults = [f"{point}: {fault}" for point in points for fault in point.faults]
    if faults and not (skip_invalid and any(point.job for point in points)):
        raise RequestError(*faults)
    for fault in faults:
        print(f"left out: {fault}", file=sys.stderr)
    _check_together([point.job for point in points if point.job is not None])
    return points


def _check_together(jobs: list[Job]) -> None:
    modes = {job.config.mode.value for job in jobs}
    if len(modes) > 1:
        raise RequestError(f"mode={','.join(sorted(modes))}: all points of a sweep have one mode")
    folders: defaultdict[Path, int] = defaultdict(int)
    for one in jobs:
        folders[one.run_dir] += 1
    shared = [str(folder) for folder, count in folders.items() if count > 1]
    if shared:
        raise RequestError(f"hydra.sweep.subdir: several points share {', '.join(shared)}; leave the key out")


def _run_all(points: list[Point], folder: Path) -> None:
    from launcher import local  # not needed to plan

    ledger = Ledger(folder)
    ledger.create()
    say(f"sweep directory {folder}")
    for point in points:
        if point.job is None:
            ledger.record(point, "invalid", reason="; ".join(point.faults))
        else:
            ledger.record(point, "pending")
    runnable = [point for point in points if point.job is not None]
    waiting, failed = list(runnable), []
    try:
        with local.interruptible():
            while waiting:
                point = waiting.pop(0)
                say(f"{point}, {len(runnable) - len(waiting)} of {len(runnable)}")
                try:
                    _run(point, ledger)
                except RunStoppedError:
                    raise
                except (RequestError, RunError) as error:
                    print(f"{point} failed: {error}", file=sys.stderr, flush=True)
                    failed.append(point)
    except RunStoppedError as error:
        for point in waiting:
            ledger.record(point, "stopped", reason=f"not started: {error}")
        raise
    if failed:
        names = "; ".join(map(str, failed))
        raise RunError(f"{len(failed)} of {len(runnable)} points failed: {names}; ledger: {ledger.path}")
    say(f"all {len(runnable)} points are done; ledger: {ledger.path}")


def _run(point: Point, ledger: Ledger) -> float | None:
    """Run one point under the eyes of the ledger; returns its last ``eval_loss``."""
    assert point.job is not None
    ledger.record(point, "running")
    try:
        eval_loss = job.run(point.job).last_eval_loss()
    except RunStoppedError as error:
        state = PREEMPTED if isinstance(error, RunPreemptedError) else "stopped"
        ledger.record(point, state, reason=str(error))
        raise
    except (RequestError, RunError) as error:
        ledger.record(point, "failed", reason=str(error))
        raise
    ledger.record(point, "completed", eval_loss=eval_loss)
    return eval_loss
