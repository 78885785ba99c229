"""Runs on two ranks that are killed, again and again, and continued by the same command until they are done.

    python benchmarks/chaos.py
    python benchmarks/chaos.py --runs 1 --first 17      # one of them again

SIGKILL goes to a rank, to the runner or to all processes of a run, at random moments: while it starts, between steps,
and while a checkpoint is written. A run that was continued must be the run that nobody disturbed, of the same ZeRO
stage: the same windows in every step, the same losses, the same parameters. What is drawn for a run depends on the seed
and its number alone; where exactly a kill strikes, the machine decides.

The checks share nothing with the program: checkpoints are read as docs/checkpoints.md tells it, and the windows of a
step are what the model itself was given.
"""

import argparse
import hashlib
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
from numpy.typing import NDArray
from safetensors import safe_open

from launcher.rundir import parse

REPOSITORY = Path(__file__).parents[1]

NETS = '''
import json, os, time, zlib
import torch
import torch.nn.functional as F

class Net(torch.nn.Module):
    """Writes down which windows it is given, and takes its time."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(17, 32)
        self.mix = torch.nn.Conv1d(32, 64, kernel_size=4)
        self.wide = torch.nn.Linear(64, 2048)
        self.narrow = torch.nn.Linear(2048, 64)
        self.head = torch.nn.Linear(64, 17)
        self.notes = os.open(f"{os.environ['NOTES']}.{os.environ['RANK']}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def forward(self, tokens):
        windows = [zlib.crc32(window.numpy().tobytes()) for window in tokens]
        os.write(self.notes, f"{json.dumps(windows)}\\n".encode())
        time.sleep(0.02)
        embedded = F.pad(self.embed(tokens).transpose(1, 2), (3, 0))
        mixed = torch.tanh(self.mix(embedded)).transpose(1, 2)
        return self.head(mixed + self.narrow(torch.tanh(self.wide(mixed))))
'''

RANKS, PASSES, STEPS, EVERY = 2, 2, 20, 3
"""Ranks, forward passes of a rank in a step, steps of a run, and steps between two checkpoints."""

COMMAND = (
    "+experiment=dna_8k data=lambda data.sequence_length=128 data.validation=null --config-dir conf model=net "
    f"batch.train_batch_size=8 batch.gradient_accumulation_steps={PASSES} cluster.ranks_per_node={RANKS} "
    f"train.max_steps={STEPS} checkpoint.every={EVERY} checkpoint.asynchronous=true optimizer.lr=1e-3 "
    "lr_schedule.warmup_steps=2 logging=none"
)

MARK = "OKAZAKI_CHAOS"
"""The variable by which the processes of a run are known, whoever their parent is by now."""

BOUND = 1e-6
"""Of the relative errors of parameters and losses."""

ENDS_S = 30.0
"""After a kill, what is left of a run is gone by then."""

HANGS_S = 300.0

SAME = ("tokens", "tokens_seen", "sequences_seen", "train_batch_size", "lr", "skipped")
"""What a line of the metrics has to tell exactly as the undisturbed run did."""

MOMENTS = {"preparing": 1, "starting": 2, "stepping": 3, "saving": 6}
"""When to kill, and how often that is drawn: while the launcher makes the run directory, until the first step, between
two steps, and while there is a checkpoint that is not complete."""

VICTIMS = ("rank", "runner", "all")

PREPARES_S = 0.2

Arrays = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Kill:
    moment: str
    victim: str
    where: float
    """In [0, 1): which of the steps or saves to come."""
    within: float
    """In [0, 1): when in it."""
    rank: int


@dataclass(frozen=True)
class Plan:
    """What is drawn for a run."""

    number: int
    stage: int
    workers: int
    kills: tuple[Kill, ...]


@dataclass
class Attempt:
    start: int
    """The step of the newest complete checkpoint before it."""
    struck: str = ""
    """Who was killed, and when."""
    in_save: bool = False
    ended_s: float = 0.0
    """From the kill until no process was left."""
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Whole:
    """A run that nobody disturbed."""

    lines: Mapping[int, Mapping[str, Any]]
    windows: Mapping[tuple[int, int], list[int]]
    parameters: Arrays
    starts_s: float
    """Until its first step was done."""
    step_s: float
    save_s: float


