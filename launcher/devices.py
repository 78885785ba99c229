"""How many GPUs this machine offers, found without torch."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

DEVICES = Path("/dev")


def visible_gpus(environment: Mapping[str, str] = os.environ) -> int:
    """GPUs that a process started with this environment can use; 0 on a machine without any.

    ``CUDA_VISIBLE_DEVICES`` counts first, as in CUDA: entries after one that is not valid are not seen. Without it
    the driver is asked, and where it has no tool, the device files are counted.
    """
    if not _nvidia_files() and shutil.which("nvidia-smi") is None:
        return 0
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        entries = [entry.strip() for entry in chosen.split(",")]
        valid = [re.fullmatch(r"\d+|(GPU|MIG)-.+", entry) is not None for entry in entries]
        return valid.index(False) if False in valid else len(valid)
    return _gpus_of_the_driver()


def _gpus_of_the_driver() -> int:
    try:
        answer = subprocess.run(["nvidia-smi", "-L"], check=False, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return len(_nvidia_files())
    if answer.returncode != 0:
        return len(_nvidia_files())
    return sum(line.startswith("GPU ") for line in answer.stdout.splitlines())


def _nvidia_files() -> list[Path]:
    return [path for path in DEVICES.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
