"""The losses and weights of a micro-batch, against a loop over the letters of its sequences."""

import itertools
import math
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from launcher.errors import RunError
from launcher.schema import Data, SoftMask
from launcher.worker.objectives import Bases, Custom, Weight

TOKENS = {"_": 0, "?": 1} | {base: token for token, base in enumerate("ACGTNRYSWKMBDHV", start=2)}
"""docs/data.md; padding is written _ and the mask ?."""

LOWER = 32

WINDOWS = ["ACGTNacgtn", "ttRGATTACA", "NNNNNACG__", "acgNNTTa__", "GC________", "NNNNNNNNNN"]


class Bigram(nn.Module):
    """Logits that depend on the token alone; remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(17, 17, generator=torch.Generator().manual_seed(1)))
        self.given: tuple[Any, ...] = ()

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        self.given = given
        return self.table[given[0]]


class Wrapped(Bigram):
    """As Hugging Face models answer."""

    def forward(self, *given: torch.Tensor) -> Any:
        return SimpleNamespace(logits=super().forward(*given))


def codes(windows: Sequence[str]) -> torch.Tensor:
    """(n, L) uint8, one byte a base: its token, and 32 more for lower case."""
    rows = [[TOKENS[base.upper()] + LOWER * base.islower() for base in window] for window in windows]
    return torch.tensor(rows, dtype=torch.uint8)


def cross_entropy(model: Bigram, seen: str, base: str) -> float:
    """Nats of predicting ``base`` where the model has seen ``seen``, in double precision."""
    logits: list[float] = model.table[TOKENS[seen.upper()]].tolist()
    return math.log(sum(map(math.exp, logits))) - logits[TOKENS[base.upper()]]


def weight_of(base: str, data: Data) -> float:
    """docs/data.md, "What counts as a target"."""
    if base.upper() not in ("A", "C", "G", "T"):
        return 0.0
    if base.isupper() or data.soft_mask is SoftMask.UPPER:
        return 1.0
    return data.soft_mask_weight if data.soft_mask is SoftMask.WEIGHT else 0.0


def by_hand(model: Bigram, data: Data, predicted: Sequence[tuple[str, str]]) -> tuple[float, Weight]:
    """The sum of weighted losses and the sum of weights over pairs of what is seen and what is predicted."""
    weights = [weight_of(base, data) for _, base in predicted]
    loss = sum(weight * cross_entropy(model, *pair) for weight, pair in zip(weights, predicted, strict=True) if weight)
    return loss, Weight(sum(weights), sum(weight > 0 for weight in weights))


SOFT_MASKS = [
    Data(soft_mask=SoftMask.UPPER),
    Data(soft_mask=SoftMask.IGNORE),
    Data(soft_mask=SoftMask.WEIGHT),
    Data(soft_mask=SoftMask.WEIGHT, soft_mask_weight=0.25),
    Data(soft_mask=SoftMask.WEIGHT, soft_mask_weight=1.0),
]
soft_masks = pytest.mark.parametrize("data", SOFT_MASKS, ids=lambda d: f"{d.soft_mask.value}-{d.soft_mask_weight}")


# Bases


@soft_masks
@pytest.mark.parametrize("model", [Bigram(), Wrapped()], ids=["plain", "wrapped"])
def test_the_causal_loss_is_the_sum_over_all_targets(data: Data, model: Bigram) -> None:
    pairs = [pair for window in WINDOWS for pair in itertools.pairwise(window)]
    expected, weight = by_hand(model, data, pairs)
    objective, batch = Bases(data), {"codes": codes(WINDOWS)}
    assert objective.loss(model, batch).item() == pytest.approx(expected, rel=1e-5)
    weighed = objective.weigh(batch)
    assert weighed.weight == pytest.approx(weight.weight, rel=1e-6)
    assert weighed.tokens == weight.tokens
    assert weighed.padded_tokens == 2 + 2 + 8


def test_the_targets_of_a_window_are_counted_from_its_second_base_on() -> None:
    # ACGTNacgtn: C G T a c g t; of these four in lower case, each a tenth.
    batch = {"codes": codes(["ACGTNacgtn"])}
    assert Bases(Data()).weigh(batch) == Weight(7.0, 7, 0)
    assert Bases(Data(soft_mask=SoftMask.IGNORE)).weigh(batch) == Weight(3.0, 3, 0)
    weighed = Bases(Data(soft_mask=SoftMask.WEIGHT)).weigh(batch)
    assert weighed.weight == pytest.approx(3.4, rel=1e-6)
    assert weighed.tokens == 7


@soft_masks
def test_the_masked_loss_is_the_sum_over_the_chosen_targets(data: Data) -> None:
    """What is seen at a target is the input there; what is predicted is the base."""
    draw = random.Random(2)
    chosen = [[base.upper() in "ACGT" and draw.random() < 0.6 for base in window] for window in WINDOWS]
    shown = [
        "".join(draw.choice([base, "?", "C"]) if target else base for base, target in zip(window, row, strict=True))
        for window, row in zip(WINDOWS, chosen, strict=True)
    ]
    pairs = [
        (shown[number][place], WINDOWS[number][place])
        for number, row in enumerate(chosen)
        for place, target in enumerate(row)
        if target
    ]
    assert any(seen == "?" for seen, _ in pairs)
    model = Bigram()
    expected, weight = by_hand(model, data, pairs)
    batch = {"codes": codes(WINDOWS), "inputs": codes(shown), "targets": torch.tensor(chosen)}
    objective = Bases(data)
    assert objective.loss(model, batch).item() == pytest.approx(expected, rel=1e-5)
    weighed = objective.weigh(batch)
    assert weighed.weight == pytest.approx(weight.weight, rel=1e-6)
    assert (weighed.tokens, weighed.padded_tokens) == (weight.tokens, 12)


def test_lower_case_is_shown_to_a_model_as_upper_case() -> None:
    model = Bigram()
    Bases(Data(soft_mask=SoftMask.IGNORE)).loss(model, {"codes": codes(["acNgtACGTr"])})
    (tokens,) = model.given
    assert tokens.tolist() == [[2, 3, 6, 4, 5, 2, 3, 4, 5, 7]]


def test_a_masked_model_is_told_where_padding_is() -> None:
    model = Bigram()
    targets = torch.tensor([[False, True, False, False, False]])
    batch = {"codes": codes(["ACG__"]), "inputs": codes(["A?G__"]), "targets": targets}
    Bases(Data()).loss(model, batch)
    tokens, attention = model.given
    assert tokens.tolist() == [[2, 1, 4, 0, 0]]
    assert attention.tolist() == [[1, 1, 1, 0, 0]]


@soft_masks
def test_windows_without_a_target_add_a_loss_of_zero_and_a_gradient_of_zero(data: Data) -> None:
    model, batch = Bigram(), {"codes": codes(["NNNN", "A___", "ANRN"])}
    loss = Bases(data).loss(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0.0
    assert model.table.grad is not None
    assert not model.table.grad.any()
    assert Bases(data).weigh(batch) == Weight(0.0, 0, 3)


def test_losses_are_summed_in_fp32_whatever_the_logits_are() -> None:
    """1000 equal losses of log 17: in bf16 the sum would stop growing at a few hundred."""
    model = Bigram().bfloat16()
    model.table.data.zero_()
    loss = Bases(Data()).loss(model, {"codes": codes(["A" * 1001])})
    assert loss.dtype is torch.float32
    assert loss.item() == pytest.approx(1000 * math.log(17), rel=1e-5)


@pytest.mark.parametrize("data", SOFT_MASKS[1:3], ids=["ignore", "weight"])
def test_weights_and_losses_of_parts_add_up_to_those_of_the_whole(data: Data) -> None:
    model, objective = Bigram(), Bases(data)
    parts = [{"codes": codes([window])} for window in WINDOWS]
    whole = {"codes": codes(WINDOWS)}
    added = sum((objective.weigh(part) for part in parts), Weight())
    expected = objective.weigh(whole)
    assert (added.tokens, added.padded_tokens) == (expected.tokens, expected.padded_tokens)
    assert added.weight == pytest.approx(expected.weight, rel=1e-12)
    losses = math.fsum(objective.loss(model, part).item() for part in parts)
    assert losses == pytest.approx(objective.loss(model, whole).item(), rel=1e-5)


# A loss of one's own


def squares(logits: torch.Tensor, batch: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Of a regression: the weight is the number of sequences."""
    return (logits - batch["labels"]).square().sum(), len(batch["labels"])