@dataclass(frozen=True)
class Outcome:
    plan: Plan
    attempts: list[Attempt]
    parameter_error: float
    loss_error: float
    debris: list[str]
    """What lies about in the end."""
    seconds: float
    faults: list[str]


def draw(seed: int, number: int) -> Plan:
    rng = random.Random(f"{seed}-{number}")
    moments = rng.choices(list(MOMENTS), list(MOMENTS.values()), k=rng.randint(1, 3))
    kills = [Kill(moment, rng.choice(VICTIMS), rng.random(), rng.random(), rng.randrange(RANKS)) for moment in moments]
    return Plan(number, rng.choice((1, 2, 3)), rng.choice((0, 1)), tuple(kills))


def prepare(folder: Path) -> None:
    """What the commands need where they are given."""
    (folder / "nets.py").write_text(NETS)
    (folder / "conf" / "model").mkdir(parents=True)
    (folder / "conf" / "model" / "net.yaml").write_text("_target_: nets.Net\n")


def undisturbed(folder: Path, stage: int) -> Whole:
    run_dir = folder / f"whole-{stage}"
    plan = Plan(-1, stage, 0, ())
    attempt = _attempt(folder, run_dir, plan, 0, None, None)
    assert not attempt.faults, attempt.faults
    lines = _lines(run_dir, 0)
    steps = {line["step"]: line for line in lines if line["kind"] == "train"}
    assert sorted(steps) == list(range(1, STEPS + 1))
    started = (run_dir / "config.yaml").stat().st_mtime
    saves = [line["total_s"] for line in lines if line["kind"] == "checkpoint"]
    return Whole(
        steps,
        _windows(run_dir, 0, 0),
        read(newest(run_dir)),
        steps[1]["time"] - started,
        statistics.median(line["step_time_s"] for line in steps.values()),
        statistics.median(saves),
    )


def torment(folder: Path, plan: Plan, whole: Whole) -> Outcome:
    """One run, killed as planned and continued until it is done, held against ``whole``."""
    began = time.perf_counter()
    run_dir = folder / f"run-{plan.number}"
    attempts: list[Attempt] = []
    for kill in (*plan.kills, None):
        attempts.append(_attempt(folder, run_dir, plan, len(attempts), kill, whole))
        if not attempts[-1].struck:
            break
    faults = [f"attempt {number}: {fault}" for number, one in enumerate(attempts, 1) for fault in one.faults]
    parameter_error = loss_error = math.inf
    if not attempts[-1].faults:
        parameter_error = relative_error(read(newest(run_dir)), whole.parameters)
        loss_error = _compare_metrics(_lines(run_dir, 0), whole, faults)
        _compare_windows(run_dir, attempts, whole, faults)
        for name, error in (("parameters", parameter_error), ("losses", loss_error)):
            if not error <= BOUND:
                faults.append(f"the {name} differ by {error:.1e}")
        state = json.loads((run_dir / "status.json").read_text())["state"]
        if state != "completed":
            faults.append(f"the status is {state}")
        if newest(run_dir).name != f"step_{STEPS:08d}":
            faults.append(f"latest is {newest(run_dir).name}")
    seconds = time.perf_counter() - began
    return Outcome(plan, attempts, parameter_error, loss_error, _debris(run_dir), seconds, faults)


