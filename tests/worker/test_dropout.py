"""Dropout in whole runs: masks that no two micro-batches share, and that no way of running changes."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from launcher.ranks import Rank
from launcher.schema import Activation, Batch, Call, Checkpointing, Config, Data, LrSchedule, Train
from tests.ranks import on_ranks
from tests.worker import plain, runs

pytestmark = pytest.mark.ranks

BATCH, MICRO, LENGTH, NUM_STEPS = 8, 2, 40, 5

MASKS: list[str] = []
"""What was dropped in each forward pass of training on this rank, in order."""


class Dropping(plain.WrappedNet):
    def __init__(self) -> None:
        super().__init__()
        self.recomputes = False

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any]) -> None:
        self.recomputes = True

    def forward(self, tokens: torch.Tensor) -> Any:
        if not self.training:
            return super().forward(tokens)
        embedded = F.pad(self.embed(tokens).transpose(1, 2), (3, 0))
        dropped = checkpoint(self.drop, embedded, use_reentrant=False) if self.recomputes else self.drop(embedded)
        output = super().forward(tokens[:, :1])  # for its wrapping
        output.logits = self.head(dropped.transpose(1, 2))
        return output

    def drop(self, embedded: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.mix(embedded))
        mask = F.dropout(torch.ones_like(hidden), 0.5)
        MASKS.append(hashlib.sha256((mask > 0).numpy().tobytes()).hexdigest())
        return hidden * mask


BASE = replace(
    runs.BASE,
    model=Call("tests.worker.test_dropout.Dropping"),
    batch=Batch(BATCH, train_micro_batch_size_per_gpu=MICRO),
    cluster=replace(runs.BASE.cluster, ranks_per_node=2),
    lr_schedule=LrSchedule(warmup_steps=1),
    train=Train(max_steps=NUM_STEPS, eval_every=2),
)
ALONE = replace(BASE, cluster=replace(BASE.cluster, ranks_per_node=1))
FULL = Activation(Checkpointing.FULL)

ON_TWO = {
    "two": BASE,
    "ahead": replace(BASE, data=replace(BASE.data, num_workers=2)),
    "recomputed": replace(BASE, activation=FULL),
    "partitioned": replace(BASE, zero=replace(BASE.zero, stage=3)),
    "partitioned and recomputed": replace(BASE, zero=replace(BASE.zero, stage=3), activation=FULL),
    "other seed": replace(BASE, seed=1),
}
ON_ONE = {"one": ALONE}


def train_all(rank: Rank, configs: dict[str, Config], folder: Path) -> dict[str, dict[str, Any]]:
    results = {}
    for name, config in configs.items():
        MASKS.clear()
        results[name] = runs.train(rank, config, folder / name) | {"masks": MASKS.copy()}
    return results


@dataclass
class Trained:
    results: dict[str, list[dict[str, Any]]]
    """By rank."""

    def losses(self, name: str) -> list[float]:
        return [line["loss"] for line in self.results[name][0]["lines"] if line["kind"] == "train"]

    def masks(self, name: str) -> list[list[str]]:
        """By step, of the micro-batches as the global batch is dealt out: one to each rank, then the next."""
        of_ranks = [result["masks"] for result in self.results[name]]
        dealt = [mask for masks in zip(*of_ranks, strict=True) for mask in masks]
        each = len(dealt) // NUM_STEPS
        return [dealt[start : start + each] for start in range(0, len(dealt), each)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("runs")
    fasta = folder / "genome.fa"
    contigs = list(plain.contigs(runs.CONTIGS).items())
    fasta.write_text("".join(f">{name}\n{bases[:LENGTH]}\n" for name, bases in contigs))
    data = Data(fasta=str(fasta), sequence_length=LENGTH, validation=[name for name, _ in contigs[-12:]])
    results: dict[str, list[dict[str, Any]]] = {}
    for ranks, configs in ((1, ON_ONE), (2, ON_TWO)):
        chosen = {
            name: replace(config, data=replace(data, num_workers=config.data.num_workers))  # type: ignore[arg-type]
            for name, config in configs.items()
        }
        of_ranks = on_ranks(ranks, train_all, chosen, folder)
        results |= {name: [result[name] for result in of_ranks] for name in configs}
    return Trained(results)


def test_masks_differ_across_micro_batches_ranks_and_steps(trained: Trained) -> None:
    masks = trained.masks("two")
    assert [len(of_step) for of_step in masks] == [4] * NUM_STEPS
    assert len({mask for of_step in masks for mask in of_step}) == 4 * NUM_STEPS
    others = {mask for of_step in trained.masks("other seed") for mask in of_step}
    assert not others & {mask for of_step in masks for mask in of_step}


@pytest.mark.parametrize("name", ["one", "ahead", "partitioned"])
def test_the_same_micro_batches_have_the_same_masks_and_losses_whatever_runs_where(trained: Trained, name: str) -> None:
    """Accumulation 4 on one rank and 2 on two; processes that read ahead; weights in pieces."""
    assert trained.masks(name) == trained.masks("two")
    assert trained.losses(name) == pytest.approx(trained.losses("two"), rel=1e-6)
    weights = trained.results["two"][0]["weights"]
    assert runs.relative_error(trained.results[name][0]["weights"], weights) <= 1e-6


@pytest.mark.parametrize(("name", "stored"), [("recomputed", "two"), ("partitioned and recomputed", "partitioned")])
def test_recomputed_activations_have_the_same_masks_and_change_nothing(
    trained: Trained, name: str, stored: str
) -> None:
    for rank in (0, 1):
        twice = trained.results[name][rank]["masks"]
        assert twice[0::2] == twice[1::2] == trained.results[stored][rank]["masks"]
    assert trained.losses(name) == trained.losses(stored)
    for weight, values in trained.results[stored][0]["weights"].items():
        np.testing.assert_array_equal(trained.results[name][0]["weights"][weight], values)
