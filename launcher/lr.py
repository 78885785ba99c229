"""The learning rate of an optimizer step: a function of the step and the horizon, so there is no state to restore."""

import math
from dataclasses import dataclass
from functools import cached_property

from launcher.errors import RequestError
from launcher.schema import Batch, BatchScheduleType, Config, LrSchedule, LrScheduleType, OptimizerType, Scaling
from launcher.steps import Steps

EXPONENTS = {Scaling.NONE: 0.0, Scaling.LINEAR: 1.0, Scaling.SQRT: 0.5, Scaling.QUADRATIC: 2.0}

GOYAL_LIMIT = 8192
"""Sequences up to which linear scaling was seen to keep the accuracy of SGD (Goyal et al. 2017, figure 1)."""

ADAPTIVE_LIMIT = 8
"""Batch over reference above which linear scaling is warned of with Adam-like optimizers: theirs is the square root."""


@dataclass(frozen=True)
class Rates:
    """The learning rates of one run: what the plan shows and the trainer uses."""

    schedule: LrSchedule
    steps: Steps
    peak: float
    """At ``train_batch_size``."""
    train_batch_size: int
    batch_scaling: Scaling
    grows: bool
    """The run itself decides when its batches grow."""
    warmup_sequences: int | None
    """``warmup_tokens`` in sequences."""

    def of(self, step: int, skipped_steps: int = 0, skipped_sequences: int = 0) -> float:
        """The learning rate of step ``step`` (from 0).

        What was skipped before it, without an update, counts neither as done nor as to be done; so the last step of a
        run uses exactly ``min_lr_ratio``.
        """
        done, total, warmup, skipped = step + 1, self.steps.num_steps, self.warmup_steps, skipped_steps
        if self.by_sequences:
            done, total, warmup = (self.steps.sequences_before(number) for number in (done, total, warmup))
            skipped = skipped_sequences
        batch = scale(self.batch_scaling, self.steps.batch_size(step), self.train_batch_size)
        return self.peak * batch * factor(self.schedule, done - skipped, total - skipped, warmup)

    @property
    def by_sequences(self) -> bool:
        """Progress is counted in sequences instead of optimizer steps.

        It is where the number of steps is not known ahead: batches grow by the noise scale, and not ``max_steps`` ends
        the run but ``max_tokens`` or ``epochs``, as far as its batches are known.
        """
        limits = self.steps.limits
        return self.grows and limits is not None and self.steps.num_steps != limits.max_steps

    @cached_property
    def warmup_steps(self) -> int:
        """The steps of the warm-up: ``warmup_steps``, or those that begin before ``warmup_tokens`` bases were read."""
        if self.warmup_sequences is None:
            return self.schedule.warmup_steps
        return self.steps.first_step_after(self.warmup_sequences)


