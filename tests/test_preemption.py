"""Whole commands that a signal stops, and that the same command continues: exit codes, and that nothing is lost."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.rundir import RunDir
from tests.small import offer

pytestmark = pytest.mark.ranks

NETS = """
import atexit, os, signal, subprocess
from pathlib import Path
from tests.small import SmallNet

if os.environ.get("SIGNAL") == f"while rank {os.environ.get('RANK')} leaves":
    signals = f"while kill -USR2 {os.getpid()}; do sleep 0.01; done"
    atexit.register(subprocess.Popen, ["sh", "-c", signals])

class Net(SmallNet):
    '''Sends a signal to its own rank at one of its passes, once.'''

    def __init__(self):
        super().__init__()
        self.passes = {True: 0, False: 0}

    def forward(self, tokens):
        self.passes[self.training] += 1
        sent = Path("sent")
        wish = os.environ.get("SIGNAL", "")
        if ":" in wish and not sent.exists():
            name, rank, mode, number = wish.split(":")
            here = (os.environ["RANK"], "training" if self.training else "evaluation", self.passes[self.training])
            if here == (rank, mode, int(number)):
                sent.write_text("")
                os.kill(os.getpid(), getattr(signal, name))
        return super().forward(tokens)
"""

COMMAND = (
    "+experiment=dna_8k data=lambda data.sequence_length=128 data.num_workers={workers} --config-dir conf model=net "
    "batch.train_batch_size=8 batch.gradient_accumulation_steps=4 cluster.ranks_per_node=2 train.max_steps=6 "
    "train.eval_every=2 checkpoint.every={every} optimizer.lr=1e-3 lr_schedule.warmup_steps=2 logging={logging}"
)
SECRET = "0123456789abcdef0123456789abcdef01234567"
FOUR = 4
"""Passes of a rank in a step."""

CASES = {
    "in the third of four micro-batches": (f"SIGTERM:1:training:{FOUR + 3}", 0, 0, 2),
    "with processes that read ahead": (f"SIGTERM:0:training:{FOUR + 3}", 2, 0, 2),
    "in an evaluation": ("SIGUSR2:1:evaluation:2", 0, 0, 2),
    "while a checkpoint is written": (f"SIGINT:0:training:{2 * FOUR + 1}", 0, 1, 3),
}
"""The signal, processes that read ahead, steps between two checkpoints, and the step at which the run has to stop."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return offer(tmp_path_factory.mktemp("here"), NETS)


def launch(
    folder: Path, name: str, workers: int, every: int, wish: str = "", logging: str = "none", more: str = ""
) -> "subprocess.CompletedProcess[str]":
    words = COMMAND.format(workers=workers, every=every or "null", logging=logging)
    return subprocess.run(
        [sys.executable, "-m", "launcher", *words.split(), *more.split(), f"hydra.run.dir={name}"],
        cwd=folder,
        env={**os.environ, "SIGNAL": wish, "WANDB_MODE": "offline", "WANDB_API_KEY": SECRET},
        check=False,
        capture_output=True,
        text=True,
    )


def lines(run_dir: RunDir) -> dict[tuple[str, int], dict[str, Any]]:
    """By kind and step; the last one counts."""
    found = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]
    return {(line["kind"], line["step"]): line for line in found}


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    done = launch(folder, "whole", workers=0, every=0)
    assert done.returncode == 0, done.stderr
    return lines(RunDir(folder / "whole"))


TRACKED = "in the third of four micro-batches"
"""This one by Weights & Biases too, with a key in the environment."""

