"""A rank that makes a mistake which ``mode=verify`` has to find: the loss is divided by the accumulation steps too."""

import sys

import torch

from launcher.worker.__main__ import main
from launcher.worker.engine import Engine

backward = Engine.backward


def divided(engine: Engine, loss_sum: torch.Tensor, weight: float) -> None:
    backward(engine, loss_sum / engine.deepspeed.gradient_accumulation_steps(), weight)


if __name__ == "__main__":
    Engine.backward = divided  # type: ignore[method-assign]
    sys.exit(main())
