"""Sweeps here: all points are checked before anything is written, and one that fails does not stop the others."""

import json
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.sweeper import Sweeper

from launcher import decode, local, slurm
from launcher.__main__ import main
from launcher.errors import RequestError, RunError
from launcher.ledger import Point

SWEEP = [
    "-m",
    "+experiment=dna_8k",
    "data=lambda",
    "data.sequence_length=1024",
    "batch.train_batch_size=8",
    "train.max_steps=2",
    "lr_schedule.warmup_steps=0",
    "hydra.sweep.dir=sweep",
]

WORKER = """
import json, re, sys, time
from pathlib import Path
run_dir = Path(sys.argv[1])
seed = int(re.search("seed: (.*)", (run_dir / "config.yaml").read_text())[1])
if seed == 13:
    sys.exit("an unlucky number")
if seed == 99:
    (run_dir / "waits").touch()
    time.sleep(600)
line = {"kind": "eval", "step": 2, "eval_loss": seed / 10, "eval_bits_per_base": None}
(run_dir / "metrics.jsonl").write_text(json.dumps(line) + "\\n")
"""
"""A rank whose evaluation is a tenth of the seed, that fails at 13 and waits at 99."""

Output = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setattr(local, "WORKER", (sys.executable, "-S", str(tmp_path / "worker.py")))


def ledger() -> dict[int, dict[str, Any]]:
    """The last line of each point."""
    lines = [json.loads(line) for line in Path("sweep/sweep.jsonl").read_text().splitlines()]
    return {line["point"]: line for line in lines}


def states() -> list[str]:
    return [line["state"] for _, line in sorted(ledger().items())]


