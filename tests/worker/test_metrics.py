"""What a real run on two ranks tells of itself: metrics.jsonl, Weights & Biases, TensorBoard."""

import itertools
import json
import logging
import math
import os
import random
import struct
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch
import yaml
from torch import nn

from launcher.errors import RunError
from launcher.ranks import Rank
from launcher.schema import Accumulation, Batch, Call, Config, Data, Logging, LrSchedule, SoftMask, Tail, Train
from launcher.steps import Steps
from tests.ranks import on_ranks
from tests.worker import plain, runs

pytestmark = pytest.mark.ranks

LENGTH, BATCH, EPOCHS = 40, 4, 2

FIELDS = """
    kind attempt step loss bits_per_base lr grad_norm grad_norm_clipped tokens padded_tokens tokens_seen sequences_seen
    gradient_accumulation_steps train_batch_size micro_batch_size tokens_per_s step_time_s data_time_s peak_memory_bytes
    mfu skipped noise_scale time
"""
"""Of a line of metrics.jsonl, as users are promised."""

LR_FACTORS = [0.5, 1.0, 0.965747, 0.868198, 0.722208, 0.55, 0.377792, 0.231802, 0.134253, 0.1]
"""Two steps of warm-up, then 0.1 + 0.9 (1 + cos(pi k / 8)) / 2 for k = 1 .. 8."""


class NotANumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(17))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.scale.expand(*tokens.shape, 17) * math.nan


class Wandb(types.ModuleType):
    """The library of a tracker that raises in one place; its run is itself."""

    def __init__(self, place: str) -> None:
        super().__init__("wandb")
        self.place = place
        self.summary: dict[str, Any] = {}

    def Settings(self, **_: Any) -> None:  # noqa: N802
        """Anything goes."""

    def save(self, *_: Any, **__: Any) -> None:
        """Anything goes."""

    def init(self, **_: Any) -> "Wandb":
        return self.reach("start")

    def log(self, *_: Any, **__: Any) -> "Wandb":
        return self.reach("log")

    def finish(self) -> "Wandb":
        return self.reach("finish")

    def reach(self, place: str) -> "Wandb":
        if place == self.place:
            raise ConnectionError("no route to the tracker")
        return self


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


BROKEN = {"start": "start", "log": "log", "finish": "finish", "missing": "start", "wrong_mode": "start"}
"""Runs whose Weights & Biases does not work, and what it then cannot do."""


def train_all(rank: Rank, configs: dict[str, Config], folder: Path) -> dict[str, list[str]]:
    """Each run in turn, with the library that its name asks for; what was logged in each."""
    heard = {}
    for name, config in configs.items():
        handler = Heard()
        logging.getLogger("launcher").addHandler(handler)
        with pytest.MonkeyPatch.context() as patch:
            if name == "missing":
                patch.setitem(sys.modules, "wandb", None)
            elif name == "wrong_mode":
                patch.setenv("WANDB_MODE", "sideways")
            elif name in BROKEN:
                patch.setitem(sys.modules, "wandb", Wandb(name))
            # A model whose losses are no numbers ends its run.
            with pytest.raises(RunError) if name == "quiet" else nullcontext():
                runs.train(rank, config, folder / name)
        logging.getLogger("launcher").removeHandler(handler)
        heard[name] = handler.lines
    return heard


