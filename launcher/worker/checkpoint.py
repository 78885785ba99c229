"""Checkpoints by DeepSpeed's own save: complete or not there, loadable into the same cut."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from launcher import rundir
from launcher.worker.engine import Engine

PARTIAL = ".partial"


def save(engine: Engine, folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write ``folder/step_00000010`` after step 10; collective over all ranks.

    Written aside, renamed when every rank has written its part, and only then named by ``latest``.
    """
    final = folder / f"step_{step:08d}"
    aside = folder / (final.name + PARTIAL)
    if dist.get_rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)
    dist.barrier()
    engine.deepspeed.save_checkpoint(str(folder), tag=aside.name, client_state=state, save_latest=False)
    dist.barrier()
    if dist.get_rank() == 0:
        os.rename(aside, final)
        rundir.write_text(folder / "latest", final.name)
    dist.barrier()
    return final
