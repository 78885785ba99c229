"""The run directory: every path in it, its lock, and how its files are written."""

import fcntl
import json
import logging
import os
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.errors import RequestError

log = logging.getLogger(__name__)

KEY = "hydra.run.dir"
SUBMITTED, PREEMPTED = "submitted", "preempted"
REQUEST, MEMORY, FAILURE = "request", "memory", "failure"
"""Why a rank ended, as it notes it: what was asked for cannot be, a micro-batch was too large, or anything else."""

FOLDERS = ("attempts", "checkpoints", "logs", "tracker")
FILES = (
    *("config.yaml", "plan.json", "deepspeed.json", "metrics.jsonl", "status.json", "verify.json"),
    *("submit.sbatch", "lock"),
)

ATTEMPT_FILES = ("config.yaml", "plan.json", "deepspeed.json", "submit.sbatch")
"""What describes an attempt, and is kept when the next one begins."""


class RunDir:
    """One run on disk.

        config.yaml       the frozen configuration: what every rank reads
        plan.json         batch cut, optimizer steps, memory
        deepspeed.json    what is given to deepspeed.initialize
        metrics.jsonl     one line an optimizer step, one an evaluation
        status.json       running, preempted, completed or failed; the step reached; the reason
        attempts/N/       what described earlier attempts
        checkpoints/
        logs/             one file a rank; what a failing rank left
        tracker/          Weights & Biases, TensorBoard
        lock              held by the launcher while it lives

    Ranks and readers make one of an existing path; a launcher gets its own, locked, from ``create``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.plan = path / "plan.json"
        self.verify = path / "verify.json"
        self.deepspeed = path / "deepspeed.json"
        self.metrics = path / "metrics.jsonl"
        self.status = path / "status.json"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.tracker = path / "tracker"
        self.lock = path / "lock"
        self._lock_fd: int | None = None

    def log(self, rank: int) -> Path:
        """What a rank prints."""
        return self.logs / f"rank_{rank:05d}.log"

    def failure(self, rank: int) -> Path:
        """What a rank that fails writes before it ends: rank, time, reason, kind ("request", "memory" or "failure") and
        the signal that had come to it, or null."""
        return self.logs / f"rank_{rank:05d}.failure.json"

    def seal(self, attempt: str) -> Path:
        """A file that the first node makes for an attempt of a Slurm job: where it is missing, the directory is another
        one. Its name is new each time, so that no network file system has an answer from before."""
        return self.logs / f"slurm_{attempt}.begun"

    @classmethod
    def create(cls, path: Path, may_continue: bool = False) -> "RunDir":
        """Make the directory of a run and hold its lock until ``release`` or the end of this process.

        Raises RequestError if it cannot be made or belongs to a launcher that lives, and if it holds a run already
        unless that ``may_continue``.
        """
        directory = cls(path)
        made = _make(path)
        try:
            directory._lock_fd = os.open(directory.lock, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            _unmake(made)
            raise _cannot_write(path, error) from error
        try:
            fcntl.flock(directory._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(directory._lock_fd, 1000).decode(errors="replace").strip()
            directory.release()
            raise RequestError(f"{KEY}={path}: a live launcher holds it ({holder}); give another directory") from None
        if directory.holds_a_run() and not may_continue:
            directory.release()
            raise RequestError(_holds_a_run(path))
        try:
            os.ftruncate(directory._lock_fd, 0)
            os.write(directory._lock_fd, f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
            directory.logs.mkdir(exist_ok=True)
        except OSError as error:
            directory.release()
            if made:
                directory.lock.unlink()
                _unmake(made)
            raise _cannot_write(path, error) from error
        return directory

    def release(self) -> None:
        """Let go of the lock."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def holds_a_run(self) -> bool:
        return self.config.exists() or self.metrics.exists() or any(self.checkpoints.glob("step_*"))

    def begin_attempt(self) -> int:
        """Keep what describes the attempt before, if there was one; returns the number of the new one."""
        for name in FILES:
            for debris in self.path.glob(aside(name)):
                remove(debris)
        told = self.read_status().get("attempt")
        before = told if isinstance(told, int) and 0 <= told < 10**6 else 0
        if self.config.exists():
            folder = self.path / "attempts" / str(before)
            folder.mkdir(parents=True, exist_ok=True)
            for name in ATTEMPT_FILES:
                if (self.path / name).exists():
                    # A copy: a job that is killed here is started again, and finds its configuration.
                    shutil.copy2(self.path / name, folder / name)
        return before + 1

    def forget_failures(self) -> None:
        """Of ranks that have ended, before others are started, of this attempt or of another."""
        for kind in ("*.failure.json", aside("*.failure.json")):
            for failure in self.logs.glob(kind):
                remove(failure)

    def write_files(self, files: Mapping[str, str]) -> None:
        """Write whole files by name, each atomically and to disk."""
        for name, text in files.items():
            write_text(self.path / name, text)

    def write_status(self, **changes: Any) -> None:
        """Change fields of ``status.json``; its heartbeat is now.

        Readers always see a whole file. The launcher writes before and after the ranks run, rank 0 in between, so that
        there is one writer at a time. Raises OSError only where the state of the run was to change.
        """
        status = self.read_status() | changes | {"heartbeat": time.time()}
        try:
            write_text(self.status, json.dumps(status, indent=2) + "\n", sync=False)
        except OSError as error:
            if "state" in changes:
                raise
            log.warning("%s cannot be written (%s)", self.status, error.strerror)

    def read_status(self) -> dict[str, Any]:
        """The fields of ``status.json``; none before the first was written, or where a reboot has emptied it."""
        try:
            status = json.loads(self.status.read_bytes())
        except (FileNotFoundError, ValueError, RecursionError):
            return {}
        return status if isinstance(status, dict) else {}

    def last_eval_loss(self) -> float | None:
        """The ``eval_loss`` (nats a valid token) of the last evaluation; None if there was none."""
        return self._last("eval", "eval_loss")

    def last_step(self) -> int:
        """The optimizer steps that are done."""
        return int(self._last("train", "step") or 0)

    def _last(self, kind: str, field: str) -> float | None:
        """Of the whole lines of the metrics; a rank that was killed may have left one half written."""
        if not self.metrics.exists():
            return None
        whole, _, _ = self.metrics.read_bytes().rpartition(b"\n")
        lines = [record for line in whole.splitlines() if (record := parse(line)) is not None]
        values = [line[field] for line in lines if line["kind"] == kind and field in line]
        return number(values[-1]) if values else None


