"""What the cut of a batch does to a loss curve: nothing here, and something where each micro-batch takes its own mean.

    python benchmarks/loss_curves.py                        # prints the distances, and draws docs/loss_curves.svg
    python benchmarks/loss_curves.py --steps 50 --figure curves.svg optimizer.lr=1e-2     # overrides, for all runs

One run of the program, on real E. coli contigs of very different lengths, at three numbers of accumulation steps and
one global batch. The baseline is plain torch and has the same weights, sequences, optimizer and learning rates, but
what many training loops do: the mean of each micro-batch, divided by the number of accumulation steps. Both tell the
loss that they minimise.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from launcher import job, plan  # noqa: E402 - runs from a checkout without installation
from launcher.compose import Composer  # noqa: E402
from launcher.course import Course  # noqa: E402
from launcher.plan import Plan  # noqa: E402

ACCUMULATION = (1, 4, 16)
LIMIT = 1e-5
COLOURS = ("#0072b2", "#e69f00", "#cc3377")
WIDTHS = (7, 3.5, 1.2)
"""The first curve is drawn broad, so that it can be seen below the others."""
LEFT, TOP, WIDTH, HEIGHT, APART = 64, 62, 380, 250, 48
"""Of a panel, in pixels."""
OVERRIDES = (
    "+experiment=dna_8k",
    "model=llama_1m",
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_hidden_layers=2",
    f"data.fasta={REPOSITORY / 'tests/data/ecoli_short_contigs.fa.gz'}",
    "data.sequence_length=300",  # longer than many contigs
    "data.validation=null",
    "batch.train_batch_size=16",
    "optimizer.lr=1e-3",
    "cluster.ranks_per_node=1",
    "logging=none",
)

Curves = dict[int, list[float]]
"""Loss of every step, by accumulation steps."""


def ours(overrides: Sequence[str], folder: Path) -> list[float]:
    """As its command line trains and its metrics tell."""
    command = [sys.executable, "-m", "launcher", *overrides, f"hydra.run.dir={folder}"]
    subprocess.run(command, check=True, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


def mean_of_means(made: Plan) -> tuple[list[float], list[float]]:
    """The same run in plain torch, with that mistake: the loss that it minimises, and the mean over all targets."""
    import torch

    from launcher.worker import models, optimizers
    from launcher.worker.data import open_task
    from launcher.worker.windows import Shares

    config, task = made.config, open_task(made.config, plan.summary(made)["data"])
    course = Course(config, made.cut, len(task.train))
    shares = Shares(task.train, task.objective, course.steps, made.cut, rank=0)
    model = models.build(config.model, config.seed, {"zero_optimization": {"stage": 0}})
    chosen = config.optimizer
    groups = optimizers.arguments(model, chosen)["model_parameters"]
    optimizer = torch.optim.AdamW(groups, lr=chosen.lr, betas=chosen.betas, eps=chosen.eps)
    losses, exact_losses = [], []
    for number in range(course.steps.num_steps):
        share = shares[number]
        loss = exact_loss = 0.0
        for micro_batch in share.micro_batches:
            loss_sum = task.objective.loss(model, micro_batch.batch)
            mean = loss_sum / micro_batch.weight.weight / len(share.micro_batches)
            mean.backward()
            loss += mean.item()
            exact_loss += loss_sum.item() / share.weight.weight
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.gradient_clipping)
        for group in optimizer.param_groups:
            group["lr"] = course.learning_rate(number)
        optimizer.step()
        optimizer.zero_grad()
        course.record(number, applied=True, noise=None)
        losses.append(loss)
        exact_losses.append(exact_loss)
    return losses, exact_losses


def distance(curves: Sequence[Sequence[float]]) -> float:
    """The largest relative distance between any two curves at any step."""
    return max((max(losses) - min(losses)) / min(losses) for losses in zip(*curves, strict=True))


def figure(program: Curves, baseline: Curves) -> str:
    """Two panels with one scale, as SVG: the second half of the run, where the loss is flat enough to see 1 %."""
    num_steps = len(program[ACCUMULATION[0]])
    first = num_steps // 2
    shown = [loss for curves in (program, baseline) for losses in curves.values() for loss in losses[first:]]
    low, high = min(shown), max(shown)
    width, bottom = LEFT + 2 * WIDTH + APART + 16, TOP + HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 84}" font-family="sans-serif" '
        'font-size="13" role="img">',
        "<title>Training loss by accumulation steps: this program, and a mean of means</title>",
        "<style>polyline{fill:none;stroke-linejoin:round}.paper{fill:#fff}text{fill:#222}.grid{stroke:#ccc}"
        ".axis{fill:none;stroke:#555}"
        "@media(prefers-color-scheme:dark){.paper{fill:#14181d}text{fill:#ddd}.grid{stroke:#3a4048}"
        ".axis{stroke:#999}}</style>",
        '<rect class="paper" width="100%" height="100%"/>',
    ]

    def text(x: float, y: float, words: object, anchor: str = "middle", more: str = "") -> None:
        parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{words}</text>')

    def y_of(loss: float) -> float:
        return bottom - 10 - (loss - low) / (high - low) * (HEIGHT - 20)

    panels = (("this program", program), ("mean of means", baseline))
    for left, (title, curves) in zip((LEFT, LEFT + WIDTH + APART), panels, strict=True):
        apart = f"at most {distance([*curves.values()]):.0e} apart, relative"
        text(left + WIDTH / 2, TOP - 32, title, more='font-weight="bold"')
        text(left + WIDTH / 2, TOP - 12, apart)
        for hundredths in range(math.ceil(low * 100), math.floor(high * 100) + 1):
            y = y_of(hundredths / 100)
            parts.append(f'<path class="grid" d="M{left} {y:.1f}h{WIDTH}"/>')
            text(left - 8, y + 4, f"{hundredths / 100:.2f}", "end")
        for step in range(-(-first // 25) * 25, num_steps + 1, 25):
            text(left + WIDTH * (step - first) / (num_steps - first), bottom + 20, step)
        for losses, colour, stroke in zip(curves.values(), COLOURS, WIDTHS, strict=True):
            points = " ".join(
                f"{left + WIDTH * (step - first) / (num_steps - first):.1f},{y_of(losses[step - 1]):.1f}"
                for step in range(first + 1, num_steps + 1)
            )
            parts.append(f'<polyline points="{points}" stroke="{colour}" stroke-width="{stroke}"/>')
        parts.append(f'<rect class="axis" x="{left}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}"/>')
        text(left + WIDTH / 2, bottom + 40, "optimizer step")
    text(16, TOP + HEIGHT / 2, "loss, nats a base", more=f'transform="rotate(-90 16 {TOP + HEIGHT / 2})"')
    for number, (accumulation, colour, stroke) in enumerate(zip(ACCUMULATION, COLOURS, WIDTHS, strict=True)):
        x, y = width / 2 - 240 + 170 * number, bottom + 66
        parts.append(f'<path d="M{x} {y}h30" stroke="{colour}" stroke-width="{stroke}"/>')
        text(x + 38, y + 4, f"accumulation {accumulation}", "start")
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--figure", type=Path, default=REPOSITORY / "docs/loss_curves.svg")
    parser.add_argument("overrides", nargs="*", help="more overrides, for all that runs")
    options = parser.parse_args()
    program: Curves = {}
    baseline: Curves = {}
    exact: Curves = {}
    with tempfile.TemporaryDirectory() as name:
        for accumulation in ACCUMULATION:
            cut = (f"batch.gradient_accumulation_steps={accumulation}", f"train.max_steps={options.steps}")
            overrides = [*OVERRIDES, *cut, *options.overrides]
            program[accumulation] = ours(overrides, Path(name) / str(accumulation))
            composer = Composer(overrides)
            made = job.prepare(composer.single(composer.compose())).plan
            baseline[accumulation], exact[accumulation] = mean_of_means(made)
    accumulations = ", ".join(map(str, ACCUMULATION))
    print(f"accumulation {accumulations}, {options.steps} steps: largest relative distance of the loss")
    print(f"  {f'between the curves of the program (limit {LIMIT:.0e})':<64}{distance([*program.values()]):10.1e}")
    print(f"  {'between those of the mean of means':<64}{distance([*baseline.values()]):10.1e}")
    print(f"  {'between those, told as one mean over all targets':<64}{distance([*exact.values()]):10.1e}")
    both = [program[1], baseline[1]]
    print(f"  {'program and plain torch at accumulation 1, where both are right':<64}{distance(both):10.1e}")
    options.figure.write_text(figure(program, baseline))


if __name__ == "__main__":
    main()
