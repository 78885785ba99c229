"""The points of a sweep, and the file that tells what has become of each."""

import json
import time
from dataclasses import dataclass
from pathlib import Path

from launcher import resume
from launcher.errors import RequestError, RunError
from launcher.job import Job


@dataclass(frozen=True)
class Point:
    """One run of a sweep; without a job it cannot be run, and ``faults`` say why."""

    index: int
    overrides: tuple[str, ...]
    job: Job | None
    faults: tuple[str, ...] = ()

    @property
    def is_done(self) -> bool:
        """By an earlier command, with the same steps and limits."""
        return self.job is not None and self.job.origin is not None and resume.is_done(self.job.config, self.job.origin)

    def __str__(self) -> str:
        return f"point {self.index} ({' '.join(self.overrides)})"


class Ledger:
    """``sweep.jsonl``: a line each time a point changes its state; the last line of a point counts.

    Fields: ``point`` (from 0), ``overrides``, ``run_dir``, ``job`` (of Slurm: the array, and the index in it),
    ``state`` (pending, submitted, running, completed, failed, preempted, invalid, stopped), ``eval_loss`` (the last;
    nats a valid token), ``reason``, ``time``.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "sweep.jsonl"

    def open(self) -> None:
        """Make the sweep directory, or go on with the sweep in it; raises RequestError if it cannot be written."""
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.path.open("a").close()
        except OSError as error:
            fault = f"it cannot be written ({error.strerror}); give another directory"
            raise RequestError(f"hydra.sweep.dir={folder}: {fault}") from error

    def record(
        self,
        point: Point,
        state: str,
        reason: str | None = None,
        eval_loss: float | None = None,
        job: str | None = None,
    ) -> None:
        line = {
            "point": point.index,
            "overrides": point.overrides,
            "run_dir": str(point.job.run_dir) if point.job else None,
            "job": job,
            "state": state,
            "eval_loss": eval_loss,
            "reason": reason,
            "time": time.time(),
        }
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise RunError(f"the sweep in {self.path.parent} cannot go on: {error}") from error