def parse(line: str | bytes) -> dict[str, Any] | None:
    """A line of the metrics; None for one that was never written to its end."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and "kind" in record else None


def number(value: object) -> float | None:
    """What a file has where a finite number should be, if it is one."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
        return value
    return None


def check(path: Path, may_continue: bool = False) -> list[str]:
    """Fault lines for a directory in which no run can be made; looks only, writes nothing."""
    try:
        if RunDir(path).holds_a_run() and not may_continue:
            return [_holds_a_run(path)]
    except OSError as error:  # its name is too long, for instance
        return [str(_cannot_write(path, error))]
    existing = path
    while not os.path.lexists(existing):
        existing = existing.parent
    folders, files = [existing], []
    if existing == path:
        folders += [path / name for name in FOLDERS]
        files += [path / name for name in FILES]
        folders += (path / "attempts").glob("*")
        files += (path / "logs").glob("*.log")
    for folder in filter(os.path.lexists, folders):
        if not folder.is_dir():
            return [f"{KEY}={path}: {folder} is not a directory; give another one"]
        if not os.access(folder, os.W_OK | os.X_OK):
            return [f"{KEY}={path}: {folder} cannot be written; give another directory"]
    for file in filter(os.path.lexists, files):
        if not file.is_file():
            return [f"{KEY}={path}: {file} is not a file; give another directory"]
        if not os.access(file, os.R_OK | os.W_OK):
            return [f"{KEY}={path}: {file} cannot be read and written; give another directory"]
    return []


def remove(path: Path) -> None:
    """Whatever it is, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def aside(name: str) -> str:
    """Matches what ``write_text`` leaves of a file if it is killed."""
    return f".{name}.*"


def write_text(path: Path, text: str, sync: bool = True) -> None:
    """Replace a file as a whole: a reader, or a reboot if ``sync``, finds the old text or the new one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def _make(path: Path) -> list[Path]:
    """Make a directory and its parents; all of them or none. Returns those that were not there, outermost first."""
    missing = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)][::-1]
    made: list[Path] = []
    try:
        for folder in missing:
            folder.mkdir(exist_ok=True)
            made.append(folder)
        if not path.is_dir():
            raise NotADirectoryError(20, "Not a directory")
    except OSError as error:
        _unmake(made)
        raise _cannot_write(path, error) from error
    return made


def _unmake(made: list[Path]) -> None:
    for folder in reversed(made):
        if any(folder.iterdir()):
            return
        folder.rmdir()


def _cannot_write(path: Path, error: OSError) -> RequestError:
    return RequestError(f"{KEY}={path}: it cannot be written ({error.strerror}); give another directory")


def _holds_a_run(path: Path) -> str:
    return f"{KEY}={path}: it holds a run already, which is not to be continued here; give another {KEY}"
