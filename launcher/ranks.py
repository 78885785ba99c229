"""What a rank is told by whoever started it, in the environment names that torch uses."""

import os
from collections.abc import MutableMapping
from dataclasses import dataclass

STORE_FD = "OKAZAKI_STORE_FD"
"""Rank 0 of a local run inherits the listening socket of the rendezvous here, so that no two runs can share a port."""

ATTEMPT = "OKAZAKI_ATTEMPT"
"""Of a Slurm job: its id, and how often it was started again."""

SLURM = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS"}
"""What torch reads, and where Slurm says it to a task."""


@dataclass(frozen=True)
class Rank:
    rank: int
    local_rank: int
    world_size: int
    master_addr: str
    master_port: int
    store_fd: int | None
    attempt: str | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def from_environment(environment: MutableMapping[str, str] = os.environ) -> Rank:
    """The rank that this process is; completes the environment of a task of Slurm.

    Raises KeyError naming the variable that its launcher did not set.
    """
    if ATTEMPT in environment:
        for name, of_slurm in SLURM.items():
            environment[name] = environment[of_slurm]
        environment.setdefault("OMP_NUM_THREADS", environment.get("SLURM_CPUS_PER_TASK", "1"))
    fd = environment.get(STORE_FD)
    return Rank(
        rank=int(environment["RANK"]),
        local_rank=int(environment["LOCAL_RANK"]),
        world_size=int(environment["WORLD_SIZE"]),
        master_addr=environment["MASTER_ADDR"],
        master_port=int(environment["MASTER_PORT"]),
        store_fd=None if fd is None else int(fd),
        attempt=environment.get(ATTEMPT),
    )
