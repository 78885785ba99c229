"""LAMB, LARS and Muon on real ranks: every cut against one process that holds whole layers and sees the whole batch.

LAMB and LARS are held against pytorch-optimizer's, which know nothing of partitions, Muon against its formula.
``python -m tests.worker.test_optimizers`` prints the errors.
"""

import itertools
import math
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_optimizer
import torch
import torch.distributed
from torch import nn

from launcher import deepspeed_json, traffic
from launcher.batch import Cut
from launcher.ranks import Rank
from launcher.schema import Accumulation, Call, Config, Dtype, Optimizer, OptimizerType, Precision, Sync, Train, Zero
from launcher.worker import models, optimizers
from tests.ranks import asked_for, on_ranks
from tests.worker import runs

LAMB, LARS, MUON = OptimizerType.LAMB, OptimizerType.LARS, OptimizerType.MUON
STAGES, RANKS, ACCUMULATIONS = (0, 1, 2, 3), (1, 2), (1, 4)

OPTIMIZERS = {
    LAMB: Optimizer(LAMB, lr=1e-3),
    # So that a step moves a layer by a thousandth, as LAMB's does.
    LARS: Optimizer(LARS, lr=1e-3, trust_coefficient=1.0),
    MUON: Optimizer(MUON, lr=1e-3),
}

BOUNDS = {Dtype.FP32: {"parameters": 1e-6, "loss": 1e-6}, Dtype.BF16: {"parameters": 1e-3, "loss": 1e-3}}
"""Relative errors: of the parameters after 10 steps, and the largest of the losses."""


class PaperLamb(pytorch_optimizer.Lamb):
    """pytorch-optimizer's LAMB with bias correction, which it has not, and without its clamp, which the paper has not.

    With c = sqrt(1 - beta2^t) / (1 - beta1^t), Adam's corrected step plus decay is

        m_hat / (sqrt(v_hat) + eps) + decay * x = c * (m / (sqrt(v) + eps * sqrt(1 - beta2^t)) + decay / c * x)

    and the trust ratio cancels the factor before the brackets. Without a trust ratio it goes into the learning rate.
    """

    clamp = math.inf

    def __init__(self, groups: list[dict[str, Any]], **arguments: Any) -> None:
        super().__init__(groups, weight_decouple=False, adam_debias=True, **arguments)
        self.num_steps = 0

    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        asked = [{name: group[name] for name in ("eps", "weight_decay", "lr")} for group in self.param_groups]
        for group in self.param_groups:
            first, second = (1 - beta**self.num_steps for beta in group["betas"])
            factor = math.sqrt(second) / first
            group["eps"] *= math.sqrt(second)
            group["weight_decay"] /= factor
            group["lr"] *= factor if group["adam"] else 1.0
        super().step()
        for group, values in zip(self.param_groups, asked, strict=True):
            group.update(values)


def lamb(
    config: Config, matrices: runs.Parameters, embeddings: runs.Parameters, vectors: runs.Parameters
) -> torch.optim.Optimizer:
    optimizer = config.optimizer
    groups = [
        {"params": matrices, "weight_decay": optimizer.weight_decay},
        {"params": embeddings, "weight_decay": 0.0},
        {"params": vectors, "weight_decay": 0.0, "adam": True},
    ]
    return PaperLamb(groups, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps)


def lars(
    config: Config, matrices: runs.Parameters, embeddings: runs.Parameters, vectors: runs.Parameters
) -> torch.optim.Optimizer:
    """The library leaves vectors out of decay and trust ratio by itself."""
    optimizer = config.optimizer
    return pytorch_optimizer.LARS(
        [
            {"params": matrices, "weight_decay": optimizer.weight_decay},
            {"params": embeddings + vectors, "weight_decay": 0.0},
        ],
        lr=optimizer.lr,
        momentum=optimizer.momentum,
        trust_coefficient=optimizer.trust_coefficient,
    )


