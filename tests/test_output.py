"""What is printed, where nobody can read it any more."""

import os
import pty
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]

PROGRAM = """
from launcher.output import complain, say
for _ in range(2):
    say("a line")
    complain("another")
raise SystemExit(75)
"""


def test_a_terminal_that_was_closed_does_not_change_the_exit_code() -> None:
    ours, theirs = pty.openpty()
    os.close(ours)
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=REPOSITORY, stdout=theirs, stderr=theirs, check=False)
    os.close(theirs)
    assert done.returncode == 75


CLOSED = """
import sys
from launcher.output import complain, open_what_is_closed, say
assert sys.stdout is sys.stderr is None
open_what_is_closed()
assert not sys.stdout.isatty()
say("a line")
complain("another")
raise SystemExit(75)
"""


def test_a_program_without_standard_output_and_error_does_what_it_is_told() -> None:
    command = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", sys.executable, "-c", CLOSED]
    assert subprocess.run(command, cwd=REPOSITORY, check=False).returncode == 75