@dataclass
class Runs:
    folder: Path
    config: Config
    """Of the run named whole."""
    genome: dict[str, str]
    heard: dict[str, list[str]]

    def lines(self, name: str, kind: str | None = None) -> list[dict[str, Any]]:
        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is not JSON")

        text = (self.folder / name / "metrics.jsonl").read_text()
        lines = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
        return [line for line in lines if kind in (None, line["kind"])]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    draw = random.Random(1)
    genome = {
        name: "".join(draw.choices("ACGTacgtN", weights=[4, 4, 4, 4, 1, 1, 1, 1, 1], k=length))
        for name, length in (("long", 500), ("short", 130), ("held_out", 210))
    }
    fasta = folder / "genome.fa"
    fasta.write_text("".join(f">{name}\n{bases}\n" for name, bases in genome.items()))
    quiet = replace(
        runs.BASE,
        model=Call("tests.worker.plain.Net"),
        data=Data(fasta=str(fasta), sequence_length=LENGTH, soft_mask=SoftMask.IGNORE, validation=["held_out"]),
        batch=Batch(train_batch_size=BATCH),
        cluster=replace(runs.BASE.cluster, ranks_per_node=2),
        lr_schedule=LrSchedule(warmup_steps=2),
        train=Train(max_steps=2),
    )
    whole = replace(
        quiet,
        accumulation=Accumulation(tail=Tail.FLUSH),
        train=Train(epochs=EPOCHS, eval_every=4),
        logging=Logging(wandb=True, tensorboard=True, project="phages", tags=["a", "b"]),
    )
    configs = {
        "whole": whole,
        "quiet": replace(
            quiet, model=Call("tests.worker.test_metrics.NotANumber"), train=replace(quiet.train, eval_every=1)
        ),
        **{name: replace(quiet, logging=Logging(wandb=True)) for name in BROKEN},
    }
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            patch.delenv(name)
        patch.setenv("HOME", str(home))
        patch.delenv("NETRC", raising=False)
        for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
            patch.setenv(name, str(home))
        heard = on_ranks(2, train_all, configs, folder)[0]
    return Runs(folder, whole, genome, heard)


def test_every_line_has_the_fields_that_users_are_promised(trained: Runs) -> None:
    for line in [*trained.lines("whole", "train"), *trained.lines("quiet", "train")]:
        assert set(line) == set(FIELDS.split())
    evaluation = {"kind", "attempt", "step", "eval_loss", "eval_bits_per_base", "tokens", "padded_tokens", "time"}
    for line in trained.lines("whole", "eval"):
        assert evaluation <= set(line) <= {*FIELDS.split(), *evaluation}


def test_there_is_a_line_for_every_step_and_every_evaluation_in_order(trained: Runs) -> None:
    order = [(line["kind"], line["step"]) for line in trained.lines("whole")]
    steps = [("train", step) for step in range(1, 11)]
    last = [("eval", 10), ("checkpoint", 10)]
    assert order == [*steps[:4], ("eval", 4), *steps[4:8], ("eval", 8), *steps[8:], *last]
    assert {line["attempt"] for line in trained.lines("whole")} == {1}


def test_sequences_and_valid_targets_are_those_of_the_global_batch(trained: Runs) -> None:
    lines = trained.lines("whole", "train")
    windows = plain.windows([trained.genome["long"], trained.genome["short"]], LENGTH)
    assert len(windows) == 13 + 4
    steps = Steps(len(windows), BATCH, Tail.FLUSH, 10, trained.config.seed)
    batches = [[windows[index] for index in steps.sequences(step)] for step in range(10)]
    assert [line["train_batch_size"] for line in lines] == [4, 4, 4, 4, 1] * EPOCHS
    assert [line["sequences_seen"] for line in lines] == [4, 8, 12, 16, 17, 21, 25, 29, 33, 34]
    assert [line["tokens"] for line in lines] == [plain.count_targets(batch, "ACGT") for batch in batches]
    assert [line["padded_tokens"] for line in lines] == [
        sum(LENGTH - len(window) for window in batch) for batch in batches
    ]
    assert [line["tokens_seen"] for line in lines] == list(itertools.accumulate(line["tokens"] for line in lines))
    assert lines[-1]["tokens_seen"] == EPOCHS * plain.count_targets(windows, "ACGT")
    assert {line["gradient_accumulation_steps"] for line in lines} == {2}
    assert {line["micro_batch_size"] for line in lines} == {1}


