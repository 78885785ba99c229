"""What would run, worked out before anything starts: the cut, the steps, the horizon, the DeepSpeed JSON."""

import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from launcher import batch, deepspeed_json, devices, genome, lr, steps, validate
from launcher.batch import Cut
from launcher.deepspeed_json import DeepSpeedJSON
from launcher.errors import RequestError
from launcher.genome import Genome
from launcher.schema import Config, CustomData, Data, Device, Mode
from launcher.steps import Steps

Result = TypeVar("Result")

MAX_WIDTH = 200
"""Columns of a plan that is printed to a file or a pipe."""


@dataclass(frozen=True)
class Plan:
    """One run. What only the job can know (the length of a user's own dataset) is None."""

    config: Config
    """As it is frozen for the ranks."""
    cut: Cut
    deepspeed: DeepSpeedJSON
    genome: Genome | None
    num_steps: int | None

    @property
    def num_ranks(self) -> int:
        return self.cut.data_parallel_size


def make(config: Config) -> Plan:
    """The plan of a configuration; reads the genome, and builds its cache unless ``mode=plan``.

    Raises RequestError with every fault that was found.
    """
    faults = validate.check(config) + deepspeed_json.check(config) + _check_packages(config) + _check_nvme(config)

    def attempt(function: Callable[..., Result], *arguments: Any, **options: Any) -> Result | None:
        try:
            return function(*arguments, **options)
        except RequestError as error:
            faults.extend(error.faults)
            return None

    ranks = attempt(num_ranks, config)
    cut = (
        attempt(batch.solve, config.batch, ranks, sequence_length(config)) if ranks is not None and ranks > 0 else None
    )
    read: Genome | None = None
    if isinstance(config.data, Data):
        data_faults = genome.check(config.data)
        faults += data_faults
        if not data_faults:
            read = attempt(genome.load, config.data, keep=config.mode is not Mode.PLAN and not faults)
    counted = attempt(count_steps, config, cut, len(read.train) if read else None) if cut is not None else None
    # Without a cut the limit that is known still tells of a warm-up that is too long.
    known = counted if cut is not None else config.train.max_steps
    faults += lr.check(config.lr_schedule, known if known is None or known >= 1 else None)
    if faults:
        raise RequestError(*faults)
    assert cut is not None
    if isinstance(config.data, Data) and read is not None and genome.reads_a_pipe(config.data):
        # A pipe can be read only once: the ranks find its bases in the cache.
        config = replace(config, data=replace(config.data, fasta=read.fasta))
    if config.offload.nvme_path is not None:
        expanded = os.path.expandvars(config.offload.nvme_path)
        config = replace(config, offload=replace(config.offload, nvme_path=expanded))
    return Plan(config, cut, deepspeed_json.build(config, cut), read, counted)


def _check_packages(config: Config) -> list[str]:
    """What the ranks import has to be installed where they run; a plan can be made without."""
    needed = [] if config.mode is Mode.PLAN else ["torch", "deepspeed", "transformers"]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if not missing:
        return []
    return [f"training needs {', '.join(missing)}, not installed for {sys.executable}: pip install 'okazaki[train]'"]


def _check_nvme(config: Config) -> list[str]:
    """The folder for offloading is on this machine, as its ranks are; its form is checked with the DeepSpeed JSON."""
    path = config.offload.nvme_path
    if Device.NVME not in (config.offload.optimizer, config.offload.parameters) or not path:
        return []
    folder = os.path.expandvars(path)
    if not os.path.isabs(folder):
        told = not path.startswith("$")
        return [] if told else [f"offload.nvme_path={path}: it stands for {folder}; it must be an absolute path"]
    if not os.path.isdir(folder):
        return [f"offload.nvme_path={path}: there is no such folder; make it, or name one on a local disk"]
    try:
        tempfile.TemporaryFile(dir=folder).close()  # root may write anywhere, as far as access rights tell
    except OSError as error:
        fault = f"it cannot be written ({error.strerror}); name another folder on a local disk"
        return [f"offload.nvme_path={path}: {fault}"]
    return []


def num_ranks(config: Config) -> int:
    """Ranks of a run here: one for each visible GPU, or ``cluster.ranks_per_node``; one on a machine without GPUs.

    Raises RequestError where there are fewer GPUs than ranks.
    """
    wanted, gpus = config.cluster.ranks_per_node, devices.visible_gpus()
    if wanted is None:
        return max(1, gpus)
    if gpus and wanted > gpus:
        raise RequestError(f"cluster.ranks_per_node={wanted}: only {gpus} GPUs are visible here; set at most {gpus}")
    return wanted


