"""The learning rate of an optimizer step: a function of the step and the horizon, so there is no state to restore."""

import math

from launcher.schema import LrSchedule, LrScheduleType


def factor(schedule: LrSchedule, step: int, num_steps: int) -> float:
    """The learning rate that step ``step`` (from 0) of ``num_steps`` uses, over the peak.

    Linear warm-up reaches the peak in its last step and is never 0; the last step of the run uses exactly
    ``min_lr_ratio`` (``constant``: 1). Cosine: Loshchilov and Hutter 2017; wsd (warm-up, stable, decay): Hu et al.
    2024.
    """
    done, warmup = step + 1, schedule.warmup_steps
    if done <= warmup:
        return done / warmup
    if schedule.type is LrScheduleType.CONSTANT:
        return 1.0
    start = num_steps - decay_steps(schedule, num_steps)
    if done <= start:
        return 1.0
    progress = (done - start) / (num_steps - start)
    shape = (1 + math.cos(math.pi * progress)) / 2 if schedule.type is LrScheduleType.COSINE else 1 - progress
    return schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * shape


def decay_steps(schedule: LrSchedule, num_steps: int) -> int:
    """The optimizer steps at the end of a run in which the learning rate falls."""
    if schedule.type is LrScheduleType.CONSTANT:
        return 0
    if schedule.type is LrScheduleType.WSD:
        return round(schedule.decay_fraction * num_steps)
    return num_steps - schedule.warmup_steps


def check(schedule: LrSchedule, num_steps: int | None) -> list[str]:
    """Fault lines; ``num_steps`` is None where only the job can know it."""
    faults = []
    if schedule.warmup_steps < 0:
        faults.append(f"lr_schedule.warmup_steps={schedule.warmup_steps}: it must be at least 0")
    if not 0 <= schedule.min_lr_ratio <= 1:
        faults.append(f"lr_schedule.min_lr_ratio={schedule.min_lr_ratio}: it must lie in [0, 1]")
    if not 0 <= schedule.decay_fraction <= 1:
        faults.append(f"lr_schedule.decay_fraction={schedule.decay_fraction}: it must lie in [0, 1]")
    if faults or num_steps is None:
        return faults
    if schedule.warmup_steps > num_steps:
        faults.append(
            f"lr_schedule.warmup_steps={schedule.warmup_steps}: the run has only {num_steps} optimizer steps; "
            f"set at most {num_steps}, or train longer"
        )
    elif schedule.type is LrScheduleType.WSD and schedule.warmup_steps + decay_steps(schedule, num_steps) > num_steps:
        faults.append(
            f"lr_schedule.warmup_steps={schedule.warmup_steps} and decay_fraction={schedule.decay_fraction} take "
            f"{schedule.warmup_steps + decay_steps(schedule, num_steps)} of {num_steps} optimizer steps: lower one"
        )
    return faults
