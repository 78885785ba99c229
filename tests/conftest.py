"""What holds for all tests."""

import signal
from collections.abc import Iterator

import pytest

# Started in the background or under nohup, pytest inherits signals that are ignored, and so would the programs under
# test, which leave an ignored signal ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """A run that a signal has stopped leaves further ones ignored, for its process is about to end."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
