"""Whole commands with real DeepSpeed ranks: what they print and leave on disk, and that they leave no process."""

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import yaml

from launcher.rundir import RunDir

pytestmark = pytest.mark.ranks

GENOME = (
    "-m +experiment=dna_8k data=lambda data.sequence_length=128 model=llama_1m model.hidden_size=32 "
    "model.intermediate_size=64 model.num_hidden_layers=2 batch.train_batch_size=8 train.max_steps=3 "
    "optimizer.lr=1e-3 lr_schedule.warmup_steps=1 logging=none"
)
"""Two steps of cosine after one of warm-up, on the genome of phage lambda."""

NETS = """
import torch

class Pairs(torch.utils.data.Dataset):
    def __init__(self, size):
        self.size = size
    def __len__(self):
        return self.size
    def __getitem__(self, index):
        inputs = torch.sin(torch.arange(4.0) + index)
        return inputs, inputs[:2] * inputs[2:]

class Stream:
    pass

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
    def forward(self, inputs):
        return self.layer(inputs)

def squares():
    return lambda logits, batch: (((logits - batch["labels"]) ** 2).sum(), len(logits))
"""

OPTIONS = {
    "model/net.yaml": {"_target_": "nets.Net"},
    "data/pairs.yaml": {"_target_": "nets.Pairs", "size": 21, "num_workers": 1},
    "data/stream.yaml": {"_target_": "nets.Stream"},
}

