"""Whole commands whose ranks are out of memory: the same steps in smaller micro-batches, by themselves."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.rundir import RunDir
from tests.small import offer

pytestmark = pytest.mark.ranks

NETS = """
import os, signal
import torch
from tests.small import SmallNet

class Net(SmallNet):
    '''Is out of memory on one rank, from one of its passes on, where a micro-batch has more than so many sequences;
    and gets a signal in one of its passes.'''

    def __init__(self):
        super().__init__()
        self.passes = 0

    def forward(self, tokens):
        self.passes += 1
        if os.environ.get("SIGNAL") == f"{os.environ['RANK']}:{self.passes}":
            os.kill(os.getpid(), signal.SIGUSR2)
        rank, number, most = os.environ.get("LIMIT", "9:0:0").split(":")
        if os.environ["RANK"] == rank and self.passes >= int(number) and len(tokens) > int(most):
            raise torch.OutOfMemoryError("tried to allocate too much")
        return super().forward(tokens)
"""

COMMAND = (
    "+experiment=dna_8k data=lambda data.sequence_length=128 data.num_workers=0 --config-dir conf model=net "
    "batch.train_batch_size=16 cluster.ranks_per_node=2 train.max_steps=5 train.eval_every=null checkpoint.every=2 "
    "optimizer.lr=1e-3 lr_schedule.warmup_steps=2 logging=none "
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return offer(tmp_path_factory.mktemp("here"), NETS)


def launch(
    folder: Path, name: str, words: str, limit: str = "9:0:0", signal: str = ""
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "launcher", *(COMMAND + words).split(), f"hydra.run.dir={name}"],
        cwd=folder,
        env={**os.environ, "LIMIT": limit, "SIGNAL": signal, "XDG_CACHE_HOME": str(folder / "cache")},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )


def losses(run_dir: RunDir) -> list[float]:
    """By step; the last line of a step counts."""
    found = {line["step"]: line["loss"] for line in map(json.loads, run_dir.metrics.read_text().splitlines())
             if line["kind"] == "train"}  # fmt: skip
    return [found[step] for step in sorted(found)]


@pytest.fixture(scope="module")
def whole(folder: Path) -> list[float]:
    done = launch(folder, "whole", "batch.train_micro_batch_size_per_gpu=4 zero=stage3")
    assert done.returncode == 0, done.stderr
    return losses(RunDir(folder / "whole"))


@pytest.mark.parametrize("stage", [pytest.param("stage2", marks=pytest.mark.slow), "stage3"])
def test_where_ranks_cannot_cut_finer_together_the_run_is_started_anew_with_smaller_micro_batches(
    folder: Path, whole: list[float], stage: str
) -> None:
    """Rank 1 fails in the first pass of its fourth step, when the second is saved."""
    words = f"batch.train_micro_batch_size_per_gpu=4 zero={stage} checkpoint.asynchronous=false"
    done = launch(folder, stage, words, "1:7:2")
    assert done.returncode == 0, done.stderr
    run_dir = RunDir(folder / stage)
    assert "rank 1 failed: OutOfMemoryError: tried to allocate too much" in done.stdout
    assert "the run goes on with micro-batches of 2" in done.stdout
    assert f"going on from {run_dir.checkpoints}/step_00000002, after step 2" in done.stdout
    train = [line for line in map(json.loads, run_dir.metrics.read_text().splitlines()) if line["kind"] == "train"]
    assert [(line["attempt"], line["step"], line["micro_batch_size"]) for line in train] == [
        (1, 1, 4), (1, 2, 4), (1, 3, 4), (2, 3, 2), (2, 4, 2), (2, 5, 2),
    ]  # fmt: skip
    assert losses(run_dir) == pytest.approx(whole, rel=1e-6)
    status = run_dir.read_status()
    assert (status["state"], status["attempt"]) == ("completed", 2)


def test_a_run_that_begins_at_the_checkpoint_of_another_begins_there_again(folder: Path, whole: list[float]) -> None:
    """Rank 1 fails in its first pass, before there is a checkpoint of its own."""
    path = folder / "whole" / "checkpoints" / "step_00000004"
    words = f"batch.train_micro_batch_size_per_gpu=4 zero=stage3 checkpoint.resume={path}"
    done = launch(folder, "begun", words, "1:1:2")
    assert done.returncode == 0, done.stderr
    assert "the run goes on with micro-batches of 2" in done.stdout
    train = [line for line in map(json.loads, RunDir(folder / "begun").metrics.read_text().splitlines())
             if line["kind"] == "train"]  # fmt: skip
    assert [(line["attempt"], line["step"], line["micro_batch_size"]) for line in train] == [(2, 5, 2)]
    assert train[0]["loss"] == pytest.approx(whole[4], rel=1e-6)


def test_a_run_whose_own_checkpoints_are_damaged_does_not_begin_at_that_of_another_again(
    folder: Path, whole: list[float]
) -> None:
    run_dir = folder / "damaged"
    shutil.copytree(folder / "whole", run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "step_00000005")
    for shard in (run_dir / "checkpoints").glob("*/rank_00001.safetensors"):
        contents = bytearray(shard.read_bytes())
        contents[-1] ^= 1
        shard.write_bytes(contents)
    path = folder / "whole" / "checkpoints" / "step_00000002"
    words = f"batch.train_micro_batch_size_per_gpu=4 zero=stage3 checkpoint.resume={path}"
    done = launch(folder, "damaged", words)
    assert done.returncode == 2
    assert f"{run_dir}/checkpoints holds no checkpoint that can be used; step_00000004 cannot be used: " in done.stderr


@pytest.mark.parametrize(("stage", "micro"), [pytest.param("stage3", 1, marks=pytest.mark.slow), ("stage1", 4)])
def test_a_sequence_that_does_not_fit_fails_the_run_with_the_reason(folder: Path, stage: str, micro: int) -> None:
    """Also where ranks came down to it by themselves: that is not tried again from the start."""
    name = f"hopeless_{stage}"
    done = launch(folder, name, f"batch.train_micro_batch_size_per_gpu={micro} zero={stage}", "1:1:0")
    assert done.returncode == 1
    assert done.stderr.startswith("rank ")
    assert "failed: OutOfMemoryError: tried to allocate too much" in done.stderr
    status = RunDir(folder / name).read_status()
    assert (status["state"], status["attempt"]) == ("failed", 1)


@pytest.mark.parametrize("stage", [pytest.param("stage1", marks=pytest.mark.slow), "stage3"])
def test_auto_finds_the_largest_micro_batch_that_fits_and_remembers_it(
    folder: Path, whole: list[float], stage: str
) -> None:
    """Of 1, 2, 4 and 8; 5 would fit."""
    words = f"batch.train_micro_batch_size_per_gpu=auto zero={stage}"
    first = launch(folder, f"auto_{stage}", words, "1:1:5")
    assert first.returncode == 0, first.stderr
    assert "batch.train_micro_batch_size_per_gpu=auto: 4, of 1, 2, 4, 8" in first.stdout
    run_dir = RunDir(folder / f"auto_{stage}")
    assert losses(run_dir) == pytest.approx(whole, rel=1e-6)
    planned = json.loads(run_dir.deepspeed.read_text())
    assert (planned["train_micro_batch_size_per_gpu"], planned["gradient_accumulation_steps"]) == (4, 2)
    assert run_dir.read_status()["attempt"] == 1
    second = launch(folder, f"again_{stage}", words + " train.max_steps=2", "1:1:5")
    assert second.returncode == 0, second.stderr
    assert "auto: 4" in second.stdout
    assert "trying" not in second.stdout
    third = launch(folder, f"less_{stage}", words + " train.max_steps=2", "1:1:2")
    assert third.returncode == 0, third.stderr
    assert RunDir(folder / f"less_{stage}").last_step() == 2
    fourth = launch(folder, f"known_{stage}", words + " train.max_steps=2", "1:1:2")
    assert "auto: 2" in fourth.stdout
    assert RunDir(folder / f"known_{stage}").read_status()["attempt"] == 1


def test_a_signal_while_sizes_are_tried_says_nothing_about_them(folder: Path, whole: list[float]) -> None:
    """It comes in the first pass of size 1, then in that of size 8, which does not fit."""
    words = "batch.train_micro_batch_size_per_gpu=auto zero=stage0"
    run_dir, remembered = RunDir(folder / "asked"), folder / "cache" / "okazaki" / "micro_batch_sizes"
    others = set(remembered.glob("*"))
    for when in ("1:1", "1:9"):
        stopped = launch(folder, "asked", words, "1:1:5", when)
        assert (stopped.returncode, stopped.stderr) == (75, "stopped by SIGUSR2 to rank 1\n")
        assert run_dir.read_status()["state"] == "preempted"
        assert set(remembered.glob("*")) == others
    done = launch(folder, "asked", words, "1:1:5")
    assert done.returncode == 0, done.stderr
    assert "batch.train_micro_batch_size_per_gpu=auto: 4, of 1, 2, 4, 8" in done.stdout
    assert losses(run_dir) == pytest.approx(whole, rel=1e-6)


def test_auto_says_so_where_no_micro_batch_fits(folder: Path) -> None:
    done = launch(folder, "none", "batch.train_micro_batch_size_per_gpu=auto zero=stage2", "0:1:0")
    assert (done.returncode, done.stderr) == (1, "a micro-batch of one sequence does not fit into memory\n")
    assert RunDir(folder / "none").read_status()["state"] == "failed"
