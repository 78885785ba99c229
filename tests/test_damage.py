"""Whole commands whose checkpoints are damaged, or cannot be written: what is said, what is taken, and that it is the
same run in the end.

``python -m tests.test_damage`` prints the lines, and as root tries a file system that is full and one that turns
read-only too.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks import chaos
from launcher.rundir import RunDir
from tests.small import offer

pytestmark = pytest.mark.ranks

STEPS, EVERY, TROUBLE, OVER = 8, 2, 4, 6
"""Steps of a run, and between two checkpoints; the steps in which trouble with the disk begins and ends."""

NETS = """
import os, resource, threading
from pathlib import Path
from tests.small import SmallNet

PASSES, TROUBLE, OVER = 2, 4, 6

class Net(SmallNet):
    '''Makes trouble with the disk in its own rank, between two steps.'''

    def __init__(self):
        super().__init__()
        self.passes = 0

    def forward(self, tokens):
        step, rest = divmod(self.passes, PASSES)
        self.passes += 1
        if rest == 0:
            for thread in threading.enumerate():  # a checkpoint that was begun before is written
                if thread.name == "checkpoint":
                    thread.join()
            if step + 1 in (TROUBLE, OVER):
                kind, rank = os.environ.get("TROUBLE", "none:0").split(":")
                if os.environ["RANK"] == rank:
                    make(kind, step + 1 == TROUBLE)
        return super().forward(tokens)

def make(kind, begins):
    folder = Path(os.environ["CHECKPOINTS"])
    if kind == "read_only":
        folder.chmod(0o555 if begins else 0o755)
    elif kind == "limited":  # files of this rank may not grow beyond
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000 if begins else -1, -1))
    elif kind == "full":
        if begins:
            with (folder / "filler").open("wb", buffering=0) as filler:
                try:
                    while True:
                        filler.write(bytes(4096))
                except OSError:
                    pass
        else:
            (folder / "filler").unlink()
    elif kind == "remounted":
        assert os.system(f"mount -o remount,{'ro' if begins else 'rw'} '{folder}'") == 0
"""

COMMAND = (
    "+experiment=dna_8k data=lambda data.sequence_length=128 data.validation=null --config-dir conf model=net "
    "batch.train_batch_size=8 batch.gradient_accumulation_steps=2 cluster.ranks_per_node=2 "
    f"train.max_steps={STEPS} checkpoint.every={EVERY} checkpoint.keep=null optimizer.lr=1e-3 "
    "lr_schedule.warmup_steps=2 logging=none"
)

AS_EVERYBODY = (
    "import ctypes, os, sys; [ctypes.CDLL(None).prctl(24, right) for right in (1, 2)]; os.execv(*eval(sys.argv[1]))"
)
"""Without the rights of root to read and write what its mode forbids (prctl(PR_CAPBSET_DROP, CAP_DAC_...))."""


class Damage(NamedTuple):
    do: Callable[[Path], None]
    """To the folder of checkpoints, whose newest is of step 6."""
    taken: int
    """The step of the checkpoint that the run goes on from."""
    said: str
    """Of the newest, or of ``latest``."""


def flip(file: Path) -> None:
    contents = bytearray(file.read_bytes())
    contents[-100] ^= 1
    file.write_bytes(contents)


NEWEST = "step_00000006"

DAMAGES = {
    "empty_latest": Damage(lambda folder: os.truncate(folder / "latest", 0), 6, "latest is empty"),
    "flipped_byte": Damage(
        lambda folder: flip(folder / NEWEST / "rank_00001.safetensors"),
        4,
        f"{NEWEST} cannot be used: rank_00001.safetensors has changed since it was written",
    ),
    "truncated_shard": Damage(
        lambda folder: os.truncate(folder / NEWEST / "rank_00001.safetensors", 1000),
        4,
        f"{NEWEST} cannot be used: rank_00001.safetensors has 1000 bytes instead of ",
    ),
    "deleted_shard": Damage(
        lambda folder: (folder / NEWEST / "rank_00000.safetensors").unlink(),
        4,
        f"{NEWEST} cannot be used: rank_00000.safetensors is missing",
    ),
    "deleted_manifest": Damage(
        lambda folder: (folder / NEWEST / "checkpoint.json").unlink(),
        4,
        f"{NEWEST} cannot be used: it has no checkpoint.json",
    ),
}

TROUBLES = {
    "read_only:0": "rank 0: [Errno 13] Permission denied: ",
    "limited:1": "rank 1: ",
}
"""What a rank does to the disk, and how the reason begins."""

MOUNTED = {"full:0": "rank ", "remounted:0": "rank 0: [Errno 30] Read-only file system: "}
"""The same on a file system of its own."""


def launch(folder: Path, name: str, trouble: str = "none:0") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "launcher", *COMMAND.split(), f"hydra.run.dir={name}"]
    checkpoints = RunDir(folder / name).checkpoints
    return subprocess.run(
        [sys.executable, "-c", AS_EVERYBODY, repr((command[0], command))]
        if trouble.startswith("read_only")
        else command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TROUBLE": trouble, "CHECKPOINTS": str(checkpoints)},
        check=False,
        capture_output=True,
        text=True,
    )


def interrupted(folder: Path, name: str) -> Path:
    """The run that was done, as it was after step 6; returns its folder of checkpoints."""
    shutil.copytree(folder / "whole", folder / name)
    checkpoints = RunDir(folder / name).checkpoints
    shutil.rmtree(checkpoints / f"step_{STEPS:08d}")
    (checkpoints / "latest").write_text(f"{NEWEST}\n")
    return checkpoints


def lines(run_dir: RunDir, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


def last_weights(run_dir: RunDir) -> chaos.Arrays:
    assert chaos.newest(run_dir.path).name == f"step_{STEPS:08d}"
    return chaos.read(chaos.newest(run_dir.path))


def manifests(run_dir: RunDir) -> dict[str, str]:
    return {path.parent.name: path.read_text() for path in run_dir.checkpoints.glob("step_*/checkpoint.json")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = offer(tmp_path_factory.mktemp("here"), NETS)
    done = launch(folder, "whole")
    assert done.returncode == 0, done.stderr
    return folder


def short(names: Iterable[str], slow: Collection[str]) -> list[Any]:
    """Each starts the program once and takes its seconds: ``slow`` ones are left to make test-full."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in slow)) for name in names]