def token_losses(logits: torch.Tensor, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    labels = batch["labels"]
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels >= 0).sum()


class Weighted:
    """Weighs every sequence itself."""

    def __call__(self, logits: torch.Tensor, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        return (logits * batch["weights"]).sum(), batch["weights"].sum()

    def weight(self, batch: dict[str, Any]) -> torch.Tensor:
        weights: torch.Tensor = batch["weights"].sum()
        return weights


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.factor


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.0))

    def forward(self, *, left: torch.Tensor, right: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self.factor * (left - right))


def test_labels_in_whole_numbers_weigh_as_many_as_are_not_ignored() -> None:
    labels = torch.tensor([[1, -100, 2], [-100, -100, 0]])
    batch = {"inputs": torch.zeros(2, 3, 4), "labels": labels}
    objective = Custom(token_losses)
    assert objective.weigh(batch) == Weight(3.0, 3, 0)
    # All logits are equal: each of the three costs log 4.
    assert objective.loss(Doubled(), batch).item() == pytest.approx(3 * math.log(4), rel=1e-6)


def test_labels_in_fractions_weigh_as_many_as_there_are_sequences() -> None:
    batch = {"inputs": torch.tensor([1.0, 2.0, 3.0]), "labels": torch.tensor([2.0, 5.0, 4.0])}
    objective = Custom(squares)
    assert objective.weigh(batch) == Weight(3.0, 3, 0)
    assert objective.loss(Doubled(), batch).item() == 0 + 1 + 4