def refused(capsys: Output, *argv: str) -> list[str]:
    """The lines of a sweep that is refused before anything is written."""
    before = sorted(Path.cwd().rglob("*"))
    assert main([*SWEEP, *argv]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert sorted(Path.cwd().rglob("*")) == before
    return output.err.splitlines()


def test_every_point_has_its_directory_and_its_line_in_the_ledger(capsys: Output) -> None:
    assert main([*SWEEP, "seed=1,2", "batch.gradient_accumulation_steps=4,8"]) == 0
    folder = Path("sweep").absolute()
    assert sorted(path.name for path in folder.iterdir()) == ["0000", "0001", "0002", "0003", "sweep.jsonl"]
    configs = [decode.load(folder / f"{number:04d}" / "config.yaml") for number in range(4)]
    assert [(config.seed, config.batch.gradient_accumulation_steps) for config in configs] == [
        (1, 4),
        (1, 8),
        (2, 4),
        (2, 8),
    ]
    lines = ledger()
    assert states() == ["completed"] * 4
    assert [lines[number]["eval_loss"] for number in range(4)] == [0.1, 0.1, 0.2, 0.2]
    assert lines[2]["run_dir"] == str(folder / "0002")
    assert lines[2]["overrides"][-2:] == ["seed=2", "batch.gradient_accumulation_steps=4"]
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"sweep directory {folder}"
    assert printed[-1] == f"all 4 points are done; ledger: {folder}/sweep.jsonl"


def test_the_ledger_tells_each_point_from_before_it_starts() -> None:
    assert main([*SWEEP, "seed=1,2"]) == 0
    lines = [json.loads(line) for line in Path("sweep/sweep.jsonl").read_text().splitlines()]
    assert [(line["point"], line["state"]) for line in lines] == [
        (0, "pending"),
        (1, "pending"),
        (0, "running"),
        (0, "completed"),
        (1, "running"),
        (1, "completed"),
    ]


def test_one_impossible_point_refuses_the_sweep_and_every_fault_is_told(capsys: Output) -> None:
    lines = refused(
        capsys, "batch.train_micro_batch_size_per_gpu=1,3", "batch.gradient_accumulation_steps=null", "seed=1,x"
    )
    rest = SWEEP[1:-1]
    assert lines == [
        f"point {number} ({' '.join([*rest, *overrides.split()])}): {fault}"
        for number, overrides, fault in [
            (
                1,
                "batch.train_micro_batch_size_per_gpu=1 batch.gradient_accumulation_steps=null seed=x",
                "seed=x: it must be an integer",
            ),
            (
                2,
                "batch.train_micro_batch_size_per_gpu=3 batch.gradient_accumulation_steps=null seed=1",
                "batch.train_batch_size=8 cannot be cut into micro-batches of 3 over 1 rank: it must be a multiple of "
                "3; nearest: 6, 9",
            ),
            (
                3,
                "batch.train_micro_batch_size_per_gpu=3 batch.gradient_accumulation_steps=null seed=x",
                "seed=x: it must be an integer",
            ),
            (
                3,
                "batch.train_micro_batch_size_per_gpu=3 batch.gradient_accumulation_steps=null seed=x",
                "batch.train_batch_size=8 cannot be cut into micro-batches of 3 over 1 rank: it must be a multiple of "
                "3; nearest: 6, 9",
            ),
        ]
    ]


def test_a_point_that_hydra_cannot_compose_is_named_too(capsys: Output) -> None:
    (line,) = refused(capsys, "zero=stage1,stage9")
    assert line == (
        f"point 1 ({' '.join([*SWEEP[1:-1], 'zero=stage9'])}): "
        "zero=stage9: there is no such option; nearest: stage3, stage2, stage1"
    )


def test_impossible_points_can_be_left_out(capsys: Output) -> None:
    assert main([*SWEEP, "seed=1,x,2", "sweep.skip_invalid=true"]) == 0
    assert states() == ["completed", "invalid", "completed"]
    assert ledger()[1]["reason"] == "seed=x: it must be an integer"
    assert ledger()[1]["run_dir"] is None
    error = capsys.readouterr().err
    assert error.startswith("left out: point 1 (")
    assert error.endswith("seed=x: it must be an integer\n")


def test_a_sweep_of_impossible_points_only_is_refused(capsys: Output) -> None:
    assert len(refused(capsys, "seed=x,y", "sweep.skip_invalid=true")) == 2


def test_a_point_that_fails_while_running_does_not_stop_the_others(capsys: Output) -> None:
    assert main([*SWEEP, "seed=1,13,2"]) == 1
    assert states() == ["completed", "failed", "completed"]
    log = Path("sweep/0001/logs/rank_00000.log").absolute()
    reason = f"rank 0 failed: exit code 1: an unlucky number (log: {log})"
    assert ledger()[1]["reason"] == reason
    name = f"point 1 ({' '.join([*SWEEP[1:-1], 'seed=13'])})"
    assert capsys.readouterr().err.splitlines() == [
        f"{name} failed: {reason}",
        f"1 of 3 points failed: {name}; ledger: {Path('sweep').absolute()}/sweep.jsonl",
    ]


def test_the_plan_of_every_point_is_shown_and_nothing_is_written(capsys: Output) -> None:
    assert main([*SWEEP, "mode=plan", "batch.gradient_accumulation_steps=4,8"]) == 0
    output = capsys.readouterr().out
    for number, steps in enumerate((4, 8)):
        words = " ".join([*SWEEP[1:-1], "mode=plan", f"batch.gradient_accumulation_steps={steps}"])
        assert f"point {number} ({words})\n" in output
        assert f"{steps} accumulation steps" in output
    assert list(Path.cwd().iterdir()) == []


def test_a_sweep_goes_on_in_its_directory_and_in_no_other_sweeps(capsys: Output) -> None:
    assert main([*SWEEP, "seed=1,13"]) == 1
    capsys.readouterr()
    assert main([*SWEEP, "seed=1,13,3"]) == 1
    assert states() == ["completed", "failed", "completed"]
    capsys.readouterr()
    assert main([*SWEEP, "seed=2"]) == 2
    assert capsys.readouterr().err.startswith("point 0 (")
    assert states() == ["completed", "failed", "completed"]


def test_what_is_done_is_not_put_aside_where_slurm_refuses_to_do_it_again(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([*SWEEP, "seed=1,2"]) == 0
    (Path("sweep/0000/checkpoints")).mkdir()
    capsys.readouterr()

    def refuse(script: str, folder: Path) -> None:
        raise RequestError("cluster=slurm: sbatch refuses: no")

    monkeypatch.setattr(slurm, "check", refuse)
    monkeypatch.setattr(Point, "is_done", property(lambda point: point.job.origin is not None))
    assert refused(capsys, "seed=1,2", "cluster=slurm", "sweep.rerun_done=true") == [
        "cluster=slurm: sbatch refuses: no"
    ]


def test_a_sweep_whose_disk_is_full_ends_in_one_line(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("sweep").mkdir()
    Path("sweep/sweep.jsonl").symlink_to("/dev/full")
    assert main([*SWEEP, "seed=1,2"]) == 1
    said = f"the sweep in {Path('sweep').absolute()} cannot go on: [Errno 28] No space left on device"
    assert capsys.readouterr().err.splitlines() == [said]


def test_a_sweep_directory_that_cannot_be_made_is_refused(capsys: Output) -> None:
    Path("sweep").write_text("x")
    file = Path("sweep").absolute()
    (line,) = refused(capsys, "seed=1")
    assert line.endswith(f"hydra.run.dir={file}/0000: {file} is not a directory; give another one")


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            ["seed=1,2", "hydra.sweep.subdir=same"],
            "hydra.sweep.subdir: several points share {here}/sweep/same; leave the key out",
        ),
        (["mode=train,plan"], "mode=plan,train: all points of a sweep have one mode"),
        (
            ["seed=1,2", "hydra/launcher=basic"],
            "hydra/launcher=basic: sweeps run through this program's own launcher; leave the choice out",
        ),
    ],
)
def test_what_cannot_be_a_sweep_is_refused(capsys: Output, argv: list[str], line: str) -> None:
    assert refused(capsys, *argv) == [line.format(here=Path.cwd())]