OWN = (
    "--config-dir conf model=net data=pairs +loss._target_=nets.squares batch.train_batch_size=8 train.max_steps=2 "
    "logging=none"
)
"""A model, a dataset and a loss of one's own, which start sooner than a language model does."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all commands are given."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "nets.py").write_text(NETS)
    for name, option in OPTIONS.items():
        file = folder / "conf" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(option))
    return folder


def launch(folder: Path, words: str, *argv: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "launcher", *words.split(), *argv]
    return subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)


def lines(run_dir: RunDir, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


def ledger(sweep: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (sweep / "sweep.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def sweep(folder: Path) -> Path:
    """Three runs that differ in their accumulation steps alone."""
    done = launch(folder, GENOME, "hydra.sweep.dir=sweep", "batch.gradient_accumulation_steps=1,2,4")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == f"all 3 points are done; ledger: {folder}/sweep/sweep.jsonl"
    return folder / "sweep"


@pytest.fixture(scope="module")
def runs(sweep: Path) -> list[RunDir]:
    return [RunDir(sweep / f"{number:04d}") for number in range(3)]


def test_every_point_of_a_sweep_has_its_directory_under_that_of_the_sweep(sweep: Path, runs: list[RunDir]) -> None:
    assert sorted(path.name for path in sweep.iterdir()) == ["0000", "0001", "0002", "sweep.jsonl"]
    for run_dir in runs:
        assert sorted(path.name for path in run_dir.path.iterdir()) == [
            "checkpoints", "config.yaml", "deepspeed.json", "lock", "logs", "metrics.jsonl", "plan.json", "status.json",
        ]  # fmt: skip
        assert sorted(path.name for path in run_dir.logs.iterdir()) == ["rank_00000.log"]


def test_the_ledger_follows_every_point_to_its_end(sweep: Path, runs: list[RunDir]) -> None:
    told = ledger(sweep)
    states = {point: [line["state"] for line in told if line["point"] == point] for point in range(3)}
    assert states == {point: ["pending", "running", "completed"] for point in range(3)}
    for number, accumulation in enumerate((1, 2, 4)):
        last = [line for line in told if line["point"] == number][-1]
        assert last["overrides"][-1] == f"batch.gradient_accumulation_steps={accumulation}"
        assert last["run_dir"] == str(runs[number].path)
        assert last["eval_loss"] == lines(runs[number], "eval")[-1]["eval_loss"]


def test_points_that_cut_the_same_batch_otherwise_have_the_same_losses(runs: list[RunDir]) -> None:
    first = [lines(run_dir, "train")[0] for run_dir in runs]
    assert [line["gradient_accumulation_steps"] for line in first] == [1, 2, 4]
    assert [line["micro_batch_size"] for line in first] == [8, 4, 2]
    whole, *others = [[line["loss"] for line in lines(run_dir, "train")] for run_dir in runs]
    assert len(set(whole)) == 3
    for other in others:
        assert other == pytest.approx(whole, rel=1e-5)
    evaluations = [lines(run_dir, "eval")[-1]["eval_loss"] for run_dir in runs]
    assert evaluations[1:] == pytest.approx(evaluations[:1] * 2, rel=1e-5)


def test_points_that_are_done_are_not_run_again_unless_that_is_asked_for(folder: Path, sweep: Path) -> None:
    words = [GENOME, "hydra.sweep.dir=sweep"]
    before = [(sweep / f"{number:04d}" / "metrics.jsonl").read_bytes() for number in range(3)]
    done = launch(folder, *words, "batch.gradient_accumulation_steps=1,2,4")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("this run is done: ") == 3
    assert [(sweep / f"{number:04d}" / "metrics.jsonl").read_bytes() for number in range(3)] == before
    assert {line["state"] for line in ledger(sweep)[-6:]} == {"running", "completed"}
    again = launch(folder, *words, "batch.gradient_accumulation_steps=1", "sweep.rerun_done=true")
    assert (again.returncode, again.stderr) == (0, "")
    assert (sweep / "0000.before_1" / "metrics.jsonl").read_bytes() == before[0]
    assert [line["step"] for line in lines(RunDir(sweep / "0000"), "train")] == [1, 2, 3]


def test_plan_metrics_and_status_of_a_run_agree(runs: list[RunDir]) -> None:
    for run_dir in runs:
        plan, status = json.loads(run_dir.plan.read_text()), run_dir.read_status()
        train, (evaluation,) = lines(run_dir, "train"), lines(run_dir, "eval")
        assert (status["state"], status["activity"], status["reason"]) == ("completed", None, None)
        assert status["step"] == status["num_steps"] == plan["run"]["num_steps"] == len(train) == 3
        assert train[-1]["sequences_seen"] == plan["run"]["sequences"] == 24
        for name in ("gradient_accumulation_steps", "train_batch_size", "micro_batch_size"):
            assert {line[name] for line in train} == {plan["batch"][name]}
        # One step of warm-up, then (1 + cos(pi k / 2)) / 2.
        assert [line["lr"] for line in train] == pytest.approx([1e-3, 0.5e-3, 0.0])
        rate = plan["learning_rate"]
        assert (rate["first"], rate["last"]) == pytest.approx((1e-3, 0.0))
        assert status["summary"]["eval_loss"] == evaluation["eval_loss"]
        assert status["summary"]["eval_bits_per_base"] == pytest.approx(evaluation["eval_loss"] / math.log(2))
        assert (run_dir.checkpoints / "latest").read_text() == "step_00000003\n"


@pytest.mark.parametrize("number", range(3))
def test_the_deepspeed_json_of_a_finished_run_is_read_unchanged_by_deepspeed(runs: list[RunDir], number: int) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig  # type: ignore[import-untyped]

    read = DeepSpeedConfig(str(runs[number].deepspeed))
    assert read._param_dict == json.loads(runs[number].deepspeed.read_text())
    assert read.train_batch_size == 8
    assert read.gradient_accumulation_steps == (1, 2, 4)[number]
    assert read.train_micro_batch_size_per_gpu == (8, 4, 2)[number]
    assert read.gradient_clipping == 1.0
    assert read.zero_config.stage == 1


def test_a_sweep_with_one_impossible_point_starts_nothing(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    done = launch(folder, GENOME, "batch.gradient_accumulation_steps=1,3", "hydra.sweep.dir=impossible")
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("point 1 (")
    assert "batch.train_batch_size=8 cannot be cut into 3 accumulation steps over 1 rank" in line
    assert sorted(folder.rglob("*")) == before


def test_a_point_that_diverges_fails_and_the_others_are_done(folder: Path) -> None:
    sweep = folder / "diverging"
    argv = ["train.max_steps=9", "train.max_consecutive_skips=1", "hydra.sweep.dir=diverging"]
    argv += ["optimizer.lr=1e30,1e-3"]
    done = launch(folder, f"-m {OWN}", *argv)
    assert done.returncode == 1
    last = {line["point"]: line for line in ledger(sweep)}
    assert [last[point]["state"] for point in (0, 1)] == ["failed", "completed"]
    reason = last[0]["reason"]
    assert reason.startswith("rank 0 failed: RunError: step ")
    assert "train.max_consecutive_skips=1" in reason
    first, second = done.stderr.splitlines()
    assert first.startswith("point 0 (")
    assert first.endswith(f") failed: {reason}")
    assert second.startswith("1 of 2 points failed: point 0 (")
    assert len(lines(RunDir(sweep / "0001"), "train")) == 9


def test_a_dataset_that_only_the_job_can_judge_is_one_line_and_exit_2(folder: Path) -> None:
    done = launch(folder, OWN, "data=stream", "cluster.ranks_per_node=2", "hydra.run.dir=stream")
    assert done.returncode == 2
    assert done.stderr == (
        "data._target_=nets.Stream: a dataset needs __len__ and __getitem__; this one has not both\n"
    )
    assert RunDir(folder / "stream").read_status()["state"] == "failed"


def wait_until(condition: Callable[[], object], timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.05)


def is_gone(process: Any) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def endless(folder: Path, tmp_path: Path) -> Iterator[tuple["subprocess.Popen[str]", RunDir]]:
    """A run on two ranks, each with a process that reads ahead, after its first steps."""
    run_dir = RunDir(tmp_path / "run")
    argv = [*OWN.split(), "train.max_steps=10000000", "cluster.ranks_per_node=2", f"hydra.run.dir={run_dir.path}"]
    command = [sys.executable, "-m", "launcher", *argv]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: process.poll() is not None or run_dir.metrics.exists())
        wait_until(lambda: process.poll() is not None or run_dir.last_step() > 2)
        yield process, run_dir
    finally:
        process.kill()
        process.communicate()


def test_a_rank_that_is_killed_ends_the_others_and_is_named(endless: tuple["subprocess.Popen[str]", RunDir]) -> None:
    process, run_dir = endless
    everybody = psutil.Process(process.pid).children(recursive=True)
    (victim,) = [child for child in psutil.Process(process.pid).children() if child.environ().get("RANK") == "1"]
    assert len(everybody) >= 5  # two ranks with a reader each, and the guard
    victim.send_signal(signal.SIGKILL)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 1
    reason = f"rank 1 failed: killed by SIGKILL, often a sign of too little memory (log: {run_dir.log(1)})"
    assert error == f"{reason}\n"
    assert all(is_gone(child) for child in everybody)
    assert (run_dir.read_status()["state"], run_dir.read_status()["reason"]) == ("failed", reason)


def test_a_run_that_is_told_to_stop_leaves_no_process(endless: tuple["subprocess.Popen[str]", RunDir]) -> None:
    process, run_dir = endless
    everybody = psutil.Process(process.pid).children(recursive=True)
    assert len(everybody) >= 5
    process.terminate()
    time.sleep(0.2)
    process.terminate()  # queues send it more than once, and nobody means by it that nothing is to be saved
    _, error = process.communicate(timeout=60)
    assert process.returncode == 75
    assert all(is_gone(child) for child in everybody)
    status = run_dir.read_status()
    assert status["state"] == "preempted"
    assert error == f"stopped by {status['reason']}, saved at step {status['checkpoint']}\n"
    assert status["reason"] == "SIGTERM to the launcher"
