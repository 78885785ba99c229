"""One optimizer step on real ranks, with losses and gradients that can be worked out by hand.

The model is a weight w of three elements, all 1 at first, and a token x has the loss w . x. So the losses of the tokens
below are 1, 2, 3 and 6, their mean is 3 and its gradient (2, 5, 5) / 4.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from launcher import deepspeed_json, traffic
from launcher.batch import Cut
from launcher.ranks import Rank
from launcher.schema import Call, Config, Dtype, Optimizer, OptimizerType, Precision, Train, Zero
from tests.ranks import on_ranks

pytestmark = pytest.mark.ranks

STAGES = (0, 1, 2, 3)
LEARNING_RATE = 0.125

ONE, TWO, THREE, SIX = [1.0, 0.0, 0.0], [0.0, 2.0, 0.0], [1.0, 1.0, 1.0], [0.0, 2.0, 4.0]
GRADIENT = [2 / 4, 5 / 4, 5 / 4]
NORM = math.sqrt(2**2 + 5**2 + 5**2) / 4
NO_TARGET = [1000.0] * 3
"""A token that is read and not predicted."""

Results = dict[Any, Any]

Tokens = list[list[float]]
"""Of a micro-batch."""

UNEVEN: list[list[Tokens]] = [[[ONE, TWO], [NO_TARGET]], [[THREE], [SIX]]]
"""By rank and micro-batch. The mean of the means of micro-batches would be 3.5 or, without the empty one, 2.625."""
EMPTY: list[list[Tokens]] = [[[NO_TARGET], [NO_TARGET]], [[NO_TARGET], [NO_TARGET, NO_TARGET]]]
ONE_SIDED: list[list[Tokens]] = [[[NO_TARGET], [NO_TARGET]], [[ONE, TWO, THREE], [SIX]]]
POISONED: list[list[Tokens]] = [[[ONE, TWO], [THREE]], [[[math.nan, 0.0, 0.0]], [SIX]]]
INFINITE: list[list[Tokens]] = [[[ONE, TWO], [THREE]], [[SIX], [[math.inf, 0.0, 0.0]]]]

WIDTH = 50
"""Of what dropout is applied to."""


class Dot(nn.Module):
    """w . x, after dropout."""

    def __init__(self, width: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        products: torch.Tensor = (self.dropout(inputs.to(self.weight.dtype)) * self.weight).sum(-1)
        return products


def sum_of_targets(logits: torch.Tensor, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    counted = batch["labels"] != -100
    return logits.float().masked_fill(~counted, 0.0).sum(), counted.sum()


def share_of(micro_batches: Sequence[Tokens], first_seed: int = 0) -> Any:
    """A rank's share; its micro-batches have consecutive dropout seeds."""
    from launcher.worker.objectives import Custom, Weight
    from launcher.worker.windows import MicroBatch, Share

    batches = []
    for tokens in micro_batches:
        inputs = torch.tensor(tokens)
        batches.append({"inputs": inputs, "labels": torch.where((inputs == 1000.0).all(-1), -100, 1)})
    weight = sum((Custom(sum_of_targets).weigh(batch) for batch in batches), Weight())
    made = [MicroBatch(batch, is_empty=False, dropout_seed=first_seed + i) for i, batch in enumerate(batches)]
    return Share(made, weight, num_sequences=0)


class Training:
    """An engine and what one does with it."""

    def __init__(self, config: Config, rank: Rank, accumulation: int = 2, width: int = 3, dropout: float = 0.0) -> None:
        from launcher.worker import models
        from launcher.worker.engine import Engine
        from launcher.worker.objectives import Custom

        cut = Cut(accumulation * rank.world_size, 1, accumulation, rank.world_size)
        values = deepspeed_json.build(config, cut).values
        request = Call("tests.worker.test_step.Dot", {"width": width, "dropout": dropout})
        self.engine = Engine(models.build(request, 0, values), values, config.optimizer, traffic.sync(config))
        self.objective = Custom(sum_of_targets)
        self.rank = rank.rank

    def step(self, of_ranks: list[list[Tokens]], first_seed: int = 0) -> Results:
        from launcher.worker import step

        share = share_of(of_ranks[self.rank], first_seed)
        outcome = step.train_step(self.engine, self.objective, share, LEARNING_RATE)
        return {
            "loss": outcome.loss,
            "tokens": outcome.weight.tokens,
            "norm": outcome.update.grad_norm,
            "applied": outcome.update.applied,
            "weights": self.weights(),
        }

    def evaluate(self, *global_batches: list[list[Tokens]]) -> Results:
        from launcher.worker import step

        shares = [share_of(of_ranks[self.rank]) for of_ranks in global_batches]
        found = step.evaluate(self.engine, self.objective, shares, stops=lambda: False)
        assert found is not None
        loss, weight = found
        modes = {module.training for module in self.engine.module.modules()}
        return {"loss": loss, "tokens": weight.tokens, "modes": modes, "weights": self.weights()}

    def weights(self) -> list[float]:
        """What the model computes with."""
        import deepspeed  # type: ignore[import-untyped]

        parameters = list(self.engine.module.parameters())
        with deepspeed.zero.GatheredParameters(parameters):
            return [element for parameter in parameters for element in parameter.detach().float().tolist()]