def rates(config: Config, train_batch_size: int, steps: Steps, sequence_length: int | None) -> Rates:
    """The learning rates of the run ``steps``; ``sequence_length`` (bases) is needed for ``warmup_tokens``.

    Raises RequestError where the run is too short for its schedule.
    """
    warmup_sequences = None
    if config.lr_schedule.warmup_tokens is not None:
        assert sequence_length is not None
        warmup_sequences = -(-config.lr_schedule.warmup_tokens // sequence_length)
    found = Rates(
        config.lr_schedule,
        steps,
        peak(config, train_batch_size),
        train_batch_size,
        config.batch_schedule.lr_scaling,
        config.batch_schedule.type is BatchScheduleType.NOISE_SCALE,
        warmup_sequences,
    )
    if faults := check_length(config.lr_schedule, steps.num_steps, found.warmup_steps):
        raise RequestError(*faults)
    return found


def factor(schedule: LrSchedule, done: int, total: int, warmup: int) -> float:
    """The learning rate over the peak, for the step with which ``done`` of ``total`` are done; all in one unit.

    Linear warm-up reaches the peak in its last step and is never 0; the last step of the run uses exactly
    ``min_lr_ratio`` (``constant``, and a warm-up as long as the run: 1). Cosine: Loshchilov and Hutter 2017; wsd
    (warm-up, stable, decay): Hu et al. 2024.
    """
    if done <= warmup:
        return done / warmup
    if schedule.type is LrScheduleType.CONSTANT:
        return 1.0
    start = total - decay_length(schedule, total, warmup)
    if done <= start:
        return 1.0
    progress = (done - start) / (total - start)
    shape = (1 + math.cos(math.pi * progress)) / 2 if schedule.type is LrScheduleType.COSINE else 1 - progress
    return schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * shape


def decay_length(schedule: LrSchedule, total: int, warmup: int) -> int:
    """How much of a run, at its end, the learning rate falls for."""
    if schedule.type is LrScheduleType.CONSTANT:
        return 0
    if schedule.type is LrScheduleType.WSD:
        # A short run ends at min_lr_ratio, too.
        return max(round(schedule.decay_fraction * total), 1 if schedule.decay_fraction > 0 else 0)
    return total - warmup


def scale(scaling: Scaling, batch_size: int, reference: int) -> float:
    """What a batch multiplies the learning rate by: (batch / reference)^p.

    Linear: Goyal et al. 2017; square root: Krizhevsky 2014, and for Adam Malladi et al. 2022.
    """
    return float((batch_size / reference) ** EXPONENTS[scaling])


def peak(config: Config, train_batch_size: int) -> float:
    """``optimizer.lr``, scaled from ``batch.reference_batch_size`` to the global batch."""
    reference = config.batch.reference_batch_size or train_batch_size
    return config.optimizer.lr * scale(config.batch.lr_scaling, train_batch_size, reference)


def check(schedule: LrSchedule, sequence_length: int | None) -> list[str]:
    """Fault lines that a schedule earns by itself; ``sequence_length`` (bases) is needed for ``warmup_tokens``."""
    faults = []
    if schedule.warmup_steps < 0:
        faults.append(f"lr_schedule.warmup_steps={schedule.warmup_steps}: it must be at least 0")
    if not 0 <= schedule.min_lr_ratio <= 1:
        faults.append(f"lr_schedule.min_lr_ratio={schedule.min_lr_ratio}: it must lie in [0, 1]")
    if not 0 <= schedule.decay_fraction <= 1:
        faults.append(f"lr_schedule.decay_fraction={schedule.decay_fraction}: it must lie in [0, 1]")
    tokens = schedule.warmup_tokens
    if tokens is None:
        return faults
    if tokens < 0:
        faults.append(f"lr_schedule.warmup_tokens={tokens}: it must be at least 0")
    if schedule.warmup_steps > 0:
        faults.append(
            f"lr_schedule.warmup_tokens={tokens} and lr_schedule.warmup_steps={schedule.warmup_steps} are both set: "
            "set warmup_tokens to null or warmup_steps to 0"
        )
    if sequence_length is None:
        faults.append(
            f"lr_schedule.warmup_tokens={tokens}: it needs data.sequence_length; set lr_schedule.warmup_steps instead"
        )
    return faults


def check_length(schedule: LrSchedule, num_steps: int, warmup: int) -> list[str]:
    """Fault lines of a schedule in a run of ``num_steps``, of which the first ``warmup`` are its warm-up."""
    name, counted = f"lr_schedule.warmup_steps={warmup}", ""
    if schedule.warmup_tokens is not None:
        name, counted = f"lr_schedule.warmup_tokens={schedule.warmup_tokens}", f" ({warmup} optimizer steps)"
    if warmup > num_steps:
        return [
            f"{name}{counted}: the run has only {num_steps} optimizer steps; set "
            f"{'less' if counted else f'at most {num_steps}'}, or train longer"
        ]
    falling = decay_length(schedule, num_steps, warmup)
    if schedule.type is LrScheduleType.WSD and warmup + falling > num_steps:
        return [
            f"{name}{counted} and decay_fraction={schedule.decay_fraction} take {warmup + falling} of {num_steps} "
            "optimizer steps: lower one"
        ]
    return []


def check_scaling(batch: Batch) -> list[str]:
    """Fault lines of ``batch.lr_scaling`` and its reference."""
    scaling, reference = batch.lr_scaling, batch.reference_batch_size
    if scaling is Scaling.NONE and reference is not None:
        return [
            f"batch.reference_batch_size={reference}: it has no meaning for batch.lr_scaling=none; set it to null, or "
            "batch.lr_scaling to linear, sqrt or quadratic"
        ]
    if scaling is not Scaling.NONE and reference is None:
        return [
            f"batch.reference_batch_size=null: batch.lr_scaling={scaling.value} needs it: the global batch (sequences) "
            "that optimizer.lr is right for"
        ]
    if reference is not None and reference < 1:
        return [f"batch.reference_batch_size={reference}: it must be at least 1"]
    return []


def check_peak(config: Config, train_batch_size: int) -> list[str]:
    """Fault lines of a learning rate that its scaling takes beyond all numbers."""
    highest = peak(config, train_batch_size)
    if math.isfinite(highest):
        return []
    return [
        f"optimizer.lr={config.optimizer.lr}: batch.lr_scaling={config.batch.lr_scaling.value} from "
        f"{config.batch.reference_batch_size} to {train_batch_size} sequences makes it {highest}; set a smaller one"
    ]


def warnings(config: Config, train_batch_size: int) -> list[str]:
    """Lines about a learning rate that is scaled beyond where its rule is known to hold; the run may go on.

    A rule that grows faster than the linear one fails no later, so the quadratic one is held to the same limits.
    """
    scaling, kind, reference = config.batch.lr_scaling, config.optimizer.type, config.batch.reference_batch_size
    if scaling not in (Scaling.LINEAR, Scaling.QUADRATIC) or reference is None or train_batch_size <= reference:
        return []
    name = f"batch.lr_scaling={scaling.value}"
    if kind is OptimizerType.ADAMW and train_batch_size > ADAPTIVE_LIMIT * reference:
        return [
            f"{name}: a global batch of {train_batch_size} is more than {ADAPTIVE_LIMIT} times "
            f"batch.reference_batch_size={reference}; the rule of Adam-like optimizers is the square root (Malladi et "
            "al. 2022, You et al. 2020): consider batch.lr_scaling=sqrt"
        ]
    if kind in (OptimizerType.SGD, OptimizerType.MUON) and train_batch_size > GOYAL_LIMIT:
        return [
            f"{name}: a global batch of {train_batch_size} is above the {GOYAL_LIMIT} up to which the linear rule is "
            "known to hold without LARS or LAMB (Goyal et al. 2017): consider batch.lr_scaling=sqrt or optimizer=lars"
        ]
    return []
