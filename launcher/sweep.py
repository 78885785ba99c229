"""Many runs from one command line, here: all of them checked first, then run one after another."""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, OmegaConf

from launcher import arrays, compose, decode, job
from launcher.arrays import Outcome
from launcher.compose import Composer
from launcher.errors import RequestError, RunError, RunPreemptedError, RunStoppedError
from launcher.job import Job
from launcher.ledger import Ledger, Point
from launcher.output import complain, say
from launcher.rundir import PREEMPTED
from launcher.schema import Mode, Sweep


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
        _run_all(points, compose.sweep_folder(cfg), any(point.job.config.sweep.wait for point in points if point.job))
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
    results = []
    points: dict[int, Point] = {}
    for index, overrides in enumerate(job_overrides, start=initial_job_idx):
        result = JobReturn(overrides=list(overrides), task_name="okazaki", status=JobStatus.FAILED)
        results.append(result)
        try:
            composed = compose.compose_point(loader, cfg, overrides, index)
            result.cfg, result.hydra_cfg = OmegaConf.create(composed.node), composed.hydra
            result.working_dir = str(composed.run_dir)
            points[index] = Point(index, tuple(overrides), job.prepare(composed))
        except RequestError as error:
            result.return_value = error
    if points and (initial_job_idx == 0 or not ledger.path.exists()):
        ledger.open()
    outcomes = _queue(list(points.values()), ledger)
    for index, point in points.items():
        _complete(results[index - initial_job_idx], point, ledger, outcomes.get(index))
    return results


def _queue(points: list[Point], ledger: Ledger) -> dict[int, Outcome]:
    """Submit those of a sweeper's points that are for Slurm, and wait for them: it goes by their values."""
    queued = arrays.of(points, ledger.path.parent)
    for array in queued:
        array.check()
    for array in queued:
        array.submit(ledger)
    return arrays.wait(queued, ledger)


def _complete(result: JobReturn, point: Point, ledger: Ledger, outcome: Outcome | None) -> None:
    """Give Hydra's sweepers the value of a point, or its error, which they raise or not; run it, if it has not been."""
    if outcome is not None and outcome.is_failure:
        result.return_value = RunError(f"{point} {outcome.state}: {outcome.reason}")
        return
    try:
        result.return_value = _run(point, ledger) if outcome is None else outcome.eval_loss
        result.status = JobStatus.COMPLETED
    except RunStoppedError:
        raise
    except (RequestError, RunError) as error:
        result.return_value = error


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
        complain(f"left out: {fault}")
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


def _run_all(points: list[Point], folder: Path, waits: bool) -> None:
    from launcher import local  # not needed to plan

    done = [point for point in points if point.is_done and point.job and point.job.config.sweep.rerun_done]
    points = [_anew(point) if point in done else point for point in points]
    queued = arrays.of(points, folder)
    for array in queued:
        array.check()
    ledger = Ledger(folder)
    ledger.open()
    say(f"sweep directory {folder}")
    for point in done:
        _put_aside(point)
    for point in points:
        if point.job is None:
            ledger.record(point, "invalid", reason="; ".join(point.faults))
        elif not (point.is_done or arrays.is_queued(point)):
            ledger.record(point, "pending")
    for array in queued:
        array.submit(ledger)
    runnable = [point for point in points if point.job is not None]
    waiting, failed = [point for point in runnable if not arrays.is_queued(point)], []
    with local.interruptible():
        try:
            while waiting:
                point = waiting.pop(0)
                say(f"{point}, {len(runnable) - len(waiting)} of {len(runnable)}")
                try:
                    _run(point, ledger)
                except RunStoppedError:
                    raise
                except (RequestError, RunError) as error:
                    complain(f"{point} failed: {error}")
                    failed.append(point)
        except RunStoppedError as error:
            for point in waiting:
                ledger.record(point, "stopped", reason=f"not started: {error}")
            raise
        if queued and not waits:
            say(f"what becomes of them is in their run directories; ledger: {ledger.path}")
        elif queued:
            try:
                outcomes = arrays.wait(queued, ledger)
            except RunStoppedError:
                numbers = " ".join(str(array.number) for array in queued)
                complain(f"what is in the queue stays there; scancel {numbers} ends it")
                raise
            failed += [point for point in runnable if point.index in outcomes and outcomes[point.index].is_failure]
    if failed:
        names = "; ".join(map(str, failed))
        raise RunError(f"{len(failed)} of {len(runnable)} points failed: {names}; ledger: {ledger.path}")
    if waits or not queued:
        many = "its only point is" if len(runnable) == 1 else f"all {len(runnable)} points are"
        say(f"{many} done; ledger: {ledger.path}")


def _anew(point: Point) -> Point:
    """A point that is done, as one that is to be run from its beginning."""
    return dataclasses.replace(point, job=point.job and dataclasses.replace(point.job, origin=None))


def _put_aside(point: Point) -> None:
    assert point.job is not None
    old, number = point.job.run_dir, 1
    while (aside := old.with_name(f"{old.name}.before_{number}")).exists():
        number += 1
    old.rename(aside)


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
