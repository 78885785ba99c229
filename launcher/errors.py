"""The errors that this program raises on purpose, and the exit code of each."""

import difflib
from collections.abc import Iterable

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_PREEMPTED = 75
EXIT_INTERRUPTED = 130


class RequestError(Exception):
    """What the user asked for cannot be done; nothing was started, submitted or written (exit code 2).

    ``faults`` holds one line for each fault: the key, the value, the rule and the remedy.
    """

    exit_code = EXIT_REFUSED

    def __init__(self, *faults: str) -> None:
        super().__init__("\n".join(faults))
        self.faults = list(faults)


class RunError(Exception):
    """A run that had started failed (exit code 1); the message names the rank and the reason."""

    exit_code = EXIT_FAILED


class OutOfMemoryError(RunError):
    """A micro-batch was too large for the memory of a rank; a smaller one may do."""


class RunStoppedError(RunError):
    """A run that a signal has stopped; what was to come after it is not started."""


class RunPreemptedError(RunStoppedError):
    """A run that was stopped by a signal, is saved and can be continued (exit code 75)."""

    exit_code = EXIT_PREEMPTED


class RunInterruptedError(RunStoppedError):
    """A run that was stopped at once, with nothing saved: exit code 130 for an interrupt, 1 for any other signal."""

    def __init__(self, signal_name: str) -> None:
        super().__init__(f"stopped by {signal_name}")
        if signal_name == "SIGINT":
            self.exit_code = EXIT_INTERRUPTED


def nearest(word: str, known: Iterable[str]) -> str:
    """``"; nearest: NAME"`` for the known names closest to a misspelt one, or an empty string."""
    names = difflib.get_close_matches(word, list(known), n=3, cutoff=0.6)
    return f"; nearest: {', '.join(names)}" if names else ""
