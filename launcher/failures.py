"""Why a run failed, from what its ranks have noted: the first of them is the cause, the others lost their peer."""

import json
import re
from typing import NamedTuple

from launcher.errors import OutOfMemoryError, RequestError, RunError
from launcher.rundir import MEMORY, REQUEST, RunDir

LOST_A_PEER = re.compile(
    r"Connection (reset|closed) by peer|remote process exited|Broken pipe|waited for other ranks|another rank was",
    re.IGNORECASE,
)
"""What gloo and NCCL say on a rank whose peer is gone, and this program on one that got no answer or fails with it."""


PORT_TAKEN = re.compile("EADDRINUSE|address already in use", re.IGNORECASE)
"""What torch says on rank 0 where it cannot listen."""


class Failure(NamedTuple):
    """Of one rank; the smallest one is the first."""

    lost_a_peer: bool
    time: float
    """Seconds since the epoch."""
    rank: int
    kind: str
    reason: str
    signal: str | None = None
    """That had asked this rank to stop by then."""

    @property
    def stopped_by(self) -> str | None:
        """What this rank was to heed at the end of a step that did not fit into its memory. Only the first failure
        counts: ranks whose peers have failed are ended by signals too."""
        return f"{self.signal} to rank {self.rank}" if self.kind == MEMORY and self.signal is not None else None


def noted(run_dir: RunDir, rank: int) -> Failure | None:
    """What a rank has left, if it came to that."""
    path = run_dir.failure(rank)
    if not path.exists():
        return None
    note = json.loads(path.read_text(encoding="utf-8"))
    reason = str(note["reason"])
    return Failure(
        LOST_A_PEER.search(reason) is not None, float(note["time"]), rank, str(note["kind"]), reason, note.get("signal")
    )


def error(first: Failure, run_dir: RunDir) -> RequestError | RunError:
    """What the run ends with."""
    if first.kind == REQUEST:
        return RequestError(*first.reason.splitlines())
    kind = OutOfMemoryError if first.kind == MEMORY else RunError
    return kind(f"rank {first.rank} failed: {first.reason} (log: {run_dir.log(first.rank)})")
