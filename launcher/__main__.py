"""The command line: ``python -m launcher [+experiment=NAME] [group=option ...] [key=value ...]``."""

import gc
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from launcher import output
from launcher.errors import EXIT_DONE, EXIT_INTERRUPTED, RequestError, RunError
from launcher.schema import Mode


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line asks for; returns the exit code."""
    try:
        act(sys.argv[1:] if argv is None else argv)
    except (RequestError, RunError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            traceback.print_exc()
        print(error, file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # what was to be shown is not wanted any more
        output.silence()
    except KeyboardInterrupt:
        print("stopped by SIGINT", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_DONE


def act(argv: Sequence[str]) -> None:
    with _quick():
        # Imported in here, since most of what is made on the way to a plan is modules.
        from launcher import job
        from launcher.compose import Composer, is_sweep

        composer = Composer(argv)
        if composer.only_shows:
            composer.show()
            return
        cfg = composer.compose()
        run = None if is_sweep(cfg) else job.prepare(composer.single(cfg))
    if run is None:
        from launcher import sweep

        sweep.run(composer, cfg)
    elif run.config.mode is Mode.PLAN:
        job.show(run)
    else:
        job.run(run)


@contextmanager
def _quick() -> Iterator[None]:
    """Collect no garbage: hardly anything is garbage before a run starts, and looking takes a tenth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


if __name__ == "__main__":
    sys.exit(main())