DRIVER = """
import sys
from launcher import local
from launcher.__main__ import main
from launcher.errors import RequestError, RunError
local.WORKER = (sys.executable, "-S", sys.argv[1])
sys.exit(main(sys.argv[2:]))
"""


def stopped(number: signal.Signals, sign: str, driver: str, *argv: str) -> int:
    """The exit code of a sweep that is sent a signal once the file ``sign`` is there."""
    process = subprocess.Popen([sys.executable, "-c", driver, *argv], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not Path(sign).exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    _, error = process.communicate(timeout=15)
    assert error.startswith(f"stopped by {number.name}")
    return process.returncode


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_sweep_and_the_ledger_says_so(tmp_path: Path, number: signal.Signals) -> None:
    argv = [str(tmp_path / "worker.py"), *SWEEP, "seed=1,99,2"]
    assert stopped(number, "sweep/0001/waits", DRIVER, *argv) == 75
    assert states() == ["completed", "preempted", "stopped"]
    reason = f"stopped by {number.name} before training had begun"
    assert [ledger()[number]["reason"] for number in (1, 2)] == [reason, f"not started: {reason}"]
    assert not Path("sweep/0002").exists()


BETWEEN = """
import sys, time
from pathlib import Path
from launcher import local, progress
from launcher.__main__ import main
from launcher.errors import RequestError, RunError
def wait(run_dir):
    Path("waits").touch()
    time.sleep(600)
progress.print_summary = wait
local.WORKER = (sys.executable, "-S", sys.argv[1])
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 1), (signal.SIGHUP, 1)])
def test_a_signal_between_two_points_is_in_the_ledger_too(tmp_path: Path, number: signal.Signals, code: int) -> None:
    assert stopped(number, "waits", BETWEEN, str(tmp_path / "worker.py"), *SWEEP, "seed=1,2") == code
    assert states() == ["stopped", "stopped"]


class Scripted(Sweeper):
    """Hands its points to whatever launcher Hydra gives it."""

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(hydra_context, task_function, config)


def offer(monkeypatch: pytest.MonkeyPatch, sweeper: type[Scripted], **settings: Any) -> None:
    """Make it a choice of ``hydra/sweeper`` by its name in lower case, as if it were installed."""
    name = sweeper.__name__.lower()
    module = types.ModuleType(f"hydra_plugins.{name}")
    monkeypatch.setattr(sweeper, "__module__", module.__name__)
    setattr(module, sweeper.__name__, sweeper)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    Plugins.instance().register(sweeper)
    node = {"_target_": f"{module.__name__}.{sweeper.__name__}", **settings}
    ConfigStore.instance().store(group="hydra/sweeper", name=name, node=node, provider="test")


class Halving(Scripted):
    """A sweeper that chooses its points while it runs: it halves the seed until the value does not fall."""

    values: ClassVar[list[float]] = []

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def sweep(self, arguments: list[str]) -> None:
        assert self.launcher is not None
        Halving.values = []
        seed = self.seed
        for number in range(3):
            batch = [[*arguments, f"seed={seed}"]]
            (result,) = self.launcher.launch(batch, initial_job_idx=number)
            Halving.values.append(result.return_value)
            seed //= 2


@pytest.fixture
def _halving(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, Halving, seed=8)


@pytest.mark.usefixtures("_halving")
def test_any_sweeper_gets_the_last_evaluation_as_the_value_of_a_point() -> None:
    assert main([*SWEEP, "hydra/sweeper=halving"]) == 0
    assert Halving.values == [0.8, 0.4, 0.2]
    assert states() == ["completed"] * 3
    assert [ledger()[number]["overrides"][-1] for number in range(3)] == ["seed=8", "seed=4", "seed=2"]


@pytest.mark.usefixtures("_halving")
@pytest.mark.parametrize(
    ("seed", "code", "line"),
    [
        ("13", 1, "rank 0 failed: exit code 1: an unlucky number (log: {log})"),
        ("-5", 2, "seed=-5: it must lie in [0, 9223372036854775807]"),
    ],
)
def test_a_failure_under_another_sweeper_is_one_line(capsys: Output, seed: str, code: int, line: str) -> None:
    assert main([*SWEEP, "hydra/sweeper=halving", f"hydra.sweeper.seed={seed}"]) == code
    log = Path("sweep/0000/logs/rank_00000.log").absolute()
    assert capsys.readouterr().err.splitlines()[-1] == line.format(log=log)


@pytest.mark.usefixtures("_halving")
def test_points_that_are_not_known_yet_have_no_plan(capsys: Output) -> None:
    assert refused(capsys, "hydra/sweeper=halving", "mode=plan") == [
        "mode=plan: hydra/sweeper=halving chooses its points while it runs, so that there is no plan of them; "
        "leave one of the two out"
    ]


class Batches(Scripted):
    """Two batches of three points; what Hydra's own tests of launchers look at is kept."""

    returns: ClassVar[list[list[JobReturn]]] = []

    def sweep(self, arguments: list[str]) -> None:
        assert self.launcher is not None
        Batches.returns = []
        seeds = [[1, 2, 3], [4, 13, -5]]
        for number, batch in enumerate(seeds):
            points = [[*arguments, f"seed={seed}", "zero=stage2"] for seed in batch]
            Batches.returns.append(list(self.launcher.launch(points, initial_job_idx=3 * number)))


@pytest.fixture
def _batches(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, Batches)


@pytest.mark.usefixtures("_batches")
def test_what_hydras_own_tests_ask_of_a_launcher_holds(capsys: Output) -> None:
    """As hydra.test_utils.launcher_common_tests has it: order, fields, batches, directories and status."""
    assert main([*SWEEP, "hydra/sweeper=batches"]) == 0
    capsys.readouterr()
    assert [len(batch) for batch in Batches.returns] == [3, 3]
    flat = [result for batch in Batches.returns for result in batch]
    for number, (result, seed) in enumerate(zip(flat, (1, 2, 3, 4, 13, -5), strict=True)):
        assert result.overrides is not None
        assert list(result.overrides)[-2:] == [f"seed={seed}", "zero=stage2"]
        assert result.task_name == "okazaki"
        assert result.cfg is not None
        assert (result.cfg.seed, result.cfg.zero.stage) == (seed, 2)
        assert "hydra" not in result.cfg
        assert result.hydra_cfg is not None
        assert result.hydra_cfg.hydra.job.num == number
        assert list(result.hydra_cfg.hydra.overrides.task)[-2:] == [f"seed={seed}", "zero=stage2"]
        assert result.working_dir == str(Path(f"sweep/{number:04d}").absolute())
    assert [result.status for result in flat] == [JobStatus.COMPLETED] * 4 + [JobStatus.FAILED] * 2
    assert [result.return_value for result in flat[:4]] == [0.1, 0.2, 0.3, 0.4]
    with pytest.raises(RunError, match="an unlucky number"):
        _ = flat[4].return_value
    with pytest.raises(RequestError, match="seed=-5"):
        _ = flat[5].return_value
    # Every directory holds what its run was made with.
    for number, seed in enumerate((1, 2, 3, 4, 13)):
        assert f"seed: {seed}\n" in Path(f"sweep/{number:04d}/config.yaml").read_text()
    assert not Path("sweep/0005").exists()


def test_the_launcher_plugin_is_found_by_hydra() -> None:
    names = {f"{plugin.__module__}.{plugin.__name__}" for plugin in Plugins.instance().discover()}
    assert "hydra_plugins.okazaki.launcher.OkazakiLauncher" in names
