"""One optimizer step, and one evaluation: the arithmetic that makes a step its global batch."""

import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import zip_longest

import torch
import torch.distributed as dist

from launcher import noise_scale
from launcher.errors import OutOfMemoryError, RunError
from launcher.worker import distributed
from launcher.worker.engine import Engine, Update
from launcher.worker.objectives import Batch, Objective, Weight
from launcher.worker.windows import MicroBatch, Share


@dataclass(frozen=True)
class Outcome:
    """What one optimizer step did, over all micro-batches and ranks. ``loss`` is nats a unit of weight."""

    loss: float | None
    weight: Weight
    update: Update
    noise: noise_scale.Estimate | None = None


def train_step(
    engine: Engine, objective: Objective, share: Share, learning_rate: float, measure_noise: bool = False
) -> Outcome:
    """Accumulate this rank's share of the global batch and apply one update.

    The loss is the sum over the whole global batch divided by its weight, so that neither unequal micro-batches nor
    unequal ranks can weigh a target more than another. A global batch without any target is left out on all ranks.

    Raises OutOfMemoryError on all ranks where one of them was out of memory and none has to wait for it: nothing has
    changed then, and the same batch may be tried again in smaller pieces.
    """
    weight = _over_ranks(share.weight, engine.device)
    if weight.weight == 0:
        return Outcome(None, weight, Update(None, None, applied=False))
    engine.set_learning_rate(learning_rate)
    engine.begin_window(len(share.micro_batches))
    passes = _Passes()
    failure = None
    try:
        passes.run(engine, objective, share, weight.weight, measure_noise)
    except (RuntimeError, MemoryError) as error:
        if not (is_out_of_memory(error) and engine.can_abandon):
            raise
        failure = str(error)  # and no more of it: its traceback holds on to the activations
    sums = [passes.loss_sum, *_small_gradient(passes.first, share.micro_batches[0].weight.weight, weight.weight)]
    loss_sum, *small, order, square, failures = distributed.sum_over_ranks(
        [*sums, *_fingerprint(engine.order()), failure is not None], engine.device
    )
    if failures:
        engine.abandon_window()
        raise OutOfMemoryError(failure or "another rank was out of memory")
    if dist.get_world_size() * int(square) != int(order) ** 2:
        raise RunError(_different_orders(engine.order()))
    update = engine.end_window()
    mean = loss_sum / weight.weight
    noise = _noise(update, small, weight.weight, share.num_sequences) if len(share.micro_batches) > 1 else None
    return Outcome(mean if math.isfinite(mean) else None, weight, update, noise)


class _Passes:
    """The forward and backward passes of a window, and what they leave."""

    def __init__(self) -> None:
        self.loss_sum = 0.0
        self.first: torch.Tensor | None = None
        """The norm of the gradient of the first micro-batch."""

    def run(self, engine: Engine, objective: Objective, share: Share, weight: float, measure_noise: bool) -> None:
        total = torch.zeros((), dtype=torch.float64, device=engine.device)
        for micro_batch in share.micro_batches:
            loss = _loss(engine, objective, micro_batch)
            total += loss.detach()
            engine.backward(loss, weight)
            del loss  # and with it what autograd still holds, before the next micro-batch needs the space
            if measure_noise and micro_batch is share.micro_batches[0]:
                self.first = engine.own_gradient_norm()
        self.loss_sum = total.item()


def is_out_of_memory(error: BaseException) -> bool:
    """torch has an error of its own for accelerators; the allocator of a CPU raises a plain one."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def _fingerprint(names: list[str]) -> tuple[int, int]:
    """A number of 20 bits and its square, whose sums over up to a thousand ranks are exact: n x sum of squares is the
    square of the sum where all are equal, and only there (Cauchy and Schwarz)."""
    number = zlib.crc32("\n".join(names).encode()) >> 12
    return number, number**2


def _different_orders(names: list[str]) -> str:
    everyones: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyones, names)
    rank, other = next((rank, other) for rank, other in enumerate(everyones) if other != everyones[0])
    at = next(place for place, pair in enumerate(zip_longest(everyones[0], other)) if pair[0] != pair[1])
    here, there = (found[at] if at < len(found) else "none" for found in (everyones[0], other))
    return (
        f"ranks use different parameters, or use them in another order, in one micro-batch (rank 0 {here}, rank {rank} "
        f"{there}), which mixes up their gradients where these are reduced after every micro-batch; set zero=stage1, "
        "or accumulation.sync=once_per_window with zero=stage2"
    )


def _small_gradient(norm: torch.Tensor | None, weight: float, total: float) -> tuple[float, float, float]:
    """Of one rank's first micro-batch, to be summed over the ranks: |sum of gradients|^2 / weight, the weight, and 1.

    ``norm`` is that of the sum over ``total``. A micro-batch without a target tells nothing.
    """
    if norm is None or weight == 0:
        return 0.0, 0.0, 0.0
    return (norm.item() * total) ** 2 / weight, weight, 1.0


def _noise(update: Update, small: list[float], weight: float, num_sequences: int) -> noise_scale.Estimate | None:
    squares, small_weight, parts = small
    if parts == 0 or not update.applied or update.grad_norm is None:
        return None
    if small_weight / parts >= weight:  # the other micro-batches have no target: there is nothing to compare
        return None
    return noise_scale.estimate(
        squares / parts, small_weight / parts, update.grad_norm**2 * weight, weight, num_sequences
    )


@torch.no_grad()
def evaluate(
    engine: Engine, objective: Objective, shares: Iterable[Share], stops: Callable[[], bool]
) -> tuple[float | None, Weight] | None:
    """The loss over whole global batches of another split, weighted as in training, and what was counted.

    None where ``stops``, which is asked on all ranks before each batch, ended it.
    """
    engine.module.eval()
    total = torch.zeros((), dtype=torch.float64, device=engine.device)
    weight = Weight()
    try:
        for share in shares:
            if stops():
                return None
            weight += share.weight
            for micro_batch in share.micro_batches:
                total += _loss(engine, objective, micro_batch)
    finally:
        engine.module.train()
    weight = _over_ranks(weight, engine.device)
    (loss_sum,) = distributed.sum_over_ranks([total.item()], engine.device)
    mean = loss_sum / weight.weight if weight.weight else math.nan
    return mean if math.isfinite(mean) else None, weight


def _loss(engine: Engine, objective: Objective, micro_batch: MicroBatch) -> torch.Tensor:
    """The sum of losses of one micro-batch, with the dropout masks that belong to it."""
    seed(micro_batch.dropout_seed, engine.device)
    loss = objective.loss(engine.module, to_device(engine.device, micro_batch.batch))
    return loss * 0 if micro_batch.is_empty else loss


def seed(number: int, device: torch.device) -> None:
    """Of what a pass draws. ``torch.manual_seed`` seeds every kind of device there might be, which takes 2 ms."""
    torch.default_generator.manual_seed(number)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(number)


def _over_ranks(weight: Weight, device: torch.device) -> Weight:
    summed = distributed.sum_over_ranks([weight.weight, weight.tokens, weight.padded_tokens], device)
    return Weight(summed[0], int(summed[1]), int(summed[2]))


def to_device(device: torch.device, batch: Batch) -> Batch:
    if device.type == "cpu":
        return batch
    moved: Batch = {}
    for name, value in batch.items():
        if isinstance(value, dict):
            moved[name] = to_device(device, value)
        else:
            moved[name] = value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
    return moved
