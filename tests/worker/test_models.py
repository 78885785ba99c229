"""Models by name: the same weights at every ZeRO stage, drawn as their library draws them, or a line why not."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from launcher import deepspeed_json
from launcher.batch import Cut
from launcher.errors import RequestError
from launcher.ranks import Rank
from launcher.schema import Call, Config, Dtype, Optimizer, Precision, Sync, Zero
from launcher.worker import models
from tests.ranks import on_ranks

HUGGING_FACE = "launcher.worker.models.hugging_face"

SMALL = {
    "vocab_size": 17,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA = {"model_type": "llama", "num_key_value_heads": 2, **SMALL}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama, tied": {**LLAMA, "tie_word_embeddings": True},
    "llama, padded": {**LLAMA, "pad_token_id": 0},
    "lfm2": {"model_type": "lfm2", "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"], **SMALL},
    "gpt_neox": {"model_type": "gpt_neox", **SMALL},
    "gpt2": {"model_type": "gpt2", "vocab_size": 17, "n_embd": 48, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "bert": {"model_type": "bert", "task": "masked_lm", "pad_token_id": 0, **SMALL},
}

Results = dict[Any, Any]
Weights = dict[str, np.ndarray[Any, np.dtype[np.float32]]]


class Net(nn.Module):
    """A module that knows nothing of this program."""

    def __init__(self, width: int, frozen: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, width)
        self.layers = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.requires_grad_(not frozen)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(self.embedding(tokens)) @ self.embedding.weight.T
        return logits


class SelfDrawn(Net):
    """Its weights are drawn by a method of the name that Hugging Face gave it."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=2.0)
            nn.init.constant_(module.bias, 0.5)


class Blocks(nn.Module):
    """Every kind of parameter; the head is tied to the embedding, and one block is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 8)
        self.bag = nn.EmbeddingBag(17, 8)
        self.conv = nn.Conv1d(8, 8, 3)
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 17, bias=False)
        self.head.weight = self.embedding.weight


class HeadFirst(nn.Module):
    """The same tie, first named as a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 17, bias=False)
        self.embedding = nn.Embedding(17, 8)
        self.embedding.weight = self.head.weight


DROPPING = Call(HUGGING_FACE, ARCHITECTURES["bert"] | {"hidden_dropout_prob": 0.3})

REQUESTS = {
    **{name: Call(HUGGING_FACE, arguments) for name, arguments in ARCHITECTURES.items()},
    "own": Call("tests.worker.test_models.Net", {"width": 32}),
    "own, drawn by itself": Call("tests.worker.test_models.SelfDrawn", {"width": 32}),
}


def values_of(stage: int, dtype: Dtype = Dtype.FP32, ranks: int = 1) -> dict[str, Any]:
    summed = Dtype.BF16 if stage == 0 and dtype is Dtype.BF16 else Dtype.FP32
    config = Config(
        zero=Zero(stage=stage, stage3_param_persistence_threshold=0),
        precision=Precision(dtype=dtype, grad_accum_dtype=summed),
    )
    return deepspeed_json.build(config, Cut(ranks, 1, 1, ranks)).values


def build(request: Call, seed: int = 0) -> nn.Module:
    """As it is built where nothing is partitioned, on one process."""
    return models.build(request, seed, values_of(0))


