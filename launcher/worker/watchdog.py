"""Ends a rank that makes no progress: a collective that hangs, a file system that does not answer."""

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType

from launcher.errors import EXIT_FAILED

WAITS = "waited for other ranks"
"""Begins what a rank says that hangs in a collective: another one is the cause."""

COLLECTIVES = ("torch/distributed/", "deepspeed/comm/")


class Watchdog:
    """While it is entered, ``beat`` has to come at least every ``timeout_s``.

    Else the stacks of all threads go to standard error, ``report`` is called with the reason, and the process ends.
    """

    def __init__(self, timeout_s: float | None, report: Callable[[str], None]) -> None:
        self._timeout_s, self._report = timeout_s, report
        self._last = time.monotonic()
        self._doing = "starting"
        self._end = threading.Event()
        self._watched = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self._timeout_s is not None:
            self._last = time.monotonic()
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._end.set()

    def beat(self, doing: str) -> None:
        """There was progress; what comes now is ``doing``."""
        self._last, self._doing = time.monotonic(), doing

    def _watch(self) -> None:
        assert self._timeout_s is not None
        while not self._end.wait(max(0.0, self._last + self._timeout_s - time.monotonic()) + 0.01):
            if time.monotonic() - self._last >= self._timeout_s:
                self._give_up()

    def _give_up(self) -> None:
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        frame = sys._current_frames()[self._watched]
        stack = traceback.extract_stack(frame)
        waits = any(part in entry.filename for entry in stack for part in COLLECTIVES)
        # The innermost line that is the program's own tells more than that of a library.
        own = [entry for entry in stack if "site-packages" not in entry.filename] or stack
        where = f"{os.path.basename(own[-1].filename)}:{own[-1].lineno}"
        what = WAITS if waits else "made no progress"
        self._report(f"{what} for {self._timeout_s:g} s in {self._doing}, at {where} (train.step_timeout)")
        os._exit(EXIT_FAILED)
