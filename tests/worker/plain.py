"""A genome and a loss spelled out by docs/data.md, with nothing of the program, and a model that is quick to start."""

import gzip
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

TOKENS = {base: number for number, base in enumerate("ACGTN", start=2)}
"""Padding is 0 and the mask 1."""


def contigs(path: Path) -> dict[str, str]:
    """Names and bases of a FASTA file, plain or gzip."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    records = text.decode().split(">")[1:]
    return {record.split()[0]: "".join(record.split("\n")[1:]) for record in records}


def windows(stretches: Iterable[str], length: int) -> list[str]:
    """Adjoining windows of each stretch in order; the last is shorter, if it has at least two bases."""
    found = [stretch[start : start + length] for stretch in stretches for start in range(0, len(stretch), length)]
    return [window for window in found if len(window) >= 2]


def count_targets(windows: Iterable[str], letters: str = "ACGTacgt") -> int:
    """Bases that a model predicts from those before them."""
    return sum(base in letters for window in windows for base in window[1:])


def loss_sum(model: Any, windows: Sequence[str]) -> torch.Tensor:
    """The sum of cross-entropies (nats) over all targets of all windows, in one forward pass."""
    longest = max(map(len, windows))
    rows = [[TOKENS[base] for base in window.upper()] for window in windows]
    inputs = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    targets = inputs[:, 1:].clone()
    targets[(targets < 2) | (targets > 5)] = -100
    logits = model(inputs).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


class Net(nn.Module):
    """Predicts a base from the four before it. Unlike a Llama it needs no library that takes seconds to import."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 32)
        self.mix = nn.Conv1d(32, 64, kernel_size=4)
        self.head = nn.Linear(64, 17)

    def forward(self, tokens: torch.Tensor) -> Any:
        embedded = F.pad(self.embed(tokens).transpose(1, 2), (3, 0))
        return self.head(torch.tanh(self.mix(embedded)).transpose(1, 2))


class WrappedNet(Net):
    """The same, with its logits wrapped as Hugging Face models do."""

    def forward(self, tokens: torch.Tensor) -> Any:
        return SimpleNamespace(logits=super().forward(tokens))


class Branching(Net):
    """Sequences whose second base is A or C take one head and the others another, as experts do: which parameters a
    micro-batch uses depends on what is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(64, 17)

    def forward(self, tokens: torch.Tensor) -> Any:
        embedded = F.pad(self.embed(tokens).transpose(1, 2), (3, 0))
        hidden = torch.tanh(self.mix(embedded)).transpose(1, 2)
        logits = hidden.new_zeros(*tokens.shape, 17)
        first = tokens[:, 1] <= TOKENS["C"]
        for chosen, head in ((first, self.head), (~first, self.other)):
            if chosen.any():
                logits[chosen] = head(hidden[chosen])
        return SimpleNamespace(logits=logits)


class PartlyIdle(Net):
    """With parameters that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(64, 64)


class Restless(Net):
    """Draws random numbers without a module that says so."""

    def forward(self, tokens: torch.Tensor) -> Any:
        return F.dropout(super().forward(tokens), 0.1, self.training)


class Still(Net):
    """Has no gradient."""

    def forward(self, tokens: torch.Tensor) -> Any:
        return 0 * super().forward(tokens)
