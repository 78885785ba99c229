"""What would run, worked out before anything starts: the cut, the steps, the horizon, the DeepSpeed JSON."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from launcher import (
    batch,
    batch_schedule,
    costs,
    deepspeed_json,
    genome,
    lr,
    noise_scale,
    parameters,
    placement,
    slurm_options,
    steps,
    traffic,
    validate,
    verify,
)
from launcher.batch import CONSTANT, Cut
from launcher.batch_schedule import Levels
from launcher.deepspeed_json import DeepSpeedJSON
from launcher.errors import RequestError
from launcher.genome import Genome
from launcher.lr import Rates
from launcher.rundir import RunDir
from launcher.schema import (
    ClusterType,
    Config,
    Count,
    CustomData,
    Data,
    MicroBatch,
    Mode,
    Scaling,
    Tail,
)
from launcher.steps import Steps

if TYPE_CHECKING:
    from rich.table import Table

Result = TypeVar("Result")

MAX_WIDTH = 200
"""Columns of a plan that is printed to a file or a pipe."""

MAX_LEVELS = 20
"""Global batches of a schedule that are printed; plan.json has all."""


@dataclass(frozen=True)
class Plan:
    """One run. What only the job can know (the length of a user's own dataset) is None."""

    config: Config
    """As it is frozen for the ranks."""
    cut: Cut
    deepspeed: DeepSpeedJSON
    genome: Genome | None
    num_steps: int | None
    """At most so many where batches grow by the noise scale and not ``max_steps`` ends the run."""

    @property
    def num_ranks(self) -> int:
        return self.cut.data_parallel_size


def make(config: Config) -> Plan:
    """The plan of a configuration; reads the genome, and builds its cache unless ``mode=plan``.

    Raises RequestError with every fault that was found.
    """
    length = sequence_length(config)
    schedule_faults = batch_schedule.check(config.batch_schedule, length)
    rate_faults = lr.check(config.lr_schedule, length) + lr.check_scaling(config.batch)
    faults = validate.check(config) + deepspeed_json.check(config) + placement.check(config)
    faults += batch_schedule.check_keys(config.batch_schedule) + schedule_faults + rate_faults

    def attempt(function: Callable[..., Result], *arguments: Any, **options: Any) -> Result | None:
        try:
            return function(*arguments, **options)
        except RequestError as error:
            faults.extend(error.faults)
            return None

    size = attempt(placement.num_ranks, config)
    schedule = CONSTANT if schedule_faults else config.batch_schedule
    solve = batch.solve_for_fewer if config.cluster.allow_fewer_ranks else batch.solve
    cut = attempt(solve, config.batch, size, length, schedule) if size is not None and size > 0 else None
    read: Genome | None = None
    if isinstance(config.data, Data):
        data_faults = genome.check(config.data)
        faults += data_faults
        if not data_faults:
            read = attempt(genome.load, config.data, keep=config.mode is not Mode.PLAN and not faults)
    counted = None
    if cut is not None and not schedule_faults:
        counted = attempt(count_steps, config, cut, len(read.train) if read else None)
    if not rate_faults and cut is not None:
        rate_faults += lr.check_peak(config, cut.train_batch_size)
        faults += rate_faults
    if not rate_faults:
        run = _run(config, cut, read, counted) if cut is not None else None
        if cut is not None and run is not None:
            attempt(rates_of, config, cut, run)
        elif config.lr_schedule.warmup_tokens is None:
            # Without a cut the limit that is known still tells of a warm-up that is too long.
            known = counted if cut is not None else config.train.max_steps
            if known is not None and known >= 1:
                faults += lr.check_length(config.lr_schedule, known, config.lr_schedule.warmup_steps)
    faults += traffic.check(config)
    if cut is not None:
        faults += _check_nodes(config, cut, solve)
    if cut is not None and not schedule_faults:
        faults += noise_scale.check(config, cut)
    if cut is not None and config.mode is Mode.VERIFY:
        faults += verify.check(config, cut)
    if faults:
        raise RequestError(*faults)
    assert cut is not None
    if isinstance(config.data, Data) and read is not None and genome.reads_a_pipe(config.data):
        # A pipe can be read only once: the ranks find its bases in the cache.
        config = replace(config, data=replace(config.data, fasta=read.fasta))
    if config.offload.nvme_path is not None and not placement.is_elsewhere(config):
        expanded = os.path.expandvars(config.offload.nvme_path)
        config = replace(config, offload=replace(config.offload, nvme_path=expanded))
    return Plan(config, cut, deepspeed_json.build(config, cut), read, counted)


def _check_nodes(config: Config, cut: Cut, solve: Callable[..., Cut]) -> list[str]:
    """Every number of nodes that Slurm may grant has to share the same global batch."""
    cluster = config.cluster
    if cluster.type is not ClusterType.SLURM:
        return []
    least, most = slurm_options.node_range(cluster.nodes)
    for nodes in range(least, most):
        try:
            num_ranks = nodes * placement.ranks_per_node(cluster)
            fewer = solve(config.batch, num_ranks, sequence_length(config), config.batch_schedule)
        except RequestError as error:
            remedy = "or set cluster.allow_fewer_ranks=true"
            return [f"cluster.nodes={cluster.nodes}: with {nodes} of them {error.faults[0]}; {remedy}"]
        if fewer.train_batch_size != cut.train_batch_size:
            return [
                f"cluster.nodes={cluster.nodes}: the global batch must not depend on it; set batch.train_batch_size"
            ]
    return []


def sequence_length(config: Config) -> int | None:
    """Bases that a sequence counts in token budgets; None for a dataset that does not tell."""
    if isinstance(config.data, CustomData):
        length = config.data.arguments.get("sequence_length")
        return length if isinstance(length, int) else None
    return config.data.sequence_length


def levels_of(config: Config, cut: Cut) -> Levels:
    return batch_schedule.levels(config.batch_schedule, cut.train_batch_size, sequence_length(config))


def count_steps(config: Config, cut: Cut, num_sequences: int | None) -> int | None:
    levels = levels_of(config, cut)
    return steps.count(config.train, config.accumulation.tail, levels, num_sequences, sequence_length(config))


def steps_of(config: Config, cut: Cut, num_sequences: int) -> Steps:
    """The optimizer steps of a run over N training sequences."""
    levels, length = levels_of(config, cut), sequence_length(config)
    return steps.of(config.train, config.accumulation.tail, levels, num_sequences, length, config.seed)


def rates_of(config: Config, cut: Cut, run: Steps) -> Rates:
    """The learning rates of a run.

    Raises RequestError where it is too short for its schedule.
    """
    return lr.rates(config, cut.train_batch_size, run, sequence_length(config))


def summary(plan: Plan) -> dict[str, Any]:
    """``plan.json``: plain values; counts are sequences unless their name says bases or steps."""
    config, cut = plan.config, plan.cut
    length, counted = sequence_length(config), plan.num_steps

    def bases(sequences: int) -> int | None:
        return None if length is None else sequences * length

    window = cut.micro_batch_size * cut.gradient_accumulation_steps
    sequences = len(plan.genome.train) if plan.genome else None
    run = _run(config, cut, plan.genome, counted)
    rates = rates_of(config, cut, run) if run is not None else None
    return {
        "batch": {
            **asdict(cut),
            "bases_per_micro_batch": bases(cut.micro_batch_size),
            "sequences_per_window": window,
            "bases_per_window": bases(window),
            "bases_per_step": bases(cut.train_batch_size),
        },
        "run": {
            "num_steps": counted,
            "epochs": run.epochs() if run and sequences is not None else None,
            "sequences": run.sequences_before(run.num_steps) if run and sequences is not None else None,
            "tail": config.accumulation.tail.value,
        },
        "learning_rate": {
            "schedule": config.lr_schedule.type.value,
            "optimizer_lr": config.optimizer.lr,
            "lr_scaling": config.batch.lr_scaling.value,
            "reference_batch_size": config.batch.reference_batch_size,
            "peak": lr.peak(config, cut.train_batch_size),
            "warmup_steps": rates.warmup_steps if rates else _known_warmup(config),
            "counted_in": rates and ("sequences" if rates.by_sequences else "steps"),
            "horizon_steps": counted,
            "first": rates.of(0) if rates else None,
            "last": rates.of(rates.steps.num_steps - 1) if rates else None,
        },
        "batch_schedule": _segments(plan, run),
        "data": {
            "fingerprint": plan.genome.fingerprint if plan.genome else None,
            "cache": plan.genome.entries if plan.genome else None,
            "train_sequences": sequences,
            "validation_sequences": len(plan.genome.validation) if plan.genome and plan.genome.validation else None,
        },
        "warnings": _warnings(plan, run),
        **({"verify": [asdict(one) for one in verify.cuts(config, cut)]} if config.mode is Mode.VERIFY else {}),
        **costs.facts(config, cut, parameters.sizes(config.model)),
        "deepspeed_sources": plan.deepspeed.sources,
    }


def _run(config: Config, cut: Cut, read: Genome | None, num_steps: int | None) -> Steps | None:
    """The steps of the run; None where they depend on a length that only the job can know."""
    if num_steps is None:
        return None
    if read is not None:
        return steps_of(config, cut, len(read.train))
    by_bases = config.batch_schedule.by is Count.TOKENS or config.lr_schedule.warmup_tokens is not None
    if config.accumulation.tail is Tail.FLUSH and by_bases:
        return None
    # Where an epoch ends changes neither the batch in force nor the learning rate of a step: as if none ended.
    return steps_of(config, cut, 2**62)


def _known_warmup(config: Config) -> int | None:
    return config.lr_schedule.warmup_steps if config.lr_schedule.warmup_tokens is None else None


def _segments(plan: Plan, run: Steps | None) -> list[dict[str, int | None]]:
    """The batches of the run in order; ``from_step`` is None where only the job can tell."""
    levels = levels_of(plan.config, plan.cut)
    found: list[tuple[int | None, int]]
    if run is not None:
        found = [(segment.first_step, segment.batch_size) for segment in run.segments]
        found += [(None, size) for size in levels.sizes[len(levels.starts) :]]
    else:
        known = (0,) if levels.by_sequences else levels.starts
        found = [(known[k] if k < len(known) else None, size) for k, size in enumerate(levels.sizes)]
    return [
        {
            "from_step": first,
            "train_batch_size": size,
            "gradient_accumulation_steps": plan.cut.accumulation_steps(size),
        }
        for first, size in found
    ]


def _warnings(plan: Plan, run: Steps | None) -> list[str]:
    lines = lr.warnings(plan.config, plan.cut.train_batch_size)
    if (wanted := placement.num_ranks(plan.config)) != plan.num_ranks:
        lines.append(
            f"cluster.allow_fewer_ranks=true: the global batch of {plan.cut.train_batch_size} cannot be cut over "
            f"{wanted} ranks; {plan.num_ranks} of them are used"
        )
    if plan.config.batch.train_micro_batch_size_per_gpu is MicroBatch.AUTO:
        sizes = ", ".join(map(str, micro_batch_sizes(plan.config, plan.cut)))
        lines.append(
            f"batch.train_micro_batch_size_per_gpu=auto: the job finds the largest of {sizes} that fits into memory; "
            "shown with the smallest"
        )
    if run is not None and run.segments[-1].first_step >= run.num_steps:
        reached = run.batch_size(run.num_steps - 1)
        lines.append(
            f"batch_schedule.type={plan.config.batch_schedule.type.value}: the run ends after {run.num_steps} "
            f"optimizer steps, at a global batch of {reached}; {plan.cut.train_batch_size} would come with step "
            f"{run.segments[-1].first_step + 1}"
        )
    return lines


def micro_batch_sizes(config: Config, cut: Cut) -> list[int]:
    """All micro-batches that the batches of a run can be cut into, smallest first."""
    ranks, length = cut.data_parallel_size, sequence_length(config)
    return batch.micro_batch_sizes(config.batch, ranks, length, config.batch_schedule)


def files(plan: Plan, **facts: Any) -> dict[str, str]:
    """The files of the run directory that state the plan, by name; ``facts`` are added to it."""
    return {
        "plan.json": json.dumps({**summary(plan), **facts}, indent=2) + "\n",
        "deepspeed.json": json.dumps(plan.deepspeed.values, indent=2) + "\n",
    }


def read(run_dir: RunDir) -> dict[str, Any]:
    """What ``files`` has written of the plan."""
    planned: dict[str, Any] = json.loads(run_dir.plan.read_text(encoding="utf-8"))
    return planned


def render(plan: Plan, run_dir: object) -> None:
    """Print the plan for a person."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = MAX_WIDTH  # a pipe is of no width; keys are long
    facts = summary(plan)
    cut, run, rate, data = facts["batch"], facts["run"], facts["learning_rate"], facts["data"]
    schedule = facts["batch_schedule"]
    validation = "no" if plan.config.data.validation is None else _number(data["validation_sequences"])
    # Batches that grow during the run make fewer steps of the same sequences.
    at_most = "at most " if rate["counted_in"] == "sequences" else ""
    console.print(f"[bold]{plan.config.name}[/bold] on {_count(plan.num_ranks, 'rank')}")
    table = Table("", "sequences", "bases", box=box.SIMPLE_HEAD, title="The cut", title_justify="left")
    rows = (
        ("micro-batch (one rank, one pass)", cut["micro_batch_size"], cut["bases_per_micro_batch"]),
        (
            f"window ({_count(cut['gradient_accumulation_steps'], 'accumulation step')}, one rank)",
            cut["sequences_per_window"],
            cut["bases_per_window"],
        ),
        (f"optimizer step ({_count(plan.num_ranks, 'rank')})", cut["train_batch_size"], cut["bases_per_step"]),
    )
    for label, *numbers in rows:
        table.add_row(label, *map(_number, numbers))
    console.print(table)
    if len(schedule) > 1:
        console.print(
            _schedule_table(schedule, cut["bases_per_step"] and cut["bases_per_step"] // cut["train_batch_size"])
        )
    console.print(
        f"run            {at_most}{_number(run['num_steps'])} optimizer steps, {_number(run['epochs'])} epochs, "
        f"tail={run['tail']}"
    )
    console.print(f"data           {_number(data['train_sequences'])} training and {validation} validation sequences")
    console.print(
        f"learning rate  {rate['schedule']}: {_number(rate['first'])} first, {_number(rate['peak'])} after "
        f"{_number(rate['warmup_steps'])} warm-up steps, {_number(rate['last'])} in the last; "
        f"horizon {at_most}{_number(rate['horizon_steps'])} optimizer steps"
    )
    if rate["lr_scaling"] != "none":
        console.print(
            f"               the peak is optimizer.lr={_number(rate['optimizer_lr'])} for "
            f"{_count(rate['reference_batch_size'], 'sequence')}, scaled to {cut['train_batch_size']:,} "
            f"({rate['lr_scaling']})"
        )
    if (scaling := plan.config.batch_schedule.lr_scaling) is not Scaling.NONE:
        console.print(
            f"               at {cut['train_batch_size']:,} sequences a step; other batches scale it ({scaling.value})"
        )
    for line in costs.lines(facts):
        console.print(escape(line), soft_wrap=True)
    console.print(f"run directory  {run_dir}", soft_wrap=True)
    for line in facts["warnings"]:
        console.print(f"[yellow]warning[/yellow]        {escape(line)}", soft_wrap=True)
    table = Table("key", "value", "set by", box=box.SIMPLE_HEAD, title="deepspeed.json", title_justify="left")
    for key, source in plan.deepspeed.sources.items():
        value: Any = plan.deepspeed.values
        for part in key.split("."):
            value = value[part]
        table.add_row(key, json.dumps(value), source)
    console.print(table)


def _schedule_table(schedule: list[dict[str, Any]], length: int | None) -> "Table":
    """Where each global batch begins; a long ramp is cut short in the middle."""
    from rich import box
    from rich.table import Table

    table = Table(
        "from step",
        "sequences",
        "bases",
        "accumulation steps",
        box=box.SIMPLE_HEAD,
        title="The batch schedule",
        title_justify="left",
    )
    for number, level in enumerate(schedule):
        if MAX_LEVELS // 2 <= number < len(schedule) - MAX_LEVELS // 2:
            if number == MAX_LEVELS // 2:
                table.add_row("...", "...", "...", "...")
            continue
        first, size = level["from_step"], level["train_batch_size"]
        table.add_row(
            "(as the run goes)" if first is None else f"{first + 1:,}",
            _number(size),
            _number(None if length is None else size * length),
            _number(level["gradient_accumulation_steps"]),
        )
    return table


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _number(value: float | int | None) -> str:
    if value is None:
        return "(checked in the job)"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
