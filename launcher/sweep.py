"""Many runs from one command line, here: all of them checked first, then run one after another."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig

from launcher import compose, decode, job
from launcher.compose import Composed, Composer
from launcher.errors import RequestError, RunError, RunInterruptedError
from launcher.job import Job
from launcher.schema import Mode, Sweep


class Ledger:
    """``sweep.jsonl``: a line each time a point changes its state; the last line of a point counts.

    Fields: ``point`` (from 0), ``overrides``, ``run_dir``, ``state`` (pending, running, completed, failed, invalid,
    stopped), ``eval_loss`` (the last, nats a valid token), ``reason``, ``time``.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "sweep.jsonl"

    def create(self) -> None:
        """Make the sweep directory; raises RequestError if it holds a sweep already or cannot be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.open("x").close()
        except FileExistsError:
            raise RequestError(
                f"hydra.sweep.dir={self.path.parent}: it holds a sweep already, and continuing one is not there yet; "
                "give another hydra.sweep.dir"
            ) from None
        except OSError as error:
            raise RequestError(
                f"hydra.sweep.dir={self.path.parent}: it cannot be written ({error.strerror}); give another directory"
            ) from error

    def record(self, index: int, point: Composed, state: str, **facts: Any) -> None:
        line = {
            "point": index,
            "overrides": list(point.overrides),
            "run_dir": str(point.run_dir),
            "state": state,
            "eval_loss": None,
            "reason": None,
            "time": time.time(),
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line | facts) + "\n")


def run(composer: Composer, cfg: DictConfig) -> None:
    """Run the sweep of a command line.

    Raises RequestError with every fault of every point before anything is written, and RunError at the end naming
    the points that failed.
    """
    if cfg.hydra.launcher._target_ != "hydra_plugins.okazaki.launcher.OkazakiLauncher":
        raise RequestError(
            f"hydra/launcher={cfg.hydra.runtime.choices['hydra/launcher']}: sweeps run through this program's own "
            "launcher; leave the choice out"
        )
    if not compose.is_basic_sweep(cfg):
        if decode.decode(composer.single(cfg).node).mode is Mode.PLAN:
            raise RequestError("mode=plan: the points that this hydra/sweeper will choose are not known before it runs")
        composer.run_sweeper()
        return
    jobs = _prepare(composer, cfg)
    if any(prepared.config.mode is Mode.PLAN for _, _, prepared in jobs):
        for index, point, prepared in jobs:
            print(f"point {index}: {_words(point)}")
            job.show(prepared)
        return
    ...