def test_an_evaluation_counts_every_target_of_the_validation_split_once(trained: Runs) -> None:
    windows = plain.windows([trained.genome["held_out"]], LENGTH)
    for line in trained.lines("whole", "eval"):
        assert line["tokens"] == plain.count_targets(windows, "ACGT")
        assert line["padded_tokens"] == 30  # 210 bases are five windows of 40, and one of 10
        assert line["eval_bits_per_base"] == pytest.approx(line["eval_loss"] / math.log(2))


def test_the_numbers_of_a_step_are_what_they_are_called(trained: Runs) -> None:
    lines = trained.lines("whole", "train")
    assert [line["lr"] for line in lines] == pytest.approx([1e-3 * factor for factor in LR_FACTORS], rel=1e-5)
    for line in lines:
        assert 0 < line["loss"] < 2 * math.log(17)
        assert line["bits_per_base"] == pytest.approx(line["loss"] / math.log(2))
        assert 0 < line["grad_norm_clipped"] <= 1.0
        assert line["grad_norm_clipped"] == pytest.approx(min(1.0, line["grad_norm"]), rel=1e-5)
        assert 0 <= line["data_time_s"] < line["step_time_s"]
        assert line["tokens_per_s"] == pytest.approx(line["tokens"] / line["step_time_s"])
        assert 10 * 2**20 < line["peak_memory_bytes"] < psutil.virtual_memory().total
        assert line["skipped"] is False
    times = [line["time"] for line in lines]
    assert times == sorted(times)


def test_numbers_that_cannot_be_known_are_null(trained: Runs) -> None:
    assert {line["mfu"] for line in trained.lines("whole", "train")} == {None}
    for line in trained.lines("quiet", "train"):
        names = ("loss", "bits_per_base", "grad_norm", "grad_norm_clipped", "noise_scale")
        assert [line[name] for name in names] == [None] * 5
        assert line["skipped"] is True
        assert line["tokens"] > 0
    evaluations = trained.lines("quiet", "eval")
    assert {(line["eval_loss"], line["eval_bits_per_base"]) for line in evaluations} == {(None, None)}


FULL = """
import json, logging, resource, signal, sys
from pathlib import Path
from launcher.worker.metrics import MetricsFile

logging.basicConfig(stream=sys.stdout, format="%(message)s")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = Path(sys.argv[1])
path.write_text('{"step": 0}\\n{"step": ')
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
metrics = MetricsFile(path)
for step in range(1, 21):
    if step == 20:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    metrics.log({"step": step})
metrics.finish({})
"""