def configure(stage: int, optimizer: OptimizerType, dtype: Dtype = Dtype.FP32) -> Config:
    """The learning rate of the configuration is not that of a step."""
    summed = Dtype.BF16 if stage == 0 and dtype is Dtype.BF16 else Dtype.FP32
    return replace(
        Config(),
        zero=Zero(stage=stage, stage3_param_persistence_threshold=0),
        precision=Precision(dtype=dtype, grad_accum_dtype=summed),
        optimizer=Optimizer(optimizer, lr=10.0, weight_decay=0.0, momentum=0.0, betas=(0.9, 0.95)),
        train=Train(gradient_clipping=None),
    )


def dropout_tokens() -> list[list[Tokens]]:
    """Four micro-batches of one to four tokens, as one rank has them."""
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(1 + i, WIDTH, generator=generator).tolist() for i in range(4)]]


def as_two_ranks_have_them(micro_batches: list[Tokens]) -> list[list[Tokens]]:
    return [micro_batches[:2], micro_batches[2:]]


def on_two(rank: Rank) -> Results:
    results: Results = {}
    for stage in STAGES:
        sgd = configure(stage, OptimizerType.SGD)
        results["uneven", stage] = Training(sgd, rank).step(UNEVEN)
        results["one-sided", stage] = Training(sgd, rank).step(ONE_SIDED)
        training = Training(sgd, rank)
        results["empty", stage] = [training.step(batch) for batch in (EMPTY, UNEVEN)]
        training = Training(sgd, rank, dropout=0.5)
        results["evaluated", stage] = [
            training.evaluate(UNEVEN),
            training.evaluate(EMPTY),
            training.evaluate(UNEVEN, [[[ONE], [ONE]], [[ONE], [ONE]]]),
            training.evaluate(POISONED),
        ]
        training = Training(sgd, rank)
        training.evaluate(UNEVEN)
        results["after evaluation", stage] = training.step(UNEVEN)
        for dtype in (Dtype.FP32, Dtype.BF16):
            training = Training(configure(stage, OptimizerType.ADAMW, dtype), rank)
            results["poisoned", stage, dtype] = [
                training.step(batch) for batch in (POISONED, UNEVEN, INFINITE, ONE_SIDED)
            ]
    training = Training(configure(1, OptimizerType.SGD), rank, width=WIDTH, dropout=0.5)
    results["dropout"] = training.step(as_two_ranks_have_them(dropout_tokens()[0]), first_seed=7 + 2 * rank.rank)
    return results


def on_one(rank: Rank) -> Results:
    training = Training(configure(0, OptimizerType.SGD), rank, accumulation=4, width=WIDTH, dropout=0.5)
    return {"dropout": training.step(dropout_tokens(), first_seed=7)}


@pytest.fixture(scope="module")
def stepped() -> list[Results]:
    """What both ranks saw."""
    return on_ranks(2, on_two)


every_stage = pytest.mark.parametrize("stage", STAGES)
both_ranks = pytest.mark.parametrize("rank", [0, 1])


def descended(gradient: Sequence[float]) -> Any:
    """The weights after a step of plain gradient descent."""
    return pytest.approx([1 - LEARNING_RATE * element for element in gradient], rel=1e-6)


# The mean over the global batch


@both_ranks
@every_stage
def test_a_step_follows_the_mean_over_all_tokens_of_the_global_batch(
    stepped: list[Results], stage: int, rank: int
) -> None:
    step = stepped[rank]["uneven", stage]
    assert step["loss"] == pytest.approx((1 + 2 + 3 + 6) / 4, rel=1e-6)
    assert step["tokens"] == 4
    assert step["norm"] == pytest.approx(NORM, rel=1e-6)
    assert step["weights"] == descended(GRADIENT)
    assert step["applied"]


