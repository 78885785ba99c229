"""What a rank runs: the only part of this program that imports torch and deepspeed."""

import os
import sys
from pathlib import Path

from launcher import devices, ranks

# DeepSpeed compiles with the ninja that it finds first. That of this Python's environment is always there; two kinds in
# turn would compile every operator again.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])

# Operators lie in the environment from whose sources they were compiled: in one folder for all of a user's environments
# each would compile over those of the others.
if ranks.ATTEMPT in os.environ:  # nodes of several kinds may share one environment
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(devices.operators_folder()))
elif os.access(sys.prefix, os.W_OK):
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
