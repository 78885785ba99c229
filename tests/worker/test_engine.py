"""Engines on two real ranks: where DeepSpeed has to be helped, against plain torch and against formulas."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from launcher import deepspeed_json, traffic
from launcher.batch import Cut
from launcher.ranks import Rank
from launcher.schema import Call, Config, Dtype, Optimizer, OptimizerType, Precision, Train, Zero
from tests.ranks import on_ranks
from tests.worker import runs

pytestmark = pytest.mark.ranks

STAGES, RANKS = (0, 1, 2, 3), 2
WIDTH, NUM_STEPS, LEARNING_RATE, DECAY = 8, 4, 2.0**-4, 0.25
CLIPPING = 1.7
"""Between the norms of the gradients below."""

Results = dict[Any, Any]


class Vector(nn.Module):
    """A matrix of one row, all 1 at first. The gradient of its loss is the input, whatever the weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, WIDTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs.to(self.weight.dtype) * self.weight).sum()


class Wrapped(nn.Module):
    """The same, with its output in an object of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = Vector()

    def forward(self, inputs: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self.vector(inputs))


class Layers(nn.Module):
    """One parameter of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 5, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(torch.tanh(self.linear(self.embedding(inputs)))))
        return logits


def configure(stage: int, dtype: Dtype = Dtype.FP32, clipping: float | None = None) -> Config:
    """The learning rate of the configuration is not that of a step, and would be seen at once."""
    summed = Dtype.BF16 if stage == 0 and dtype is Dtype.BF16 else Dtype.FP32
    return replace(
        Config(),
        zero=Zero(stage=stage, stage3_param_persistence_threshold=0),
        precision=Precision(dtype=dtype, grad_accum_dtype=summed),
        optimizer=Optimizer(OptimizerType.ADAMW, lr=1.0, weight_decay=DECAY, betas=(0.9, 0.95), eps=1e-8),
        train=Train(gradient_clipping=clipping),
    )


@contextmanager
def engine_of(name: str, config: Config) -> Iterator[Any]:
    """An engine on two ranks that accumulates twice."""
    from launcher.worker import models
    from launcher.worker.engine import Engine

    request = runs.TINY_LLAMA if name == "llama" else Call(f"tests.worker.test_engine.{name}")
    values = deepspeed_json.build(config, Cut(2 * RANKS, 1, 2, RANKS)).values
    engine = Engine(models.build(request, 0, values), values, config.optimizer, traffic.sync(config))
    engine.set_learning_rate(LEARNING_RATE)
    yield engine
    engine.deepspeed.destroy()


def weights_of(engine: Any) -> dict[str, Any]:
    """By name, what the model computes with."""
    import deepspeed  # type: ignore[import-untyped]

    named = dict(engine.module.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(named.values())):
        return {name: parameter.detach().float().clone().numpy() for name, parameter in named.items()}


def masters_of(engine: Any) -> dict[str, Any]:
    """By name, the fp32 weights that are updated."""
    import deepspeed.utils  # type: ignore[import-untyped]

    named = dict(engine.module.module.named_parameters())
    optimizer = engine.deepspeed.optimizer
    if engine.deepspeed.zero_optimization():
        return {name: deepspeed.utils.safe_get_full_fp32_param(parameter).numpy() for name, parameter in named.items()}
    if not engine.deepspeed.bfloat16_enabled():
        return weights_of(engine)
    masters = {
        id(weight): master
        for weights, group in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        for weight, master in zip(weights, group, strict=True)
    }
    return {name: masters[id(parameter)].detach().clone().numpy() for name, parameter in named.items()}


def gradients(step: int) -> torch.Tensor:
    """By micro-batch, exact in bf16 alone and summed: small multiples of 1/4."""
    generator = torch.Generator().manual_seed(4 + step)
    return torch.randint(-8, 9, (2 * RANKS, WIDTH), generator=generator) / 4


def follow(rank: Rank, stage: int, dtype: Dtype, clipping: float | None, name: str = "Vector") -> Results:
    """Some steps over known gradients."""

    def loss(inputs: torch.Tensor) -> torch.Tensor:
        output = engine.module(inputs)
        return getattr(output, "logits", output).float()  # type: ignore[no-any-return]

    with engine_of(name, configure(stage, dtype, clipping)) as engine:
        updates = []
        for step in range(NUM_STEPS):
            first, second = gradients(step)[2 * rank.rank : 2 * rank.rank + 2]
            engine.begin_window(2)
            engine.backward(loss(first), 2 * RANKS)
            engine.backward(loss(second), 2 * RANKS)
            updates.append(engine.end_window())
        (weights,), (masters,) = weights_of(engine).values(), masters_of(engine).values()
        return {
            "norms": [update.grad_norm for update in updates],
            "clipped": [update.grad_norm_clipped for update in updates],
            "applied": [update.applied for update in updates],
            "weights": weights.flatten().tolist(),
            "masters": masters.flatten().tolist(),
        }


def decay(stage: int, dtype: Dtype) -> Results:
    """The weights before and after a step whose gradients are all zero, so that nothing but decay moves them."""
    with engine_of("Layers", configure(stage, dtype)) as engine:
        before = masters_of(engine)
        engine.begin_window(2)
        for _ in range(2):
            engine.backward(engine.module(torch.tensor([[0, 3, 1]])).float().sum() * 0, 1.0)
        update = engine.end_window()
        return {"before": before, "after": masters_of(engine), "norm": update.grad_norm}