def weights_of(model: nn.Module) -> Weights:
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def decay_of(model: nn.Module) -> dict[str, float]:
    """By name, the weight decay of each parameter that is in a group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = models.parameter_groups(model, 0.3)
    decays = [(names[id(parameter)], group["weight_decay"]) for group in groups for parameter in group["params"]]
    assert len(decays) == len(dict(decays)), "no parameter is in two groups"
    return dict(decays)


# The same weights, whatever the stage


def partition(request: Call, dtype: Dtype, ranks: int) -> Results:
    """A model at stage 3: its weights, their weight decay and type, and how many lie on this rank."""
    import deepspeed  # type: ignore[import-untyped]

    model = models.build(request, 0, values_of(3, dtype, ranks))
    held = {name: parameter.ds_tensor.numel() for name, parameter in model.named_parameters()}  # type: ignore[attr-defined]
    decays = decay_of(model)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {
            "held": held,
            "decays": decays,
            "types": {str(parameter.dtype) for parameter in model.parameters()},
            "weights": {name: p.detach().float().clone().numpy() for name, p in model.named_parameters()},
        }


def update(rank: Rank, stage: int, is_checkpointed: bool) -> Weights:
    """The weights after one step with dropout."""
    import deepspeed

    from launcher.worker.engine import Engine

    values = values_of(stage, ranks=rank.world_size)
    model = models.build(DROPPING, 0, values)
    if is_checkpointed:
        models.checkpoint_activations(model)
    engine = Engine(model, values, Optimizer(weight_decay=0.1), Sync.EVERY_MICRO_BATCH)
    tokens = (torch.arange(2 * 40).reshape(2, 40) + rank.rank) % 17
    engine.begin_window(1)
    torch.manual_seed(3)
    loss = nn.functional.cross_entropy(engine.module(tokens).logits.flatten(0, 1), tokens.flatten(), reduction="sum")
    engine.backward(loss, 160)
    assert engine.end_window().applied
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: parameter.detach().clone().numpy() for name, parameter in model.named_parameters()}


def work(rank: Rank) -> Results:
    results: Results = {}
    for name, request in REQUESTS.items():
        for dtype in (Dtype.FP32, Dtype.BF16):
            try:
                results[name, dtype] = partition(request, dtype, rank.world_size)
            except Exception as error:  # the tests of other models shall still be run
                results[name, dtype] = repr(error)
    for stage in (0, 3):
        results["updated", stage] = [update(rank, stage, is_checkpointed) for is_checkpointed in (False, True)]
    return results


@pytest.fixture(scope="module")
def worked() -> list[Results]:
    """What each of two ranks has."""
    return on_ranks(2, work)


def built(worked: list[Results], rank: int, name: str, dtype: Dtype = Dtype.FP32) -> Results:
    result = worked[rank][name, dtype]
    assert isinstance(result, dict), result
    return result


@pytest.mark.ranks
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", REQUESTS)
def test_weights_are_the_same_partitioned_over_ranks_and_whole(worked: list[Results], name: str, rank: int) -> None:
    ours, whole = built(worked, rank, name)["weights"], weights_of(build(REQUESTS[name]))
    assert ours.keys() == whole.keys()
    for parameter, values in whole.items():
        np.testing.assert_array_equal(ours[parameter], values, err_msg=parameter)


@pytest.mark.ranks
@pytest.mark.parametrize("name", REQUESTS)
def test_weights_in_bf16_are_those_in_fp32_rounded(worked: list[Results], name: str) -> None:
    """As DeepSpeed rounds them at the other stages."""
    result = built(worked, 0, name, Dtype.BF16)
    assert result["types"] == {"torch.bfloat16"}
    for parameter, values in build(REQUESTS[name]).named_parameters():
        rounded = values.detach().bfloat16().float().numpy()
        np.testing.assert_array_equal(result["weights"][parameter], rounded, err_msg=parameter)


@pytest.mark.ranks
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", REQUESTS)
def test_a_rank_holds_its_half_of_every_weight(worked: list[Results], name: str, rank: int) -> None:
    halves = {name: math.ceil(values.size / 2) for name, values in weights_of(build(REQUESTS[name])).items()}
    assert built(worked, rank, name)["held"] == halves


@pytest.mark.ranks
@pytest.mark.parametrize("name", REQUESTS)
def test_weights_decay_alike_partitioned_and_whole(worked: list[Results], name: str) -> None:
    decays = built(worked, 0, name)["decays"]
    assert decays == decay_of(build(REQUESTS[name]))
    assert set(decays.values()) == {0.0, 0.3}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "embedding"),
    [("llama, padded", "model.embed_tokens.weight"), ("bert", "bert.embeddings.word_embeddings.weight")],
)
def test_the_padding_row_of_an_embedding_is_zero_at_every_stage(
    worked: list[Results], name: str, embedding: str
) -> None:
    library = weights_of(drawn_by_transformers(ARCHITECTURES[name]))[embedding]
    whole = weights_of(build(REQUESTS[name]))[embedding]
    partitioned = built(worked, 0, name)["weights"][embedding]
    for weights in (library, whole, partitioned):
        assert not weights[0].any()
        assert weights[1:].all()


# How weights are drawn


def drawn_by_transformers(arguments: Mapping[str, Any]) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    own = dict(arguments)
    automatic = {"causal_lm": AutoModelForCausalLM, "masked_lm": AutoModelForMaskedLM}[own.pop("task", "causal_lm")]
    model: nn.Module = automatic.from_config(AutoConfig.for_model(**own))  # type: ignore[no-untyped-call]
    return model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_weights_are_drawn_from_the_distributions_of_the_library(name: str) -> None:
    """Means and deviations of normal samples agree within five standard errors; constants exactly."""
    ours, theirs = build(REQUESTS[name]), drawn_by_transformers(ARCHITECTURES[name])
    assert type(ours) is type(theirs)
    expected = weights_of(theirs)
    assert weights_of(ours).keys() == expected.keys()
    for parameter, values in weights_of(ours).items():
        other = expected[parameter]
        assert values.shape == other.shape
        if other.min() == other.max():
            np.testing.assert_array_equal(values, other, err_msg=parameter)
            continue
        spread = other.std()
        assert abs(values.mean() - other.mean()) < 5 * spread * math.sqrt(2 / other.size), parameter
        assert abs(values.std() - spread) < 5 * spread / math.sqrt(other.size), parameter


def test_no_two_matrices_share_a_draw() -> None:
    matrices = [values.ravel()[:100] for values in weights_of(build(REQUESTS["llama"])).values() if values.ndim == 2]
    assert len({matrix.tobytes() for matrix in matrices}) == len(matrices) == 2 + 2 * 7


@pytest.mark.parametrize("name", REQUESTS)
def test_a_seed_gives_the_same_weights_again_and_another_seed_gives_others(name: str) -> None:
    torch.manual_seed(5)
    first = weights_of(build(REQUESTS[name], seed=1))
    torch.manual_seed(6)
    again, other = weights_of(build(REQUESTS[name], seed=1)), weights_of(build(REQUESTS[name], seed=2))
    for parameter, values in first.items():
        np.testing.assert_array_equal(again[parameter], values, err_msg=parameter)
        is_constant = values.min() == values.max()
        assert np.array_equal(other[parameter], values) == is_constant, parameter


def test_tied_weights_are_one_parameter() -> None:
    names = set(weights_of(build(REQUESTS["llama"]))) - set(weights_of(build(REQUESTS["llama, tied"])))
    assert names == {"lm_head.weight"}
    tied: Any = build(REQUESTS["llama, tied"])
    assert tied.lm_head.weight is tied.model.embed_tokens.weight


def test_a_module_of_ones_own_draws_its_weights_from_the_seed() -> None:
    torch.manual_seed(11)
    plain = Net(width=32)
    ours = build(REQUESTS["own"], seed=11)
    assert type(ours) is Net
    for parameter, values in weights_of(plain).items():
        np.testing.assert_array_equal(weights_of(ours)[parameter], values)


def test_a_module_of_ones_own_may_draw_as_hugging_face_modules_do() -> None:
    weights = weights_of(build(REQUESTS["own, drawn by itself"]))
    assert weights["layers.0.weight"].std() == pytest.approx(2.0, rel=5 / math.sqrt(2 * 32 * 32))
    assert (weights["layers.0.bias"] == 0.5).all()
    assert (weights["layers.2.weight"] == 1.0).all()


# Attention


@pytest.mark.parametrize(("asked", "used"), [({}, "sdpa"), ({"attn_implementation": "eager"}, "eager")])
def test_attention_is_torchs_own_unless_asked_otherwise(asked: dict[str, str], used: str) -> None:
    model: Any = build(Call(HUGGING_FACE, LLAMA | asked))
    assert model.config._attn_implementation == used


# Weight decay


def test_matrices_decay_and_norms_biases_embeddings_and_tied_heads_do_not() -> None:
    assert decay_of(Blocks()) == {
        "embedding.weight": 0.0,
        "bag.weight": 0.0,
        "conv.weight": 0.3,
        "conv.bias": 0.0,
        "linear.weight": 0.3,
        "linear.bias": 0.0,
        "norm.weight": 0.0,
        "norm.bias": 0.0,
    }


def test_an_embedding_does_not_decay_under_whichever_name_it_comes_first() -> None:
    assert decay_of(HeadFirst()) == {"head.weight": 0.0}


def test_there_is_no_group_without_parameters() -> None:
    (group,) = models.parameter_groups(nn.Linear(3, 3, bias=False), 0.3)
    assert group["weight_decay"] == 0.3
    (group,) = models.parameter_groups(nn.LayerNorm(3), 0.3)
    assert group["weight_decay"] == 0.0
    assert models.parameter_groups(nn.Linear(3, 3).requires_grad_(False), 0.3) == []


# Activation checkpointing


def gradients(model: nn.Module) -> tuple[Weights, int]:
    """Of a forward pass with dropout, and how often the first layer was run for it."""
    runs = []
    (inside,) = [module for name, module in model.named_modules() if name.endswith("layer.0.attention")]
    inside.register_forward_pre_hook(lambda *_: runs.append(1))
    tokens = torch.arange(2 * 40).reshape(2, 40) % 17
    torch.manual_seed(3)
    model(tokens).logits.square().sum().backward()
    return {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}, len(runs)


def test_activations_are_recomputed_with_the_same_dropout_masks() -> None:
    plain, checkpointed = build(DROPPING), build(DROPPING)
    models.checkpoint_activations(checkpointed)
    expected, runs = gradients(plain)
    found, runs_again = gradients(checkpointed)
    assert (runs, runs_again) == (1, 2)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 3])
def test_recomputing_changes_no_update(worked: list[Results], stage: int) -> None:
    initial = weights_of(build(DROPPING))
    plain, checkpointed = worked[0]["updated", stage]
    for name, values in plain.items():
        np.testing.assert_array_equal(checkpointed[name], values, err_msg=name)
    assert not any(np.array_equal(initial[name], values) for name, values in plain.items())


def test_a_model_that_cannot_recompute_is_refused() -> None:
    with pytest.raises(RequestError) as refused:
        models.checkpoint_activations(Net(width=4))
    assert refused.value.faults == [
        "activation.checkpointing=full: Net has no method gradient_checkpointing_enable; add it, or set none"
    ]


# What is refused


def refusal(target: str, **arguments: Any) -> list[str]:
    with pytest.raises(RequestError) as refused:
        build(Call(target, arguments))
    return refused.value.faults


def test_an_unknown_architecture_is_refused_with_the_nearest() -> None:
    (line,) = refusal(HUGGING_FACE, model_type="lama")
    assert line.startswith("model.model_type=lama: transformers has no such architecture; nearest: ")
    assert "llama" in line.partition("nearest: ")[2].split(", ")


def test_every_unknown_argument_is_refused_with_the_nearest() -> None:
    first, second, third = refusal(HUGGING_FACE, model_type="llama", hiden_size=32, num_hidden_layer=2, zzz=1)
    assert first.startswith("model.hiden_size: LlamaConfig has no such argument; nearest: hidden_size")
    assert second.startswith("model.num_hidden_layer: LlamaConfig has no such argument; nearest: num_hidden_layers")
    assert third == "model.zzz: LlamaConfig has no such argument"


def test_an_unknown_task_is_refused_with_those_there_are() -> None:
    assert refusal(HUGGING_FACE, model_type="llama", task="causal") == [
        "model.task=causal: it must be one of causal_lm, masked_lm"
    ]


def test_an_architecture_without_the_task_is_refused() -> None:
    assert refusal(HUGGING_FACE, **LLAMA, task="masked_lm") == [
        "model.model_type=llama: transformers has no masked_lm model of it"
    ]


def test_a_missing_or_wrong_argument_is_refused() -> None:
    (line,) = refusal(HUGGING_FACE)
    assert line.startswith(f"model._target_={HUGGING_FACE}: ")
    assert "model_type" in line
    (line,) = refusal("tests.worker.test_models.Net", wide=3)
    assert line.startswith("model._target_=tests.worker.test_models.Net: ")
    assert "'wide'" in line


@pytest.mark.parametrize("wrong", [{"hidden_size": "wide"}, {"hidden_size": 33}])
def test_an_argument_that_the_library_cannot_use_is_refused(wrong: dict[str, Any]) -> None:
    (line,) = refusal(HUGGING_FACE, **(LLAMA | wrong))
    assert line.startswith(f"model._target_={HUGGING_FACE}: ")


@pytest.mark.parametrize("target", ["tests.worker.test_models.Nest", "no_such_package.Net", "Net", ""])
def test_what_cannot_be_imported_is_refused(target: str) -> None:
    (line,) = refusal(target)
    assert line.startswith(f"model._target_={target}: it cannot be imported: ")


def test_what_makes_no_module_is_refused() -> None:
    assert refusal("collections.Counter") == [
        "model._target_=collections.Counter: it makes a Counter, not a torch.nn.Module"
    ]


@pytest.mark.parametrize(
    ("target", "arguments"),
    [("torch.nn.GELU", {}), ("tests.worker.test_models.Net", {"width": 4, "frozen": True})],
    ids=["none", "frozen"],
)
def test_a_module_without_parameters_to_train_is_refused(target: str, arguments: dict[str, Any]) -> None:
    assert refusal(target, **arguments) == [f"model._target_={target}: it has no parameter to train"]


class Odd(nn.Module):
    def __init__(self, scalar: bool = False) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
        if scalar:
            self.scale = nn.Parameter(torch.tensor(1.0))


def test_a_parameter_without_a_dimension_is_refused_by_name() -> None:
    assert refusal("tests.worker.test_models.Odd", scalar=True) == [
        "model._target_=tests.worker.test_models.Odd: DeepSpeed cannot take a parameter without a dimension (scale); "
        "give it the shape (1,)"
    ]


def test_a_parameter_that_does_not_lie_in_one_piece_is_copied() -> None:
    model = models.build(Call("tests.worker.test_models.Odd"), 0, {"zero_optimization": {"stage": 0}})
    (turned,) = model.parameters()
    assert turned.is_contiguous()
    assert turned.tolist() == [[0, 3], [1, 4], [2, 5]]


class OddAndDrawn(Odd):
    """So that it is partitioned while it is built."""

    def _init_weights(self, module: nn.Module) -> None:
        pass


def refused_at_stage_3(rank: Rank) -> list[str]:
    values = deepspeed_json.build(Config(zero=Zero(stage=3)), Cut(1, 1, 1, 1)).values
    return [
        refusal_of("tests.worker.test_models.OddAndDrawn", values, scalar=True),
        refusal_of("tests.worker.test_models.OddAndDrawn", values),
    ]


def refusal_of(target: str, values: Mapping[str, Any], **arguments: Any) -> str:
    with pytest.raises(RequestError) as raised:
        models.build(Call(target, arguments), 0, values)
    return str(raised.value)


@pytest.mark.ranks
def test_such_parameters_are_refused_where_the_model_is_partitioned_as_it_is_built() -> None:
    for told in on_ranks(1, refused_at_stage_3)[0]:
        assert told.startswith("model._target_=tests.worker.test_models.OddAndDrawn: DeepSpeed cannot take a parameter")
