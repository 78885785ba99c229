"""How many GPUs this machine offers, found without torch."""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
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


def kinds(environment: Mapping[str, str] = os.environ) -> str:
    """The kinds of the visible devices and their memory, as the driver words them; or what memory this machine has."""
    if visible_gpus(environment):
        query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
        if chosen := environment.get("CUDA_VISIBLE_DEVICES"):
            query += ["-i", chosen]
        answer = subprocess.run(query, check=False, capture_output=True, text=True, timeout=60)
        return " + ".join(sorted(set(answer.stdout.splitlines())))
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"CPU, {gib:.0f} GiB"


def operators_folder() -> Path:
    """Where torch keeps what it compiles for this environment on this kind of node.

    A home folder may be shared by nodes with other processors, which could not execute it.
    """
    processor = next((line for line in _lines_of("/proc/cpuinfo") if line.startswith(("model name", "CPU part"))), "")
    facts = [sys.prefix, platform.machine(), processor, kinds() if visible_gpus() else "", platform.python_version()]
    facts += [metadata.version(package) for package in ("torch", "deepspeed")]
    key = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    users = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(users).expanduser() / "okazaki" / "operators" / key


def _lines_of(file: str) -> list[str]:
    try:
        return Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


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
