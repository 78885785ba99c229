"""BatchNorm is found wherever it is, and what takes its place computes what it says, over ranks and accumulation."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from launcher.errors import RequestError, RunError
from launcher.ranks import Rank
from launcher.schema import Batch, BatchNorm, Call, Config, CustomData, Dtype, LrSchedule, Optimizer, Precision, Train
from launcher.steps import Steps
from launcher.worker.examples.digits import CrossEntropy, Digits, ResNet
from launcher.worker.normalisation import num_groups, replace_batch_norms
from tests.ranks import on_ranks
from tests.worker import runs

HERE = "tests.worker.test_normalisation"
DIGITS = "launcher.worker.examples.digits"

Results = dict[str, Any]
Array = np.ndarray[Any, np.dtype[np.float64]]


class Renamed(nn.BatchNorm2d):
    """A subclass that computes nothing else."""


class Activated(nn.BatchNorm2d):
    """One that does, as some model libraries have it."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.relu(super().forward(input))


class SelfDrawnResNet(ResNet):
    """At ZeRO stage 3 it is built partitioned, and drawn module by module at every stage."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.constant_(module.weight, 0.9)


def nested(layer: nn.Module) -> nn.Module:
    return nn.ModuleDict({"first": nn.Linear(3, 8), "rest": nn.Sequential(nn.ReLU(), nn.ModuleList([layer]))})


def refusal(model: nn.Module, choice: BatchNorm) -> list[str]:
    with pytest.raises(RequestError) as refused:
        replace_batch_norms(model, choice)
    return refused.value.faults


# What is found, and what is refused


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(8),
        nn.BatchNorm2d(8),
        nn.BatchNorm3d(8),
        nn.SyncBatchNorm(8),
        nn.LazyBatchNorm2d(),
        Renamed(8),
        Activated(8),
        nn.BatchNorm2d(8).eval(),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_every_kind_of_batch_norm_is_refused_however_deep_it_lies(layer: nn.Module) -> None:
    (fault,) = refusal(nested(layer), BatchNorm.ERROR)
    assert fault.startswith("train.batch_norm=error: the model has 1 BatchNorm layer (rest.1.0), which ")


def test_the_refusal_names_the_first_layers_the_reason_and_the_remedies() -> None:
    assert refusal(ResNet(8), BatchNorm.ERROR) == [
        "train.batch_norm=error: the model has 7 BatchNorm layers (stem.1, blocks.0.norm1, blocks.0.norm2, ...), which "
        "normalise by the statistics of a micro-batch on one rank, so that the update would depend on how the global "
        "batch is cut; set train.batch_norm=group_norm (GroupNorm instead, every cut is the same update) or sync "
        "(statistics over all ranks, of a micro-batch still)"
    ]


@pytest.mark.parametrize("choice", BatchNorm)
def test_a_model_without_batch_norm_is_left_alone(choice: BatchNorm) -> None:
    for layer in (nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, track_running_stats=True)):
        model = nested(layer)
        assert replace_batch_norms(model, choice) is model
        assert layer in list(model.modules())


@pytest.mark.parametrize("choice", [BatchNorm.GROUP_NORM, BatchNorm.SYNC])
def test_a_layer_whose_replacement_would_change_the_model_is_refused(choice: BatchNorm) -> None:
    model = nn.Sequential(nn.BatchNorm2d(8), Activated(8), nn.LazyBatchNorm2d())
    assert refusal(model, choice) == [
        f"train.batch_norm={choice.value}: 1 is a Activated, whose forward() does more than BatchNorm; "
        "replace it in the model",
        f"train.batch_norm={choice.value}: 2 is a LazyBatchNorm2d, which has no channels before the first batch; "
        "give it its number of channels",
    ]


# GroupNorm


@pytest.mark.parametrize(
    ("channels", "groups"),
    [(1, 1), (7, 1), (8, 1), (12, 1), (16, 2), (34, 2), (48, 6), (64, 8), (96, 12), (256, 32), (257, 1), (2048, 32)],
)
def test_groups_divide_the_channels_and_hold_eight_or_more(channels: int, groups: int) -> None:
    assert num_groups(channels) == groups


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.BatchNorm1d(16, eps=0.1), (5, 16)),
        (nn.BatchNorm1d(16), (5, 16, 7)),
        (nn.BatchNorm2d(16), (5, 16, 3, 4)),
        (nn.BatchNorm3d(16, affine=False), (5, 16, 3, 4, 2)),
        (Renamed(16), (5, 16, 3, 4)),
        (nn.SyncBatchNorm(16), (5, 16, 3, 4)),
    ],
    ids=str,
)
def test_group_norm_takes_the_place_of_batch_norm_with_its_weights(layer: Any, shape: tuple[int, ...]) -> None:
    model = nested(layer)
    if layer.affine:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    parameters = dict(model.named_parameters())
    assert replace_batch_norms(model, BatchNorm.GROUP_NORM) is model
    replaced = dict(model.named_parameters())
    assert replaced.keys() == parameters.keys()
    assert all(replaced[name] is parameter for name, parameter in parameters.items())
    assert list(model.buffers()) == []
    inputs = torch.randn(shape)
    expected = nn.functional.group_norm(inputs, 2, layer.weight, layer.bias, layer.eps)
    torch.testing.assert_close(model.get_submodule("rest.1.0")(inputs), expected, rtol=0, atol=0)


def test_a_layer_in_two_places_stays_one_and_a_frozen_weight_frozen() -> None:
    layer = nn.BatchNorm2d(8)
    layer.weight.requires_grad_(False)
    model: Any = replace_batch_norms(nn.Sequential(layer, nn.Sequential(layer)), BatchNorm.GROUP_NORM)
    assert isinstance(model[0], nn.GroupNorm)
    assert model[1][0] is model[0]
    assert not model[0].weight.requires_grad


def test_a_model_that_is_a_batch_norm_is_replaced_itself() -> None:
    assert isinstance(replace_batch_norms(nn.BatchNorm2d(8), BatchNorm.GROUP_NORM), nn.GroupNorm)


# BatchNorm over the ranks, layer by layer

SAMPLES = [3, 1, 5]
"""Of each rank in turn."""

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "vectors": (nn.BatchNorm1d(4), ()),
    "sequences": (nn.BatchNorm1d(4, momentum=None), (6,)),
    "images": (nn.BatchNorm2d(4, momentum=0.3, eps=0.01), (3, 5)),
    "volumes": (nn.BatchNorm3d(4, affine=False), (2, 3, 2)),
    "no averages": (nn.BatchNorm2d(4, track_running_stats=False), (3, 5)),
}


def batches(ranks: int, inner: tuple[int, ...]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Inputs and what the loss weighs outputs by, of each rank, for three passes.

    Their channels have means of up to a hundred deviations, where a variance from squares in fp32 loses four digits.
    """
    torch.manual_seed(1)
    offset = torch.tensor([0.0, 1.0, -20.0, 100.0]).reshape(1, 4, *[1] * len(inner))
    shapes = [(SAMPLES[rank], 4, *inner) for rank in range(ranks)]
    return [([torch.randn(s) + offset for s in shapes], [torch.randn(s) for s in shapes]) for _ in range(3)]


