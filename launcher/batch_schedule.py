"""The global batch on its way to ``train_batch_size``: which sizes it takes, and where each of them begins.

Counted in optimizer steps or in bases that were read, never in pieces of a batch, so that the batch of a step does not
depend on how batches are cut. Only the accumulation follows it: all sizes are cut into the same micro-batches.

Batches that grow instead of a learning rate that falls: Smith et al. 2018; batches that follow the gradient noise
scale: McCandlish et al. 2018.
"""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields

from launcher import decode, nodes
from launcher.errors import RequestError
from launcher.schema import BatchSchedule, BatchScheduleType, Count, Growth

RAMP, MILESTONES, NOISE_SCALE = BatchScheduleType.RAMP, BatchScheduleType.MILESTONES, BatchScheduleType.NOISE_SCALE

NEEDED = {
    BatchScheduleType.CONSTANT: {},
    RAMP: {"initial_batch_size": "the sequences of the first step", "over": "the steps or bases it takes"},
    MILESTONES: {"milestones": "pairs of (from where, sequences)"},
    NOISE_SCALE: {"initial_batch_size": "the sequences of the first step"},
}
"""The keys that a type cannot do without, and what to give for them."""

OPTIONAL = {
    BatchScheduleType.CONSTANT: set(),
    RAMP: {"by", "growth", "growth_factor", "increment", "lr_scaling"},
    MILESTONES: {"by", "lr_scaling"},
    NOISE_SCALE: {"growth_factor", "patience", "threshold", "lr_scaling"},
}

LEAST = {"initial_batch_size": 1, "over": 1, "increment": 1, "growth_factor": 2, "patience": 1}


@dataclass(frozen=True)
class Levels:
    """The global batches of a run in order, in sequences, and where each of them begins.

    ``starts`` counts optimizer steps, or sequences that were read; it is shorter than ``sizes`` where only the run
    itself can tell.
    """

    sizes: tuple[int, ...]
    starts: tuple[int, ...] = (0,)
    by_sequences: bool = False