class PlainMuon(torch.optim.Optimizer):
    """Muon for hidden matrices and torch's AdamW for the rest, in one process.

    Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks": Nesterov momentum, five steps of the
    quintic Newton-Schulz iteration with coefficients (3.4445, -4.7750, 2.0315), and sqrt(max(1, rows / columns)).
    Unlike torch's Muon, which iterates in bf16, it does so in fp64.
    """

    def __init__(self, hidden: runs.Parameters, others: list[dict[str, Any]], optimizer: Optimizer) -> None:
        super().__init__(hidden, {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay})
        self.momentum = optimizer.momentum
        self.adamw = torch.optim.AdamW(others, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps)
        self.param_groups += self.adamw.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        muon = self.param_groups[0]
        for weight in muon["params"]:
            gradient = weight.grad.double()
            momentum = self.state[weight].setdefault("momentum", torch.zeros_like(gradient))
            momentum.lerp_(gradient, 1 - self.momentum)
            update = orthogonalize(gradient.lerp(momentum, self.momentum))
            update *= math.sqrt(max(1, weight.shape[0] / weight.shape[1]))
            weight.mul_(1 - muon["lr"] * muon["weight_decay"]).sub_(update.float(), alpha=muon["lr"])
        self.adamw.step()


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    result = wide / (wide.norm() + 1e-7)
    for _ in range(5):
        gram = result @ result.T
        result = 3.4445 * result + (-4.7750 * gram + 2.0315 * gram @ gram) @ result
    return result if wide is matrix else result.T


def muon(
    config: Config, matrices: runs.Parameters, embeddings: runs.Parameters, vectors: runs.Parameters
) -> torch.optim.Optimizer:
    decay = config.optimizer.weight_decay
    head = [matrix for matrix in matrices if matrix.shape[0] == runs.TINY_LLAMA.arguments["vocab_size"]]
    hidden = [matrix for matrix in matrices if matrix is not head[0]]
    others = [{"params": head, "weight_decay": decay}, {"params": embeddings + vectors, "weight_decay": 0.0}]
    return PlainMuon(hidden, others, config.optimizer)


PLAIN = {LAMB: lamb, LARS: lars, MUON: muon}


# Whole runs


@dataclass(frozen=True)
class Cell:
    optimizer: OptimizerType
    stage: int
    accumulation: int
    ranks: int
    dtype: Dtype = Dtype.FP32
    sync: Sync | None = None
    sub_group_size: int = Zero().sub_group_size
    naive: bool = False
    """A partition is taken for a layer."""

    def __str__(self) -> str:
        name = f"{self.optimizer.value}-stage{self.stage}-gas{self.accumulation}-ranks{self.ranks}-{self.dtype.value}"
        name += f"-{self.sync.value}" if self.sync else ""
        name += f"-sub_groups_of_{self.sub_group_size}" if self.sub_group_size < Zero().sub_group_size else ""
        return name + "-naive" * self.naive

    def config(self) -> Config:
        config, muon = runs.cut(runs.BASE, self.ranks, self.accumulation), self.optimizer is MUON
        zero = replace(config.zero, stage=self.stage, sub_group_size=self.sub_group_size, reduce_scatter=not muon)
        return replace(
            config,
            optimizer=OPTIMIZERS[self.optimizer],
            zero=zero,
            precision=Precision(dtype=self.dtype),
            accumulation=replace(config.accumulation, sync=self.sync),
            train=replace(config.train, gradient_clipping=None if muon else 1.0),
        )


