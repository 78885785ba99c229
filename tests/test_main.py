"""The command line as a whole: what it prints, what it leaves, and its exit codes."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from launcher import compose, decode, job, local
from launcher.__main__ import main
from launcher.compose import Composer
from launcher.rundir import RunDir

LAMBDA = [
    "+experiment=dna_8k",
    "data=lambda",
    "data.sequence_length=1024",
    "train.max_steps=2",
    "lr_schedule.warmup_steps=0",
]
"""A small request that can be planned in no time."""

WORKER = """
import json, os, sys
from pathlib import Path
run_dir = Path(sys.argv[1])
if "seed: 13" in (run_dir / "config.yaml").read_text():
    sys.exit("an unlucky number")
status = json.loads((run_dir / "status.json").read_text())
summary = {"num_steps": 2, "eval_bits_per_base": 1.95}
(run_dir / "status.json").write_text(json.dumps(status | {"step": 2, "summary": summary}))
"""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that does nothing but leave a summary."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    monkeypatch.setattr(local, "WORKER", (sys.executable, "-S", str(script)))


def launch(*argv: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "launcher", *argv], check=False, capture_output=True, text=True)


def test_a_run_leaves_its_frozen_configuration_and_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LAMBDA, "batch.train_batch_size=4", "hydra.run.dir=run"]) == 0
    run_dir = RunDir(Path("run").absolute())
    config = decode.load(run_dir.config)
    composer = Composer([*LAMBDA, "batch.train_batch_size=4"])
    assert config == decode.decode(composer.single(composer.compose()).node)
    assert json.loads(run_dir.plan.read_text())["run"]["num_steps"] == 2
    assert json.loads(run_dir.deepspeed.read_text())["train_batch_size"] == 4
    status = run_dir.read_status()
    assert (status["state"], status["num_steps"], status["step"]) == ("completed", 2, 2)
    assert sorted(path.name for path in run_dir.path.iterdir()) == [
        "config.yaml", "deepspeed.json", "lock", "logs", "plan.json", "status.json",
    ]  # fmt: skip
    assert capsys.readouterr().out.splitlines() == [
        f"run directory {run_dir.path}",
        "starting",
        "num_steps                    2",
        "eval_bits_per_base           1.9500",
        f"run directory                {run_dir.path}",
    ]


def test_a_plan_is_printed_and_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LAMBDA, "mode=plan", "hydra.run.dir=X"]) == 0
    output = capsys.readouterr()
    assert "2 optimizer steps" in output.out
    assert str(Path("X").absolute()) in output.out.replace("\n", "")
    assert output.err == ""
    assert list(Path.cwd().iterdir()) == []
    assert not (tmp_path / "cache").exists()


def test_planning_leaves_torch_out() -> None:
    code = f"import sys; from launcher.__main__ import main; code = main({[*LAMBDA, 'mode=plan']!r}); "
    code += (
        "print(code, [name for name in ('torch', 'deepspeed', 'transformers', 'numpy.testing') if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert output.splitlines()[-1] == "0 []"


def test_relative_paths_are_frozen_as_absolute_ones() -> None:
    Path("g.fa").write_text(">a\n" + "ACGT" * 3000 + "\n")
    argv = [*LAMBDA, "data=fasta", "data.fasta=g.fa", "data.validation=null"]
    assert main([*argv, "hydra.run.dir=run"]) == 0
    assert decode.load(Path("run/config.yaml")).data.fasta == str(Path("g.fa").absolute())  # type: ignore[union-attr]


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    """The lines of a request that is refused; nothing is written and nothing else printed."""
    before = sorted(Path.cwd().rglob("*"))
    assert main([*LAMBDA, *argv]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert sorted(Path.cwd().rglob("*")) == before
    return output.err.splitlines()


def test_wrong_values_are_refused_all_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(
        capsys, "mode=trian", "batch.train_batch_size=8.5", "+logging.proejct=x", "model.hidden_size=???"
    ) == [
        "mode=trian: it must be one of train, plan, verify; nearest: train",
        "model.hidden_size: it must be given, and is still ???",
        "batch.train_batch_size=8.5: it must be an integer or null",
        "logging.proejct: there is no such key; nearest: logging.project",
    ]


def test_a_directory_that_slurm_would_read_as_a_pattern_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Found on a real cluster: the job fails at its launch, and no log says why."""
    assert refused(capsys, "cluster=slurm", "hydra.run.dir=50%/run") == [
        f"hydra.run.dir={Path.cwd()}/50%/run: Slurm does not take a % in the path of a log as it is; give a "
        "directory without"
    ]
    assert main([*LAMBDA, "hydra.run.dir=50%/run", "mode=plan"]) == 0