def _attempt(folder: Path, run_dir: Path, plan: Plan, number: int, kill: Kill | None, whole: Whole | None) -> Attempt:
    """Give the command, kill what it started if that is wanted, and look at what it went on from and left."""
    attempt = Attempt(max(complete(run_dir), default=0))
    seen = (run_dir / "metrics.jsonl").stat().st_size if (run_dir / "metrics.jsonl").exists() else 0
    (folder / "notes").mkdir(exist_ok=True)
    words = [*COMMAND.split(), f"zero=stage{plan.stage}", f"data.num_workers={plan.workers}"]
    environment = {
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # nothing is compiled, and its import takes as long as the run
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
        "NOTES": str(_notes(run_dir, number)),
        MARK: str(run_dir),
    }
    printed, told = (folder / "notes" / f"{run_dir.name}.{number}.{name}" for name in ("out", "err"))
    with printed.open("w") as out, told.open("w") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "launcher", *words, f"hydra.run.dir={run_dir}"],
            cwd=folder,
            env=environment,
            stdout=out,
            stderr=err,
        )
    began = time.time()
    try:
        if kill is not None:
            assert whole is not None
            _strike(attempt, process, run_dir, kill, whole, began)
        _end(attempt, process, run_dir)
    finally:
        for orphan in _alive(run_dir):
            orphan.kill()
        process.kill()
        process.wait()
    _judge(attempt, process.returncode, run_dir, told.read_text(), seen)
    return attempt


def _strike(
    attempt: Attempt, process: "subprocess.Popen[bytes]", run_dir: Path, kill: Kill, whole: Whole, began: float
) -> None:
    """Wait for the moment and kill, unless the run has ended before."""
    moment = kill.moment
    if attempt.start == STEPS and moment in ("stepping", "saving"):  # there are none to come
        moment = "starting"
    step = attempt.start + 1 + int(kill.where * (STEPS - attempt.start))
    waits: dict[str, tuple[Callable[[], object], float]] = {
        "preparing": (lambda: _changed(run_dir / "lock", began), PREPARES_S),
        "starting": (lambda: True, whole.starts_s),
        "stepping": (lambda: _last_step(run_dir) >= min(step, STEPS - 1), whole.step_s),
        "saving": (lambda: any(_number(path) >= step for path in _unfinished(run_dir, began)), whole.save_s),
    }
    is_there, lasts_s = waits[moment]
    while not is_there():
        if process.poll() is not None or time.time() - began > HANGS_S:
            return
        time.sleep(0.001)
    time.sleep(kill.within * lasts_s)
    if process.poll() is not None:
        return
    victims, name = _victims(process, kill)
    attempt.in_save = bool(_unfinished(run_dir, began))
    for victim in victims:
        try:
            victim.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    attempt.struck = f"{name} {'in a save' if attempt.in_save else moment} after step {_last_step(run_dir)}"


def _victims(process: "subprocess.Popen[bytes]", kill: Kill) -> tuple[list[Any], str]:
    """A rank is none any more when it is done: the runner dies in its place."""
    runner = psutil.Process(process.pid)
    if kill.victim == "all":
        return [runner, *runner.children(recursive=True)], "all"
    if kill.victim == "rank":
        for child in runner.children():
            try:
                if child.status() != psutil.STATUS_ZOMBIE and child.environ().get("RANK") == str(kill.rank):
                    return [child], f"rank {kill.rank}"
            except psutil.Error:
                continue
    return [runner], "runner"


def _end(attempt: Attempt, process: "subprocess.Popen[bytes]", run_dir: Path) -> None:
    """Wait for the end of the command, and of all that it started."""
    struck = time.monotonic()
    try:
        process.wait(ENDS_S if attempt.struck else HANGS_S)
    except subprocess.TimeoutExpired:
        attempt.faults.append("the launcher did not end")
    deadline = max(struck + ENDS_S, time.monotonic() + 1.0)
    while (left := _alive(run_dir)) and time.monotonic() < deadline:
        time.sleep(0.05)
    attempt.ended_s = time.monotonic() - struck
    if left:
        attempt.faults.append(f"{len(left)} processes were left")


