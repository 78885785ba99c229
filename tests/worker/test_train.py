"""The loop on two ranks: how many steps, of what size, what is evaluated when, and what ends a run."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launcher.errors import RunError
from launcher.ranks import Rank
from launcher.rundir import RunDir
from launcher.schema import Accumulation, Batch, Call, Checkpoint, Config, Data, LrSchedule, SoftMask, Tail, Train
from launcher.steps import Steps
from tests.ranks import on_ranks
from tests.worker import plain, runs

pytestmark = pytest.mark.ranks

LENGTH, BATCH, NUM_TRAIN, NUM_VALIDATION = 120, 8, 21, 11
"""Contigs of at most LENGTH bases: each is one sequence."""


def train_all(rank: Rank, configs: dict[str, Config], folder: Path) -> dict[str, dict[str, Any]]:
    """Each run in turn: what it returned, or its error; and what was written to status.json, in order."""
    results = {}
    write = RunDir.write_status
    for name, config in configs.items():
        told: list[dict[str, Any]] = []

        def note(run_dir: RunDir, told: list[dict[str, Any]] = told, **changes: Any) -> None:
            told.append(changes)
            write(run_dir, **changes)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RunDir, "write_status", note)
            try:
                results[name] = runs.train(rank, config, folder / name)
            except RunError as error:
                results[name] = {"error": str(error)}
        results[name]["told"] = told
    return results


@dataclass
class Trained:
    folder: Path
    configs: dict[str, Config]
    results: dict[str, dict[str, Any]]
    train: list[str]
    validation: list[str]

    def lines(self, name: str, kind: str = "train") -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if line["kind"] == kind]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("runs")
    contigs = {name: bases[:LENGTH] for name, bases in plain.contigs(runs.CONTIGS).items()}
    names = list(contigs)[: NUM_TRAIN + NUM_VALIDATION]
    fasta = folder / "genome.fa"
    fasta.write_text("".join(f">{name}\n{contigs[name]}\n" for name in names))
    lower = folder / "lower.fa"
    lower.write_text("".join(f">{name}\n{contigs[name].lower()}\n" for name in names))
    data = Data(fasta=str(fasta), sequence_length=LENGTH, validation=names[NUM_TRAIN:])
    base = replace(
        runs.BASE,
        model=Call("tests.worker.plain.WrappedNet"),
        data=data,
        batch=Batch(train_batch_size=BATCH, gradient_accumulation_steps=2),
        cluster=replace(runs.BASE.cluster, ranks_per_node=2),
        lr_schedule=LrSchedule(min_lr_ratio=1.0),  # so that the weights after a step do not depend on the last one
        train=Train(epochs=2),
    )

    def change(tail: Tail = Tail.CARRY, **limits: Any) -> Config:
        return replace(base, accumulation=Accumulation(tail=tail), train=replace(base.train, **limits))

    configs = {
        "carry": replace(change(eval_every=2), checkpoint=Checkpoint(every=2)),
        "drop": change(Tail.DROP),
        "flush": change(Tail.FLUSH),
        "max_tokens": change(max_tokens=4 * BATCH * LENGTH - 1, max_steps=10),
        "max_steps": change(max_steps=1, max_tokens=10**9, eval_batches=1),
        "no target": replace(change(max_steps=2), data=replace(data, fasta=str(lower), soft_mask=SoftMask.IGNORE)),
        "diverging": replace(change(max_consecutive_skips=2), optimizer=replace(base.optimizer, lr=1e30)),
    }
    results = on_ranks(2, train_all, configs, folder)[0]
    return Trained(
        folder,
        configs,
        results,
        train=[contigs[name] for name in names[:NUM_TRAIN]],
        validation=[contigs[name] for name in names[NUM_TRAIN:]],
    )


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("carry", [8] * 5),  # floor(2 x 21 / 8)
        ("drop", [8] * 4),  # 2 x floor(21 / 8)
        ("flush", [8, 8, 5, 8, 8, 5]),  # 2 x ceil(21 / 8)
        ("max_tokens", [8] * 3),  # the fourth would exceed it
        ("max_steps", [8]),
    ],
)
def test_a_run_has_the_steps_and_sizes_of_the_earliest_limit(trained: Trained, name: str, sizes: list[int]) -> None:
    lines = trained.lines(name)
    assert [line["step"] for line in lines] == list(range(1, len(sizes) + 1))
    assert [line["train_batch_size"] for line in lines] == sizes
    assert [line["sequences_seen"] for line in lines] == np.cumsum(sizes).tolist()
    assert trained.results[name]["summary"]["num_steps"] == len(sizes)


def test_an_epoch_under_flush_reads_every_sequence_once_and_one_under_drop_leaves_the_tail_out(
    trained: Trained,
) -> None:
    flushed, dropped = trained.lines("flush"), trained.lines("drop")
    every = plain.count_targets(trained.train)
    assert sum(line["tokens"] for line in flushed[:3]) == sum(line["tokens"] for line in flushed[3:]) == every
    assert sum(line["tokens"] for line in dropped[:2]) < every


@pytest.mark.parametrize("name", ["carry", "drop", "flush"])
def test_every_tail_gives_the_losses_and_weights_of_plain_training(trained: Trained, name: str) -> None:
    """Under flush the last five of an epoch leave rank 1 without a sequence in its second micro-batch."""
    config = trained.configs[name]
    num_steps = len(trained.lines(name))
    whole = runs.reference(replace(config, train=replace(config.train, max_steps=num_steps)))
    assert runs.relative_error(whole["weights"], whole["initial"]) > 1e-3
    assert runs.series_error([line["loss"] for line in trained.lines(name)], whole["loss"]) <= 1e-6
    assert runs.series_error([line["grad_norm"] for line in trained.lines(name)], whole["grad_norm"]) <= 1e-6
    assert runs.relative_error(trained.results[name]["weights"], whole["weights"]) <= 1e-6


def evaluate(weights: dict[str, np.ndarray], windows: Sequence[str]) -> float:
    """The mean loss over all targets of the windows at once."""
    model = plain.WrappedNet()
    model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    with torch.no_grad():
        return float(plain.loss_sum(model, windows)) / plain.count_targets(windows)


def test_evaluations_come_when_they_are_due_and_at_the_end(trained: Trained) -> None:
    assert [line["step"] for line in trained.lines("carry", "eval")] == [2, 4, 5]
    assert [line["step"] for line in trained.lines("flush", "eval")] == [6]


def test_an_evaluation_is_exact_over_the_whole_validation_split(trained: Trained) -> None:
    config = trained.configs["carry"]
    middle = runs.reference(replace(config, train=replace(config.train, max_steps=2)))["weights"]
    first, *_, last = trained.lines("carry", "eval")
    assert {line["tokens"] for line in (first, last)} == {plain.count_targets(trained.validation)}
    assert first["eval_loss"] == pytest.approx(evaluate(middle, trained.validation), rel=1e-6)
    final = evaluate(trained.results["carry"]["weights"], trained.validation)
    assert last["eval_loss"] == pytest.approx(final, rel=1e-6)
    assert last["eval_bits_per_base"] == pytest.approx(final / math.log(2), rel=1e-6)
    assert trained.results["carry"]["summary"]["eval_loss"] == last["eval_loss"]
    assert first["eval_loss"] != pytest.approx(final, rel=1e-3)


def test_an_evaluation_can_be_limited_to_some_global_batches(trained: Trained) -> None:
    (line,) = trained.lines("max_steps", "eval")
    steps = Steps(NUM_VALIDATION, BATCH, Tail.FLUSH, 2, trained.configs["max_steps"].seed)
    windows = [trained.validation[index] for index in steps.sequences(0)]
    assert len(windows) == BATCH
    assert line["tokens"] == plain.count_targets(windows)
    expected = evaluate(trained.results["max_steps"]["weights"], windows)
    assert line["eval_loss"] == pytest.approx(expected, rel=1e-6)


def test_a_run_that_only_skips_ends_with_the_reason(trained: Trained) -> None:
    skipped = [line["skipped"] for line in trained.lines("diverging")]
    assert skipped[0] is False
    assert skipped[-2:] == [True, True]
    assert skipped.index(True) == len(skipped) - 2
    assert trained.results["diverging"]["error"] == (
        f"step {len(skipped)}: no update could be applied, loss or gradients are not finite "
        "(2 in a row; train.max_consecutive_skips=2)"
    )


def test_a_run_without_one_update_has_failed(trained: Trained) -> None:
    """Skipped steps are none of its two; its data end it."""
    assert {line["tokens"] for line in trained.lines("no target")} == {0}
    assert trained.results["no target"]["error"] == (
        "step 5: no update could be applied, the global batch has no target (5 in a row; none in the whole run)"
    )


@pytest.mark.parametrize(("name", "steps"), [("carry", [2, 4, 5]), ("flush", [6]), ("diverging", [])])
def test_checkpoints_come_when_they_are_due_and_at_the_end(trained: Trained, name: str, steps: list[int]) -> None:
    folders = sorted(path.name for path in (trained.folder / name / "checkpoints").glob("step_*"))
    assert folders == [f"step_{step:08d}" for step in steps]


def test_the_status_tells_what_a_run_is_doing_and_how_far_it_has_come(trained: Trained) -> None:
    told = trained.results["carry"]["told"]
    activities = [changes["activity"] for changes in told if "activity" in changes]
    for step in (2, 4, 5):
        saving = activities.index(f"saving step {step}")
        assert activities[saving + 1] is None
    steps = [changes["step"] for changes in told if "step" in changes]
    assert steps == sorted(steps)
    assert (told[-1]["step"], told[-1]["num_steps"]) == (5, 5)
    status = RunDir(trained.folder / "carry").read_status()
    assert (status["step"], status["num_steps"], status["activity"]) == (5, 5, None)