def test_what_cannot_be_run_is_refused_all_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("x")
    folder = Path("file").absolute()
    lines = refused(
        capsys,
        "batch.train_batch_size=10",
        "batch.train_micro_batch_size_per_gpu=4",
        "data.fasta=nothere.fa",
        "parallel.tensor=2",
        "hydra.run.dir=file/run",
    )
    keys = [line.partition(":")[0].partition("=")[0].split()[0] for line in lines]
    assert lines[0] == f"hydra.run.dir={folder}/run: {folder} is not a directory; give another one"
    assert set(keys) == {
        "hydra.run.dir",
        "parallel.tensor",
        "batch.train_batch_size",
        "data.fasta",
    }


def test_a_directory_that_holds_a_run_is_refused_where_none_is_to_be_continued(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*LAMBDA, "hydra.run.dir=run"]) == 0
    capsys.readouterr()
    assert refused(capsys, "hydra.run.dir=run", "checkpoint.resume=never") == [
        f"hydra.run.dir={Path('run').absolute()}: it holds a run already, which is not to be continued here; give "
        "another hydra.run.dir"
    ]


def test_a_secret_of_the_environment_never_reaches_the_disk(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    assert refused(capsys, "logging.tags=[${oc.env:WANDB_API_KEY}]") == [
        "logging.tags[0]: it holds the value of the environment variable WANDB_API_KEY, and would be written to "
        "config.yaml; leave it out: ranks see the environment"
    ]
    assert refused(capsys, "+model.api_key=hunter2") == [
        "model.api_key: it looks like a secret, and would be written to config.yaml; "
        "leave it out and put it in the environment"
    ]


def test_a_run_that_fails_exits_1_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LAMBDA, "seed=13", "hydra.run.dir=run"]) == 1
    log = RunDir(Path("run").absolute()).log(0)
    assert capsys.readouterr().err == f"rank 0 failed: exit code 1: an unlucky number (log: {log})\n"
    assert RunDir(Path("run")).read_status()["state"] == "failed"


def test_an_interrupt_while_nothing_runs_exits_130(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "prepare", lambda composed: os.kill(os.getpid(), signal.SIGINT))
    assert main(LAMBDA) == 130
    assert capsys.readouterr().err == "stopped by SIGINT\n"


def test_an_error_of_this_program_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "prepare", lambda composed: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(LAMBDA)


def test_hydras_variable_shows_where_a_fault_was_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert main(["zero=stage9"]) == 2
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert error.splitlines()[-1] == "zero=stage9: there is no such option; nearest: stage3, stage2, stage1"


def test_fifty_starts_in_one_second_get_fifty_directories() -> None:
    # Fifty processes differ from this in nothing but time: each resolves the name of its directory anew.
    composer = Composer(LAMBDA)
    cfg = composer.compose()
    paths = []
    for _ in range(50):
        OmegaConf.clear_cache(cfg)
        paths.append(composer.single(cfg).run_dir)
    made: list[RunDir] = []
    threads = [threading.Thread(target=lambda path=path: made.append(RunDir.create(path))) for path in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({run_dir.path for run_dir in made}) == 50
    assert len(list(Path("runs/dna_8k").iterdir())) == 50


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["--help"], 0, "== Groups"),
        (["--version"], 0, "okazaki"),
        (["--cfg", "job", "+experiment=dna_8k", "zero=stage3"], 0, "\n  stage: 3\n"),
        (["--info", "searchpath"], 0, "file://"),
        (["+experiment=nope"], 2, "+experiment=nope: there is no such option; there are: digits_resnet, dna_8k\n"),
        (["--config-dir", "nope"], 2, "there is no folder"),
        (["seed=[1"], 2, "seed=[1: it cannot be read"),
    ],
)
def test_the_program_says_it_without_a_traceback(argv: list[str], code: int, says: str) -> None:
    done = launch(*argv)
    assert done.returncode == code
    assert says in (done.stderr if code else done.stdout)
    assert (done.stdout if code else done.stderr) == ""
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == (1 if code else 0)
    assert list(Path.cwd().iterdir()) == []