def rotary(stage: int) -> Results:
    """What a Llama in bf16 keeps in which precision, and whether it learns."""
    with engine_of("llama", configure(stage, Dtype.BF16)) as engine:
        model = engine.module.module
        losses = []
        for _ in range(2):
            engine.begin_window(2)
            for _ in range(2):
                tokens = torch.arange(64).reshape(1, 64) % 5 + 2
                logits = engine.module(tokens).logits[:, :-1]
                loss = nn.functional.cross_entropy(
                    logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
                )
                engine.backward(loss, 63 * 2 * RANKS)
            engine.end_window()
            losses.append(loss.item() / 63)
        return {
            "frequencies": model.model.rotary_emb.inv_freq.tolist(),
            "buffers": {name: str(buffer.dtype) for name, buffer in model.named_buffers()},
            "weights": {str(parameter.dtype) for parameter in model.parameters()},
            "losses": losses,
        }


def work(rank: Rank) -> Results:
    results: Results = {}
    for stage in STAGES:
        for dtype in (Dtype.FP32, Dtype.BF16):
            for clipping in (None, CLIPPING):
                results["followed", stage, dtype, clipping] = follow(rank, stage, dtype, clipping)
            results["wrapped", stage, dtype] = follow(rank, stage, dtype, CLIPPING, "Wrapped")
            results["decayed", stage, dtype] = decay(stage, dtype)
        results["rotary", stage] = rotary(stage)
    return results


@pytest.fixture(scope="module")
def worked() -> Results:
    """What the ranks saw, which is the same."""
    first: Results
    first, second = on_ranks(RANKS, work)
    for key in first:
        if key[0] == "followed":
            assert first[key] == second[key]
    return first


def followed_by_torch(clipping: float | None) -> Results:
    """The same steps in one process in plain torch, in fp32."""
    weight = nn.Parameter(torch.ones(WIDTH))
    optimizer = torch.optim.AdamW([weight], lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=DECAY)
    norms, clipped = [], []
    for step in range(NUM_STEPS):
        weight.grad = gradients(step).mean(0)
        norms.append(nn.utils.clip_grad_norm_([weight], clipping or math.inf).item())
        clipped.append(weight.grad.norm().item())
        optimizer.step()
    return {"norms": norms, "clipped": clipped, "weights": weight.tolist()}


stages = pytest.mark.parametrize("stage", STAGES)
dtypes = pytest.mark.parametrize("dtype", [Dtype.FP32, Dtype.BF16])
clippings = pytest.mark.parametrize("clipping", [None, CLIPPING])


@clippings
@dtypes
@stages
def test_steps_are_those_of_torchs_adamw_from_the_first_one_on(
    worked: Results, stage: int, dtype: Dtype, clipping: float | None
) -> None:
    """In bf16 the masters are fp32, and at stage 0 no step of DeepSpeed's own comes before the first."""
    ours, torchs = worked["followed", stage, dtype, clipping], followed_by_torch(clipping)
    assert ours["applied"] == [True] * NUM_STEPS
    assert ours["masters"] == pytest.approx(torchs["weights"], rel=1e-6)
    rounded = torch.tensor(ours["masters"])
    if dtype is Dtype.BF16:
        rounded = rounded.bfloat16().float()
    assert ours["weights"] == rounded.tolist()


@dtypes
@stages
def test_a_model_may_wrap_its_output_in_a_class_of_its_own(worked: Results, stage: int, dtype: Dtype) -> None:
    """In which DeepSpeed finds no tensor to hook."""
    assert worked["wrapped", stage, dtype] == worked["followed", stage, dtype, CLIPPING]


@clippings
@dtypes
@stages
def test_the_norm_of_the_gradient_is_told_before_and_after_clipping(
    worked: Results, stage: int, dtype: Dtype, clipping: float | None
) -> None:
    ours, torchs = worked["followed", stage, dtype, clipping], followed_by_torch(clipping)
    assert [norm > CLIPPING for norm in torchs["norms"]] == [True, False, True, False]
    assert ours["norms"] == pytest.approx(torchs["norms"], rel=1e-6)
    assert ours["clipped"] == pytest.approx(torchs["clipped"], rel=1e-6)
    if clipping is None:
        assert ours["clipped"] == ours["norms"]


@dtypes
@stages
def test_matrices_decay_and_norms_biases_and_embeddings_do_not(worked: Results, stage: int, dtype: Dtype) -> None:
    """AdamW without a gradient multiplies by 1 - lr x decay (Loshchilov and Hutter 2019, algorithm 2)."""
    decayed = worked["decayed", stage, dtype]
    factors = dict.fromkeys(decayed["before"], 1.0)
    assert factors.keys() == {f"{name}.weight" for name in ("embedding", "linear", "norm", "head")} | {
        f"{name}.bias" for name in ("linear", "norm")
    }
    factors |= {"linear.weight": 1 - LEARNING_RATE * DECAY, "head.weight": 1 - LEARNING_RATE * DECAY}
    for name, factor in factors.items():
        assert decayed["after"][name] == pytest.approx(decayed["before"][name] * factor, rel=1e-6), name
    assert decayed["norm"] == 0.0


@stages
def test_rotary_frequencies_stay_exact_in_bf16(worked: Results, stage: int) -> None:
    """theta_i = 10000^(-2i/d) (Su et al. 2021, section 3.2.2), d = 16; neighbours at 1000 would agree in bf16."""
    result = worked["rotary", stage]
    assert result["weights"] == {"torch.bfloat16"}
    assert result["buffers"]
    assert set(result["buffers"].values()) == {"torch.float32"}
    assert result["frequencies"] == pytest.approx([10000 ** (-2 * i / 16) for i in range(8)], rel=1e-6)


@stages
def test_a_model_in_bf16_with_frequencies_in_fp32_learns(worked: Results, stage: int) -> None:
    before, after = worked["rotary", stage]["losses"]
    assert before == pytest.approx(math.log(17), rel=0.02), "nothing is known at first"
    assert after < before - 0.1
