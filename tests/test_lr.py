"""The learning rate against the formulas on paper and against torch's own schedulers."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from launcher import lr, steps
from launcher.batch_schedule import Levels
from launcher.errors import RequestError
from launcher.schema import (
    Batch,
    BatchSchedule,
    BatchScheduleType,
    Config,
    LrSchedule,
    LrScheduleType,
    Optimizer,
    OptimizerType,
    Scaling,
    Tail,
    Train,
)

COSINE, LINEAR, CONSTANT, WSD = (
    LrScheduleType.COSINE,
    LrScheduleType.LINEAR,
    LrScheduleType.CONSTANT,
    LrScheduleType.WSD,
)


def rates(schedule: LrSchedule, num_steps: int) -> list[float]:
    return [lr.factor(schedule, done, num_steps, schedule.warmup_steps) for done in range(1, num_steps + 1)]


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
    schedule = LrSchedule(kind, int(warmup * (num_steps - 1)), min_lr_ratio=floor, decay_fraction=decay)
    if lr.check_length(schedule, num_steps, schedule.warmup_steps):
        return
    series = rates(schedule, num_steps)
    assert all(0 <= rate <= 1 + 1e-12 for rate in series)
    if schedule.warmup_steps:
        assert series[schedule.warmup_steps - 1] == 1.0
        assert series[0] == pytest.approx(1 / schedule.warmup_steps)
    if kind is not WSD or decay:
        assert series[-1] == floor


def test_a_constant_stays_at_the_peak_after_warm_up() -> None:
    assert rates(LrSchedule(CONSTANT, warmup_steps=2), 5) == [0.5, 1, 1, 1, 1]


def test_a_short_run_ends_at_its_floor_too() -> None:
    assert rates(LrSchedule(WSD, min_lr_ratio=0.25, decay_fraction=0.2), 2) == [1, 0.25]
    assert rates(LrSchedule(WSD, min_lr_ratio=0.25, decay_fraction=0.0), 2) == [1, 1]


@given(st.sampled_from([COSINE, LINEAR, WSD]), st.integers(2, 40), st.sets(st.integers(0, 39)))
def test_a_run_that_skips_steps_ends_at_its_floor(kind: LrScheduleType, num_steps: int, skips: set[int]) -> None:
    """A skipped step is neither done nor to be done: the factor goes on as if it had not been planned."""
    run = steps.of(Train(max_steps=num_steps), Tail.CARRY, Levels((4,)), 100, None)
    found = lr.Rates(LrSchedule(kind, min_lr_ratio=0.1), run, 1.0, 4, Scaling.NONE, False, None)
    skipped, used = 0, []
    for step in range(num_steps):
        used.append(found.of(step, skipped, skipped * 4))
        if step in skips and step < num_steps - 1:
            skipped += 1
    assert used[-1] == 0.1
    assert all(later <= earlier for earlier, later in pairwise(used))
    updates = num_steps - skipped
    assert used[-1] == lr.factor(LrSchedule(kind, min_lr_ratio=0.1), updates, updates, 0)


BASE = Config(optimizer=Optimizer(lr=0.5), lr_schedule=LrSchedule(LINEAR, min_lr_ratio=0.0))


def test_the_batch_scales_the_peak_from_its_reference() -> None:
    def peak(scaling: Scaling, reference: int | None = 16) -> float:
        return lr.peak(replace(BASE, batch=Batch(64, lr_scaling=scaling, reference_batch_size=reference)), 64)

    assert peak(Scaling.NONE, None) == 0.5
    assert peak(Scaling.LINEAR) == 2.0
    assert peak(Scaling.SQRT) == 1.0
    assert peak(Scaling.QUADRATIC) == 8.0
    assert peak(Scaling.SQRT, 256) == 0.25


@pytest.mark.parametrize(("scaling", "power"), [("none", 0), ("linear", 1), ("sqrt", 0.5), ("quadratic", 2)])
def test_a_step_of_a_smaller_batch_scales_its_own_rate(scaling: str, power: float) -> None:
    """Two steps each of 4, 8 and 16 sequences; the line falls by a sixth a step."""
    config = replace(BASE, batch_schedule=BatchSchedule(lr_scaling=Scaling(scaling)))
    run = steps.of(Train(max_steps=6), Tail.CARRY, Levels((4, 8, 16), (0, 2, 4)), 100, None)
    found = lr.rates(config, 16, run, None)
    expected = [0.5 * (size / 16) ** power * (5 - k) / 6 for k, size in enumerate((4, 4, 8, 8, 16, 16))]
    assert [found.of(step) for step in range(6)] == pytest.approx(expected, abs=1e-15)


def test_a_batch_that_the_end_of_an_epoch_cuts_short_is_no_other_batch() -> None:
    """10 sequences in batches of 4 under flush: the third has 2, and the rate of one of 4."""
    config = replace(BASE, lr_schedule=LrSchedule(CONSTANT), batch_schedule=BatchSchedule(lr_scaling=Scaling.LINEAR))
    run = steps.of(Train(epochs=1), Tail.FLUSH, Levels((4,)), 10, None)
    assert [lr.rates(config, 4, run, None).of(step) for step in range(3)] == [0.5] * 3


@pytest.mark.parametrize(
    ("tokens", "warmup"),
    # Batches of 2, 2, 2, 4, 4, ... sequences of 100 bases: steps begin at 0, 200, 400, 600, 1000, 1400 bases.
    [(0, 0), (1, 1), (200, 1), (201, 2), (600, 3), (601, 4), (1000, 4), (1001, 5), (1400, 5)],
)
def test_a_warm_up_in_bases_is_the_steps_that_begin_before_so_many(tokens: int, warmup: int) -> None:
    config = replace(BASE, lr_schedule=LrSchedule(COSINE, warmup_tokens=tokens))
    run = steps.of(Train(max_steps=20), Tail.CARRY, Levels((2, 4), (0, 3)), 1000, 100)
    found = lr.rates(config, 4, run, 100)
    assert found.warmup_steps == warmup
    assert [found.of(step) for step in range(warmup)] == [0.5 * (step + 1) / warmup for step in range(warmup)]
    assert found.of(warmup) < 0.5
    assert found.of(19) == 0.5 * 0.1


GROWING = replace(
    BASE,
    lr_schedule=LrSchedule(LINEAR, warmup_steps=2, min_lr_ratio=0.0),
    batch_schedule=BatchSchedule(BatchScheduleType.NOISE_SCALE, initial_batch_size=4),
)


def test_a_batch_that_grows_by_itself_counts_progress_in_sequences() -> None:
    """100 sequences in batches of 4, that grow to 8 after 5 steps: 2 steps of warm-up leave 92 sequences to fall in."""
    run = steps.of(Train(max_tokens=1000), Tail.CARRY, Levels((4, 8)), 1000, 10)
    found = lr.rates(GROWING, 8, run, 10)
    assert found.by_sequences
    assert [found.of(step) for step in range(25)] == pytest.approx(
        [0.25, 0.5] + [0.5 * (92 - 4 * k) / 92 for k in range(1, 24)], abs=1e-15
    )
    grown = replace(found, steps=run.grown(5, 8))
    # 20 sequences and 10 batches of 8 are 100: nothing of the budget is left over.
    assert [grown.of(step) for step in range(5)] == [found.of(step) for step in range(5)]
    assert [grown.of(step) for step in range(5, 15)] == pytest.approx(
        [0.5 * (92 - 12 - 8 * k) / 92 for k in range(1, 11)], abs=1e-15
    )
    assert grown.of(14) == 0.0


def test_a_batch_that_grows_by_itself_counts_steps_where_these_end_the_run() -> None:
    run = steps.of(Train(max_steps=10, max_tokens=1000), Tail.CARRY, Levels((4, 8)), 1000, 10)
    found = lr.rates(GROWING, 8, run, 10)
    assert not found.by_sequences
    expected = [0.25, 0.5] + [0.5 * (8 - k) / 8 for k in range(1, 9)]
    assert [found.of(step) for step in range(10)] == pytest.approx(expected, abs=1e-15)
    assert [replace(found, steps=run.grown(5, 8)).of(step) for step in range(10)] == pytest.approx(expected, abs=1e-15)


def test_what_does_not_fit_the_run_is_refused() -> None:
    def refused(schedule: LrSchedule, num_steps: int, warmup: int | None = None) -> list[str]:
        return lr.check_length(schedule, num_steps, schedule.warmup_steps if warmup is None else warmup)

    assert refused(LrSchedule(warmup_steps=11), 10) == [
        "lr_schedule.warmup_steps=11: the run has only 10 optimizer steps; set at most 10, or train longer"
    ]
    assert refused(LrSchedule(warmup_steps=10), 10) == []
    assert refused(LrSchedule(WSD, warmup_steps=9, decay_fraction=0.2), 10) == [
        "lr_schedule.warmup_steps=9 and decay_fraction=0.2 take 11 of 10 optimizer steps: lower one"
    ]
    assert refused(LrSchedule(warmup_tokens=5000), 10, 11) == [
        "lr_schedule.warmup_tokens=5000 (11 optimizer steps): the run has only 10 optimizer steps; set less, or train "
        "longer"
    ]
    run = steps.of(Train(max_steps=3), Tail.CARRY, Levels((4,)), 100, 10)
    with pytest.raises(RequestError, match="the run has only 3 optimizer steps"):
        lr.rates(replace(BASE, lr_schedule=LrSchedule(warmup_tokens=121)), 4, run, 10)


def test_what_a_schedule_cannot_be_is_refused() -> None:
    assert lr.check(LrSchedule(warmup_steps=11, warmup_tokens=None), None) == []
    assert lr.check(LrSchedule(min_lr_ratio=1.5, warmup_steps=-1), None) == [
        "lr_schedule.warmup_steps=-1: it must be at least 0",
        "lr_schedule.min_lr_ratio=1.5: it must lie in [0, 1]",
    ]
    assert lr.check(LrSchedule(warmup_steps=3, warmup_tokens=100), 10) == [
        "lr_schedule.warmup_tokens=100 and lr_schedule.warmup_steps=3 are both set: set warmup_tokens to null or "
        "warmup_steps to 0"
    ]
    assert lr.check(LrSchedule(warmup_tokens=-1), None) == [
        "lr_schedule.warmup_tokens=-1: it must be at least 0",
        "lr_schedule.warmup_tokens=-1: it needs data.sequence_length; set lr_schedule.warmup_steps instead",
    ]


def test_a_scaling_and_its_reference_need_each_other() -> None:
    assert lr.check_scaling(Batch(64)) == []
    assert lr.check_scaling(Batch(64, lr_scaling=Scaling.SQRT, reference_batch_size=8)) == []
    assert lr.check_scaling(Batch(64, lr_scaling=Scaling.SQRT)) == [
        "batch.reference_batch_size=null: batch.lr_scaling=sqrt needs it: the global batch (sequences) that "
        "optimizer.lr is right for"
    ]
    assert lr.check_scaling(Batch(64, reference_batch_size=8)) == [
        "batch.reference_batch_size=8: it has no meaning for batch.lr_scaling=none; set it to null, or "
        "batch.lr_scaling to linear, sqrt or quadratic"
    ]
    assert lr.check_scaling(Batch(64, lr_scaling=Scaling.LINEAR, reference_batch_size=0)) == [
        "batch.reference_batch_size=0: it must be at least 1"
    ]


@pytest.mark.parametrize(
    ("kind", "scaling", "reference", "size", "told"),
    [
        ("adamw", "linear", 8, 64, ""),
        ("adamw", "linear", 8, 65, "Malladi"),
        ("adamw", "quadratic", 8, 65, "Malladi"),
        ("adamw", "sqrt", 8, 65536, ""),
        ("sgd", "linear", 256, 8192, ""),
        ("sgd", "linear", 256, 8193, "Goyal"),
        ("muon", "linear", 256, 8193, "Goyal"),
        ("sgd", "linear", 16384, 8193, ""),
        ("lars", "linear", 256, 32768, ""),
        ("lamb", "linear", 256, 32768, ""),
        ("adamw", "none", None, 65536, ""),
    ],
)
def test_a_rule_that_is_stretched_is_warned_of(
    kind: str, scaling: str, reference: int | None, size: int, told: str
) -> None:
    optimizer, batch = Optimizer(OptimizerType(kind)), Batch(size, None, None, None, 1, Scaling(scaling), reference)
    lines = lr.warnings(replace(BASE, optimizer=optimizer, batch=batch), size)
    assert len(lines) == bool(told)
    assert all(told in line and line.startswith(f"batch.lr_scaling={scaling}: ") for line in lines)


def test_a_learning_rate_that_its_scaling_takes_beyond_all_numbers_is_refused() -> None:
    config = replace(
        BASE,
        optimizer=replace(BASE.optimizer, lr=1e308),
        batch=Batch(64, lr_scaling=Scaling.QUADRATIC, reference_batch_size=1),
    )
    assert lr.check_peak(config, 64) == [
        "optimizer.lr=1e+308: batch.lr_scaling=quadratic from 1 to 64 sequences makes it inf; set a smaller one"
    ]
    assert lr.check_peak(config, 1) == []
