"""The command line: ``python -m launcher [+experiment=NAME] [group=option ...] [key=value ...]``."""

import os
import sys
import traceback
from collections.abc import Sequence

from launcher import job
from launcher.compose import Composer, is_sweep
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
    except KeyboardInterrupt:
        print("stopped by SIGINT", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_DONE


def act(argv: Sequence[str]) -> None:
    composer = Composer(argv)
    if composer.only_shows:
        composer.show()
        return
    cfg = composer.compose()
    if is_sweep(cfg):
        from launcher import sweep

        sweep.run(composer, cfg)
        return
    run = job.prepare(composer.single(cfg))
    if run.config.mode is Mode.PLAN:
        job.show(run)
    else:
        job.run(run)


if __name__ == "__main__":
    sys.exit(main())
