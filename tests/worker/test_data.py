"""Datasets, models and losses of one's own on two ranks; what is wrong with them; the masked objective."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from launcher.errors import RequestError
from launcher.ranks import Rank
from launcher.schema import Batch, Call, Config, CustomData, Data, LrSchedule, Objective, Optimizer, Train
from launcher.steps import Steps
from tests.ranks import on_ranks
from tests.worker import plain, runs

HERE = "tests.worker.test_data"
SIZE, WIDTH, BATCH, STEPS = 21, 16, 8, 10
"""Batches of eight run over the end of an epoch of 21."""


class Signals(Dataset[dict[str, Tensor]]):
    """Four numbers, what is to be predicted from them, and how much it weighs."""

    def __init__(self, size: int, shift: float = 0.0) -> None:
        self.size = size
        self.shift = shift

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs = torch.sin(torch.arange(4.0) + index + self.shift)
        return {"inputs": inputs, "labels": inputs[:2] * inputs[2:], "weights": torch.tensor(0.5 + index % 3)}


class Stream(IterableDataset[Tensor]):
    """It has no length."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(3.0))


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(4, width)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.out(torch.tanh(self.norm(self.hidden(inputs))))
        return out


class WeightedSquares:
    def __call__(self, logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        squares = ((logits - batch["labels"]) ** 2).sum(1)
        return (squares * batch["weights"]).sum(), batch["weights"].sum()

    def weight(self, batch: dict[str, Tensor]) -> float:
        return float(batch["weights"].sum())


SIGNALS = replace(
    runs.BASE,
    model=Call(f"{HERE}.Net", {"width": WIDTH}),
    loss=Call(f"{HERE}.WeightedSquares"),
    data=CustomData(
        f"{HERE}.Signals", {"size": SIZE}, validation=CustomData(f"{HERE}.Signals", {"size": 5, "shift": 0.5})
    ),
    batch=Batch(train_batch_size=BATCH, gradient_accumulation_steps=2),
    cluster=replace(runs.BASE.cluster, ranks_per_node=2),
    optimizer=Optimizer(lr=1e-3),
    lr_schedule=LrSchedule(min_lr_ratio=1.0),
    train=Train(max_steps=STEPS, gradient_clipping=None),
)

ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": 300,
    },
    "modernbert": {"bos_token_id": None, "eos_token_id": None, "cls_token_id": None, "sep_token_id": None},
}


def masked(model_type: str, accumulation: int) -> Config:
    arguments = {
        "model_type": model_type,
        "task": "masked_lm",
        "vocab_size": 17,
        "pad_token_id": 0,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        **ENCODERS[model_type],
    }
    return replace(
        runs.BASE,
        model=Call("launcher.worker.models.hugging_face", arguments),
        data=Data(fasta=str(runs.CONTIGS), sequence_length=300, objective=Objective.MASKED),
        batch=Batch(train_batch_size=BATCH, gradient_accumulation_steps=accumulation),
        cluster=replace(runs.BASE.cluster, ranks_per_node=2),
        train=Train(max_steps=3),
    )


