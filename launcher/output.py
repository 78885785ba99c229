"""Lines for whoever watches; a run does not end because nobody does any more."""

import os
import sys
from typing import TextIO


def say(line: str) -> None:
    """Print a line at once. Once it cannot be written (a closed pipe, a full disk), nothing more is shown."""
    try:
        print(line, flush=True)
    except OSError:
        silence()


def complain(line: object) -> None:
    """The same on standard error."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        silence(sys.stderr)


def silence(stream: TextIO | None = None) -> None:
    """Let standard output, or another stream, lead nowhere, for what is printed from now on and for what is still to be
    flushed."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, (stream or sys.stdout).fileno())
    os.close(nowhere)


def open_what_is_closed() -> None:
    """A program that was started without standard output or standard error writes into nothing."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for as long as the program runs