def test_what_comes_with_the_program_is_found_inside_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "package" / "conf").mkdir(parents=True)
    monkeypatch.setattr(compose, "PACKAGE", tmp_path / "package")
    assert compose.shipped("conf") == tmp_path / "package" / "conf"
    assert compose.shipped("genomes") == tmp_path / "genomes"


def test_faults_of_values_files_and_numbers_are_told_together(capsys: pytest.CaptureFixture[str]) -> None:
    lines = refused(
        capsys,
        "data.fasta=[/nope1,/nope2]",
        "data.regions=/nope3.bed",
        "train.max_steps=many",
        "optimizer.lr=nan",
        "zero.stage=9",
        "cluster.ranks_per_node=0",
        "model.vocab_size=5",
        "trian.x=1",
    )
    assert lines == ["trian.x=1: there is no such key"], "Hydra's own come one at a time"
    lines = refused(
        capsys,
        "data.fasta=[/nope1,/nope2]",
        "train.max_steps=many",
        "optimizer.lr=nan",
        "zero.stage=9",
        "cluster.ranks_per_node=0",
        "model.vocab_size=5",
    )
    assert lines == [
        "optimizer.lr=nan: it must be a number",
        "train.max_steps=many: it must be an integer or null",
        "model.vocab_size=5: bases have 17 token ids; set at least 17",
        "cluster.ranks_per_node=0: it must be at least 1",
        "zero.stage=9: it must be 0, 1, 2 or 3",
        "data.fasta=/nope1: there is no such file",
        "data.fasta=/nope2: there is no such file",
    ]


def test_nothing_is_said_of_what_stands_in_for_a_faulty_key(capsys: pytest.CaptureFixture[str]) -> None:
    for fault in (
        "train.max_steps=null: set it, or train.max_tokens, or train.epochs",
        "model._target_: it must be given: the dotted name of something callable",
        "data.fasta: it must be given, and is still ???",
        "batch.train_batch_size=many: it must be an integer or null",
        "batch.gradient_accumulation_steps=[3]: it must be an integer or null",
    ):
        override = fault.split(": ")[0] if "=" in fault else f"{fault.split(': ')[0]}=???"
        assert refused(capsys, override) == [fault]


@pytest.mark.parametrize("ranks", ["0", "-1"])
def test_a_number_of_ranks_that_cannot_be_is_one_line(capsys: pytest.CaptureFixture[str], ranks: str) -> None:
    line = f"cluster.ranks_per_node={ranks}: it must be at least 1"
    assert refused(capsys, f"cluster.ranks_per_node={ranks}") == [line]


def test_a_run_outlives_whoever_watches_it() -> None:
    program = "import sys; from launcher import local; from launcher.__main__ import main; "
    program += f"local.WORKER = {local.WORKER!r}; sys.exit(main({[*LAMBDA, 'hydra.run.dir=run']!r}))"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (0, b"")
    assert RunDir(Path("run")).read_status()["state"] == "completed"


@pytest.mark.parametrize(
    ("launcher", "variable"),
    [("srun", "SLURM_STEP_NUM_TASKS"), ("torchrun", "LOCAL_WORLD_SIZE"), ("mpirun", "OMPI_COMM_WORLD_SIZE")],
)
def test_a_program_that_another_launcher_has_started_many_times_starts_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, launcher: str, variable: str
) -> None:
    monkeypatch.setenv(variable, "4")
    assert main(["+experiment=dna_8k", "mode=plan"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        f"{launcher} has started this program 4 times ({variable}), and each would start a run of its own: start it "
        f"once, without {launcher}; cluster=slurm submits it\n"
    )
    monkeypatch.setenv(variable, "1")
    assert main(["+experiment=dna_8k", "mode=plan"]) == 0