def test_without_labels_sequences_are_counted() -> None:
    objective = Custom(lambda logits, batch: (logits.sum(), 4))
    batch = {"inputs": torch.tensor([1.0, 2.0, 3.0, 4.0])}
    assert objective.weigh(batch) == Weight(4.0, 4, 0)
    assert objective.loss(Doubled(), batch).item() == 20.0


def test_a_loss_may_say_itself_what_a_micro_batch_weighs() -> None:
    batch = {"inputs": torch.tensor([1.0, 2.0, 3.0]), "weights": torch.tensor([0.5, 0.0, 2.0])}
    objective = Custom(Weighted())
    assert objective.weigh(batch) == Weight(2.5, 3, 0)
    assert objective.loss(Doubled(), batch).item() == 1.0 + 12.0


def test_inputs_in_a_dict_are_given_to_the_model_by_name() -> None:
    inputs = {"right": torch.tensor([1.0, 1.0, 1.0]), "left": torch.tensor([3.0, 4.0, 7.0])}
    batch = {"inputs": inputs, "labels": torch.tensor([0.0, 0.0, 0.0])}
    objective = Custom(squares)
    assert objective.weigh(batch) == Weight(3.0, 3, 0)
    assert objective.loss(Named(), batch).item() == 4 + 9 + 36


def test_sequences_are_counted_also_where_inputs_are_a_dict() -> None:
    inputs = {"left": torch.tensor([3.0, 4.0, 7.0]), "right": torch.tensor([1.0, 1.0, 1.0])}
    objective = Custom(lambda logits, batch: (logits.sum(), len(logits)))
    assert objective.weigh({"inputs": inputs}) == Weight(3.0, 3, 0)
    assert objective.loss(Named(), {"inputs": inputs}).item() == 2 + 3 + 6


@pytest.mark.parametrize("wrong", [2.0, 3.0001, 0.0, math.nan])
def test_a_loss_that_weighs_otherwise_than_announced_ends_the_run(wrong: float) -> None:
    objective = Custom(lambda logits, batch: (logits.sum(), torch.tensor(wrong)))
    with pytest.raises(RunError, match=r"^the loss weighs a micro-batch .*, but 3\.0 was expected from its data: give"):
        objective.loss(Doubled(), {"inputs": torch.zeros(3)})


def test_a_constant_loss_takes_part_in_the_backward_pass_and_adds_no_gradient() -> None:
    """As one returns it where a micro-batch has no target."""
    model = Doubled()
    loss = Custom(lambda logits, batch: (torch.tensor(0.0), 3)).loss(model, {"inputs": torch.ones(3)})
    loss.backward()
    assert loss.item() == 0
    assert model.factor.grad is not None
    assert model.factor.grad.item() == 0


def test_a_loss_in_a_row_of_one_is_that_one() -> None:
    loss = Custom(lambda logits, batch: (logits.sum().reshape(1), 3)).loss(Doubled(), {"inputs": torch.ones(3)})
    assert (loss.shape, loss.item()) == (torch.Size([]), 6.0)


@pytest.mark.parametrize(
    ("returned", "told"), [(torch.zeros(3, requires_grad=True), r"\[3\]"), (0.0, "float")], ids=["many", "none"]
)
def test_a_loss_that_is_no_number_ends_the_run(returned: Any, told: str) -> None:
    objective = Custom(lambda logits, batch: (returned, 3))
    with pytest.raises(RunError, match=rf"^the loss returned {told} where the sum of a micro-batch belongs"):
        objective.loss(Doubled(), {"inputs": torch.ones(3)})


def test_a_micro_batch_that_uses_no_parameter_ends_the_run_unless_it_is_only_evaluated() -> None:
    objective, batch = Custom(lambda logits, batch: (logits.sum(), 3)), {"inputs": torch.ones(3)}
    with pytest.raises(RunError, match=r"^the loss of a micro-batch depends on no parameter"):
        objective.loss(nn.Identity(), batch)
    with torch.no_grad():
        assert objective.loss(nn.Identity(), batch).item() == 3.0