CELLS = [
    *(
        Cell(optimizer, stage, accumulation, ranks)
        for optimizer, stage, accumulation, ranks in itertools.product((LAMB, LARS), STAGES, ACCUMULATIONS, RANKS)
    ),
    Cell(LAMB, 3, 4, 2, sub_group_size=1000),
    Cell(LAMB, 1, 4, 2, Dtype.BF16),
    Cell(LARS, 3, 4, 2, Dtype.BF16),
    *(Cell(MUON, stage, accumulation, accumulation // 2) for stage in (1, 2, 3) for accumulation in (2, 4)),
    *(Cell(MUON, stage, 4, 2, Dtype.BF16) for stage in (1, 3)),
    *(Cell(MUON, stage, 4, 2, sync=Sync.ONCE_PER_WINDOW) for stage in (2, 3)),
]

SLOW = {
    cell
    for cell in CELLS
    if cell.optimizer in (LAMB, LARS)
    and (cell.accumulation in (2, 8) or cell.ranks * cell.accumulation < (8 if cell.stage in (0, 2) else 2))
}
"""Left to make test-full."""

NAIVE = [Cell(LAMB, 1, 1, 2, naive=True), Cell(LAMB, 3, 1, 2, naive=True), Cell(LARS, 2, 1, 2, naive=True)]


def train_cells(rank: Rank, cells: list[Cell], folder: Path) -> list[dict[str, Any]]:
    """All the cells one after another in one process group; starting one costs more than training."""
    results, find_slices = [], optimizers.LayerWise.find_slices
    for cell in cells:
        optimizers.LayerWise.find_slices = (lambda self, zero: None) if cell.naive else find_slices
        results.append(runs.train(rank, cell.config(), folder / str(cell)))
    return results


def train_all(cells: list[Cell], folder: Path) -> dict[Cell, dict[str, Any]]:
    results = {}
    for ranks in RANKS:
        chosen = [cell for cell in cells if cell.ranks == ranks]
        results |= dict(zip(chosen, on_ranks(ranks, train_cells, chosen, folder, timeout=1200)[0], strict=True))
    return results


Whole = dict[tuple[OptimizerType, Dtype], dict[str, Any]]


def references() -> Whole:
    return {
        (optimizer, dtype): runs.reference(Cell(optimizer, 1, 1, 1, dtype).config(), PLAIN[optimizer])
        for optimizer in PLAIN
        for dtype in BOUNDS
    }


def errors(ours: dict[str, Any], whole: dict[str, Any]) -> dict[str, float]:
    losses = [line["loss"] for line in ours["lines"] if line["kind"] == "train"]
    return {
        "parameters": runs.relative_error(ours["weights"], whole["weights"]),
        "loss": runs.series_error(losses, whole["loss"]),
    }


@pytest.fixture(scope="module")
def whole() -> Whole:
    return references()


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, dict[str, Any]]:
    # DeepSpeed has torch compile its Muon, which takes minutes on a CPU.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        return train_all(asked_for(request, "cell"), tmp_path_factory.mktemp("cells"))


@pytest.mark.ranks
@pytest.mark.parametrize(
    "cell", [pytest.param(cell, marks=[pytest.mark.slow] * (cell in SLOW), id=str(cell)) for cell in CELLS]
)
def test_a_cut_gives_the_update_of_the_whole_batch(
    trained: dict[Cell, dict[str, Any]], whole: Whole, cell: Cell
) -> None:
    found = errors(trained[cell], whole[cell.optimizer, cell.dtype])
    assert all(found[name] <= bound for name, bound in BOUNDS[cell.dtype].items()), found


@pytest.mark.ranks
@pytest.mark.parametrize("cell", NAIVE, ids=str)
def test_norms_of_partitions_in_the_place_of_layers_are_noticed(
    trained: dict[Cell, dict[str, Any]], whole: Whole, cell: Cell
) -> None:
    found = errors(trained[cell], whole[cell.optimizer, cell.dtype])
    assert found["parameters"] > 10 * BOUNDS[cell.dtype]["parameters"]


@pytest.mark.ranks
def test_the_norm_of_the_gradient_is_told_except_where_deepspeed_measures_what_muon_made_of_it(
    trained: dict[Cell, dict[str, Any]], whole: Whole
) -> None:
    for cell in (Cell(LAMB, 2, 4, 2), Cell(LARS, 3, 4, 2)):
        norms = [line["grad_norm"] for line in trained[cell]["lines"]]
        assert runs.series_error(norms, whole[cell.optimizer, cell.dtype]["grad_norm"]) <= 1e-6
    assert {line["grad_norm"] for line in trained[Cell(MUON, 2, 4, 2)]["lines"]} == {None}


def test_the_references_move(whole: Whole) -> None:
    """Otherwise agreement would prove nothing."""
    for result in whole.values():
        assert runs.relative_error(result["weights"], result["initial"]) > 3e-3


# Layers that no number of ranks divides


class Odd(nn.Module):
    """One parameter of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 7)
        self.linear = nn.Linear(7, 3)
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 5, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.linear(self.embed(inputs))))
        return logits


ODD = Call("tests.worker.test_optimizers.Odd")
NUM_STEPS = 4
NOT_FINITE = 2
"""The step in which the second of two ranks has no finite gradient."""


def odd_config(optimizer: OptimizerType, stage: int, sync: Sync | None = None) -> Config:
    return replace(
        Config(),
        accumulation=Accumulation(sync=sync),
        # Parameters of up to 8 elements, the norms and biases, are kept whole.
        zero=Zero(stage=stage, stage3_param_persistence_threshold=8),
        optimizer=replace(OPTIMIZERS[optimizer], lr=0.1),
        train=Train(gradient_clipping=None),
    )


def odd_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    tokens = torch.randint(5, (6 + rank,), generator=torch.Generator().manual_seed(10 * step + rank))
    return nn.functional.cross_entropy(model(tokens), tokens.roll(1), reduction="sum")


def odd_steps(rank: Rank, optimizer: OptimizerType, stage: int, sync: Sync | None) -> dict[str, Any]:
    """Some steps on two ranks, with something dreadful in all padding."""
    from launcher.worker.engine import Engine

    config = odd_config(optimizer, stage, sync)
    values = deepspeed_json.build(config, Cut(2, 1, 1, 2)).values
    engine = Engine(models.build(ODD, 0, values), values, config.optimizer, traffic.sync(config))
    layer_wise = engine.deepspeed.basic_optimizer
    num_padding = 0
    for partition, slices in (layer_wise._slices or {}).items():
        padding = torch.ones_like(partition, dtype=torch.bool)
        for one in slices:
            one.of(padding).fill_(False)
        partition.data[padding] = 1e6
        num_padding += int(padding.sum())
    reductions: list[int] = []

    def all_reduce(tensor: torch.Tensor) -> None:
        reductions.append(tensor.numel())
        torch.distributed.all_reduce(tensor)

    optimizers.dist = SimpleNamespace(all_reduce=all_reduce)
    applied = []
    for step in range(NUM_STEPS):
        engine.begin_window(1)
        loss = odd_loss(engine.module, step, rank.rank)
        engine.backward(loss * math.nan if step == NOT_FINITE and rank.rank == 1 else loss, 13)
        applied.append(engine.end_window().applied)
    optimizers.dist = torch.distributed
    weights = runs._masters(engine.deepspeed)
    engine.deepspeed.destroy()
    return {"weights": weights, "applied": applied, "reductions": reductions, "num_padding": num_padding}


ODD_CASES = [(stage, None) for stage in STAGES] + [(stage, Sync.ONCE_PER_WINDOW) for stage in (2, 3)]


def all_odd_steps(rank: Rank) -> dict[tuple[OptimizerType, int, Sync | None], dict[str, Any]]:
    return {
        (optimizer, stage, sync): odd_steps(rank, optimizer, stage, sync)
        for optimizer, (stage, sync) in itertools.product((LAMB, LARS), ODD_CASES)
    }


@pytest.mark.ranks
def test_padding_and_steps_without_finite_gradients_change_nothing_and_norms_need_one_collective_a_step() -> None:
    results = on_ranks(2, all_odd_steps)
    for optimizer in (LAMB, LARS):
        config = odd_config(optimizer, 0)
        model = models.build(ODD, 0, {"zero_optimization": {"stage": 0}})
        named = dict(model.named_parameters())
        matrices, embeddings = [named["linear.weight"], named["head.weight"]], [named["embed.weight"]]
        vectors = [parameter for parameter in named.values() if parameter.dim() == 1]
        plain = PLAIN[optimizer](config, matrices, embeddings, vectors)
        for step in range(NUM_STEPS):
            if step != NOT_FINITE:
                plain.zero_grad()
                (sum(odd_loss(model, step, rank) for rank in range(2)) / 13).backward()
                plain.step()
        wanted = {name: parameter.detach().numpy() for name, parameter in named.items()}
        for stage, sync in ODD_CASES:
            for result in (ranks[optimizer, stage, sync] for ranks in results):
                assert runs.relative_error(result["weights"], wanted) < 1e-6, (optimizer, stage, sync)
                assert result["applied"] == [step != NOT_FINITE for step in range(NUM_STEPS)]
                # Two norms of three layers, in each step that is applied.
                assert result["reductions"] == ([6] * (NUM_STEPS - 1) if stage > 0 else [])
        assert sum(ranks[optimizer, 3, None]["num_padding"] for ranks in results) > 0


# Formulas


def one_step(optimizer: Optimizer) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """By name, weights before and after one step of an optimizer on whole layers, and the gradients of it."""
    torch.manual_seed(0)
    model = Odd()
    named = dict(model.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    for parameter in named.values():
        parameter.grad = torch.randn_like(parameter)
    optimizers.arguments(model, optimizer)["optimizer"].step()
    after = {name: parameter.detach() for name, parameter in named.items()}
    return before, after, {name: parameter.grad for name, parameter in named.items()}


DECAYS = {"embed.weight": 0.0, "linear.weight": 0.25, "head.weight": 0.25}
"""Of what is adapted."""


def test_lamb_decays_and_adapts_matrices_adapts_embeddings_and_leaves_adam_to_norms_and_biases() -> None:
    """The first corrected moments are g and g^2 (Kingma and Ba 2015), so Adam's first step is g / (|g| + eps)."""
    before, after, gradients = one_step(Optimizer(LAMB, lr=0.5, weight_decay=0.25, eps=1e-2))
    for name, weight in before.items():
        adam = gradients[name] / (gradients[name].abs() + 1e-2)
        wanted = weight - 0.5 * adam
        if name in DECAYS:
            direction = adam + DECAYS[name] * weight
            wanted = weight - 0.5 * weight.norm() / direction.norm() * direction
        torch.testing.assert_close(after[name], wanted, msg=name)


def test_lars_decays_and_adapts_matrices_adapts_embeddings_and_leaves_sgd_to_norms_and_biases() -> None:
    before, after, gradients = one_step(Optimizer(LARS, lr=0.5, weight_decay=0.25, trust_coefficient=0.1))
    for name, weight in before.items():
        gradient = gradients[name]
        wanted = weight - 0.5 * gradient
        if name in DECAYS:
            decay = DECAYS[name]
            ratio = 0.1 * weight.norm() / (gradient.norm() + decay * weight.norm())
            wanted = weight - 0.5 * ratio * (gradient + decay * weight)
        torch.testing.assert_close(after[name], wanted, msg=name)


@pytest.mark.parametrize("kind", [LAMB, LARS])
def test_a_layer_whose_norm_is_zero_takes_a_step_with_trust_ratio_one(kind: OptimizerType) -> None:
    model = nn.Linear(3, 2, bias=False)
    nn.init.zeros_(model.weight)
    model.weight.grad = torch.full((2, 3), 2.0)
    optimizers.arguments(model, Optimizer(kind, lr=0.5))["optimizer"].step()
    torch.testing.assert_close(model.weight.detach(), torch.full((2, 3), -0.5 if kind is LAMB else -1.0))


def test_muon_is_for_hidden_matrices_only() -> None:
    class Convolutional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.output = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.kernel, self.mix, self.norm = nn.Conv1d(4, 4, 3), nn.Linear(4, 4), nn.LayerNorm(4)

        def get_output_embeddings(self) -> nn.Module:
            return self.output

    model = Convolutional()
    groups = optimizers.arguments(model, Optimizer(MUON, lr=0.5, weight_decay=0.25))["optimizer"].param_groups
    names = {parameter: name for name, parameter in model.named_parameters()}
    sorted_groups = sorted(
        (group["use_muon"], group["weight_decay"], sorted(names[parameter] for parameter in group["params"]))
        for group in groups
    )
    assert sorted_groups == [
        (False, 0.0, ["embedding.weight", "kernel.bias", "mix.bias", "norm.bias", "norm.weight"]),
        (False, 0.25, ["kernel.weight", "output.weight"]),
        (True, 0.25, ["mix.weight"]),
    ]
    assert {names[parameter] for parameter in names if parameter.use_muon} == {"mix.weight"}


def test_the_muon_of_these_tests_is_torchs_but_for_its_rounding() -> None:
    """torch's iterates in bf16."""
    torch.manual_seed(0)
    ours, torchs = nn.Parameter(torch.randn(12, 5)), nn.Parameter(torch.empty(12, 5))
    torchs.data.copy_(ours.data)
    before, request = ours.detach().clone(), Optimizer(MUON, lr=0.1, weight_decay=0.1, momentum=0.9)
    first = PlainMuon([ours], [{"params": [nn.Parameter(torch.zeros(1))]}], request)
    second = torch.optim.Muon([torchs], lr=0.1, weight_decay=0.1, momentum=0.9)
    for _ in range(3):
        ours.grad = torch.randn(12, 5)
        torchs.grad = ours.grad.clone()
        first.step()
        second.step()
    assert (ours - torchs).norm() < 2e-2 * (ours - before).norm()


def print_errors() -> None:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    with tempfile.TemporaryDirectory() as name:
        trained, whole = train_all(CELLS + NAIVE, Path(name)), references()
    for cell in CELLS + NAIVE:
        found = errors(trained[cell], whole[cell.optimizer, cell.dtype])
        print(f"| {cell} | {found['parameters']:.1e} | {found['loss']:.1e} |")


if __name__ == "__main__":
    print_errors()
