"""What a rank is told by whoever started it, in the environment names that torch uses."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

STORE_FD = "OKAZAKI_STORE_FD"
"""Rank 0 of a local run inherits the listening socket of the rendezvous here, so that no two runs can share a port."""


@dataclass(frozen=True)
class Rank:
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int
    store_fd: int | None

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def from_environment(environment: Mapping[str, str] = os.environ) -> Rank:
    """The rank that this process is; raises KeyError naming the variable that its launcher did not set."""
    fd = environment.get(STORE_FD)
    return Rank(
        rank=int(environment["RANK"]),
        local_rank=int(environment["LOCAL_RANK"]),
        world_size=int(environment["WORLD_SIZE"]),
        local_world_size=int(environment["LOCAL_WORLD_SIZE"]),
        master_addr=environment["MASTER_ADDR"],
        master_port=int(environment["MASTER_PORT"]),
        store_fd=None if fd is None else int(fd),
    )
