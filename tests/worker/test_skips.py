"""Batches with little or nothing to learn from, and steps that make no update, against one process of plain torch."""

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
from launcher.schema import (
    Batch,
    Call,
    Config,
    Data,
    Device,
    Dtype,
    LrSchedule,
    Offload,
    Precision,
    Sync,
    Tail,
    Train,
)
from launcher.steps import Steps
from tests.ranks import on_ranks
from tests.worker import plain, runs

pytestmark = pytest.mark.ranks

RANKS, BATCH, MICRO, LENGTH, SEED = 2, 8, 2, 60, 5
WARMUP = 2

N = 6
"""The token of a base that is not known."""


class Wary(plain.WrappedNet):
    """Makes nothing of a sequence with an unknown base but NaN, and gradients of NaN."""

    def forward(self, tokens: torch.Tensor) -> Any:
        output = super().forward(tokens)
        wrong = (tokens == N).any(1)[:, None, None]
        output.logits = output.logits * torch.where(wrong, math.nan, 1.0).to(output.logits.dtype)
        return output


class Barred(plain.WrappedNet):
    """Holds every base for impossible in it: infinite losses, and finite gradients."""

    def forward(self, tokens: torch.Tensor) -> Any:
        output = super().forward(tokens)
        bases = torch.tensor([token in plain.TOKENS.values() and token != N for token in range(17)])
        wrong = (tokens == N).any(1)[:, None, None] & bases
        output.logits = output.logits.masked_fill(wrong, -math.inf)
        return output


class Endless(plain.WrappedNet):
    """Makes infinite losses of it."""

    def forward(self, tokens: torch.Tensor) -> Any:
        output = super().forward(tokens)
        wrong = (tokens == N).any(1)[:, None, None]
        output.logits = output.logits * torch.where(wrong, math.inf, 1.0).to(output.logits.dtype)
        return output


ONCE = Sync.ONCE_PER_WINDOW

BASE = replace(
    runs.BASE,
    seed=SEED,
    batch=Batch(BATCH, train_micro_batch_size_per_gpu=MICRO),
    cluster=replace(runs.BASE.cluster, ranks_per_node=RANKS),
    lr_schedule=LrSchedule(warmup_steps=WARMUP),
)


def at(stage: int, config: Config, sync: Sync | None = None) -> Config:
    accumulation = replace(config.accumulation, sync=sync)
    return replace(config, zero=replace(config.zero, stage=stage), accumulation=accumulation)


def at_every_stage(config: Config) -> dict[str, Config]:
    """At all stages, where there is a choice with both ways to communicate."""
    return {f"stage{stage}": at(stage, config) for stage in (0, 1, 2, 3)} | {
        f"stage{stage}-once": at(stage, config, ONCE) for stage in (2, 3)
    }


def bf16(config: Config) -> Config:
    sums = Dtype.BF16 if config.zero.stage == 0 else Dtype.FP32
    return replace(config, precision=Precision(dtype=Dtype.BF16, grad_accum_dtype=sums))


def on_cpu(config: Config) -> Config:
    return replace(config, offload=Offload(Device.CPU))


# Sequences with one unknown base, by step and place: on the second rank in its first micro-batch, on the first in its
# second, and on the second in its second.
POISONED = {(2, 2): "nan", (4, 5): "nan", (5, 7): "nan"}
NUM_POISONED, NUM_UPDATES = 88, 6

WARY = replace(BASE, model=Call("tests.worker.test_skips.Wary"), train=Train(max_steps=NUM_UPDATES))
SKIPPING = (
    at_every_stage(WARY)
    | {f"{name}-bf16": bf16(config) for name, config in at_every_stage(WARY).items()}
    | {f"{name}-cpu": on_cpu(at_every_stage(WARY)[name]) for name in ("stage2", "stage2-once", "stage3-once")}
    | {
        f"{name}-barred": replace(config, model=Call("tests.worker.test_skips.Barred"))
        for name, config in at_every_stage(WARY).items()
    }
    | {"stage2-once-inf": replace(at(2, WARY, ONCE), model=Call("tests.worker.test_skips.Endless"))}
)
STOPPED = replace(WARY, train=replace(WARY.train, max_consecutive_skips=2))

