"""What holds for all tests."""

import signal

# Started in the background or under nohup, pytest inherits signals that are ignored, and so would the programs under
# test, which leave an ignored signal ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
