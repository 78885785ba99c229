"""The command line: ``python -m launcher [+experiment=NAME] [group=option ...] [key=value ...]``."""

import gc
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from launcher import output
from launcher.errors import EXIT_DONE, EXIT_INTERRUPTED, RequestError, RunError
from launcher.schema import Mode

LAUNCHERS = {"srun": "SLURM_STEP_NUM_TASKS", "torchrun": "LOCAL_WORLD_SIZE", "mpirun": "OMPI_COMM_WORLD_SIZE"}
"""Programs that start others many times, and where they say how often."""


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line asks for; returns the exit code."""
    output.open_what_is_closed()
    try:
        act(sys.argv[1:] if argv is None else argv)
    except (RequestError, RunError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            traceback.print_exc()
        output.complain(error)
        return error.exit_code
    except BrokenPipeError:  # what was to be shown is not wanted any more
        output.silence()
    except KeyboardInterrupt:
        output.complain("stopped by SIGINT")
        return EXIT_INTERRUPTED
    return EXIT_DONE


def act(argv: Sequence[str]) -> None:
    _refuse_many(os.environ)
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


def _refuse_many(environment: Mapping[str, str]) -> None:
    """This program starts the ranks itself: where another launcher has started it as one of several, there would be N
    runs of N ranks. Raises RequestError."""
    for launcher, variable in LAUNCHERS.items():
        number = environment.get(variable, "1")
        if number.isdigit() and int(number) > 1:
            raise RequestError(
                f"{launcher} has started this program {number} times ({variable}), and each would start a run of its "
                f"own: start it once, without {launcher}; cluster=slurm submits it"
            )


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
