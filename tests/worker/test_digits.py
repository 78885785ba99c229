"""The example of a model, a dataset and a loss of one's own: its parts, and the whole command on two ranks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from launcher.errors import RequestError
from launcher.rundir import RunDir
from launcher.schema import Call
from launcher.worker import models
from launcher.worker.examples.digits import CrossEntropy, Digits, ResNet

COMMAND = (
    "+experiment=digits_resnet batch.train_micro_batch_size_per_gpu=32 cluster.ranks_per_node=2 train.epochs=null "
    "train.max_steps=30 train.eval_every=6 logging=none"
)


def test_the_splits_share_no_image_and_hold_all_digits() -> None:
    train, validation = Digits("train"), Digits("validation")
    assert (len(train), len(validation)) == (1500, 297)
    for dataset in (train, validation):
        assert {int(dataset[index]["labels"]) for index in range(len(dataset))} == set(range(10))
    images = {
        dataset[index]["inputs"].numpy().tobytes() for dataset in (train, validation) for index in range(len(dataset))
    }
    assert len(images) == 1797
    assert train[0]["inputs"].shape == (1, 8, 8)
    assert (float(train[0]["inputs"].min()), float(train[0]["inputs"].max())) == (0.0, 15 / 16)


def test_a_shifted_image_is_the_image_moved_by_at_most_a_pixel() -> None:
    plain, shifted = Digits("train")[3]["inputs"], Digits("train", shift=1)
    torch.manual_seed(0)
    seen = {shifted[3]["inputs"].numpy().tobytes() for _ in range(200)}
    around = torch.zeros(1, 10, 10)
    around[:, 1:9, 1:9] = plain
    moved = {around[:, y : y + 8, x : x + 8].numpy().tobytes() for y in range(3) for x in range(3)}
    assert len(moved) == 9
    assert seen == moved


def test_the_loss_is_a_sum_over_images() -> None:
    logits, labels = torch.randn(5, 10), torch.tensor([1, 2, 3, 4, 5])
    total, weight = CrossEntropy()(logits, {"labels": labels})
    assert weight == 5
    assert float(total) == pytest.approx(5 * float(torch.nn.functional.cross_entropy(logits, labels)))


def test_the_model_has_the_size_that_its_file_states() -> None:
    num_parameters = sum(parameter.numel() for parameter in ResNet(16).parameters())
    assert f" {num_parameters:,} parameters." in Path("conf/model/resnet_digits.yaml").read_text()


def test_without_scikit_learn_it_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(RequestError) as refused:
        models.call("data", Call("launcher.worker.examples.digits.Digits", {"split": "train"}))
    assert refused.value.faults == [
        "data._target_=launcher.worker.examples.digits.Digits: "
        "the images come with scikit-learn: pip install 'okazaki[examples]'"
    ]


@pytest.mark.ranks
def test_the_experiment_learns_on_two_ranks(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    command = [sys.executable, "-m", "launcher", *COMMAND.split(), f"hydra.run.dir={run_dir.path}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]
    first, *_, last = [line["eval_loss"] for line in lines if line["kind"] == "eval"]
    assert last < 0.7 * first
    assert run_dir.read_status()["summary"]["eval_loss"] == last


@pytest.mark.ranks
def test_the_experiment_without_its_choice_is_refused_in_one_line(tmp_path: Path) -> None:
    argv = [*COMMAND.split(), "train.batch_norm=error", f"hydra.run.dir={tmp_path / 'run'}"]
    done = subprocess.run([sys.executable, "-m", "launcher", *argv], check=False, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("train.batch_norm=error: the model has 7 BatchNorm layers (stem.1, ")
