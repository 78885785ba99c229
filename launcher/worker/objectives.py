"""What is predicted: from a micro-batch to the sum of its losses and the sum of their weights.

Sums, never means: the loss of a step is one sum over its whole global batch, divided once by one weight, however the
batch is cut. The weight must be known before the first backward pass of a window, so an objective can tell it from the
data alone.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from launcher.errors import RunError
from launcher.genome import alphabet
from launcher.schema import Data, SoftMask

IGNORED = -100
"""The label of a position that is no target (torch's default ``ignore_index``)."""

Batch = dict[str, Any]


@dataclass(frozen=True)
class Weight:
    """What a micro-batch counts: the divisor's share, the valid targets, and the positions that are padding."""

    weight: float = 0.0
    tokens: int = 0
    padded_tokens: int = 0

    def __add__(self, other: "Weight") -> "Weight":
        return Weight(self.weight + other.weight, self.tokens + other.tokens, self.padded_tokens + other.padded_tokens)


class Objective(Protocol):
    def weigh(self, batch: Batch) -> Weight: ...

    def loss(self, model: nn.Module, batch: Batch) -> Tensor: ...


class Bases:
    """Cross-entropy in nats over single nucleotides, causal or masked.

    A batch holds ``codes`` (n, L) uint8, one byte a base (``launcher.genome.alphabet``), and for the masked objective
    ``targets`` (n, L) bool and ``inputs`` (n, L) uint8, the codes with the targets masked. A target's weight follows
    the target base: 1, or ``soft_mask_weight`` for lower case under ``soft_mask=weight``.
    """

    def __init__(self, data: Data) -> None:
        weights = np.where(alphabet.IS_TARGET, np.float32(1), np.float32(0))
        lower = (np.arange(256) & alphabet.LOWER) != 0
        if data.soft_mask is not SoftMask.UPPER:
            weights[lower] *= data.soft_mask_weight if data.soft_mask is SoftMask.WEIGHT else 0.0
        self._weights = weights
        self._weight_table = torch.from_numpy(weights)
        self._token_table = torch.from_numpy(alphabet.TOKEN.astype(np.int64))
        self._weights_are_0_or_1 = bool(np.isin(weights, (0, 1)).all())

    def weigh(self, batch: Batch) -> Weight:
        codes = batch["codes"].numpy()
        masked = "targets" in batch
        weights = self._weights[codes] * batch["targets"].numpy() if masked else self._weights[codes[:, 1:]]
        return Weight(
            weight=float(weights.sum(dtype=np.float64)),
            tokens=int(np.count_nonzero(weights)),
            padded_tokens=int(np.count_nonzero(codes == alphabet.PAD)),
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        codes = batch["codes"].long()
        self._weight_table, self._token_table = self._weight_table.to(codes.device), self._token_table.to(codes.device)
        tokens, weights = self._token_table[codes], self._weight_table[codes]
        if "targets" in batch:
            logits = _logits(model(self._token_table[batch["inputs"].long()], (tokens != alphabet.PAD).long()))
            weights = weights * batch["targets"]
        else:
            # Position t predicts base t + 1 and the last one nothing, so that a window keeps its length.
            logits = _logits(model(tokens))
            tokens, weights = F.pad(tokens[:, 1:], (0, 1)), F.pad(weights[:, 1:], (0, 1))
        labels = tokens.masked_fill(weights == 0, IGNORED).flatten()
        logits = logits.float().flatten(0, 1)
        if self._weights_are_0_or_1:
            return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        losses = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
        return (losses * weights.flatten()).sum()


class Custom:
    """A user's loss: ``loss(logits, batch)`` returns (sum, weight); the model is called on ``batch["inputs"]``.

    The weight must be the same as ``loss.weight(batch)``, if the loss has that method; else as the number of labels
    other than -100, for whole-numbered ``batch["labels"]``; else as the number of sequences.
    """

    def __init__(self, loss: Callable[[Any, Batch], tuple[Tensor, Any]]) -> None:
        self._loss = loss

    def weigh(self, batch: Batch) -> Weight:
        labels = batch.get("labels")
        whole = isinstance(labels, Tensor) and not labels.is_floating_point()
        counted = int((labels != IGNORED).sum()) if whole else _length(batch["inputs"] if labels is None else labels)
        weight = float(self._loss.weight(batch)) if hasattr(self._loss, "weight") else float(counted)
        return Weight(weight=weight, tokens=counted)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs = batch["inputs"]
        logits = _logits(model(**inputs) if isinstance(inputs, dict) else model(inputs))
        total, weight = self._loss(logits, batch)
        announced = self.weigh(batch).weight
        if not math.isclose(float(weight), announced, rel_tol=1e-6):
            raise RunError(
                f"the loss weighs a micro-batch {float(weight)}, but {announced} was expected from its data: give the "
                "loss a method weight(batch), since the step divides by the weight before the first backward pass"
            )
        if not isinstance(total, Tensor) or total.numel() != 1:
            shape = list(total.shape) if isinstance(total, Tensor) else type(total).__name__
            raise RunError(f"the loss returned {shape} where the sum of a micro-batch belongs, a tensor of one number")
        return total.reshape(()) if total.requires_grad or not torch.is_grad_enabled() else _attached(total, logits)


def _attached(total: Tensor, logits: Any) -> Tensor:
    """A loss that is the same whatever the weights are, as part of the model's graph: every pass has to go backward."""
    if isinstance(logits, Tensor) and logits.requires_grad:
        return total.reshape(()) + 0 * logits.sum()
    raise RunError(
        "the loss of a micro-batch depends on no parameter, so that its rank could not take part in the backward pass: "
        "let the model use its parameters for every input, and add 0 * logits.sum() to a loss without a target"
    )


def _logits(output: Any) -> Tensor:
    """Hugging Face models wrap them."""
    logits: Tensor = getattr(output, "logits", output)
    return logits


def _length(values: Any) -> int:
    """How many sequences a collated value holds."""
    while isinstance(values, dict):
        values = next(iter(values.values()))
    return len(values)
