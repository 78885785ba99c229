"""How a run goes on after skipped steps and grown batches, against numbers worked out by hand and a simulation."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.batch import Cut
from launcher.course import Course
from launcher.noise_scale import Estimate
from launcher.schema import (
    Accumulation,
    BatchSchedule,
    BatchScheduleType,
    Config,
    Data,
    LrSchedule,
    LrScheduleType,
    Optimizer,
    Scaling,
    Tail,
    Train,
)

LENGTH, FLOOR = 10, 0.25

# A line from 1 to a quarter.
BASE = Config(
    data=Data(fasta="unread.fa", sequence_length=LENGTH),
    optimizer=Optimizer(lr=1.0),
    lr_schedule=LrSchedule(LrScheduleType.LINEAR, min_lr_ratio=FLOOR),
    train=Train(max_steps=6),
)


def course(config: Config, size: int = 4, num_sequences: int = 1000) -> Course:
    return Course(config, Cut(size, 1, size, 1), num_sequences)


@dataclass
class Run:
    """What each step of a run had."""

    rates: list[float]
    sizes: list[int]
    skipped: list[bool]

    @property
    def rates_of_updates(self) -> list[float]:
        return [rate for rate, skipped in zip(self.rates, self.skipped, strict=True) if not skipped]


def follow(
    course: Course,
    skips: set[int] = frozenset(),  # type: ignore[assignment]
    measured: Callable[[int], Estimate | None] = lambda step: None,
) -> Run:
    """A whole run, whose steps ``skips`` make no update; the others measure the noise scale."""
    run, step = Run([], [], []), 0
    while step < course.steps.num_steps:
        assert step < 10_000, "a run ends"
        run.rates.append(course.learning_rate(step))
        run.sizes.append(course.steps.batch_size(step))
        run.skipped.append(step in skips)
        course.record(step, step not in skips, None if step in skips else measured(step))
        step += 1
    return run


def line(done: float, total: float) -> float:
    return 1 - (1 - FLOOR) * done / total


# Skipped steps


@pytest.mark.parametrize("skips", [{0}, {0, 1, 2}, {2}, {2, 4}, {5}, {5, 6, 7}, {0, 3, 7}, set(range(6))])
def test_a_skipped_step_extends_a_run_limited_by_steps_and_changes_no_rate_of_an_update(skips: set[int]) -> None:
    run = follow(course(BASE), skips)
    assert len(run.rates) == 6 + len(skips)
    assert run.rates_of_updates == pytest.approx([0.875, 0.75, 0.625, 0.5, 0.375, 0.25], abs=1e-15)
    assert run.rates[-1] == FLOOR


def test_a_skipped_step_is_done_again_at_the_same_rate() -> None:
    """Two of warm-up and four to fall in; the third and fourth try of the run are skipped, then its last."""
    config = replace(BASE, lr_schedule=replace(BASE.lr_schedule, warmup_steps=2))
    expected = [0.5, 1, line(1, 4), line(1, 4), line(1, 4), line(2, 4), line(3, 4), FLOOR, FLOOR]
    assert follow(course(config), {2, 3, 7}).rates == pytest.approx(expected, abs=1e-15)
    assert follow(course(config), {0, 2}).rates[:4] == pytest.approx([0.5, 0.5, 1, 1], abs=1e-15)


LIMITED = {
    "tokens": replace(BASE, train=Train(max_tokens=6 * 4 * LENGTH + 39)),
    "epochs": replace(BASE, train=Train(epochs=2)),
}


@pytest.mark.parametrize("limit", LIMITED)
@pytest.mark.parametrize(
    ("skips", "rates"),
    [
        (set(), [line(k, 6) for k in range(1, 7)]),
        ({0}, [line(1, 6), *(line(k, 5) for k in range(1, 6))]),
        ({2}, [line(1, 6), line(2, 6), line(3, 6), line(3, 5), line(4, 5), FLOOR]),
        ({1, 3}, [line(1, 6), line(2, 6), line(2, 5), line(3, 5), line(3, 4), FLOOR]),
        ({0, 1, 2}, [line(1, 6), line(1, 5), line(1, 4), line(1, 3), line(2, 3), FLOOR]),
        ({5}, [line(k, 6) for k in range(1, 6)] + [FLOOR]),
        ({4, 5}, [line(k, 6) for k in range(1, 6)] + [FLOOR]),
    ],
)
def test_a_skipped_step_does_not_extend_a_run_limited_by_its_data(
    limit: str, skips: set[int], rates: list[float]
) -> None:
    """Six batches of 4 there are: 24 sequences and less than one batch more, or two epochs of 12."""
    run = follow(course(LIMITED[limit], num_sequences=12), skips)
    assert run.rates == pytest.approx(rates, abs=1e-15)
    assert run.rates[-1] == FLOOR


def test_of_two_limits_the_earlier_one_ends_a_run_that_skips() -> None:
    """Five updates, out of six batches: the first skipped step is made up for and the second is not."""
    config = replace(BASE, train=Train(max_steps=5, max_tokens=6 * 4 * LENGTH))
    assert len(follow(course(config)).rates) == 5
    once, twice = follow(course(config), {1}), follow(course(config), {1, 3})
    assert once.rates_of_updates == pytest.approx([line(k, 5) for k in range(1, 6)], abs=1e-15)
    assert twice.rates == pytest.approx([*(line(k, 5) for k in (1, 2, 2, 3)), line(3, 4), FLOOR], abs=1e-15)
    assert twice.rates[-1] == FLOOR


@pytest.mark.parametrize("tail", Tail)
def test_a_skipped_step_leaves_the_batches_of_the_others_as_they_are(tail: Tail) -> None:
    """A ramp counts all optimizer steps; what was read for a skipped one is not read again."""
    ramp = BatchSchedule(BatchScheduleType.MILESTONES, milestones=[[0, 2], [3, 4]])
    config = replace(BASE, batch_schedule=ramp, accumulation=Accumulation(tail=tail))
    straight, skipping = (course(replace(config, train=Train(max_steps=steps)), num_sequences=13) for steps in (9, 6))
    assert follow(skipping, {1, 4, 6}).sizes == follow(straight).sizes == [2, 2, 2, 4, 4, 4, 4, 4, 4]
    for step in range(9):
        assert skipping.steps.sequences(step).tolist() == straight.steps.sequences(step).tolist()


# Batches that grow by the noise scale

GROWING = replace(
    BASE,
    batch_schedule=BatchSchedule(
        BatchScheduleType.NOISE_SCALE, initial_batch_size=4, patience=3, threshold=2.0, lr_scaling=Scaling.NONE
    ),
    train=Train(max_steps=16, noise_scale_decay=0.0),  # the average is the last estimate
)


def in_turn(*scales: float | None) -> Callable[[int], Estimate | None]:
    """Estimates of these noise scales, and then ever again the last one."""
    return lambda step: None if (scale := scales[min(step, len(scales) - 1)]) is None else Estimate(2.0, 2 * scale)


def sizes_of(*scales: float | None, config: Config = GROWING, skips: set[int] = frozenset()) -> list[int]:  # type: ignore[assignment]
    return follow(course(config, 16), skips, in_turn(*scales)).sizes


def test_a_batch_grows_once_the_noise_scale_has_exceeded_it_so_many_steps_in_a_row() -> None:
    """More than twice 4 for three steps, then more than twice 8; the eighth estimate is not above but at it."""
    assert sizes_of(9, 9, 9, 17, 17, 17, 17) == [4] * 3 + [8] * 3 + [16] * 10
    assert sizes_of(9, 9, 8, 9, 9, 9, 17, 16, 17, 17, 17) == [4] * 6 + [8] * 5 + [16] * 5
    assert sizes_of(8) == [4] * 16


def test_a_batch_grows_by_one_level_at_a_time_up_to_the_global_batch_and_never_shrinks() -> None:
    assert sizes_of(1e9) == [4] * 3 + [8] * 3 + [16] * 10
    assert sizes_of(9, 9, 9, 0.001) == [4] * 3 + [8] * 13
    by_four = replace(GROWING, batch_schedule=replace(GROWING.batch_schedule, growth_factor=4))
    assert sizes_of(9, config=by_four) == [4] * 3 + [16] * 13


def test_what_is_not_known_is_not_above() -> None:
    """A negative estimate of either is none; a step that measures nothing changes nothing."""
    assert sizes_of(9, 9, -9, 9, 9, 9) == [4] * 6 + [8] * 10
    assert sizes_of(9, None, 9, None, 9, 1) == [4] * 5 + [8] * 11
    assert sizes_of(None) == [4] * 16


def test_a_skipped_step_neither_counts_for_growth_nor_against_it() -> None:
    assert sizes_of(9, 9, 9, 9, 1, skips={1}) == [4] * 4 + [8] * 13


@pytest.mark.parametrize(("spike", "grows"), [(10, False), (1000, True)])
def test_a_single_high_value_does_not_grow_a_batch(spike: float, grows: bool) -> None:
    """The average of 3 and of one value ten times as large, 3 + 27 x 0.05 x 0.95^k, is above 4 for six steps of ten.

    It would take one of more than 3 + 1 / (0.05 x 0.95^9) = 35 or eleven times.
    """
    config = replace(
        GROWING,
        batch_schedule=replace(GROWING.batch_schedule, patience=10, threshold=1.0),
        train=Train(max_steps=60, noise_scale_decay=0.95),
    )
    sizes = sizes_of(*[3] * 30, 3 * spike, *[3] * 30, config=config)
    assert sizes == ([4] * 40 + [8] * 10 + [16] * 10 if grows else [4] * 60)


def test_rates_of_a_run_limited_by_steps_do_not_depend_on_growth() -> None:
    grown, constant = (follow(course(GROWING, 16), measured=in_turn(scale)) for scale in (1e9, 1.0))
    assert grown.sizes != constant.sizes
    assert grown.rates == constant.rates == pytest.approx([line(k, 16) for k in range(1, 17)], abs=1e-15)


def test_a_batch_that_grows_is_paid_for_out_of_the_same_tokens() -> None:
    """Of 48 sequences three steps of 4 leave 36, three of 8 leave 12: one more of 8 would fit, one of 16 would not."""
    config = replace(GROWING, train=Train(max_tokens=48 * LENGTH, noise_scale_decay=0.0))
    run = follow(course(config, 16), measured=in_turn(1e9))
    assert run.sizes == [4, 4, 4, 8, 8, 8, 8]
    # Progress is in sequences: 48 of them to begin with, and 44 from the growth on.
    expected = [line(4, 48), line(8, 48), line(12, 48), *(line(read, 44) for read in (20, 28, 36, 44))]
    assert run.rates == pytest.approx(expected, abs=1e-15)
    assert run.rates[-1] == FLOOR


@settings(deadline=None, max_examples=50)
@given(
    st.integers(1, 4),
    st.sampled_from([2, 3]),
    st.sampled_from([0.0, 0.9]),
    st.lists(st.tuples(st.integers(-1, 3), st.integers(-10, 100), st.booleans()), min_size=1, max_size=12),
    st.sampled_from([Train(max_steps=20), Train(max_tokens=150 * LENGTH), Train(epochs=3)]),
    st.sampled_from([Scaling.NONE, Scaling.SQRT]),
)
def test_whatever_is_skipped_and_measured_a_run_is_that_of_a_simulation(
    patience: int,
    factor: int,
    decay: float,
    events: list[tuple[int, int, bool]],
    train: Train,
    scaling: Scaling,
) -> None:
    """Where the run is limited by its data, 50 sequences an epoch, progress is counted in sequences."""
    largest, read_at_most = 4 * factor**2, None if train.max_steps else 150
    schedule = replace(GROWING.batch_schedule, patience=patience, growth_factor=factor, lr_scaling=scaling)
    config = replace(GROWING, batch_schedule=schedule, train=replace(train, noise_scale_decay=decay))
    skips = {step for step in range(100) if events[step % len(events)][2] and step % 3 != 2}
    run = follow(
        course(config, largest, num_sequences=50), skips, lambda step: Estimate(*events[step % len(events)][:2])
    )
    sizes, rates, size = [], [], 4
    read = updates = skipped = above = 0
    signal = noise = 0.0
    while read + size <= read_at_most if read_at_most else updates < 20:
        step, later = len(sizes), 0 if read_at_most is None else (read_at_most - read) // size * size
        progress = ((updates + 1), 20) if read_at_most is None else (read + size - skipped, read + later - skipped)
        rates.append(line(*progress) * (1 if scaling is Scaling.NONE else math.sqrt(size / largest)))
        sizes.append(size)
        read += size
        if step in skips:
            skipped += size
            continue
        updates += 1
        signal = decay * signal + (1 - decay) * events[step % len(events)][0]
        noise = decay * noise + (1 - decay) * events[step % len(events)][1]
        above = above + 1 if signal > 0 and noise / signal > 2 * size else 0
        if above >= patience and size < largest:
            above = 0
            fits = updates < 20 if read_at_most is None else read + size * factor <= read_at_most
            size *= factor if fits else 1
    assert run.sizes == sizes
    assert run.rates == pytest.approx(rates, rel=1e-9)
    scale = 1 if scaling is Scaling.NONE else math.sqrt(sizes[-1] / largest)
    assert run.rates[-1] == FLOOR * scale


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(-1, 3), st.integers(-10, 100), st.booleans()), min_size=1, max_size=12),
    st.sets(st.integers(1, 19), max_size=4),
    st.sampled_from([Train(max_steps=20), Train(max_tokens=150 * LENGTH), Train(epochs=3)]),
    st.sampled_from(
        [
            BASE.batch_schedule,
            GROWING.batch_schedule,
            BatchSchedule(BatchScheduleType.MILESTONES, milestones=[[0, 4], [5, 8], [11, 16]]),
        ]
    ),
)
def test_a_course_that_was_written_down_and_restored_goes_on_as_if_it_had_not_been(
    events: list[tuple[int, int, bool]], restarts: set[int], train: Train, schedule: BatchSchedule
) -> None:
    config = replace(GROWING, batch_schedule=schedule, train=replace(train, noise_scale_decay=0.9))
    skips = {step for step in range(100) if events[step % len(events)][2] and step % 3 != 2}

    def run(restarts: set[int]) -> list[tuple[float, int, float | None, int]]:
        """What each step had, in the course that is begun anew before ``restarts``."""
        now, step, found = course(config, 16, num_sequences=50), 0, []
        while step < now.steps.num_steps:
            if step in restarts:
                written = json.dumps(now.state())
                now = course(config, 16, num_sequences=50)
                now.restore(json.loads(written))
            found.append((now.learning_rate(step), now.steps.batch_size(step), now.noise_scale, now.steps.num_steps))
            measured = None if step in skips else Estimate(*events[step % len(events)][:2])
            now.record(step, step not in skips, measured)
            step += 1
        return found

    assert run(restarts) == run(set())


def test_a_restored_course_may_have_other_limits() -> None:
    """Two of the six steps were skipped; nine updates are wanted now."""
    before = course(BASE)
    for step in range(4):
        before.record(step, step not in (1, 2), None)
    after = course(replace(BASE, train=Train(max_steps=9)))
    after.restore(before.state())
    assert after.steps.num_steps == 9 + 2
    assert after.learning_rate(4) == pytest.approx(line(3, 9), abs=1e-15)
