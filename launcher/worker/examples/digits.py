"""Handwritten digits: a dataset, a model and a loss that have nothing to do with DNA, as a user brings them.

``conf/experiment/digits_resnet.yaml`` puts them together. They are plain torch and know nothing of this program: not of
ranks, micro-batches or ZeRO, and not of how the batch is cut.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

NUM_VALIDATION = 297


class Digits(Dataset[dict[str, Tensor]]):
    """The 1,797 images of 8 x 8 pixels that come with scikit-learn; the last 297 are for validation.

    An item is ``inputs`` (1, 8, 8), from 0 to 1, and ``labels``, a digit. ``shift`` moves an image by up to so many
    pixels each way at random; the program seeds the draw by the step and the sequence's place in it, so that it is the
    same wherever the sequence is computed.
    """

    def __init__(self, split: str, shift: int = 0) -> None:
        try:
            from sklearn.datasets import load_digits  # here: a second that only the ranks shall wait
        except ImportError as error:
            raise ImportError("the images come with scikit-learn: pip install 'okazaki[examples]'") from error
        if split not in ("train", "validation"):
            raise ValueError(f"split={split}: it must be train or validation")
        images, labels = load_digits(return_X_y=True)
        part = slice(-NUM_VALIDATION) if split == "train" else slice(-NUM_VALIDATION, None)
        self._images = torch.tensor(images[part], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
        self._labels = torch.tensor(labels[part])
        self._shift = shift

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        image = self._images[index]
        if self._shift:
            down, right = torch.randint(0, 2 * self._shift + 1, (2,)).tolist()
            image = F.pad(image, [self._shift] * 4)[:, down : down + 8, right : right + 8]
        return {"inputs": image, "labels": self._labels[index]}


class Block(nn.Module):
    """Two convolutions around which the input passes (He et al. 2015, figure 2)."""

    def __init__(self, num_inputs: int, num_outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_inputs, num_outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(num_outputs)
        self.conv2 = nn.Conv2d(num_outputs, num_outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(num_outputs)
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(num_inputs, num_outputs, 1, stride, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = F.relu(self.norm1(self.conv1(inputs)))
        return F.relu(self.norm2(self.conv2(hidden)) + self.shortcut(inputs))


class ResNet(nn.Module):
    """From images (N, 1, 8, 8) to the logits of ten digits (N, 10)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(
            Block(width, width), Block(width, 2 * width, stride=2), Block(2 * width, 4 * width, stride=2)
        )
        self.head = nn.Linear(4 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        images = images.to(self.head.weight.dtype)  # precision=bf16 casts the weights, not the data
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))


class CrossEntropy:
    """The sum over the images of a micro-batch, and their number: the program divides once, by that of the whole batch.

    A mean would weigh the images of a small micro-batch more than those of a large one.
    """

    def __call__(self, logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        return F.cross_entropy(logits.float(), batch["labels"], reduction="sum"), len(logits)