def passes(layer: nn.Module, given: list[tuple[Tensor, Tensor]]) -> Results:
    """Training passes of one layer, then one in evaluation mode: all that they compute."""
    results: Results = {"outputs": [], "input gradients": []}
    for inputs, weights in given:
        leaves = inputs.clone().requires_grad_()
        outputs = layer(leaves)
        (outputs * weights).sum().backward()
        results["outputs"].append(array(outputs))
        results["input gradients"].append(array(leaves.grad))
    results["gradients"] = {name: array(parameter.grad) for name, parameter in layer.named_parameters()}
    results["buffers"] = {name: array(buffer) for name, buffer in layer.named_buffers()}
    with torch.no_grad():
        results["evaluated"] = array(layer.eval()(given[0][0]))
    return results


def array(tensor: Tensor | None) -> Array:
    assert tensor is not None
    return tensor.detach().double().numpy()


def in_one_process(layer: nn.Module, given: list[tuple[list[Tensor], list[Tensor]]]) -> Results:
    """The same with plain BatchNorm on the samples of all ranks, in fp64."""
    together = [(torch.cat(inputs).double(), torch.cat(weights).double()) for inputs, weights in given]
    return passes(copy.deepcopy(layer).double(), together)


def layer_by_layer(rank: Rank) -> Results:
    results: Results = {}
    for name, (layer, inner) in LAYERS.items():
        own = [(inputs[rank.rank], weights[rank.rank]) for inputs, weights in batches(rank.world_size, inner)]
        results[name] = passes(replace_batch_norms(layer, BatchNorm.SYNC), own)
    half = replace_batch_norms(nn.BatchNorm2d(4), BatchNorm.SYNC).bfloat16()
    own = [(x[rank.rank].bfloat16(), w[rank.rank]) for x, w in batches(rank.world_size, (3, 5))]
    results["bf16"] = passes(half, own)
    results["types"] = {name: str(tensor.dtype) for name, tensor in half.state_dict().items()}
    return results


@pytest.fixture(scope="module", params=[2, 3])
def layered(request: pytest.FixtureRequest) -> list[Results]:
    """What each rank computed."""
    return on_ranks(request.param, layer_by_layer)


