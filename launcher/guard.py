"""Ends the ranks of a launcher that is gone, however it went: also by SIGKILL.

Run as a program it reads process groups from its standard input, ``+PID`` for one that began and ``-PID`` for one
that ended, and when the input closes, since the launcher is gone, it ends those that are left.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

NOW = signal.SIGALRM
"""To end at once. What asks a rank to stop, it takes its time to heed; this one kills what does not know it."""

GRACE_S = 5.0
"""What a process has between NOW and SIGKILL."""

POLL_S = 0.02


def end(groups: Collection[int], hurry: Callable[[], bool] = lambda: False) -> None:
    """NOW to the process groups, and SIGKILL to what is left after GRACE_S, or as soon as ``hurry`` says so."""
    deadline = time.monotonic() + GRACE_S
    _kill(living(groups), NOW)
    while (left := living(groups)) and time.monotonic() < deadline and not hurry():
        time.sleep(POLL_S)
    _kill(left, signal.SIGKILL)


def living(groups: Collection[int]) -> set[int]:
    """Those of the process groups that have a member which is not a zombie."""
    found: set[int] = set()
    if not groups:
        return found
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):  # it ended while we looked
            continue
        # pid (name) state parent group ...; the name may hold spaces and brackets.
        state, _, group = text.rpartition(")")[2].split()[:3]
        if state not in "ZX" and int(group) in groups:
            found.add(int(group))
    return found


def _kill(groups: Collection[int], number: signal.Signals) -> None:
    for group in groups:
        try:
            os.killpg(group, number)
        except ProcessLookupError:  # it ended first
            continue


def main() -> None:
    groups: set[int] = set()
    for line in sys.stdin:
        if line.startswith("+"):
            groups.add(int(line))
        else:
            groups.discard(-int(line))
    end(groups)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    main()
