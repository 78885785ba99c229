"""Lines for whoever watches; a run does not end because nobody does any more."""

import os
import sys


def say(line: str) -> None:
    """Print a line at once. Once it cannot be written (a closed pipe, a full disk), nothing more is shown."""
    try:
        print(line, flush=True)
    except OSError:
        silence()


def silence() -> None:
    """Let standard output lead nowhere, for what is printed from now on and for what is still to be flushed."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