@pytest.mark.ranks
@pytest.mark.parametrize("name", LAYERS)
def test_batch_norm_over_unequal_ranks_is_batch_norm_of_all_samples(layered: list[Results], name: str) -> None:
    layer, inner = LAYERS[name]
    given = batches(len(layered), inner)
    expected = in_one_process(layer, given)
    for key, bound in (("outputs", 3e-5), ("input gradients", 3e-4)):
        for number, values in enumerate(expected[key]):
            ours = np.concatenate([rank[name][key][number] for rank in layered])
            np.testing.assert_allclose(ours, values, rtol=1e-5, atol=bound, err_msg=key)
    for parameter, gradient in expected["gradients"].items():
        ours = sum(rank[name]["gradients"][parameter] for rank in layered)
        np.testing.assert_allclose(ours, gradient, rtol=1e-5, atol=3e-4, err_msg=parameter)
    for buffer, values in expected["buffers"].items():
        for rank in layered:
            np.testing.assert_allclose(rank[name]["buffers"][buffer], values, rtol=1e-6, err_msg=buffer)
            np.testing.assert_array_equal(rank[name]["buffers"][buffer], layered[0][name]["buffers"][buffer])
    if expected["buffers"]:
        evaluated = np.concatenate([rank[name]["evaluated"] for rank in layered])
        np.testing.assert_allclose(evaluated, expected["evaluated"], rtol=1e-5, atol=3e-5)


@pytest.mark.ranks
def test_statistics_are_fp32_where_weights_are_bf16(layered: list[Results]) -> None:
    assert layered[0]["types"] == {
        "weight": "torch.bfloat16",
        "bias": "torch.bfloat16",
        "running_mean": "torch.float32",
        "running_var": "torch.float32",
        "num_batches_tracked": "torch.int64",
    }
    given = [([inputs.bfloat16() for inputs in of_ranks], w) for of_ranks, w in batches(len(layered), (3, 5))]
    expected = in_one_process(nn.BatchNorm2d(4), given)
    for buffer, values in expected["buffers"].items():
        np.testing.assert_allclose(layered[0]["bf16"]["buffers"][buffer], values, rtol=1e-6)
    outputs = np.concatenate([rank["bf16"]["outputs"][0] for rank in layered])
    np.testing.assert_allclose(outputs, expected["outputs"][0], rtol=2**-8, atol=1e-4)


def one_value(rank: Rank) -> str:
    with pytest.raises(RunError) as refused:
        replace_batch_norms(nn.BatchNorm1d(4), BatchNorm.SYNC)(torch.zeros(1, 4))
    return str(refused.value)


# Whole runs

STEPS, SIZE = 4, 16

BASE = replace(
    runs.BASE,
    model=Call(f"{DIGITS}.ResNet", {"width": 8}),
    loss=Call(f"{DIGITS}.CrossEntropy"),
    data=CustomData(f"{DIGITS}.Digits", {"split": "train", "shift": 0}),
    batch=Batch(train_batch_size=SIZE),
    optimizer=Optimizer(lr=1e-3),
    lr_schedule=LrSchedule(min_lr_ratio=1.0),
    train=Train(max_steps=STEPS, gradient_clipping=None, batch_norm=BatchNorm.SYNC),
)
GROUP_NORM = replace(BASE, train=replace(BASE.train, batch_norm=BatchNorm.GROUP_NORM))
SELF_DRAWN = Call(f"{HERE}.SelfDrawnResNet", {"width": 8})


def staged(config: Config, stage: int) -> Config:
    return replace(config, zero=replace(config.zero, stage=stage, stage3_param_persistence_threshold=0))


RUNS: dict[int, dict[str, Config]] = {
    1: {
        "sync": runs.cut(BASE, 1, 1),
        "sync, accumulated": runs.cut(BASE, 1, 2),
        "self-drawn": runs.cut(replace(BASE, model=SELF_DRAWN), 1, 1),
        "group_norm": runs.cut(GROUP_NORM, 1, 1),
        "group_norm, accumulated": runs.cut(GROUP_NORM, 1, 4),
    },
    2: {
        **{f"sync, stage {stage}": staged(runs.cut(BASE, 2, 1), stage) for stage in range(4)},
        **{f"group_norm, stage {stage}": staged(runs.cut(GROUP_NORM, 2, 2), stage) for stage in range(4)},
        "self-drawn": staged(runs.cut(replace(BASE, model=SELF_DRAWN), 2, 1), 3),
        "bf16": staged(replace(runs.cut(BASE, 2, 1), precision=Precision(dtype=Dtype.BF16)), 3),
    },
}