@pytest.mark.parametrize("name", short(DAMAGES, {"truncated_shard", "deleted_shard"}))
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(folder: Path, name: str) -> None:
    damage, run_dir = DAMAGES[name], RunDir(folder / name)
    damage.do(interrupted(folder, name))
    done = launch(folder, name)
    assert done.returncode == 0, done.stderr
    assert damage.said in done.stdout
    taken = [line for line in done.stdout.splitlines() if line.startswith("going on from ")]
    assert f"step_{damage.taken:08d}" in taken[-1], "the last word on it"
    again = [line["step"] for line in lines(run_dir, "train") if line["attempt"] == 2]
    assert again == list(range(damage.taken + 1, STEPS + 1))
    assert chaos.relative_error(last_weights(run_dir), last_weights(RunDir(folder / "whole"))) <= chaos.BOUND
    assert chaos.complete(run_dir.path) >= {2, 4, 6, 8} - ({6} if damage.taken == 4 else set())


@pytest.mark.parametrize("trouble", short(TROUBLES, {"read_only:0"}))
def test_a_save_that_fails_is_reported_and_the_run_goes_on(folder: Path, trouble: str) -> None:
    name = trouble.partition(":")[0]
    done = launch(folder, name, trouble)
    check_trouble(RunDir(folder / name), done, TROUBLES[trouble])
    assert chaos.relative_error(last_weights(RunDir(folder / name)), last_weights(RunDir(folder / "whole"))) == 0


def check_trouble(run_dir: RunDir, done: "subprocess.CompletedProcess[str]", reason: str) -> None:
    """The save of step 4 failed, which the metrics and the launcher say, and nothing else did."""
    assert done.returncode == 0, done.stderr
    faults = {line["step"]: line["fault"] for line in lines(run_dir, "checkpoint")}
    assert [step for step in faults if faults[step] is not None] == [TROUBLE]
    assert faults[TROUBLE].startswith(reason)
    assert sorted(faults) == [2, 4, 6, 8]
    assert chaos.complete(run_dir.path) == {2, 6, 8}, "those before and after are whole"
    assert sorted(path.name for path in run_dir.checkpoints.iterdir()) == [
        "latest", "step_00000002", "step_00000006", "step_00000008",
    ]  # fmt: skip
    assert [line["step"] for line in lines(run_dir, "train")] == list(range(1, STEPS + 1))
    assert run_dir.read_status()["state"] == "completed"
    assert f"step {TROUBLE} could not be saved ({faults[TROUBLE]})" in done.stdout.splitlines()


def main() -> None:
    with tempfile.TemporaryDirectory() as here:
        folder = offer(Path(here), NETS)
        assert launch(folder, "whole").returncode == 0
        for name, damage in DAMAGES.items():
            damage.do(interrupted(folder, name))
            show(name, launch(folder, name), RunDir(folder / name))
        for trouble in (*TROUBLES, *MOUNTED):
            checkpoints = RunDir(folder / trouble).checkpoints
            if trouble in MOUNTED:
                checkpoints.mkdir(parents=True)
                mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(checkpoints)]
                if subprocess.run(mount, check=False).returncode != 0:
                    print(f"\n{trouble}: nothing can be mounted here")
                    continue
            show(trouble, launch(folder, trouble, trouble), RunDir(folder / trouble))
            if trouble in MOUNTED:
                subprocess.run(["umount", str(checkpoints)], check=True)


def show(name: str, done: "subprocess.CompletedProcess[str]", run_dir: RunDir) -> None:
    whole = RunDir(run_dir.path.with_name("whole"))
    error = chaos.relative_error(last_weights(run_dir), last_weights(whole)) if done.returncode == 0 else float("nan")
    faults = [f"step {line['step']}: {line['fault']}" for line in lines(run_dir, "checkpoint") if line["fault"]]
    said = [line for line in done.stdout.splitlines() if line.startswith("going on") or "could not" in line]
    print(f"\n{name}: exit code {done.returncode}, error of the parameters {error:.1e}")
    print("\n".join([f"  said: {line}" for line in said] + [f"  metrics: {fault}" for fault in faults]))
    print(f"  complete: {sorted(chaos.complete(run_dir.path))} {done.stderr.strip()}")


if __name__ == "__main__":
    main()
