"""The learning rate against the formulas on paper and against torch's own schedulers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from launcher import lr
from launcher.schema import LrSchedule, LrScheduleType

COSINE, LINEAR, CONSTANT, WSD = (
    LrScheduleType.COSINE,
    LrScheduleType.LINEAR,
    LrScheduleType.CONSTANT,
    LrScheduleType.WSD,
)


def rates(schedule: LrSchedule, num_steps: int) -> list[float]:
    return [lr.factor(schedule, step, num_steps) for step in range(num_steps)]


def test_a_cosine_of_ten_steps_is_that_on_paper() -> None:
    expected = [0.5, 1.0] + [0.1 + 0.9 * (1 + math.cos(math.pi * k / 8)) / 2 for k in range(1, 9)]
    assert rates(LrSchedule(COSINE, warmup_steps=2, min_lr_ratio=0.1), 10) == pytest.approx(expected, abs=1e-15)


def test_wsd_rises_stays_and_falls() -> None:
    schedule = LrSchedule(WSD, warmup_steps=2, min_lr_ratio=0.0, decay_fraction=0.4)
    expected = [0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]
    assert rates(schedule, 10) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("kind", [COSINE, LINEAR])
def test_without_warm_up_it_is_torchs_scheduler_one_step_on(kind: LrScheduleType) -> None:
    """torch starts at the peak and ends below the floor's last step; ours has left the peak in its first step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedulers = {
        COSINE: lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=0.1),
        LINEAR: lambda: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20),
    }
    scheduler = schedulers[kind]()
    for ours in rates(LrSchedule(kind, min_lr_ratio=0.1), 20):
        optimizer.step()
        scheduler.step()
        assert ours == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)


@given(st.sampled_from([COSINE, LINEAR, WSD]), st.integers(1, 300), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_every_schedule_is_positive_peaks_at_one_and_ends_at_its_floor(
    kind: LrScheduleType, num_steps: int, warmup: float, floor: float, decay: float
) -> None:
    schedule = LrSchedule(kind, int(warmup * (num_steps - 1)), floor, decay)
    if lr.check(schedule, num_steps):
        return
    series = rates(schedule, num_steps)
    assert all(0 <= rate <= 1 + 1e-12 for rate in series)
    if schedule.warmup_steps:
        assert series[schedule.warmup_steps - 1] == 1.0
        assert series[0] == pytest.approx(1 / schedule.warmup_steps)
    if lr.decay_steps(schedule, num_steps):
        assert series[-1] == pytest.approx(floor, abs=1e-12)


def test_a_constant_stays_at_the_peak_after_warm_up() -> None:
    assert rates(LrSchedule(CONSTANT, warmup_steps=2), 5) == [0.5, 1, 1, 1, 1]


def test_a_warm_up_longer_than_the_run_is_refused() -> None:
    assert lr.check(LrSchedule(warmup_steps=11), 10) == [
        "lr_schedule.warmup_steps=11: the run has only 10 optimizer steps; set at most 10, or train longer"
    ]
    assert lr.check(LrSchedule(warmup_steps=10), 10) == []
    assert lr.check(LrSchedule(warmup_steps=11), None) == []
    assert lr.check(LrSchedule(WSD, warmup_steps=9, decay_fraction=0.2), 10) == [
        "lr_schedule.warmup_steps=9 and decay_fraction=0.2 take 11 of 10 optimizer steps: lower one"
    ]
    assert lr.check(LrSchedule(min_lr_ratio=1.5, warmup_steps=-1), 10) == [
        "lr_schedule.warmup_steps=-1: it must be at least 0",
        "lr_schedule.min_lr_ratio=1.5: it must lie in [0, 1]",
    ]
