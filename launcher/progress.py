"""What the launcher shows of a run while its ranks work: read from the files that rank 0 writes."""

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from launcher.output import say
from launcher.rundir import RunDir, parse
from launcher.schema import Config

INTERVAL_S = 0.2
LONGEST_S = 10 * 365 * 24 * 3600
"""What would take longer is not foretold."""

Record = Mapping[str, Any]
"""One line of metrics.jsonl."""


class Progress:
    """Follows ``metrics.jsonl`` and ``status.json``: a bar on a terminal, plain lines elsewhere."""

    def __init__(self, run_dir: RunDir, config: Config, num_steps: int | None) -> None:
        self._run_dir = run_dir
        self._num_steps = num_steps
        with_bar = config.logging.progress_bar and sys.stdout.isatty()
        self._display: Bar | Lines = Bar(num_steps) if with_bar else Lines(config.train.log_every)
        # What earlier attempts have left is known already.
        self._offset = run_dir.metrics.stat().st_size if run_dir.metrics.exists() else 0
        self._activity: str | None = None
        self._next = 0.0
        self._pace = Pace()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._show()
        self._display.close()

    def update(self) -> None:
        """Show what is new; cheap, and so for every turn of a waiting loop."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + INTERVAL_S
            self._show()

    def _show(self) -> None:
        status = self._run_dir.read_status()
        self._num_steps = status.get("num_steps") or self._num_steps
        activity = status.get("activity")
        if activity != self._activity:
            self._activity = activity
            self._display.activity(activity)
        for record in self._new_records():
            if record["kind"] == "eval":
                self._display.evaluation(record)
            elif record["kind"] == "train":
                self._display.step(record, self._num_steps, self._pace.left(record, self._num_steps))
            elif record["kind"] == "resume":
                self._display.activity(record["origin"])
            elif record["kind"] == "checkpoint" and record["fault"] is not None:
                self._display.activity(f"step {record['step']} could not be saved ({record['fault']})")

    def _new_records(self) -> Iterator[Record]:
        """The whole lines that were appended since the last call."""
        if not self._run_dir.metrics.exists():
            return
        with self._run_dir.metrics.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                if (record := parse(line)) is not None:
                    yield record


class Pace:
    """How long a run still takes, at the mean pace of the steps seen so far."""

    def __init__(self) -> None:
        self._first: Record | None = None

    def left(self, record: Record, num_steps: int | None) -> timedelta | None:
        """Time left after the step of ``record``; None while it cannot be known."""
        if self._first is None:
            self._first = record
        steps = record["step"] - self._first["step"]
        if num_steps is None or steps < 1:
            return None
        pace_s = (record["time"] - self._first["time"]) / steps
        left_s = pace_s * (num_steps - record["step"])
        return timedelta(seconds=round(left_s)) if left_s < LONGEST_S else None


class Lines:
    """Plain lines, for logs and pipes: every ``log_every`` steps, and the last."""

    def __init__(self, log_every: int) -> None:
        self._log_every = log_every

    def activity(self, text: str | None) -> None:
        if text is not None:
            say(text)

    def step(self, record: Record, num_steps: int | None, left: timedelta | None) -> None:
        if record["step"] % self._log_every == 0 or record["step"] == num_steps:
            of = f"/{num_steps}" if num_steps is not None else ""
            eta = f"  ETA {left}" if left is not None else ""
            say(f"step {record['step']}{of}  {describe(record)}{eta}")

    def evaluation(self, record: Record) -> None:
        say(describe_evaluation(record))

    def close(self) -> None:
        """Nothing to put away."""


class Bar:
    """A live bar on a terminal, with evaluations as lines above it."""

    def __init__(self, num_steps: int | None) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._bar: RichProgress = RichProgress(
            TextColumn("{task.fields[activity]}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TextColumn("{task.fields[eta]}"),
        )
        self._task = self._bar.add_task("", total=num_steps, activity="", eta="")
        self._bar.start()

    def activity(self, text: str | None) -> None:
        self._bar.update(self._task, activity=text or "training")

    def step(self, record: Record, num_steps: int | None, left: timedelta | None) -> None:
        eta = f"ETA {left}" if left is not None else ""
        self._bar.update(self._task, completed=record["step"], total=num_steps, description=describe(record), eta=eta)

    def evaluation(self, record: Record) -> None:
        with contextlib.suppress(OSError):  # the terminal was closed
            self._bar.console.print(describe_evaluation(record), highlight=False)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._bar.stop()


def describe(record: Record) -> str:
    """One optimizer step in a line's length."""
    parts = [
        f"loss {_number(record['loss'], '.4f')}",
        *_bits(record["bits_per_base"]),
        f"lr {_number(record['lr'], '.2e')}",
        f"grad norm {_number(record['grad_norm'], '.3g')}",
        f"{_number(record['tokens_per_s'], ',.0f')} tokens/s",
    ]
    return "  ".join(parts + ["no update"] * bool(record["skipped"]))


def describe_evaluation(record: Record) -> str:
    found = [f"loss {_number(record['eval_loss'], '.4f')}", *_bits(record["eval_bits_per_base"])]
    return f"evaluation after step {record['step']}: {', '.join(found)}"


def _bits(value: float | None) -> list[str]:
    """Where the model does not predict bases there are none."""
    return [] if value is None else [f"{value:.4f} bits/base"]


def print_summary(run_dir: RunDir) -> None:
    """The figures that rank 0 left at the end of a run, and where everything lies."""
    told = run_dir.read_status().get("summary")
    summary: Mapping[str, Any] = told if isinstance(told, dict) else {}
    for name, value in summary.items():
        say(f"{name:<28} {_number(value, '.4f' if isinstance(value, float) else '')}")
    say(f"{'run directory':<28} {run_dir.path}")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