SLOW = {"with processes that read ahead", "in an evaluation", "while a checkpoint is written"}
"""Each case starts the program twice; these are left to make test-full."""


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES])
def test_a_run_that_is_stopped_is_saved_and_the_same_command_ends_it_as_if_it_had_not_been(
    folder: Path, whole: dict[tuple[str, int], dict[str, Any]], case: str
) -> None:
    wish, workers, every, stop = CASES[case]
    name = case.replace(" ", "_")
    (folder / "sent").unlink(missing_ok=True)
    logging = "wandb" if case == TRACKED else "none"
    first = launch(folder, name, workers, every, wish, logging)
    number, rank, *_ = wish.split(":")
    assert first.returncode == 75, first.stderr
    assert first.stderr == f"stopped by {number} to rank {rank}, saved at step {stop}\n"
    run_dir = RunDir(folder / name)
    status = run_dir.read_status()
    assert (status["state"], status["step"], status["checkpoint"]) == ("preempted", stop, stop)
    assert status["signal_lead_s"] > 0
    second = launch(folder, name, workers, every, wish, logging)
    assert second.returncode == 0, second.stderr
    assert f"going on from {run_dir.checkpoints}/step_{stop:08d}, after step {stop}" in second.stdout
    steps = [json.loads(line)["step"] for line in run_dir.metrics.read_text().splitlines() if '"train"' in line]
    assert steps == [1, 2, 3, 4, 5, 6], "none was repeated or left out"
    ours = lines(run_dir)
    for key, expected in whole.items():
        for field in ("loss", "lr", "grad_norm", "tokens", "tokens_seen", "sequences_seen", "eval_loss"):
            if expected.get(field) is not None:
                assert ours[key][field] == pytest.approx(expected[field], rel=1e-6), (key, field)
    assert run_dir.read_status()["attempt"] == 2
    assert sorted(path.name for path in (run_dir.path / "attempts" / "1").iterdir()) == [
        "config.yaml", "deepspeed.json", "plan.json",
    ]  # fmt: skip
    if case == TRACKED:
        identity = (run_dir.tracker / "wandb_id").read_text()
        tracked = [path.name for path in (run_dir.tracker / "wandb").glob("offline-run-*")]
        assert len(tracked) == 2, "one for each attempt"
        assert all(path.endswith(f"-{identity}") for path in tracked), "which are one run"
        holders = [path for path in run_dir.path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
        assert holders == []


def test_a_run_that_is_stopped_before_its_last_evaluation_makes_up_for_it(folder: Path) -> None:
    (folder / "sent").unlink(missing_ok=True)
    run_dir = RunDir(folder / "last")
    first = launch(folder, "last", 0, 0, f"SIGUSR2:1:training:{2 * FOUR}", more="train.max_steps=2")
    assert first.stderr == "stopped by SIGUSR2 to rank 1, saved at step 2\n"
    assert (first.returncode, run_dir.last_eval_loss()) == (75, None)
    second = launch(folder, "last", 0, 0, more="train.max_steps=2")
    assert (second.returncode, second.stderr) == (0, "")
    assert run_dir.last_eval_loss() is not None
    third = launch(folder, "last", 0, 0, more="train.max_steps=2")
    assert third.stdout.startswith("this run is done: ")
    fewer = launch(folder, "last", 0, 0, more="train.max_steps=1 lr_schedule.warmup_steps=0")
    assert fewer.stdout.startswith("this run is done: ")


def test_a_signal_after_the_last_step_does_not_make_the_run_another_one(folder: Path) -> None:
    done = launch(folder, "ends", 0, 0, "while rank 1 leaves", more="train.max_steps=2")
    assert (done.returncode, done.stderr) == (0, "")
    assert RunDir(folder / "ends").read_status()["state"] == "completed"


def test_a_run_that_is_done_says_so(folder: Path, whole: object) -> None:
    again = launch(folder, "whole", workers=0, every=0)
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout.splitlines()[0] == (
        f"this run is done: {folder}/whole/checkpoints/step_00000006 is its last step (the checksums of its files were "
        "not compared)"
    )
    path = folder / "whole" / "checkpoints" / "step_00000006"
    elsewhere = launch(folder, "elsewhere", workers=0, every=0, more=f"checkpoint.resume={path}")
    assert (elsewhere.returncode, elsewhere.stdout, elsewhere.stderr) == (0, again.stdout.splitlines()[0] + "\n", "")
    assert not (folder / "elsewhere").exists(), "there is nothing left to be done in it"


def test_a_signal_before_training_loses_nothing_and_is_no_failure(folder: Path) -> None:
    words = COMMAND.format(workers=0, every="null", logging="none")
    process = subprocess.Popen(
        [sys.executable, "-m", "launcher", *words.split(), "hydra.run.dir=early"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("loading torch"):
            break
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 75, errors
    assert RunDir(folder / "early").read_status()["state"] == "preempted"