NUM_UNEVEN = 18
UNEVEN = replace(BASE, model=Call("tests.worker.plain.WrappedNet"), train=Train(epochs=2))
TAILS = {
    f"{name}-{tail.value}": replace(config, accumulation=replace(config.accumulation, tail=tail))
    for tail in Tail
    for name, config in at_every_stage(UNEVEN).items()
}


def train_all(rank: Rank, configs: dict[str, Config], folder: Path) -> dict[str, dict[str, Any]]:
    results = {}
    for name, config in configs.items():
        try:
            results[name] = runs.train(rank, config, folder / name)
        except RunError as error:
            results[name] = {"error": str(error)}
    return results


@dataclass
class Trained:
    configs: dict[str, Config]
    results: dict[str, dict[str, Any]]

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [line for line in self.results[name]["lines"] if line["kind"] == "train"]

    def check(self, name: str, course: Sequence[tuple[Sequence[int], float]]) -> None:
        """The updates of a run are those of one process."""
        config, lines = self.configs[name], [line for line in self.lines(name) if not line["skipped"]]
        whole = runs.reference(replace(config, model=Call("tests.worker.plain.WrappedNet")), course=course)
        assert runs.relative_error(whole["weights"], whole["initial"]) > 1e-3
        assert [line["tokens"] for line in lines] == whole["tokens"]
        rounded = config.precision.dtype is Dtype.BF16
        assert runs.relative_error(self.results[name]["weights"], whole["weights"]) <= (1e-3 if rounded else 1e-6)
        assert runs.series_error([line["loss"] for line in lines], whole["loss"]) <= (1e-3 if rounded else 1e-6)
        norms = [line["grad_norm"] for line in lines]
        assert runs.series_error(norms, whole["grad_norm"]) <= (5e-3 if rounded else 1e-6)


def shuffled(num_sequences: int, epochs: int = 1) -> list[int]:
    whole = Steps(num_sequences, num_sequences, Tail.CARRY, epochs, SEED)
    return [int(index) for epoch in range(epochs) for index in whole.sequences(epoch)]


def cosine(done: int, total: int) -> float:
    if done <= WARMUP:
        return done / WARMUP
    return 0.1 + 0.9 * (1 + math.cos(math.pi * (done - WARMUP) / (total - WARMUP))) / 2


