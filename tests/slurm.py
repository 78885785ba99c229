"""A real Slurm cluster on this machine, for as long as a test needs it (``slurm/cluster.sh``)."""

import os
import random
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from launcher.schema import Batch, Call, Cluster, ClusterType, Config, Data, Train

SCRIPT = Path(__file__).parents[1] / "slurm" / "cluster.sh"

FASTA = Path(__file__).parent / "data" / "ecoli_short_contigs.fa.gz"

RUN = Config(
    model=Call("launcher.worker.models.hugging_face", {"model_type": "llama", "hidden_size": 32}),
    data=Data(fasta=str(FASTA), sequence_length=300, validation=None),
    batch=Batch(train_batch_size=24),
    train=Train(max_steps=10),
    cluster=Cluster(type=ClusterType.SLURM),
)
"""One for Slurm that is quickly planned."""

PROGRAMS = ("sbatch", "slurmctld", "slurmd", "munged")

PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


def in_ci() -> bool:
    """There, what is missing is a failure."""
    return os.environ.get("CI") == "true"


# On a user's own machine a cluster cannot always be started; where in_ci says so, what is missing fails the tests.
needs_slurm = pytest.mark.skipif(
    (os.getuid() != 0 or any(shutil.which(program, path=PATH) is None for program in PROGRAMS)) and not in_ci(),
    reason=f"it starts a cluster of its own: see the top of {SCRIPT}",
)


class Cluster:
    """A running cluster with its files in ``folder``; the knobs are those of the script, such as ``NODES=2``."""

    def __init__(self, folder: Path, **knobs: str | int) -> None:
        self.folder = folder
        self._knobs = {"NODES": 1, "PORT": _free_ports(16 + int(knobs.get("NODES", 1)))} | knobs

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        self.control("start", environment={name: str(value) for name, value in self._knobs.items()})

    def stop(self) -> None:
        """End all its daemons and jobs; ``folder/log`` stays."""
        self.control("stop")

    def control(self, action: str, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
        """An action of the script, such as ``node-kill n1``; what it printed."""
        command = [str(SCRIPT), action, str(self.folder), *arguments]
        done = subprocess.run(
            command, env=os.environ | (environment or {}), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{action}: {done.stdout}{done.stderr}"
        return done.stdout

    @property
    def environment(self) -> dict[str, str]:
        """This process' environment, with what makes Slurm's programs talk to this cluster, and no other settings."""
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        return plain | {"SLURM_CONF": str(self.folder / "etc" / "slurm.conf")}

    def run(self, *command: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        """A command on the login node of the cluster, with ``text`` as its input."""
        return subprocess.run(
            self.enter(command), env=self.environment, input=text, capture_output=True, text=True, check=False
        )

    def enter(self, command: Sequence[str]) -> list[str]:
        """The command on the login node: only one with a network of its own has to be entered."""
        enters = self._knobs.get("ISOLATION") == "net"
        return [str(SCRIPT), "exec", str(self.folder), *command] if enters else list(command)

    def submit(self, script: str, *options: str) -> str:
        """Submit a script; the id of the job."""
        done = self.run("sbatch", "--parsable", *options, text=script)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def show(self, job: str) -> str:
        """What ``scontrol show job`` says."""
        done = self.run("scontrol", "show", "job", job)
        assert done.returncode == 0, done.stderr
        return done.stdout


def field(job: str, name: str) -> str:
    """A field of what ``scontrol show job`` says: JobName and Comment to the end of their line, others one word."""
    value = {"JobName": "[^\n]*", "Comment": "[^\n]*(?= \n)"}.get(name, r"\S*")
    match = re.search(rf"(?:^|\s){name}=({value})", job)
    assert match is not None, f"no {name} in {job}"
    return match[1]


def _free_ports(num_ports: int) -> int:
    """The first of so many TCP ports in a row that nobody uses now."""
    while True:
        first = random.randrange(20000, 32000)
        try:
            for port in range(first, first + num_ports):
                with socket.socket() as taken:
                    taken.bind(("127.0.0.1", port))
            return first
        except OSError:
            continue