@both_ranks
@every_stage
def test_a_rank_without_targets_takes_part_and_adds_nothing(stepped: list[Results], stage: int, rank: int) -> None:
    step = stepped[rank]["one-sided", stage]
    assert step["loss"] == pytest.approx(3.0, rel=1e-6)
    assert step["norm"] == pytest.approx(NORM, rel=1e-6)
    assert step["weights"] == descended(GRADIENT)


@both_ranks
@every_stage
def test_a_global_batch_without_targets_is_left_out_on_all_ranks(stepped: list[Results], stage: int, rank: int) -> None:
    left_out, next_one = stepped[rank]["empty", stage]
    assert left_out == {"loss": None, "tokens": 0, "norm": None, "applied": False, "weights": [1.0, 1.0, 1.0]}
    assert next_one["loss"] == pytest.approx(3.0, rel=1e-6)
    assert next_one["weights"] == descended(GRADIENT)


# A gradient that is not finite


def adamw(num_steps: int) -> list[list[float]]:
    """The weights before the first step of plain torch and after each."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    weights = [weight.tolist()]
    for _ in range(num_steps):
        weight.grad = torch.tensor(GRADIENT)
        optimizer.step()
        weights.append(weight.tolist())
    return weights


@both_ranks
@pytest.mark.parametrize(("dtype", "rel"), [(Dtype.FP32, 1e-6), (Dtype.BF16, 2**-8)])
@every_stage
def test_where_one_rank_has_no_finite_loss_none_steps_and_the_next_step_is_right(
    stepped: list[Results], stage: int, rank: int, dtype: Dtype, rel: float
) -> None:
    """Before the first step of AdamW, and between two: it counts neither in the weights nor in the moments."""
    before, first, between, second = stepped[rank]["poisoned", stage, dtype]
    start, once, twice = adamw(2)
    for poisoned, weights in ((before, start), (between, first["weights"])):
        assert not poisoned["applied"]
        assert poisoned["weights"] == weights
        assert (poisoned["loss"], poisoned["norm"]) == (None, None)
    for step, weights in ((first, once), (second, twice)):
        assert step["applied"]
        assert step["weights"] == pytest.approx(weights, rel=rel)
        assert step["norm"] == pytest.approx(NORM, rel=rel)


# Evaluation


@both_ranks
@every_stage
def test_an_evaluation_weighs_tokens_and_uses_no_dropout(stepped: list[Results], stage: int, rank: int) -> None:
    one, nothing, two, _ = stepped[rank]["evaluated", stage]
    assert (one["loss"], one["tokens"]) == (pytest.approx(3.0, rel=1e-6), 4)
    assert (two["loss"], two["tokens"]) == (pytest.approx((12 + 4) / 8, rel=1e-6), 8)
    assert (nothing["loss"], nothing["tokens"]) == (None, 0)


@both_ranks
@every_stage
def test_a_loss_that_is_not_finite_is_evaluated_as_unknown(stepped: list[Results], stage: int, rank: int) -> None:
    *_, poisoned = stepped[rank]["evaluated", stage]
    assert (poisoned["loss"], poisoned["tokens"]) == (None, 5)


@both_ranks
@every_stage
def test_an_evaluation_changes_nothing_in_training(stepped: list[Results], stage: int, rank: int) -> None:
    for evaluation in stepped[rank]["evaluated", stage]:
        assert evaluation["modes"] == {True}
        assert evaluation["weights"] == [1.0, 1.0, 1.0]
    after, without = stepped[rank]["after evaluation", stage], stepped[rank]["uneven", stage]
    assert after == without


# Dropout


def test_dropout_masks_follow_the_seed_of_the_micro_batch_whatever_runs_where(stepped: list[Results]) -> None:
    (alone,) = on_ranks(1, on_one)
    (micro_batches,) = dropout_tokens()
    weight = nn.Parameter(torch.ones(WIDTH))
    losses = []
    for seed, tokens in enumerate(micro_batches, start=7):
        torch.manual_seed(seed)
        losses.append((nn.functional.dropout(torch.tensor(tokens), 0.5) * weight).sum())
    loss = torch.stack(losses).sum() / 10
    loss.backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    plain = torch.tensor(list(itertools.chain(*micro_batches))).sum().item() / 10
    assert loss.item() != pytest.approx(plain, rel=0.1), "dropout makes a difference"
    for step in (alone["dropout"], stepped[0]["dropout"], stepped[1]["dropout"]):
        assert step["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert step["weights"] == pytest.approx((1 - LEARNING_RATE * weight.grad).tolist(), rel=1e-6)