def test_lines_that_a_full_disk_does_not_take_are_written_when_it_has_room(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    done = subprocess.run([sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout == "metrics.jsonl cannot be written (File too large); the run goes on, and tries again\n"
    first, torn, *others = path.read_text().splitlines()
    assert (first, torn) == ('{"step": 0}', '{"step": ')
    assert [json.loads(line)["step"] for line in others] == list(range(1, 21))


def test_without_logging_there_is_no_folder_for_trackers(trained: Runs) -> None:
    assert not (trained.folder / "quiet" / "tracker").exists()
    assert (trained.folder / "whole" / "tracker").is_dir()


@pytest.mark.parametrize("name", BROKEN)
def test_training_goes_on_without_a_tracker_that_fails_and_the_log_says_so_once(trained: Runs, name: str) -> None:
    assert [line["step"] for line in trained.lines(name, "train")] == [1, 2]
    told = [line for line in trained.heard[name] if line.startswith("Weights & Biases could not ")]
    assert told == [f"Weights & Biases could not {BROKEN[name]}; the run goes on without it"]


def test_trackers_that_work_are_not_complained_about(trained: Runs) -> None:
    assert [line for line in trained.heard["whole"] if "could not" in line] == []


def records(file: Path) -> Iterator[Any]:
    """What a .wandb file holds: protocol buffers in the log format of LevelDB, after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    data, place, whole = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(whole)
            whole = b""


@pytest.fixture(scope="module")
def told(trained: Runs) -> dict[str, list[Any]]:
    """The records of the one Weights & Biases run, by their type."""
    (file,) = (trained.folder / "whole" / "tracker").rglob("*.wandb")
    assert file.parent.name.startswith("offline-run-")
    found: dict[str, list[Any]] = {}
    for record in records(file):
        kind = record.WhichOneof("record_type")
        found.setdefault(kind, []).append(getattr(record, kind))
    return found


def values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def test_two_ranks_make_one_wandb_run_that_was_finished(trained: Runs, told: dict[str, list[Any]]) -> None:
    (run,) = told["run"]
    assert (run.project, run.display_name, list(run.tags)) == ("phages", "whole", ["a", "b"])
    assert len(told["exit"]) == 1


def test_wandb_is_told_the_configuration_the_deepspeed_json_and_the_plan(
    trained: Runs, told: dict[str, list[Any]]
) -> None:
    folder = trained.folder / "whole"
    config = values(told["run"][0].config.update)
    assert config["config"] == yaml.safe_load((folder / "config.yaml").read_text())
    assert config["deepspeed"] == json.loads((folder / "deepspeed.json").read_text())
    assert config["plan"] == json.loads((folder / "plan.json").read_text())


def test_the_history_of_wandb_is_metrics_jsonl_by_optimizer_step(trained: Runs, told: dict[str, list[Any]]) -> None:
    rows = {row["_step"]: row for row in (values(record.item) for record in told["history"])}
    assert list(rows) == list(range(1, 11))
    for line in [*trained.lines("whole", "train"), *trained.lines("whole", "eval")]:
        prefix = "" if line["kind"] == "train" else "eval_"
        for name in set(line) - {"kind", "attempt", "step", "time"}:
            assert rows[line["step"]].get(prefix + name.removeprefix(prefix)) == line[name], name


def test_the_summary_of_wandb_holds_the_final_values(trained: Runs, told: dict[str, list[Any]]) -> None:
    summary: dict[str, Any] = {}
    for record in told["summary"]:
        summary |= values(record.update)
    last = trained.lines("whole", "eval")[-1]
    assert summary["num_steps"] == 10
    assert summary["eval_loss"] == last["eval_loss"]
    assert summary["eval_bits_per_base"] == last["eval_bits_per_base"]
    assert summary["loss"] == trained.lines("whole", "train")[-1]["loss"]


def attached(trained: Runs, told: dict[str, list[Any]]) -> dict[str, Path]:
    """The files given to Weights & Biases, by their name there, where they lie."""
    (folder,) = (trained.folder / "whole" / "tracker").rglob("files")
    names = [file.path for record in told["files"] for file in record.files]
    return {name: folder / name for name in names if name != "requirements.txt"}


def test_the_three_files_are_attached(trained: Runs, told: dict[str, list[Any]]) -> None:
    files = attached(trained, told)
    assert sorted(Path(name).name for name in files) == ["config.yaml", "deepspeed.json", "plan.json"]
    for file in files.values():
        assert file.read_text() == (trained.folder / "whole" / file.name).read_text()


def test_wandb_cannot_write_its_own_config_yaml_over_that_of_the_run(trained: Runs, told: dict[str, list[Any]]) -> None:
    """Online, or synchronised later, Weights & Biases writes ``files/config.yaml``, through a link if it is one."""
    (folder,) = (trained.folder / "whole" / "tracker").rglob("files")
    assert not (folder / "config.yaml").is_symlink()


def test_tensorboard_is_told_what_metrics_jsonl_holds(trained: Runs) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    events = EventAccumulator(str(trained.folder / "whole" / "tracker" / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    scalars = {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    expected: dict[str, dict[int, float]] = {}
    for line in [*trained.lines("whole", "train"), *trained.lines("whole", "eval")]:
        prefix = "" if line["kind"] == "train" else "eval_"
        for name in set(line) - {"kind", "attempt", "step", "time"}:
            if line[name] is not None:
                tag = prefix + name.removeprefix(prefix)
                expected.setdefault(tag, {})[line["step"]] = float(line[name])
    assert scalars.keys() == expected.keys()
    for tag, series in expected.items():
        assert scalars[tag] == pytest.approx(series, rel=1e-6), tag
