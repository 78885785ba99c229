"""The wish that a run stops, by a signal to any of its ranks; training heeds it where a step ends.

Nothing is imported here that takes time: until the handlers are there a signal kills.
"""

import os
import signal
from types import FrameType

from launcher.errors import EXIT_INTERRUPTED

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)

_caught: list[signal.Signals] = []


def listen() -> None:
    """From now on a signal only notes the wish; a second SIGINT ends this process at once."""
    for number in SIGNALS:
        signal.signal(number, _note)


def ignore() -> None:
    """For the processes that read data, which their rank ends, and for a rank that has done its work."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def wanted() -> str | None:
    """The name of the first signal that came to this rank."""
    return _caught[0].name if _caught else None


def _note(number: int, _: FrameType | None) -> None:
    if number == signal.SIGINT and signal.SIGINT in _caught:
        os._exit(EXIT_INTERRUPTED)
    _caught.append(signal.Signals(number))