def _judge(attempt: Attempt, code: int, run_dir: Path, told: str, seen: int) -> None:
    """Whether the attempt went on from where it had to, ended as it had to, and left nothing that only looks whole."""
    victim = re.match(r"rank (\d+)", attempt.struck)
    if not attempt.struck and code != 0:
        attempt.faults.append(f"exit code {code}: {told.strip()[-500:]}")
    elif victim and not (code == 0 or (code == 1 and told.startswith(f"rank {victim[1]} failed: killed by SIGKILL"))):
        attempt.faults.append(f"after the death of rank {victim[1]} exit code {code}: {told.strip()[-500:]}")
    lines = _lines(run_dir, seen)
    origin = next((line["step"] for line in lines if line["kind"] == "resume"), None)
    if origin not in (None, attempt.start):
        attempt.faults.append(f"it went on from step {origin}, and complete was {attempt.start}")
    steps = [line["step"] for line in lines if line["kind"] == "train"]
    if steps and origin is None and attempt.start > 0:
        attempt.faults.append("it did not say what it went on from")
    if steps != list(range(attempt.start + 1, attempt.start + 1 + len(steps))):
        attempt.faults.append(f"its steps were {steps}, and complete was {attempt.start}")
    looks = {_number(path) for path in run_dir.glob("checkpoints/step_*") if path.suffix != ".partial"}
    if looks != complete(run_dir):
        attempt.faults.append(f"steps {sorted(looks - complete(run_dir))} look complete and are not")


def _compare_metrics(lines: list[dict[str, Any]], whole: Whole, faults: list[str]) -> float:
    """The largest relative error of a loss; every line of a step counts, not only its last."""
    largest = 0.0
    steps = [line for line in lines if line["kind"] == "train"]
    for line in steps:
        expected = whole.lines[line["step"]]
        different = [name for name in SAME if line[name] != expected[name]]
        faults += [f"step {line['step']}: {name} is {line[name]} instead of {expected[name]}" for name in different]
        largest = max(largest, abs(line["loss"] - expected["loss"]) / expected["loss"])
    missing = set(whole.lines) - {line["step"] for line in steps}
    faults += [f"steps {sorted(missing)} are not in the metrics"] * bool(missing)
    return largest


def _compare_windows(run_dir: Path, attempts: list[Attempt], whole: Whole, faults: list[str]) -> None:
    """Every pass of every attempt saw what it had to; and what the run is made of was seen whole."""
    for number, attempt in enumerate(attempts):
        found = _windows(run_dir, number, attempt.start)
        for (rank, step), windows in found.items():
            if whole.windows[rank, step][: len(windows)] != windows:
                faults.append(f"attempt {number + 1}: rank {rank} saw other windows in step {step}")
        following = attempts[number + 1].start if number + 1 < len(attempts) else STEPS
        for rank in range(RANKS):
            for step in range(attempt.start + 1, following + 1):
                if found.get((rank, step)) != whole.windows[rank, step]:
                    faults.append(f"attempt {number + 1}: rank {rank} did not see all windows of step {step}")