def train_all(rank: Rank, configs: dict[str, Config], folder: Path) -> dict[str, dict[str, Any]]:
    return {name: runs.train(rank, config, folder / name) for name, config in configs.items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    configs = {f"stage{stage}": replace(SIGNALS, zero=replace(SIGNALS.zero, stage=stage)) for stage in (1, 3)}
    configs |= {f"{name}{accumulation}": masked(name, accumulation) for name in ENCODERS for accumulation in (1, 4)}
    result: dict[str, dict[str, Any]] = on_ranks(2, train_all, configs, tmp_path_factory.mktemp("runs"))[0]
    return result


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """The same run in one process that sees every global batch whole."""
    torch.manual_seed(SIGNALS.seed)
    model, loss, items = Net(WIDTH), WeightedSquares(), Signals(SIZE)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    initial = {name: parameter.detach().clone().numpy() for name, parameter in model.named_parameters()}

    def mean(items: list[dict[str, Tensor]]) -> Tensor:
        batch = {name: torch.stack([item[name] for item in items]) for name in items[0]}
        total, weight = loss(model(batch["inputs"]), batch)
        return total / weight

    steps, losses = Steps(SIZE, BATCH, runs.BASE.accumulation.tail, STEPS, SIGNALS.seed), []
    for step in range(STEPS):
        optimizer.zero_grad()
        value = mean([items[int(index)] for index in steps.sequences(step)])
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(value.item())
    weights = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    held_out = Signals(5, shift=0.5)
    with torch.no_grad():
        eval_loss = mean([held_out[index] for index in range(5)]).item()
    return {"initial": initial, "weights": weights, "loss": losses, "eval_loss": eval_loss}


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_dataset_and_loss_of_ones_own_train_like_plain_torch(
    trained: dict[str, dict[str, Any]], reference: dict[str, Any], stage: int
) -> None:
    ours = trained[f"stage{stage}"]
    lines = [line for line in ours["lines"] if line["kind"] == "train"]
    assert runs.relative_error(reference["weights"], reference["initial"]) > 1e-3
    assert runs.relative_error(ours["weights"], reference["weights"]) <= 1e-6
    assert runs.series_error([line["loss"] for line in lines], reference["loss"]) <= 1e-6
    assert ours["summary"]["eval_loss"] == pytest.approx(reference["eval_loss"], rel=1e-6)


@pytest.mark.ranks
def test_what_is_not_bases_has_no_bits_per_base(trained: dict[str, dict[str, Any]]) -> None:
    lines = trained["stage1"]["lines"]
    assert {line["bits_per_base"] for line in lines if line["kind"] == "train"} == {None}
    assert {line["eval_bits_per_base"] for line in lines if line["kind"] == "eval"} == {None}
    assert trained["stage1"]["summary"].keys() == {"num_steps", "eval_loss", "eval_bits_per_base"}


@pytest.mark.ranks
@pytest.mark.parametrize("name", ENCODERS)
def test_the_masked_objective_trains_encoders_alike_however_a_batch_is_cut(
    trained: dict[str, dict[str, Any]], name: str
) -> None:
    whole, cut = trained[f"{name}1"], trained[f"{name}4"]
    assert runs.relative_error(cut["weights"], whole["weights"]) <= 1e-6
    assert runs.series_error(*([line["loss"] for line in run["lines"]] for run in (cut, whole))) <= 1e-6
    assert [line["tokens"] for line in cut["lines"]] == [line["tokens"] for line in whole["lines"]]


@pytest.mark.ranks
@pytest.mark.parametrize("name", ENCODERS)
def test_the_targets_of_the_masked_objective_are_the_asked_part_of_the_bases(
    trained: dict[str, dict[str, Any]], name: str
) -> None:
    windows = plain.windows(plain.contigs(runs.CONTIGS).values(), 300)
    steps = Steps(len(windows), BATCH, runs.BASE.accumulation.tail, 3, runs.BASE.seed)
    num_bases = sum(len(windows[index]) for step in range(3) for index in steps.sequences(step))
    num_targets = sum(line["tokens"] for line in trained[f"{name}1"]["lines"])
    deviation = (num_bases * 0.15 * 0.85) ** 0.5  # of a binomial distribution
    assert abs(num_targets - 0.15 * num_bases) < 5 * deviation


def fault(data: CustomData) -> str:
    """The one line that a request with this dataset is refused with."""
    from launcher.worker.data import open_task

    with pytest.raises(RequestError) as raised:
        open_task(replace(SIGNALS, data=data), {})
    (line,) = raised.value.faults
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("target", "arguments", "says"),
    [
        ("Stream", {}, "a dataset needs __len__ and __getitem__; this one has not both"),
        ("Signals", {"size": 0}, "the dataset is empty"),
        ("Signals", {"sise": 3}, "unexpected keyword argument 'sise'"),
        ("Signals", {}, "missing 1 required positional argument: 'size'"),
    ],
)
def test_a_dataset_that_cannot_be_used_is_one_clear_line(target: str, arguments: dict[str, Any], says: str) -> None:
    data = CustomData(f"{HERE}.{target}", arguments)
    line = fault(data)
    assert line.startswith(f"data._target_={HERE}.{target}: ")
    assert says in line
    line = fault(CustomData(f"{HERE}.Signals", {"size": SIZE}, validation=data))
    assert line.startswith(f"data.validation._target_={HERE}.{target}: ")


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (Call(f"{HERE}.Net", {"widht": 3}), "unexpected keyword argument 'widht'"),
        (Call(f"{HERE}.Signals", {"size": 3}), "it makes a Signals, not a torch.nn.Module"),
        (Call("torch.nn.Identity"), "it has no parameter to train"),
    ],
)
def test_a_model_that_cannot_be_used_is_one_clear_line(call: Call, says: str) -> None:
    from launcher.worker import models

    with pytest.raises(RequestError) as raised:
        models.build(call, 0, {"zero_optimization": {"stage": 0}})
    (line,) = raised.value.faults
    assert line.startswith(f"model._target_={call.target}: ")
    assert says in line
