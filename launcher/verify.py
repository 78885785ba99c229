"""``mode=verify``: which cuts of the global batch are held against one process that sees it whole, and the verdict."""

import json
import math
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from launcher import rundir
from launcher.batch import Cut
from launcher.rundir import RunDir
from launcher.schema import Config, Dtype


@dataclass(frozen=True)
class Bound:
    """The largest relative error that passes, and why it may be so large."""

    largest: float
    reason: str


QUANTITIES = ("loss", "grad_norm", "gradient", "parameters", "update", "learning_rate")
"""Relative errors against the whole batch. ``loss``, ``grad_norm`` and ``learning_rate``: the largest over the steps.
``gradient``: the first moment of the optimizer after the first step, which is the gradient as it was accumulated,
reduced and clipped.
``parameters``: after the last step, |a - b| / |b|. ``update``: the same for what the steps changed, so that small steps
hide nothing."""


def bounds(config: Config) -> dict[str, Bound]:
    """What each quantity may differ by, for the precision and the optimizer of a run."""
    if config.precision.dtype is Dtype.FP32:
        rounding = "fp32 rounds by 6e-8, and a sum of many terms depends on their order"
        return {
            "loss": Bound(1e-6, rounding),
            "grad_norm": Bound(2e-6, rounding),
            "gradient": Bound(1e-5, f"{rounding}; small gradients are differences of large terms"),
            "parameters": Bound(1e-6, rounding),
            "update": Bound(
                1e-4, "the rounding of the gradient, which Adam-like optimizers enlarge where a gradient is nearly 0"
            ),
            "learning_rate": Bound(0.0, "a constant"),
        }
    name = config.precision.dtype.value
    digits = {Dtype.BF16: "8 significant bits, 4e-3", Dtype.FP16: "11 significant bits, 5e-4"}[config.precision.dtype]
    against = f"{name} has {digits}; held against the same micro-batches in {name}, summed in fp32"
    rounding = f"{against}; later steps see weights that another last digit has rounded to the other side"
    return {
        "loss": Bound(2e-4, rounding),
        "grad_norm": Bound(2e-3, rounding),
        "gradient": Bound(3e-3, f"{against}; tied weights sum the gradients of their places in {name}"),
        "parameters": Bound(5e-4, rounding),
        "update": Bound(2e-2, f"{rounding}; Adam-like optimizers enlarge it where a gradient is nearly 0"),
        "learning_rate": Bound(0.0, "a constant"),
    }


def cuts(config: Config, cut: Cut) -> list[Cut]:
    """The cuts to try, on one rank and on all ranks of the run: the whole share at once, the run's own cut, and those
    with the next smaller and larger micro-batch; or the accumulation steps that ``verify.cuts`` lists."""
    found = []
    for ranks in sorted({1, cut.data_parallel_size}):
        share = cut.train_batch_size // ranks
        for steps in config.verify.cuts or _accumulations(share, cut.micro_batch_size):
            found.append(Cut(cut.train_batch_size, share // steps, steps, ranks))
    return found


def _accumulations(share: int, micro_batch_size: int) -> list[int]:
    """Accumulation steps, fewest first: 1, those of the run's micro-batch, and others near them."""
    divisors = [steps for steps in range(1, share + 1) if share % steps == 0]
    own = share // micro_batch_size
    position = divisors.index(own)
    near = divisors[max(0, position - 1) : position + 2]
    return sorted({1, *near})


def check(config: Config, cut: Cut) -> list[str]:
    """Fault lines of ``verify``."""
    verify, faults = config.verify, []
    if verify.steps < 1:
        faults.append(f"verify.steps={verify.steps}: it must be at least 1")
    if not (math.isfinite(verify.learning_rate) and verify.learning_rate > 0):
        faults.append(f"verify.learning_rate={verify.learning_rate}: it must be above 0")
    share = cut.train_batch_size // cut.data_parallel_size
    divisors = [steps for steps in range(1, share + 1) if share % steps == 0]
    for steps in verify.cuts or []:
        if steps not in divisors:
            faults.append(
                f"verify.cuts={steps}: the {share} sequences of a rank cannot be cut into {steps} accumulation steps; "
                f"there are: {', '.join(map(str, divisors))}"
            )
    return faults


def verdict(config: Config, rows: Iterable[Mapping[str, Any]], passes: int) -> dict[str, Any]:
    """``verify.json``: the rows of all cuts with their errors, the bounds, and whether every error is within its bound.

    An error that cannot be known is None: a gradient, for an optimizer without a first moment. ``passes``: in how many
    pieces the one process had to read the whole batch.
    """
    limits = bounds(config)
    judged = []
    for row in rows:
        failed = [
            name for name, error in row["errors"].items() if error is not None and not error <= limits[name].largest
        ]
        judged.append({**row, "failed": failed, "passed": not failed})
    return {
        "passed": all(row["passed"] for row in judged),
        "precision": config.precision.dtype.value,
        "optimizer": config.optimizer.type.value,
        "zero_stage": config.zero.stage,
        "steps": config.verify.steps,
        "learning_rate": config.verify.learning_rate,
        "whole_batch_passes": passes,
        "bounds": {name: asdict(bound) for name, bound in limits.items()},
        "cuts": judged,
    }


def collect(config: Config, run_dir: RunDir) -> dict[str, Any]:
    """Write ``verify.json`` from what each group of ranks left in the run directory; returns it."""
    folder = run_dir.path / "verify"
    groups = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"), key=lambda path: int(path.stem))]
    found = verdict(config, [row for group in groups for row in group["rows"]], groups[0]["passes"])
    rundir.write_text(run_dir.verify, json.dumps(found, indent=2) + "\n")
    shutil.rmtree(folder)
    return found


def render(found: Mapping[str, Any]) -> None:
    """Print the verdict for a person."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200
    title = (
        f"{found['steps']} steps at a learning rate of {found['learning_rate']:g}, {found['precision']}, "
        f"{found['optimizer']}, ZeRO stage {found['zero_stage']}: relative errors against one process that sees "
    )
    if found["precision"] != Dtype.FP32.value:
        title += f"the same micro-batches in {found['precision']} and sums them in fp32"
    else:
        passes = found["whole_batch_passes"]
        title += "the whole batch" + (f" (in {passes} passes)" if passes > 1 else "")
    table = Table(
        "ranks",
        "micro-batch",
        "accumulation",
        "loss",
        "gradient norm",
        *(name.replace("_", " ") for name in QUANTITIES),
        "",
        box=box.SIMPLE_HEAD,
        title=title,
        title_justify="left",
    )
    for row in found["cuts"]:
        errors = [
            f"[red]{_error(row['errors'][name])}[/red]" if name in row["failed"] else _error(row["errors"][name])
            for name in QUANTITIES
        ]
        cut = row["cut"]
        table.add_row(
            str(cut["data_parallel_size"]),
            str(cut["micro_batch_size"]),
            str(cut["gradient_accumulation_steps"]),
            f"{row['loss'][0]:.6f}",
            f"{row['grad_norm'][0]:.6f}" if row["grad_norm"][0] is not None else "-",
            *errors,
            "pass" if row["passed"] else "[red]FAIL[/red]",
        )
    table.add_section()
    table.add_row("", "", "bounds", "", "", *(f"{found['bounds'][name]['largest']:.0e}" for name in QUANTITIES), "")
    console.print(table)
    for name in QUANTITIES:
        console.print(f"{name:14} {found['bounds'][name]['reason']}", soft_wrap=True)


def _error(error: float | None) -> str:
    return "-" if error is None else f"{error:.1e}"
