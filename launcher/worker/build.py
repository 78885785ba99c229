"""Build the operators that DeepSpeed compiles at first use, with a word to the user: it takes a minute, once.

python -m launcher.worker.build        # what every run on CPU ranks needs
"""

import fcntl
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.utils.cpp_extension
from deepspeed.accelerator import get_accelerator

from launcher.errors import RequestError

OPERATORS = {
    "ShareMemCommBuilder": "shared-memory collective",
    "CPUAdamBuilder": "AdamW for offloaded optimizer states",
    "PinMemoryBuilder": "pinned host memory",
    "AsyncIOBuilder": "asynchronous NVMe access",
}
"""What DeepSpeed calls the builder, and what it is."""

NEEDS = {"AsyncIOBuilder": "libaio with its headers (Debian: libaio-dev)"}
"""What has to be installed for it, beside a C++ compiler."""


def needed(values: Mapping[str, Any]) -> list[str]:
    """The builders that a run with this DeepSpeed JSON uses."""
    zero = values["zero_optimization"]
    optimizer, parameters = (zero.get(key, {}).get("device", "none") for key in ("offload_optimizer", "offload_param"))
    builders = ["ShareMemCommBuilder"] if get_accelerator().device_name() == "cpu" else []
    if optimizer != "none":
        builders.append("CPUAdamBuilder")
    if "nvme" in (optimizer, parameters):
        builders += ["PinMemoryBuilder", "AsyncIOBuilder"]
    return builders


def build(builders: list[str], tell: Callable[[str], None]) -> None:
    """Load the operators, compiling what is not there yet; ranks that ask for the same one at once take turns.

    Raises RequestError for one that cannot be built on this machine.
    """
    for name in builders:
        builder = get_accelerator().create_op_builder(name)
        folder = Path(torch.utils.cpp_extension._get_build_directory(builder.name, False))
        with open(folder / "turn", "w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            # torch's own lock outlives a process that is killed, and would be waited for without end.
            (folder / "lock").unlink(missing_ok=True)
            if not (folder / f"{builder.name}.so").exists():
                if not builder.is_compatible(verbose=False):
                    raise RequestError(
                        f"DeepSpeed's {OPERATORS[name]} cannot be built on this machine: "
                        f"install {NEEDS.get(name, 'a C++ compiler')}"
                    )
                tell(f"building DeepSpeed's {OPERATORS[name]}, once in this environment (a minute or more)")
            try:
                builder.load(verbose=False)
            except Exception as error:
                raise RequestError(
                    f"DeepSpeed's {OPERATORS[name]} could not be built: {str(error).strip().splitlines()[0]}"
                    " (what the compiler said is in the log of the rank)"
                ) from error


if __name__ == "__main__":
    try:
        build(sys.argv[1:] or needed({"zero_optimization": {}}), lambda line: print(line, flush=True))
    except RequestError as error:
        sys.exit(str(error))
