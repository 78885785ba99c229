"""A rank that makes no progress ends itself in time, and says where it hangs."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from launcher.rundir import RunDir
from tests.small import offer

STALLS = """
    import sys, time
    from launcher.worker.watchdog import Watchdog

    def slow_file_system():
        time.sleep(60)

    with Watchdog(float(sys.argv[1]), lambda reason: print(reason, flush=True)) as watchdog:
        for number in range(4):
            watchdog.beat(f"step {number + 1}")
            time.sleep(0.3)
        slow_file_system()
"""


def stall(timeout_s: float) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", textwrap.dedent(STALLS), str(timeout_s)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=50)


def test_what_makes_progress_lives_and_what_stalls_ends_with_the_step_and_its_stack() -> None:
    """Four beats take longer than the time allowed for one."""
    done = stall(0.9)
    assert done.returncode == 1
    assert done.stdout.startswith("made no progress for 0.9 s in step 4, at ")
    assert done.stdout.endswith("(train.step_timeout)\n")
    assert "in slow_file_system" in done.stderr


COMMAND = (
    "+experiment=dna_8k data=lambda data.sequence_length=128 data.num_workers=0 --config-dir conf model=net "
    "batch.train_batch_size=4 cluster.ranks_per_node=2 train.max_steps=2000 train.eval_every=null "
    "train.step_timeout=20 logging=none hydra.run.dir=run"
)

NETS = """
import os, signal, torch
from pathlib import Path

class Net(torch.nn.Module):
    '''Rank 1 stops itself in its third step, without a word.'''

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(17, 17)
        self.passes = 0

    def forward(self, tokens):
        self.passes += 1
        if self.passes == 6 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        return self.embed(tokens)
"""


@pytest.mark.ranks
def test_a_rank_that_has_stopped_is_named_within_the_time_out_and_nothing_is_left(tmp_path: Path) -> None:
    offer(tmp_path, NETS)
    words = COMMAND.split()
    process = subprocess.Popen(
        [sys.executable, "-m", "launcher", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    run_dir = RunDir(tmp_path / "run")
    while process.poll() is None and run_dir.last_step() < 2:
        time.sleep(0.1)
    start = time.monotonic()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1, errors
    assert errors.startswith("rank 1 failed: no sign of life (log: ")
    assert time.monotonic() - start < 20 + 25, "the time-out, and what it takes to end the ranks"
    log = run_dir.log(0).read_text()
    assert "all_reduce" in log, "the stack of the rank that waited"
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and str(tmp_path) in _command(pid)]
    assert run_dir.read_status()["state"] == "failed"


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