def _windows(run_dir: Path, number: int, start: int) -> dict[tuple[int, int], list[int]]:
    """By rank and step the checksums of the windows that the model of an attempt was given."""
    found: dict[tuple[int, int], list[int]] = {}
    for rank in range(RANKS):
        notes = _notes(run_dir, number).with_name(f"{_notes(run_dir, number).name}.{rank}")
        passes = notes.read_text().splitlines() if notes.exists() else []
        for place, windows in enumerate(passes):
            found.setdefault((rank, start + 1 + place // PASSES), []).extend(json.loads(windows))
    return found


def _notes(run_dir: Path, number: int) -> Path:
    return run_dir.parent / "notes" / f"{run_dir.name}.{number}"


def complete(run_dir: Path) -> set[int]:
    """The steps of the checkpoints whose manifest and files are all there, byte for byte."""
    return {_number(path) for path in run_dir.glob("checkpoints/step_*") if path.suffix == "" and _is_complete(path)}


def _is_complete(folder: Path) -> bool:
    try:
        files = json.loads((folder / "checkpoint.json").read_text())["files"]
        return all(hashlib.sha256((folder / name).read_bytes()).hexdigest() == files[name]["sha256"] for name in files)
    except (FileNotFoundError, ValueError):
        return False


def newest(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / (run_dir / "checkpoints" / "latest").read_text().strip()


def read(folder: Path) -> Arrays:
    """The weights of a checkpoint by name, with safetensors alone."""
    weights = {}
    for name, entry in json.loads((folder / "checkpoint.json").read_text())["parameters"].items():
        flat = np.full(math.prod(entry["shape"]), np.nan, dtype=np.float32)
        for rank, start, stop in entry["kinds"]["weight"]:
            with safe_open(folder / f"rank_{rank:05d}.safetensors", framework="np") as file:
                flat[start:stop] = file.get_tensor(f"weight:{name}")
        weights[name] = flat.reshape(entry["shape"])
    return weights


def relative_error(ours: Arrays, expected: Arrays) -> float:
    """|a - b| / |b| over all parameters as one vector."""
    assert ours.keys() == expected.keys()
    a, b = (
        np.concatenate([found[name].ravel().astype(np.float64) for name in sorted(found)]) for found in (ours, expected)
    )
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def _lines(run_dir: Path, offset: int) -> list[dict[str, Any]]:
    if not (run_dir / "metrics.jsonl").exists():
        return []
    # A line may be half there: it is being written, or was when its rank was killed.
    lines = map(parse, (run_dir / "metrics.jsonl").read_bytes()[offset:].splitlines())
    return [line for line in lines if line is not None]


def _last_step(run_dir: Path) -> int:
    return max((line["step"] for line in _lines(run_dir, 0) if line["kind"] == "train"), default=0)


def _changed(path: Path, since: float) -> bool:
    return path.exists() and path.stat().st_mtime >= since


def _unfinished(run_dir: Path, since: float) -> list[Path]:
    """The checkpoints that are being written; not what a kill before has left."""
    return list(_made_since(run_dir.glob("checkpoints/*.partial"), since))


def _made_since(paths: Iterator[Path], since: float) -> Iterator[Path]:
    for path in paths:
        try:
            if path.stat().st_ctime >= since:
                yield path
        except FileNotFoundError:  # it has become complete
            continue


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def _debris(run_dir: Path) -> list[str]:
    found = [*run_dir.glob("checkpoints/*"), *run_dir.glob("checkpoints/.*"), *run_dir.glob(".*")]
    return sorted(path.name for path in found if path.name.startswith(".") or path.suffix == ".partial")


def _alive(run_dir: Path) -> list[Any]:
    found = []
    for process in psutil.process_iter(["environ", "status"]):
        told = process.info["environ"] or {}
        if told.get(MARK) == str(run_dir) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def describe(outcome: Outcome) -> str:
    plan, attempts = outcome.plan, outcome.attempts
    kills = "; ".join(one.struck for one in attempts if one.struck) or "none came in time"
    return (
        f"{plan.number:4}  {plan.stage:5}  {plan.workers:7}  {len(attempts):8}  {outcome.parameter_error:10.1e}  "
        f"{outcome.loss_error:7.1e}  {max(one.ended_s for one in attempts[:-1] or attempts):7.1f}  "
        f"{len(outcome.debris):6}  {outcome.seconds:5.0f}  {kills}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="a new folder in which everything is kept")
    options = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with tempfile.TemporaryDirectory() as name:
        folder = options.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        prepare(folder)
        plans = [draw(options.seed, number) for number in range(options.first, options.first + options.runs)]
        wholes = {stage: undisturbed(folder, stage) for stage in sorted({plan.stage for plan in plans})}
        print(" run  stage  workers  attempts  parameters   losses  ends in  debris      s  killed")
        outcomes = []
        for plan in plans:
            outcomes.append(torment(folder, plan, wholes[plan.stage]))
            print(describe(outcomes[-1]))
            for fault in outcomes[-1].faults:
                print(f"      FAULT: {fault}")
    kills = [one for outcome in outcomes for one in outcome.attempts if one.struck]
    failed = [outcome.plan.number for outcome in outcomes if outcome.faults]
    print(
        f"{len(outcomes)} runs, {len(kills)} kills, {sum(kill.in_save for kill in kills)} of them in a save; "
        f"failed: {', '.join(map(str, failed)) or 'none'}; largest error: "
        f"{max(outcome.parameter_error for outcome in outcomes):.1e} of the parameters, "
        f"{max(outcome.loss_error for outcome in outcomes):.1e} of a loss"
    )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