def sequence_length(config: Config) -> int | None:
    """Bases that a sequence counts in token budgets; None for a dataset that does not tell."""
    if isinstance(config.data, CustomData):
        length = config.data.arguments.get("sequence_length")
        return length if isinstance(length, int) else None
    return config.data.sequence_length


def count_steps(config: Config, cut: Cut, num_sequences: int | None) -> int | None:
    return steps.count(
        config.train, config.accumulation.tail, cut.train_batch_size, num_sequences, sequence_length(config)
    )


def steps_of(config: Config, cut: Cut, num_sequences: int) -> Steps:
    """The optimizer steps of a run over N training sequences."""
    counted = count_steps(config, cut, num_sequences)
    assert counted is not None, "the number of sequences is known"
    return Steps(num_sequences, cut.train_batch_size, config.accumulation.tail, counted, config.seed)


def summary(plan: Plan) -> dict[str, Any]:
    """``plan.json``: plain values; counts are sequences unless their name says bases or steps."""
    config, cut = plan.config, plan.cut
    length, counted = sequence_length(config), plan.num_steps

    def bases(sequences: int) -> int | None:
        return None if length is None else sequences * length

    window = cut.micro_batch_size * cut.gradient_accumulation_steps
    sequences = len(plan.genome.train) if plan.genome else None
    run = steps_of(config, cut, sequences) if sequences is not None else None
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
            "epochs": run.epochs() if run else None,
            "sequences": run.sequences_before(run.num_steps) if run else None,
            "tail": config.accumulation.tail.value,
        },
        "learning_rate": {
            "schedule": config.lr_schedule.type.value,
            "peak": config.optimizer.lr,
            "warmup_steps": config.lr_schedule.warmup_steps,
            "horizon_steps": counted,
            "first": _learning_rate(config, 0, counted),
            "last": _learning_rate(config, counted - 1, counted) if counted else None,
        },
        "data": {
            "fingerprint": plan.genome.fingerprint if plan.genome else None,
            "cache": plan.genome.entries if plan.genome else None,
            "train_sequences": sequences,
            "validation_sequences": len(plan.genome.validation) if plan.genome and plan.genome.validation else None,
        },
        "deepspeed_sources": plan.deepspeed.sources,
    }


def files(plan: Plan) -> dict[str, str]:
    """The files of the run directory that state the plan, by name."""
    return {
        "plan.json": json.dumps(summary(plan), indent=2) + "\n",
        "deepspeed.json": json.dumps(plan.deepspeed.values, indent=2) + "\n",
    }


def render(plan: Plan, run_dir: object) -> None:
    """Print the plan for a person."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = MAX_WIDTH  # a pipe is of no width; keys are long
    facts = summary(plan)
    cut, run, rate, data = facts["batch"], facts["run"], facts["learning_rate"], facts["data"]
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
    console.print(
        f"run            {_number(run['num_steps'])} optimizer steps, {_number(run['epochs'])} epochs, "
        f"tail={run['tail']}"
    )
    console.print(
        f"data           {_number(data['train_sequences'])} training and {_number(data['validation_sequences'])} "
        "validation sequences"
    )
    console.print(
        f"learning rate  {rate['schedule']}: {_number(rate['first'])} first, {_number(rate['peak'])} after "
        f"{rate['warmup_steps']} warm-up steps, {_number(rate['last'])} in the last; "
        f"horizon {_number(rate['horizon_steps'])} optimizer steps"
    )
    console.print(f"run directory  {run_dir}", soft_wrap=True)
    table = Table("key", "value", "set by", box=box.SIMPLE_HEAD, title="deepspeed.json", title_justify="left")
    for key, source in plan.deepspeed.sources.items():
        value: Any = plan.deepspeed.values
        for part in key.split("."):
            value = value[part]
        table.add_row(key, json.dumps(value), source)
    console.print(table)


def _learning_rate(config: Config, step: int, num_steps: int | None) -> float | None:
    return None if num_steps is None else config.optimizer.lr * lr.factor(config.lr_schedule, step, num_steps)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _number(value: float | int | None) -> str:
    if value is None:
        return "(checked in the job)"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
