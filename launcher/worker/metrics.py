"""The metrics of a run: one line of JSON an optimizer step, and the trackers that are told the same."""

import json
import logging
import netrc
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from launcher.rundir import RunDir, write_text
from launcher.schema import Config

log = logging.getLogger(__name__)

Values = Mapping[str, Any]


class MetricsFile:
    """``metrics.jsonl``: appended a line at a time, never truncated; what a full disk refuses is written later."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self._left = b""
        self._failed = False
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":  # an earlier attempt was ended in the middle of a line
            self._left = b"\n"

    def log(self, values: Values) -> None:
        self._left += (json.dumps(values) + "\n").encode()
        try:
            while self._left:
                self._left = self._left[os.write(self._file, self._left) :]
            self._failed = False
        except OSError as error:
            if not self._failed:
                log.warning("metrics.jsonl cannot be written (%s); the run goes on, and tries again", error.strerror)
            self._failed = True

    def finish(self, summary: Values) -> None:
        os.close(self._file)


class TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def log(self, values: Values) -> None:
        for name, value in _numbers(values).items():
            self._writer.add_scalar(name, value, values["step"])

    def finish(self, summary: Values) -> None:
        self._writer.close()


class WandB:
    """One Weights & Biases run. Offline unless a key is there; decided here, on the node.

    ``WANDB_MODE`` from the environment is respected.
    """

    TIMEOUT_S = 30

    def __init__(self, config: Config, run_dir: RunDir, attachments: Mapping[str, Values]) -> None:
        import wandb

        run_dir.tracker.mkdir(exist_ok=True)
        identity = run_dir.tracker / "wandb_id"
        if not identity.exists():
            write_text(identity, secrets.token_hex(4))
        self._run = wandb.init(
            id=identity.read_text(),
            resume="allow",  # later attempts go on with the same run
            project=config.logging.project,
            entity=config.logging.entity,
            name=run_dir.path.name,
            tags=list(config.logging.tags),
            dir=str(run_dir.tracker),
            mode=None if os.environ.get("WANDB_MODE") else "online" if _has_wandb_key() else "offline",
            config={name: dict(values) for name, values in attachments.items()},
            settings=wandb.Settings(init_timeout=self.TIMEOUT_S, console="off", silent=True),
        )
        for file in (run_dir.config, run_dir.deepspeed, run_dir.plan):
            # Below the name of the run: at the top wandb writes a config.yaml of its own, through a link to ours.
            self._run.save(str(file), base_path=str(run_dir.path.parent), policy="now")

    def log(self, values: Values) -> None:
        self._run.log(_numbers(values), step=values["step"])

    def finish(self, summary: Values) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish()


def _has_wandb_key() -> bool:
    """Whether a key is in the environment, or in the netrc file where ``wandb login`` leaves it."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    server = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(str(server)) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class Guarded:
    """A tracker that may fail without the run: its first error is logged, and it is not asked again."""

    def __init__(self, name: str, make: Any) -> None:
        self._name, self._tracker = name, None
        self._tracker = self._try("start", make)

    def log(self, values: Values) -> None:
        if self._tracker is not None:
            self._try("log", self._tracker.log, values)

    def finish(self, summary: Values) -> None:
        if self._tracker is not None:
            self._try("finish", self._tracker.finish, summary)

    def _try(self, what: str, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception:  # whatever a tracker's library raises, training goes on
            log.warning("%s could not %s; the run goes on without it", self._name, what, exc_info=True)
            self._tracker = None
            return None


def now() -> float:
    """Seconds since the epoch, as in the field ``time``."""
    return round(time.time(), 3)


def _numbers(values: Values) -> dict[str, float]:
    """What trackers plot by optimizer step, under the names of ``metrics.jsonl``; evaluations as ``eval_...``."""
    prefix = "" if values["kind"] == "train" else "eval_"
    return {
        prefix + name.removeprefix(prefix): value
        for name, value in values.items()
        if isinstance(value, int | float) and name not in ("step", "time", "attempt")
    }
