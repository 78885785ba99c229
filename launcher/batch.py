"""Batch algebra: how one global batch is cut into micro-batches over accumulation steps and ranks.

    train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data-parallel size

Exactly, or refused with the nearest values that work. DeepSpeed divides with rounding and then asserts on every rank.
"""

import math
from dataclasses import dataclass, replace

from launcher import batch_schedule
from launcher.errors import RequestError
from launcher.schema import Batch, BatchSchedule, MicroBatch

CONSTANT = BatchSchedule()


@dataclass(frozen=True)
class Cut:
    """One global batch, cut. All counts are sequences, but ``gradient_accumulation_steps`` and the ranks."""

    train_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    data_parallel_size: int

    def __post_init__(self) -> None:
        assert self.train_batch_size == (
            self.micro_batch_size * self.gradient_accumulation_steps * self.data_parallel_size
        )

    def accumulation_steps(self, batch_size: int) -> int:
        """Of a step with another global batch, cut into the same micro-batches."""
        return batch_size // (self.micro_batch_size * self.data_parallel_size)

    def finer(self) -> "Cut | None":
        """The same global batch in micro-batches of half the size, or of the next smaller one that cuts them evenly;
        None where they are of one sequence already."""
        smaller = [size for size in range(1, self.micro_batch_size // 2 + 1) if self.micro_batch_size % size == 0]
        if not smaller:
            return None
        pieces = self.micro_batch_size // smaller[-1]
        return replace(
            self,
            micro_batch_size=smaller[-1],
            gradient_accumulation_steps=self.gradient_accumulation_steps * pieces,
        )


def solve(
    batch: Batch,
    data_parallel_size: int,
    sequence_length: int | None,
    schedule: BatchSchedule = CONSTANT,
) -> Cut:
    """The one exact cut that the keys of ``batch`` ask for.

    ``sequence_length`` (bases) is needed for ``train_batch_tokens`` only. Of micro-batch and accumulation, one gives
    the other; with neither, the micro-batch is the largest exact one not above ``max_micro_batch_size_per_gpu``; with
    both, all three must agree, or ``train_batch_size`` must be null.

    The micro-batch cuts every batch of ``schedule`` (which ``batch_schedule.check`` accepts), not only the last. Where
    it is to be found by trying (auto), the cut has the smallest.

    Raises RequestError with the nearest values that work.
    """
    positive = {
        "train_batch_size": batch.train_batch_size,
        "train_batch_tokens": batch.train_batch_tokens,
        "train_micro_batch_size_per_gpu": batch.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
        "max_micro_batch_size_per_gpu": batch.max_micro_batch_size_per_gpu,
    }
    faults = [
        f"batch.{key}={value}: it must be at least 1"
        for key, value in positive.items()
        if isinstance(value, int) and value < 1
    ]
    if faults:
        raise RequestError(*faults)
    micro, accumulation = batch.train_micro_batch_size_per_gpu, batch.gradient_accumulation_steps
    if isinstance(micro, MicroBatch):
        if accumulation is not None:
            raise RequestError(
                f"batch.train_micro_batch_size_per_gpu=auto: batch.gradient_accumulation_steps={accumulation} leaves "
                "no choice; set one of them to null"
            )
        micro = 1
    size, name, unit = _global_batch(batch, sequence_length, data_parallel_size)
    if size is None:
        if micro is None or accumulation is None:
            raise RequestError(
                "batch.train_batch_size=null: set it, or batch.train_batch_tokens, or both "
                "batch.train_micro_batch_size_per_gpu and batch.gradient_accumulation_steps"
            )
        size = micro * accumulation * data_parallel_size
    if micro is not None and accumulation is not None:
        product = micro * accumulation * data_parallel_size
        if product != size:
            raise RequestError(
                f"{name}={size * unit} is not micro-batches of {micro} x {accumulation} accumulation steps x "
                f"{_ranks(data_parallel_size)} = {product * unit}: set one of the three to null, "
                f"or {name}={product * unit}"
            )
    elif micro is not None:
        _require_multiple(size, micro * data_parallel_size, name, unit, f"micro-batches of {micro}", data_parallel_size)
    elif accumulation is not None:
        what = f"{accumulation} accumulation steps"
        share = size // data_parallel_size
        others = _nearest_divisors(accumulation, share) if size % data_parallel_size == 0 else []
        remedy = f"; or batch.gradient_accumulation_steps={' or '.join(map(str, others))}" if others else ""
        _require_multiple(size, accumulation * data_parallel_size, name, unit, what, data_parallel_size, remedy)
        micro = size // (accumulation * data_parallel_size)
    else:
        _require_multiple(size, data_parallel_size, name, unit, "equal parts", data_parallel_size)
        sizes = batch_schedule.sizes(
            schedule, size, data_parallel_size, f"equal parts over {_ranks(data_parallel_size)}"
        )
        share = math.gcd(*sizes) // data_parallel_size
        micro = max(m for m in range(1, min(share, batch.max_micro_batch_size_per_gpu) + 1) if share % m == 0)
    parts = f"micro-batches of {micro} over {_ranks(data_parallel_size)}"
    batch_schedule.sizes(schedule, size, micro * data_parallel_size, parts)
    return Cut(size, micro, size // (micro * data_parallel_size), data_parallel_size)


def solve_for_fewer(batch: Batch, most: int, sequence_length: int | None, schedule: BatchSchedule = CONSTANT) -> Cut:
    """The cut over as many data-parallel ranks as can share the batch exactly, at most ``most``.

    Raises RequestError, as ``solve`` does for ``most``, where not even one rank can have it.
    """
    refusal = None
    for ranks in range(most, 0, -1):
        try:
            return solve(batch, ranks, sequence_length, schedule)
        except RequestError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def micro_batch_sizes(
    batch: Batch, data_parallel_size: int, sequence_length: int | None, schedule: BatchSchedule = CONSTANT
) -> list[int]:
    """All micro-batches that cut every batch exactly, smallest first, where ``solve`` has found one."""
    size, *_ = _global_batch(batch, sequence_length, data_parallel_size)
    assert size is not None
    share = math.gcd(*batch_schedule.sizes(schedule, size, data_parallel_size)) // data_parallel_size
    return [micro for micro in range(1, share + 1) if share % micro == 0]


def _global_batch(batch: Batch, sequence_length: int | None, ranks: int) -> tuple[int | None, str, int]:
    """Sequences of a global batch, the key that states it, and what that key counts a sequence as."""
    if batch.train_batch_tokens is None:
        return batch.train_batch_size, "batch.train_batch_size", 1
    tokens, name = batch.train_batch_tokens, "batch.train_batch_tokens"
    if batch.train_batch_size is not None:
        raise RequestError(
            f"{name}={tokens} and batch.train_batch_size={batch.train_batch_size} are both set: set one of them to null"
        )
    if sequence_length is None:
        raise RequestError(f"{name}={tokens}: it needs data.sequence_length; set batch.train_batch_size instead")
    _require_multiple(tokens, sequence_length, name, 1, f"sequences of {sequence_length} bases", None)
    return tokens // sequence_length, name, sequence_length


def _require_multiple(
    size: int, multiple: int, name: str, unit: int, parts: str, ranks: int | None, remedy: str = ""
) -> None:
    """Raise unless ``multiple`` divides ``size``; both are shown in the unit of the key ``name``."""
    if size % multiple == 0:
        return
    below = size // multiple * multiple
    values = [value * unit for value in (below, below + multiple) if value > 0]
    over = f" over {_ranks(ranks)}" if ranks is not None else ""
    raise RequestError(
        f"{name}={size * unit} cannot be cut into {parts}{over}: it must be a multiple of {multiple * unit}; "
        f"nearest: {', '.join(map(str, values))}{remedy}"
    )


def _nearest_divisors(wanted: int, number: int) -> list[int]:
    """The divisors of ``number`` next below and next above ``wanted``."""
    below = max((d for d in range(1, min(wanted, number) + 1) if number % d == 0), default=None)
    above = min((d for d in range(wanted + 1, number + 1) if number % d == 0), default=None)
    return [d for d in (below, above) if d is not None]


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"
