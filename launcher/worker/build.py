"""Build the operators that DeepSpeed compiles at first use, with a word to the user: it takes a minute, once.

python -m launcher.worker.build        # what every run on CPU ranks needs
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.utils.cpp_extension
from deepspeed.accelerator import get_accelerator

OPERATORS = {
    "ShareMemCommBuilder": "shared-memory collective",
    "CPUAdamBuilder": "AdamW for offloaded optimizer states",
    "AsyncIOBuilder": "asynchronous NVMe access",
}
"""What DeepSpeed calls the builder, and what it is."""


def needed(values: Mapping[str, Any]) -> list[str]:
    """The builders that a run with this DeepSpeed JSON uses."""
    zero = values["zero_optimization"]
    devices = {zero.get(key, {}).get("device", "none") for key in ("offload_optimizer", "offload_param")}
    builders = ["ShareMemCommBuilder"] if get_accelerator().device_name() == "cpu" else []
    if zero.get("offload_optimizer", {}).get("device", "none") != "none":
        builders.append("CPUAdamBuilder")
    if "nvme" in devices:
        builders.append("AsyncIOBuilder")
    return builders


def build(builders: list[str], tell: Callable[[str], None]) -> None:
    """Compile what is not there yet; ranks that ask for the same one at once wait for the first."""
    for name in builders:
        builder = get_accelerator().create_op_builder(name)
        folder = Path(torch.utils.cpp_extension._get_build_directory(builder.name, False))
        if not (folder / f"{builder.name}.so").exists():
            tell(f"building DeepSpeed's {OPERATORS[name]}, once on this machine (a minute or more)")
        builder.load()


if __name__ == "__main__":
    build(sys.argv[1:] or needed({"zero_optimization": {}}), lambda line: print(line, flush=True))
