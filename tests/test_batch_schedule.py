"""Batch schedules against levels written out by hand, and refusals against trying every value."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher import batch_schedule, steps
from launcher.batch_schedule import NONE_WORKS, Levels, levels, sizes
from launcher.errors import RequestError
from launcher.schema import BatchSchedule, BatchScheduleType, Count, Growth, Scaling, Tail, Train

CONSTANT = BatchSchedule()
RAMP = BatchSchedule(BatchScheduleType.RAMP, initial_batch_size=4, over=10)
LINEAR = replace(RAMP, growth=Growth.LINEAR)
MILESTONES = BatchSchedule(BatchScheduleType.MILESTONES, milestones=[[0, 8], [5, 2], [9, 16]])
NOISE_SCALE = BatchSchedule(BatchScheduleType.NOISE_SCALE, initial_batch_size=4)

counts = st.integers(1, 48)


def refusals(schedule: BatchSchedule, size: int, multiple: int = 1, parts: str = "equal parts") -> list[str]:
    with pytest.raises(RequestError) as refused:
        sizes(schedule, size, multiple, parts)
    return refused.value.faults


def works(schedule: BatchSchedule, size: int, multiple: int) -> bool:
    try:
        sizes(schedule, size, multiple)
    except RequestError:
        return False
    return True


def test_the_batches_on_the_way() -> None:
    assert sizes(CONSTANT, 32) == [32]
    assert sizes(RAMP, 32) == [4, 8, 16, 32]
    assert sizes(replace(RAMP, growth_factor=3), 108) == [4, 12, 36, 108]
    assert sizes(LINEAR, 16) == [4, 8, 12, 16]
    assert sizes(replace(LINEAR, increment=6), 22) == [4, 10, 16, 22]
    assert sizes(MILESTONES, 16) == [8, 2, 16]
    assert sizes(NOISE_SCALE, 16) == [4, 8, 16]


def test_a_ramp_in_steps_gives_each_batch_the_same_part_of_them() -> None:
    assert levels(RAMP, 32, None) == Levels((4, 8, 16, 32), (0, 3, 6, 10))
    assert levels(replace(RAMP, over=9), 32, None).starts == (0, 3, 6, 9)
    run = steps.of(Train(max_steps=12), Tail.CARRY, levels(RAMP, 32, None), 1000, None)
    assert [run.batch_size(step) for step in range(12)] == [4] * 3 + [8] * 3 + [16] * 4 + [32] * 2


def test_a_ramp_in_bases_changes_with_the_first_step_after_them() -> None:
    """Sequences of 100 bases; a third of 10,000 bases is reached in the 34th sequence, two thirds in the 67th."""
    made = levels(replace(RAMP, by=Count.TOKENS, over=10_000), 32, 100)
    assert made == Levels((4, 8, 16, 32), (0, 34, 67, 100), by_sequences=True)
    run = steps.of(Train(max_steps=20), Tail.CARRY, made, 1000, None)
    # 9 x 4 = 36 sequences, then 4 x 8 to 68, then 2 x 16 to 100.
    assert [run.batch_size(step) for step in range(16)] == [4] * 9 + [8] * 4 + [16] * 2 + [32]


def test_milestones_begin_where_they_say() -> None:
    assert levels(MILESTONES, 16, None) == Levels((8, 2, 16), (0, 5, 9))
    by_bases = replace(MILESTONES, by=Count.TOKENS, milestones=[[0, 8], [401, 16]])
    assert levels(by_bases, 16, 100) == Levels((8, 16), (0, 5), by_sequences=True)


def test_what_the_noise_scale_decides_is_left_open() -> None:
    assert levels(NOISE_SCALE, 16, None) == Levels((4, 8, 16), (0,))


@given(counts, st.integers(1, 200), st.integers(2, 5), st.none() | counts, st.sampled_from(Growth), st.integers(1, 8))
def test_a_ramp_is_exact_or_refused_with_the_nearest_values_that_work(
    initial: int, size: int, factor: int, increment: int | None, growth: Growth, multiple: int
) -> None:
    if growth is Growth.GEOMETRIC:
        increment = None
    schedule = replace(RAMP, initial_batch_size=initial, growth_factor=factor, increment=increment, growth=growth)

    def grown(now: int) -> int:
        return now * factor if growth is Growth.GEOMETRIC else now + (increment or initial)

    way = [initial]
    while way[-1] < size:
        way.append(grown(way[-1]))
    if way[-1] == size and initial < size and all(level % multiple == 0 for level in way):
        assert sizes(schedule, size, multiple) == way
        return
    if size % multiple:
        return  # batch.solve refuses the global batch itself first
    # One fault that can be mended alone says how; with two, each says what works beside a sound other value.
    faults = refusals(schedule, size, multiple)
    for key, value in (("initial_batch_size", initial), ("increment", increment or initial)):
        possible = [n for n in range(1, size + 1) if works(replace(schedule, **{key: n}), size, multiple)]
        below, above = [n for n in possible if n < value], [n for n in possible if n > value]
        expected = below[-1:] + above[:1]
        for fault in faults:
            if f"batch_schedule.{key}={value}" in fault.split(": ")[0] and len(faults) == 1:
                named = re.search(r"; nearest: ([0-9, ]+)", fault)
                assert [int(n) for n in named[1].split(", ")] == expected if named else NONE_WORKS in fault
            elif (other := re.search(r"; or batch_schedule.increment=(.*)$", fault)) and key == "increment":
                assert [int(n) for n in other[1].split(" or ")] == expected


def test_a_global_batch_that_is_not_reached_is_refused() -> None:
    assert refusals(replace(RAMP, initial_batch_size=5), 32) == [
        "batch_schedule.initial_batch_size=5: 5 x 2^n, n >= 1, is never the global batch, 32; nearest: 4, 8"
    ]
    assert refusals(replace(RAMP, initial_batch_size=32), 32) == [
        "batch_schedule.initial_batch_size=32: 32 x 2^n, n >= 1, is never the global batch, 32; nearest: 16"
    ]
    assert refusals(replace(NOISE_SCALE, growth_factor=7), 32) == [
        "batch_schedule.initial_batch_size=4: 4 x 7^n, n >= 1, is never the global batch, 32; none works: change the "
        "global batch, the growth or the micro-batch"
    ]
    assert refusals(replace(LINEAR, initial_batch_size=8), 20) == [
        "batch_schedule.initial_batch_size=8: 8 + n x 8, n >= 1, is never the global batch, 20; nearest: 5, 10; or "
        "batch_schedule.increment=6 or 12"
    ]
    assert refusals(MILESTONES, 32) == [
        "batch_schedule.milestones[2]: 16 sequences: the last must be the global batch, 32; change it, or set "
        "batch.train_batch_size=16"
    ]


def test_batches_that_cannot_be_cut_are_refused_all_at_once() -> None:
    parts = "micro-batches of 4 over 2 ranks"
    assert refusals(RAMP, 32, 8, parts) == [
        "batch_schedule.initial_batch_size=4 cannot be cut into micro-batches of 4 over 2 ranks: it must be a multiple "
        "of 8; nearest: 8"
    ]
    assert refusals(replace(LINEAR, initial_batch_size=4, increment=10), 64, 8, parts) == [
        "batch_schedule.initial_batch_size=4 cannot be cut into micro-batches of 4 over 2 ranks: it must be a multiple "
        "of 8; nearest: 24",
        "batch_schedule.increment=10 cannot be cut into micro-batches of 4 over 2 ranks: it must be a multiple of 8",
    ]
    assert refusals(replace(MILESTONES, milestones=[[0, 12], [5, 2], [9, 20]]), 32, 8, parts) == [
        "batch_schedule.milestones[0]: 12 sequences cannot be cut into micro-batches of 4 over 2 ranks: they must be a "
        "multiple of 8; nearest: 8, 16",
        "batch_schedule.milestones[1]: 2 sequences cannot be cut into micro-batches of 4 over 2 ranks: they must be a "
        "multiple of 8; nearest: 8",
        "batch_schedule.milestones[2]: 20 sequences cannot be cut into micro-batches of 4 over 2 ranks: they must be a "
        "multiple of 8; nearest: 16, 24",
        "batch_schedule.milestones[2]: 20 sequences: the last must be the global batch, 32; change it, or set "
        "batch.train_batch_size=20",
    ]


@pytest.mark.parametrize("schedule", [CONSTANT, RAMP, LINEAR, MILESTONES, NOISE_SCALE])
def test_a_whole_schedule_has_no_fault(schedule: BatchSchedule) -> None:
    assert batch_schedule.check(schedule, None) + batch_schedule.check_keys(schedule) == []


@pytest.mark.parametrize(
    ("schedule", "faults"),
    [
        (
            replace(CONSTANT, type=BatchScheduleType.RAMP),
            [
                "batch_schedule.initial_batch_size=null: type=ramp needs it: the sequences of the first step",
                "batch_schedule.over=null: type=ramp needs it: the steps or bases it takes",
            ],
        ),
        (
            replace(CONSTANT, type=BatchScheduleType.MILESTONES),
            ["batch_schedule.milestones=[]: type=milestones needs it: pairs of (from where, sequences)"],
        ),
        (
            replace(CONSTANT, type=BatchScheduleType.NOISE_SCALE),
            ["batch_schedule.initial_batch_size=null: type=noise_scale needs it: the sequences of the first step"],
        ),
        (
            replace(LINEAR, initial_batch_size=0, over=-1, increment=0),
            [
                "batch_schedule.initial_batch_size=0: it must be at least 1",
                "batch_schedule.over=-1: it must be at least 1",
                "batch_schedule.increment=0: it must be at least 1",
            ],
        ),
        (
            replace(NOISE_SCALE, growth_factor=1, patience=0, threshold=0.0),
            [
                "batch_schedule.growth_factor=1: it must be at least 2",
                "batch_schedule.patience=0: it must be at least 1",
                "batch_schedule.threshold=0.0: it must be above 0",
            ],
        ),
        (
            replace(RAMP, by=Count.TOKENS),
            ["batch_schedule.by=tokens: it needs data.sequence_length; set batch_schedule.by=steps"],
        ),
        (
            replace(MILESTONES, milestones=[[1, 4], [1, 0], [0, 8]]),
            [
                "batch_schedule.milestones[1]=[1,0]: a batch has at least 1 sequence",
                "batch_schedule.milestones[0]=[1,4]: the first must begin at 0; put the batch of the first steps "
                "before it",
                "batch_schedule.milestones[1]=[1,0]: it must begin after the one before it, at 2 or later",
                "batch_schedule.milestones[2]=[0,8]: it must begin after the one before it, at 2 or later",
            ],
        ),
        (
            replace(MILESTONES, milestones=[[0, 4], [8]]),
            ["batch_schedule.milestones[1]=[8]: it must be a pair of (from where, sequences)"],
        ),
    ],
)
def test_what_a_type_goes_by_is_checked(schedule: BatchSchedule, faults: list[str]) -> None:
    assert batch_schedule.check(schedule, None) == faults


@pytest.mark.parametrize(
    ("schedule", "faults"),
    [
        (
            replace(MILESTONES, type=BatchScheduleType.CONSTANT, lr_scaling=Scaling.SQRT),
            [
                "batch_schedule.milestones=[[0,8],[5,2],[9,16]]: it has no meaning for type=constant; set it to []",
                "batch_schedule.lr_scaling=sqrt: it has no meaning for type=constant; set it to none",
            ],
        ),
        (
            replace(RAMP, increment=4, patience=3),
            [
                "batch_schedule.increment=4: it has no meaning for type=ramp with growth=geometric; set it to null",
                "batch_schedule.patience=3: it has no meaning for type=ramp; set it to 10",
            ],
        ),
        (
            replace(LINEAR, growth_factor=4),
            ["batch_schedule.growth_factor=4: it has no meaning for type=ramp with growth=linear; set it to 2"],
        ),
        (
            replace(NOISE_SCALE, over=9, by=Count.TOKENS, growth=Growth.LINEAR),
            [
                "batch_schedule.by=tokens: it has no meaning for type=noise_scale; set it to steps",
                "batch_schedule.over=9: it has no meaning for type=noise_scale; set it to null",
                "batch_schedule.growth=linear: it has no meaning for type=noise_scale; set it to geometric",
            ],
        ),
    ],
)
def test_keys_without_a_meaning_are_refused(schedule: BatchSchedule, faults: list[str]) -> None:
    assert batch_schedule.check_keys(schedule) == faults
