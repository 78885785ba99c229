"""Copies what all ranks read at random onto the disk of their node, once for each node."""

import fcntl
import os
import shutil
from pathlib import Path

from launcher.errors import RequestError


def stage(folder: Path, to: str) -> Path:
    """The copy of ``folder``, whose name tells its contents, under ``to`` on this node's disk.

    The ranks of a node take turns, and the first one copies. Raises RequestError where ``to`` cannot be written.
    """
    root = Path(os.path.expandvars(to), "okazaki")
    copy = root / folder.name
    aside = root / f"{folder.name}.partial"
    try:
        if not root.is_absolute():
            raise OSError("it stands for no absolute path on this node")
        root.mkdir(parents=True, exist_ok=True)
        with (root / f"{folder.name}.turn").open("w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            if not copy.exists():
                shutil.rmtree(aside, ignore_errors=True)
                shutil.copytree(folder, aside)
                aside.rename(copy)
    except OSError as error:
        reason = error.strerror or error
        raise RequestError(
            f"cluster.stage_to={to}: {reason} ({root}); name a folder on the node's disk, or null"
        ) from None
    return copy