def train_all(rank: Rank, configs: Mapping[str, Config], folder: Path) -> Results:
    results: Results = {name: runs.train(rank, config, folder / name) for name, config in configs.items()}
    if rank.world_size == 1:
        results["one value"] = one_value(rank)
    return results


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Results]]:
    """By the number of ranks, what each of them has in the end."""
    return {ranks: on_ranks(ranks, train_all, RUNS[ranks], tmp_path_factory.mktemp("runs")) for ranks in RUNS}


@pytest.fixture(scope="module")
def whole() -> Results:
    """The run in one process of plain torch, whose BatchNorm sees every global batch whole."""
    torch.manual_seed(BASE.seed)
    model, loss, items = ResNet(8), CrossEntropy(), Digits("train")
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    initial = {name: parameter.detach().clone().numpy() for name, parameter in model.named_parameters()}
    steps, losses = Steps(len(items), SIZE, BASE.accumulation.tail, STEPS, BASE.seed), []
    for step in range(STEPS):
        batch = torch.utils.data.default_collate([items[int(index)] for index in steps.sequences(step)])
        total, weight = loss(model(batch["inputs"]), batch)
        optimizer.zero_grad()
        (total / weight).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append((total / weight).item())
    weights = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    buffers = {name: buffer.numpy() for name, buffer in model.named_buffers()}
    return {"initial": initial, "weights": weights, "buffers": buffers, "loss": losses}


def losses_of(run: Results) -> list[float]:
    return [line["loss"] for line in run["lines"] if line["kind"] == "train"]


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "name"), [(1, "sync"), *((2, f"sync, stage {stage}") for stage in range(4))])
def test_sync_without_accumulation_is_batch_norm_in_one_process(
    trained: dict[int, list[Results]], whole: Results, ranks: int, name: str
) -> None:
    run = trained[ranks][0][name]
    assert runs.relative_error(whole["weights"], whole["initial"]) > 1e-2
    assert runs.relative_error(run["weights"], whole["weights"]) <= 1e-6
    assert runs.relative_error(run["buffers"], whole["buffers"]) <= 1e-6
    assert runs.series_error(losses_of(run), whole["loss"]) <= 1e-6


@pytest.mark.ranks
@pytest.mark.parametrize("name", [name for name in RUNS[2] if not name.startswith("group_norm")])
def test_running_statistics_are_the_same_on_every_rank(trained: dict[int, list[Results]], name: str) -> None:
    first, second = (rank[name]["buffers"] for rank in trained[2])
    assert len(first) == 3 * 7
    for buffer, values in first.items():
        np.testing.assert_array_equal(second[buffer], values, err_msg=buffer)


@pytest.mark.ranks
def test_sync_with_accumulation_is_another_update(trained: dict[int, list[Results]]) -> None:
    """The limit that the documentation states: half a batch has other statistics."""
    run, accumulated = trained[1][0]["sync"], trained[1][0]["sync, accumulated"]
    assert runs.relative_error(accumulated["weights"], run["weights"]) > 1e-3
    assert runs.relative_error(accumulated["buffers"], run["buffers"]) > 1e-2


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "name"), [(1, "group_norm, accumulated"), *((2, f"group_norm, stage {stage}") for stage in range(4))]
)
def test_with_group_norm_every_cut_is_the_same_update(trained: dict[int, list[Results]], ranks: int, name: str) -> None:
    run, cut = trained[1][0]["group_norm"], trained[ranks][0][name]
    assert run["buffers"] == {}
    assert runs.relative_error(cut["weights"], run["weights"]) <= 1e-6
    assert runs.series_error(losses_of(cut), losses_of(run)) <= 1e-6


@pytest.mark.ranks
def test_a_model_that_is_built_partitioned_is_replaced_too(trained: dict[int, list[Results]]) -> None:
    one, two = trained[1][0]["self-drawn"], trained[2][0]["self-drawn"]
    assert runs.relative_error(two["weights"], one["weights"]) <= 1e-6
    assert runs.relative_error(two["buffers"], one["buffers"]) <= 1e-6


@pytest.mark.ranks
def test_sync_in_bf16_is_near_to_fp32(trained: dict[int, list[Results]]) -> None:
    run, exact = trained[2][0]["bf16"], trained[2][0]["sync, stage 3"]
    assert runs.series_error(losses_of(run), losses_of(exact)) < 0.02


@pytest.mark.ranks
def test_one_value_a_channel_is_refused(trained: dict[int, list[Results]]) -> None:
    assert trained[1][0]["one value"] == (
        "train.batch_norm=sync: a BatchNorm sees one value a channel in a micro-batch of all ranks, which has no "
        "variance: raise batch.train_micro_batch_size_per_gpu, or set train.batch_norm=group_norm"
    )
