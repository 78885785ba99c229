"""What training with this program costs beside the computation itself: time of its loop, and memory of accumulation.

    python benchmarks/training_loop.py
    python benchmarks/training_loop.py --skip-memory model=llama_1m     # overrides of dna_8k, for all that runs

The loop is the program's own, with its metrics file and its reading of the genome; it is held against the least that
trains the same model in the same cut with DeepSpeed: forward, loss, backward and step over batches that are in memory.
Both run in one process group and take turns step by step. Every rank has one thread.
"""

import argparse
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from launcher import job, plan  # noqa: E402 - runs from a checkout without installation
from launcher.compose import Composer  # noqa: E402
from launcher.ranks import Rank  # noqa: E402
from launcher.rundir import RunDir  # noqa: E402
from tests.ranks import on_ranks  # noqa: E402

if TYPE_CHECKING:
    from launcher.worker.train import Trainer

OVERRIDES = ("+experiment=dna_8k", "data.validation=null", "logging=none")
ACCUMULATION = 4
WARM_UP = 2
"""Steps of each loop that are not counted."""
SPEED_LIMIT = 0.97
MEMORY_STEPS = 2
MEMORY_LIMIT = 1.05


def cut(ranks: int, accumulation: int, steps: int) -> list[str]:
    """Overrides for a run of so many steps in micro-batches of one sequence."""
    return [
        f"batch.train_batch_size={ranks * accumulation}",
        f"batch.gradient_accumulation_steps={accumulation}",
        f"cluster.ranks_per_node={ranks}",
        f"train.max_steps={steps}",
        "lr_schedule.warmup_steps=1",
    ]


def make_trainer(rank: Rank, overrides: Sequence[str], folder: Path) -> "Trainer":
    """A whole run of the program in the process group that there is; its ``train()`` runs it."""
    import torch.distributed as dist

    from launcher.worker.data import open_task
    from launcher.worker.train import Trainer

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    composer = Composer([*OVERRIDES, *overrides])
    made = job.prepare(composer.single(composer.compose())).plan
    if rank.is_first:
        folder.mkdir()
        RunDir(folder).write_files(plan.files(made))
    dist.barrier()
    task = open_task(made.config, plan.summary(made)["data"])
    return Trainer(made.config, made.cut, made.deepspeed.values, rank, RunDir(folder), task)


class BareLoop:
    """Steps over one global batch in memory: the first of a run, with the run's model and DeepSpeed JSON."""

    def __init__(self, trainer: "Trainer") -> None:
        import deepspeed  # type: ignore[import-untyped]
        import torch
        import torch.nn.functional as F

        from launcher.genome import alphabet
        from launcher.worker import models
        from launcher.worker.windows import Shares

        values = trainer.engine.deepspeed.config
        model = models.build(trainer.config.model, trainer.config.seed, values)
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=dict(values))
        tokens = torch.from_numpy(alphabet.TOKEN).long()
        self.micro_batches = []
        shares = Shares(
            trainer.task.train, trainer.task.objective, trainer.course.steps, trainer.cut, trainer.rank.rank
        )
        for micro_batch in shares[0].micro_batches:
            inputs = tokens[micro_batch.batch["codes"].long()]
            labels = F.pad(inputs[:, 1:], (0, 1), value=alphabet.PAD).flatten()
            self.micro_batches.append((inputs, labels.masked_fill(labels == alphabet.PAD, -100)))
        self.loss = F.cross_entropy

    def step(self) -> None:
        for inputs, labels in self.micro_batches:
            logits = self.engine(inputs).logits
            loss = self.loss(logits.flatten(0, 1), labels)
            self.engine.backward(loss)
            self.engine.step()


class Turns:
    """Told of every step of a run after its metrics file was: takes the time, and lets the bare loop do a step."""

    def __init__(self, bare: BareLoop) -> None:
        self.bare = bare
        self.tokens = 0
        self.program_s: list[float] = []
        self.bare_s: list[float] = []
        self.started = 0.0

    def log(self, values: Mapping[str, Any]) -> None:
        import torch.distributed as dist

        self.program_s.append(time.perf_counter() - self.started)
        self.tokens = values["tokens"]
        dist.barrier()
        started = time.perf_counter()
        self.bare.step()
        self.bare_s.append(time.perf_counter() - started)
        dist.barrier()
        self.started = time.perf_counter()

    def finish(self, summary: Mapping[str, Any]) -> None:
        pass


def take_turns(rank: Rank, overrides: Sequence[str], folder: Path) -> tuple[int, list[float], list[float]]:
    """Tokens of a step, the seconds of every step of the program's loop, and of those of the bare one in between."""
    trainer = make_trainer(rank, overrides, folder)
    turns = Turns(BareLoop(trainer))
    trainer.trackers.append(turns)  # on every rank, not only on the one that has a metrics file
    trainer.train()
    return turns.tokens, turns.program_s[WARM_UP:], turns.bare_s[WARM_UP:]


def peak_memory(rank: Rank, overrides: Sequence[str], folder: Path) -> int:
    """The most bytes that this process has held up to the last step of a run, as the metrics tell it."""
    trainer = make_trainer(rank, overrides, folder)
    told: list[Mapping[str, Any]] = []

    class Memory:
        log = told.append
        finish = told.append

    trainer.trackers.append(Memory())
    trainer.train()
    return max(int(values.get("peak_memory_bytes", 0)) for values in told)


def speed(steps: int, overrides: Sequence[str], folder: Path) -> None:
    title = f"tokens/s at GAS {ACCUMULATION}, {steps} steps each"
    print(f"{title:<40}{'program':>12}{'bare':>10}     ratio (limit {SPEED_LIMIT})")
    for ranks in (1, 2):
        arguments = [*cut(ranks, ACCUMULATION, WARM_UP + steps), *overrides]
        tokens, program, bare = on_ranks(ranks, take_turns, arguments, folder / f"speed-{ranks}")[0]
        # Of neighbours in time, so that a busy machine slowed both.
        ratio = statistics.median(base / ours for ours, base in zip(program, bare, strict=True))
        rates = [tokens / statistics.median(times) for times in (program, bare)]
        print(f"  {f'ranks: {ranks}':<38}{rates[0]:12,.0f}{rates[1]:10,.0f}{ratio:10.3f}")


def memory(overrides: Sequence[str], folder: Path) -> None:
    print(f"\n{'peak memory of a rank, MB':<40}{'GAS 1':>12}{'GAS 16':>10}     ratio (limit {MEMORY_LIMIT})")

    def peak(stage: int, accumulation: int) -> int:
        arguments = [f"zero=stage{stage}", *cut(1, accumulation, MEMORY_STEPS), *overrides]
        measured: list[int] = on_ranks(1, peak_memory, arguments, folder / f"memory-{stage}-{accumulation}")
        return measured[0]

    for stage in range(4):
        with ThreadPoolExecutor() as both:
            one, sixteen = both.map(peak, (stage, stage), (1, 16))
        print(f"  {f'ZeRO stage {stage}':<38}{one / 1e6:12,.0f}{sixteen / 1e6:10,.0f}{sixteen / one:10.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="of each loop, after the warm-up; default: 12")
    parser.add_argument("--skip-speed", action="store_true")
    parser.add_argument("--skip-memory", action="store_true")
    parser.add_argument("overrides", nargs="*", help="more overrides, for all that runs")
    options = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with tempfile.TemporaryDirectory() as name:
        if not options.skip_speed:
            speed(options.steps, options.overrides, Path(name))
        if not options.skip_memory:
            memory(options.overrides, Path(name))


if __name__ == "__main__":
    main()