def levels(schedule: BatchSchedule, train_batch_size: int, sequence_length: int | None) -> Levels:
    """The levels of a schedule that ``check`` and ``sizes`` accept; ``sequence_length`` in bases, for ``by: tokens``.

    A ramp of n levels below ``train_batch_size`` gives each of them the same part of ``over``: in steps, level k begins
    at step floor(k*over/n); in bases, at the first step that begins when at least k*over/n bases were read. So
    ``train_batch_size`` itself is in force from step ``over`` on, or once ``over`` bases were read. A level whose
    successor begins at the same step does not come about.
    """
    found = tuple(sizes(schedule, train_batch_size))
    n, unit, by_sequences = len(found) - 1, 1, schedule.by is Count.TOKENS
    if by_sequences:
        assert sequence_length is not None
        unit = sequence_length
    if schedule.type is RAMP:
        assert schedule.over is not None
        # So many bases are reached with a whole sequence, so many steps are begun.
        starts = [-(-k * schedule.over // (n * unit)) if by_sequences else k * schedule.over // n for k in range(n + 1)]
    elif schedule.type is MILESTONES:
        starts = [-(-start // unit) for start, _ in schedule.milestones]
    else:
        starts = [0]
    return Levels(found, tuple(starts), by_sequences)


def sizes(schedule: BatchSchedule, train_batch_size: int, multiple: int = 1, parts: str = "equal parts") -> list[int]:
    """The global batches of a run in order, in sequences; the last is ``train_batch_size``.

    All have to be multiples of ``multiple``, which ``parts`` explains ("micro-batches of 4 over 2 ranks").

    Raises RequestError, with the nearest values that work, where ``train_batch_size`` is not reached exactly or a
    batch on the way cannot be cut.
    """
    if schedule.type is BatchScheduleType.CONSTANT:
        return [train_batch_size]
    if schedule.type is MILESTONES:
        return _milestone_sizes(schedule, train_batch_size, multiple, parts)
    if schedule.type is NOISE_SCALE or schedule.growth is Growth.GEOMETRIC:
        return _geometric_sizes(schedule, train_batch_size, multiple, parts)
    return _linear_sizes(schedule, train_batch_size, multiple, parts)


def check(schedule: BatchSchedule, sequence_length: int | None) -> list[str]:
    """Fault lines of the values that the type of a schedule goes by, whatever ``train_batch_size`` is."""
    kind = schedule.type
    faults = []
    for name in (field.name for field in fields(schedule) if field.name in _applicable(schedule)):
        value = getattr(schedule, name)
        text = f"batch_schedule.{name}={nodes.show(decode.encode(value))}"
        if name in NEEDED[kind] and value in (None, []):
            faults.append(f"{text}: type={kind.value} needs it: {NEEDED[kind][name]}")
        elif name in LEAST and value is not None and value < LEAST[name]:
            faults.append(f"{text}: it must be at least {LEAST[name]}")
    if kind is NOISE_SCALE and not schedule.threshold > 0:
        faults.append(f"batch_schedule.threshold={schedule.threshold}: it must be above 0")
    if kind is MILESTONES:
        faults += _check_milestones(schedule.milestones)
    if kind in (RAMP, MILESTONES) and schedule.by is Count.TOKENS and sequence_length is None:
        faults.append("batch_schedule.by=tokens: it needs data.sequence_length; set batch_schedule.by=steps")
    return faults


def check_keys(schedule: BatchSchedule) -> list[str]:
    """Fault lines of the keys that were set without a meaning for the type of a schedule."""
    kind = schedule.type
    faults = []
    for field in fields(schedule):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        value, unset = (nodes.show(decode.encode(item)) for item in (getattr(schedule, field.name), default))
        if field.name not in _applicable(schedule) and value != unset:
            growth = f" with growth={schedule.growth.value}" if field.name in OPTIONAL[kind] else ""
            rule = f"it has no meaning for type={kind.value}{growth}"
            faults.append(f"batch_schedule.{field.name}={value}: {rule}; set it to {unset}")
    return faults


def _applicable(schedule: BatchSchedule) -> set[str]:
    names = {"type", *NEEDED[schedule.type], *OPTIONAL[schedule.type]}
    if schedule.type is RAMP:
        names -= {"increment" if schedule.growth is Growth.GEOMETRIC else "growth_factor"}
    return names


def _check_milestones(milestones: list[list[int]]) -> list[str]:
    wrong = [f"[{i}]={nodes.show(pair)}" for i, pair in enumerate(milestones) if len(pair) != 2]
    if wrong:
        return [f"batch_schedule.milestones{item}: it must be a pair of (from where, sequences)" for item in wrong]
    faults = [
        f"batch_schedule.milestones[{i}]={nodes.show([start, size])}: a batch has at least 1 sequence"
        for i, (start, size) in enumerate(milestones)
        if size < 1
    ]
    for i, (start, size) in enumerate(milestones):
        text = f"batch_schedule.milestones[{i}]={nodes.show([start, size])}"
        if i == 0 and start != 0:
            faults.append(f"{text}: the first must begin at 0; put the batch of the first steps before it")
        if i > 0 and start <= milestones[i - 1][0]:
            faults.append(f"{text}: it must begin after the one before it, at {milestones[i - 1][0] + 1} or later")
    return faults


def _milestone_sizes(schedule: BatchSchedule, train_batch_size: int, multiple: int, parts: str) -> list[int]:
    found = [size for _, size in schedule.milestones]
    last = len(found) - 1
    faults = []
    for i, size in enumerate(found):
        if size % multiple:
            below = size // multiple * multiple
            rule = f"cannot be cut into {parts}: they must be a multiple of {multiple}"
            faults.append(
                f"batch_schedule.milestones[{i}]: {size} sequences {rule}{_nearest(size, [below, below + multiple])}"
            )
    if found[last] != train_batch_size:
        faults.append(
            f"batch_schedule.milestones[{last}]: {found[last]} sequences: the last must be the global batch, "
            f"{train_batch_size}; change it, or set batch.train_batch_size={found[last]}"
        )
    if faults:
        raise RequestError(*faults)
    return found


def _geometric_sizes(schedule: BatchSchedule, train_batch_size: int, multiple: int, parts: str) -> list[int]:
    """B0, B0*f, B0*f^2, ..., B."""
    initial, factor = schedule.initial_batch_size, schedule.growth_factor
    assert initial is not None
    found = [initial]
    while found[-1] < train_batch_size:
        found.append(found[-1] * factor)
    smaller, size = [], train_batch_size
    while size % factor == 0:
        size //= factor
        smaller.append(size)
    name = f"batch_schedule.initial_batch_size={initial}"
    near = _nearest(initial, [size for size in smaller if size % multiple == 0])
    if found[-1] != train_batch_size or initial == train_batch_size:
        raise RequestError(
            f"{name}: {initial} x {factor}^n, n >= 1, is never the global batch, {train_batch_size}{near}"
        )
    if initial % multiple:
        raise RequestError(f"{name} cannot be cut into {parts}: it must be a multiple of {multiple}{near}")
    return found


def _linear_sizes(schedule: BatchSchedule, train_batch_size: int, multiple: int, parts: str) -> list[int]:
    """B0, B0 + increment, B0 + 2*increment, ..., B."""
    initial, given = schedule.initial_batch_size, schedule.increment
    assert initial is not None
    increment, rest = given or initial, train_batch_size - initial
    smaller = range(multiple, train_batch_size, multiple)
    near = _nearest(initial, [size for size in smaller if (train_batch_size - size) % (given or size) == 0])
    near_increment = _around(increment, [step for step in range(multiple, rest + 1, multiple) if rest % step == 0])
    name, rule = f"batch_schedule.initial_batch_size={initial}", f"it must be a multiple of {multiple}"
    faults = []
    if rest <= 0 or rest % increment:
        other = f"; or batch_schedule.increment={' or '.join(map(str, near_increment))}" if near_increment else ""
        faults.append(
            f"{name}: {initial} + n x {increment}, n >= 1, is never the global batch, {train_batch_size}{near}"
            + (other if initial % multiple == 0 else "")
        )
    elif initial % multiple:
        faults.append(f"{name} cannot be cut into {parts}: {rule}{near}")
    if given is not None and given % multiple:
        values = f"; nearest: {', '.join(map(str, near_increment))}" if near_increment else NONE_WORKS
        # Which increments work depends on the initial batch, and is not told while that is wrong.
        remedy = "" if faults else values
        faults.append(f"batch_schedule.increment={given} cannot be cut into {parts}: {rule}{remedy}")
    if faults:
        raise RequestError(*faults)
    return list(range(initial, train_batch_size + 1, increment))


NONE_WORKS = "; none works: change the global batch, the growth or the micro-batch"


def _nearest(wanted: int, working: Sequence[int]) -> str:
    """``"; nearest: VALUES"`` for the working values next to ``wanted``, or that there is none."""
    values = _around(wanted, working)
    return f"; nearest: {', '.join(map(str, values))}" if values else NONE_WORKS


def _around(wanted: int, working: Sequence[int]) -> list[int]:
    below = [value for value in working if 0 < value < wanted]
    above = [value for value in working if value > wanted]
    return ([max(below)] if below else []) + ([min(above)] if above else [])