def empty_sequences() -> set[int]:
    """Those of the last batch of the first epoch under flush, and all that the second rank has in the first step."""
    order = shuffled(NUM_UNEVEN)
    return {order[place] for place in (16, 17, 2, 3, 6, 7)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("runs")
    contigs = [bases[: LENGTH - 11 * (number % 5)] for number, bases in enumerate(plain.contigs(runs.CONTIGS).values())]
    assert len(contigs) == NUM_POISONED
    poisoned = contigs.copy()
    order = shuffled(NUM_POISONED)
    for step, place in POISONED:
        number = order[step * BATCH + place]
        poisoned[number] = poisoned[number][:7] + "N" + poisoned[number][8:]
    uneven = [
        "N" * len(bases) if number in empty_sequences() else bases for number, bases in enumerate(contigs[:NUM_UNEVEN])
    ]
    data = {}
    for name, sequences in (("poisoned", poisoned), ("uneven", uneven)):
        fasta = folder / f"{name}.fa"
        fasta.write_text("".join(f">{number}\n{bases}\n" for number, bases in enumerate(sequences)))
        data[name] = Data(fasta=str(fasta), sequence_length=LENGTH, validation=None, max_n_fraction=1.0)
    configs = {name: replace(config, data=data["poisoned"]) for name, config in SKIPPING.items()}
    configs["stopped"] = replace(STOPPED, data=data["poisoned"])
    configs |= {name: replace(config, data=data["uneven"]) for name, config in TAILS.items()}
    return Trained(configs, on_ranks(RANKS, train_all, configs, folder)[0])


# Losses and gradients that are not finite


@pytest.mark.parametrize("name", SKIPPING)
def test_a_run_with_steps_that_are_not_finite_is_that_in_which_they_never_happened(trained: Trained, name: str) -> None:
    """In one micro-batch of one rank; alone, and twice in a row."""
    lines = trained.lines(name)
    skipped = {step for step, _ in POISONED}
    assert [line["skipped"] for line in lines] == [step in skipped for step in range(NUM_UPDATES + len(skipped))]
    for line in (lines[step] for step in skipped):
        assert (line["loss"], line["grad_norm"], line["grad_norm_clipped"]) == (None, None, None)
        assert line["tokens"] > 0
    order = shuffled(NUM_POISONED)
    rates, done, course = [], 0, []
    for step in range(len(lines)):
        rates.append(1e-3 * cosine(done + 1, NUM_UPDATES))
        if step not in skipped:
            course.append((order[step * BATCH : (step + 1) * BATCH], rates[-1]))
            done += 1
    assert [line["lr"] for line in lines] == pytest.approx(rates, rel=1e-12)
    assert lines[-1]["lr"] == pytest.approx(1e-4, rel=1e-15)
    assert [line["sequences_seen"] for line in lines] == [BATCH * (step + 1) for step in range(len(lines))]
    trained.check(name, course)


def test_steps_in_a_row_that_are_not_finite_stop_a_run_with_the_reason(trained: Trained) -> None:
    assert trained.results["stopped"]["error"] == (
        "step 6: no update could be applied, loss or gradients are not finite "
        "(2 in a row; train.max_consecutive_skips=2)"
    )


# Batches that are not whole


@pytest.mark.parametrize("name", TAILS)
def test_every_tail_is_exact_where_micro_batches_and_ranks_have_no_target(trained: Trained, name: str) -> None:
    """The second rank has none in the first step, and under flush no sequence in the two of every last one.

    Those of the first epoch have no target either: that step is left out, and counted.
    """
    tail, lines = trained.configs[name].accumulation.tail, trained.lines(name)
    starts = {
        Tail.FLUSH: [(0, 8), (8, 16), (16, 18), (18, 26), (26, 34), (34, 36)],
        Tail.DROP: [(0, 8), (8, 16), (18, 26), (26, 34)],
        Tail.CARRY: [(0, 8), (8, 16), (16, 24), (24, 32)],
    }[tail]
    order = shuffled(NUM_UNEVEN, epochs=2)
    batches = [order[start:end] for start, end in starts]
    empty = [set(batch) <= empty_sequences() for batch in batches]
    assert empty == [False, False, tail is Tail.FLUSH] + [False] * (len(starts) - 3)
    assert {batches[0][place] for place in (2, 3, 6, 7)} <= empty_sequences(), "all that the second rank has"
    assert [line["train_batch_size"] for line in lines] == [len(batch) for batch in batches]
    assert [line["sequences_seen"] for line in lines] == np.cumsum([len(batch) for batch in batches]).tolist()
    assert {line["gradient_accumulation_steps"] for line in lines} == {2}
    assert [line["skipped"] for line in lines] == empty
    rates, done, total, course = [], 0, len(starts), []
    for batch, left_out in zip(batches, empty, strict=True):
        rates.append(1e-3 * cosine(done + 1, total))
        done, total = (done, total - 1) if left_out else (done + 1, total)
        if not left_out:
            course.append((batch, rates[-1]))
    assert [line["lr"] for line in lines] == pytest.approx(rates, rel=1e-12)
    for line in (line for line in lines if line["skipped"]):
        assert (line["loss"], line["grad_norm"], line["tokens"]) == (None, None, 0)
    assert lines[-1]["tokens_seen"] == sum(line["tokens"] for line in lines)
    trained.check(name, course)
