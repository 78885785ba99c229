"""What the user sees while files are read: nothing for a second, then a bar on a terminal, or one plain line."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.output import complain

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

PATIENCE_S = 1.0


class Progress:
    """Counts the bytes of ``files`` that have been read; shown on standard error."""

    def __init__(self, activity: str, files: Sequence[Path]) -> None:
        self._text = f"{activity} {files[0]}" + (f" and {len(files) - 1} more" if len(files) > 1 else "")
        self._files = files
        self._started = time.monotonic()
        self._is_shown = False
        self._bar: Bar | None = None
        self._done = 0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        if not self._is_shown and time.monotonic() - self._started > PATIENCE_S:
            self._is_shown = True
            self._show()
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=self._done)

    def _show(self) -> None:
        is_known = all(file.is_file() for file in self._files)
        total = sum(file.stat().st_size for file in self._files) if is_known else None
        if not sys.stderr.isatty():
            size = f" ({total:,} bytes)" if total is not None else ""
            complain(f"{self._text}{size}")
            return
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._bar.add_task(self._text, total=total)
        self._bar.start()
