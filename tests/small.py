"""The model of whole runs that have to be short, and the folder in which their commands are given."""

from pathlib import Path

import torch
import torch.nn.functional as F


class SmallNet(torch.nn.Module):
    """A causal convolution over the four bases before each: logits of the 17 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(17, 32)
        self.mix = torch.nn.Conv1d(32, 64, kernel_size=4)
        self.head = torch.nn.Linear(64, 17)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded = F.pad(self.embed(tokens).transpose(1, 2), (3, 0))
        return self.head(torch.tanh(self.mix(embedded)).transpose(1, 2))


def offer(folder: Path, nets: str) -> Path:
    """Write ``nets`` as the module nets.py of ``folder``, and ``model=net``, which is its class Net; the folder."""
    (folder / "conf" / "model").mkdir(parents=True)
    (folder / "conf" / "model" / "net.yaml").write_text("_target_: nets.Net\n")
    (folder / "nets.py").write_text(nets)
    return folder
