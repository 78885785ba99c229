"""Whole runs on a real Slurm cluster of four nodes: they end as the same run does here, whatever the queue does."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.rundir import RunDir
from tests import slurm
from tests.slurm import field
from tests.small import offer

pytestmark = [pytest.mark.ranks, slurm.needs_slurm]

NETS = """
import os, time
import torch
from tests.small import SmallNet

class Net(SmallNet):
    '''Takes its time in training, has room for some sequences, and fails on one rank if it is told to.'''

    def __init__(self, fails=False):
        super().__init__()
        self.fails = fails

    def forward(self, tokens):
        if self.fails and os.environ["RANK"] == "1":
            raise ValueError("no such base")
        if os.environ["RANK"] == "1" and len(tokens) > int(os.environ.get("ROOM", "99")):
            raise torch.OutOfMemoryError("tried to allocate too much")
        time.sleep(float(os.environ.get("PASS_S", "0")) if self.training else 0)
        return super().forward(tokens)
"""

COMMAND = (
    "+experiment=dna_8k data=lambda data.sequence_length=128 --config-dir conf model=net batch.train_batch_size=8 "
    "batch.max_micro_batch_size_per_gpu=4 train.eval_every=10 checkpoint.every=5 optimizer.lr=1e-3 "
    "lr_schedule.warmup_steps=2 train.max_steps=20 logging=none"
)

PREEMPTIBLE = "PartitionName=cancel Nodes=ALL PriorityTier=1 PreemptMode=CANCEL GraceTime=20 State=UP"

Lines = dict[tuple[str, int], dict[str, Any]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    with slurm.Cluster(folder, NODES=4, CPUS=4, MEM=8000, GPUS=0, EXTRA_CONF=PREEMPTIBLE) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """From where everything is submitted."""
    folder = offer(tmp_path_factory.mktemp("lab"), NETS)
    (folder / "conf" / "model" / "failing.yaml").write_text("_target_: nets.Net\nfails: true\n")
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> Lines:
    """The run that nobody has disturbed, on this machine."""
    argv = [*COMMAND.split(), "cluster.ranks_per_node=2", "hydra.run.dir=whole"]
    done = launch(folder, environment({}), *argv)
    assert done.returncode == 0, done.stderr
    return lines(folder / "whole")


def environment(plain: dict[str, str], pass_s: float = 0.0) -> dict[str, str]:
    from torch.utils import cpp_extension

    import launcher.worker  # which says where operators are kept

    assert launcher.worker
    # Nodes of another kind compile for themselves; these are all this machine, which has compiled.
    compiled = Path(cpp_extension._get_build_directory("deepspeed_shm_comm_op", False)).parent
    repository = Path(__file__).parents[1]
    return {
        **(plain or os.environ),
        "OMP_NUM_THREADS": "1",
        "PASS_S": str(pass_s),
        "SQUEUE_PARTITION": "none",  # a habit of the user's that must not matter
        "WANDB_MODE": "offline",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(repository), os.environ.get("PYTHONPATH")])),
        "TORCH_EXTENSIONS_DIR": str(compiled),
        "TORCHDYNAMO_DISABLE": "1",  # nothing is compiled by it here, and its import takes as long as a run
    }


def launch(
    folder: Path, variables: dict[str, str], *argv: str, cluster: slurm.Cluster | None = None
) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "launcher", *argv]
    command = command if cluster is None else cluster.enter(command)
    return subprocess.run(command, cwd=folder, env=variables, check=False, capture_output=True, text=True)


def submit(
    cluster: slurm.Cluster, folder: Path, run_dir: str, *words: str, pass_s: float = 0.0
) -> "subprocess.CompletedProcess[str]":
    own = ["cluster=slurm", f"hydra.run.dir={run_dir}", *words]
    return launch(folder, environment(cluster.environment, pass_s), *COMMAND.split(), *own, cluster=cluster)


def job_of(run_dir: Path) -> str:
    return str(RunDir(run_dir).read_status()["job"])


def lines(run_dir: Path) -> Lines:
    """By kind and step; the last one counts."""
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {(line["kind"], line["step"]): line for line in found}


def same(ours: Lines, theirs: Lines) -> None:
    """Every step and evaluation of a run is that of another."""
    for key, expected in theirs.items():
        if key[0] in ("train", "eval"):
            for name in ("loss", "lr", "grad_norm", "tokens", "tokens_seen", "sequences_seen", "eval_loss"):
                if expected.get(name) is not None:
                    assert ours[key][name] == pytest.approx(expected[name], rel=1e-6), (key, name)


def until(what: Callable[[], bool], timeout_s: float = 240) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.2)


def state(cluster: slurm.Cluster, job: str) -> str:
    return field(cluster.show(job), "JobState")


def until_state(cluster: slurm.Cluster, job: str, *states: str, timeout_s: float = 240) -> str:
    until(lambda: state(cluster, job) in states, timeout_s)
    return state(cluster, job)


def until_activity(run_dir: Path, activity: str) -> None:
    until(lambda: RunDir(run_dir).read_status().get("activity") == activity)


def until_step(run_dir: Path, step: int) -> None:
    until(lambda: RunDir(run_dir).last_step() >= step)


def told(run_dir: Path) -> str:
    """What the job said, for the message of a test that fails."""
    return "".join(path.read_text() for path in (run_dir / "logs").glob("slurm_*.log"))


@pytest.mark.parametrize(
    ("nodes", "ranks"), [(2, 1), pytest.param(2, 2, marks=pytest.mark.slow), pytest.param(4, 1, marks=pytest.mark.slow)]
)
def test_a_run_on_several_nodes_is_the_run_on_this_machine(
    cluster: slurm.Cluster, folder: Path, whole: Lines, nodes: int, ranks: int
) -> None:
    name = f"nodes_{nodes}_{ranks}"
    done = submit(cluster, folder, name, f"cluster.nodes={nodes}", f"cluster.ranks_per_node={ranks}")
    assert (done.returncode, done.stderr) == (0, "")
    run_dir = folder / name
    job = job_of(run_dir)
    assert done.stdout.splitlines()[:2] == [f"run directory {run_dir}", f"submitted as job {job}"]
    assert until_state(cluster, job, "COMPLETED", "FAILED") == "COMPLETED", told(run_dir)
    same(lines(run_dir), whole)
    status = RunDir(run_dir).read_status()
    assert (status["state"], status["attempt"], status["restarts"]) == ("completed", 1, 0)
    assert sorted(path.name for path in (run_dir / "logs").glob("rank_*.log")) == [
        f"rank_{number:05d}.log" for number in range(nodes * ranks)
    ]


@pytest.mark.slow
def test_nodes_with_a_network_of_their_own_find_each_other(
    folder: Path, whole: Lines, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with slurm.Cluster(tmp_path_factory.mktemp("net"), NODES=2, CPUS=4, MEM=8000, GPUS=0, ISOLATION="net") as cluster:
        done = submit(cluster, folder, "net", "cluster.nodes=2")
        assert (done.returncode, done.stderr) == (0, "")
        until(lambda: RunDir(folder / "net").read_status()["state"] in ("completed", "failed"))
        same(lines(folder / "net"), whole)


@pytest.mark.parametrize("command", ["scancel --signal=USR2", pytest.param("scontrol requeue", marks=pytest.mark.slow)])
def test_a_run_that_is_asked_to_stop_saves_goes_back_into_the_queue_and_ends_as_if_nothing_had_been(
    cluster: slurm.Cluster, folder: Path, whole: Lines, command: str
) -> None:
    program, option = command.split()
    submit(cluster, folder, program, "cluster.nodes=2", pass_s=0.2)
    run_dir, job = folder / program, job_of(folder / program)
    until_step(run_dir, 3)
    cluster.run(program, option, job)
    until(lambda: field(cluster.show(job), "Restarts") == "1")
    assert until_state(cluster, job, "COMPLETED", "FAILED") == "COMPLETED", told(run_dir)
    status = RunDir(run_dir).read_status()
    assert (status["attempt"], status["restarts"], status["requeues"]) == (2, 1, 1)
    steps = [
        json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines() if "train" in line
    ]
    assert steps == list(range(1, 21)), "none was repeated or left out"
    same(lines(run_dir), whole)
    assert (run_dir / "attempts" / "1" / "submit.sbatch").exists()


@pytest.mark.slow
def test_sizes_are_tried_in_the_job_and_one_that_is_asked_to_stop_tries_on_when_its_turn_comes_again(
    cluster: slurm.Cluster, folder: Path, whole: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sequences fit on rank 1, of four."""
    monkeypatch.setenv("ROOM", "2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    run_dir = folder / "tried"
    done = submit(cluster, folder, "tried", "cluster.nodes=2", "batch.train_micro_batch_size_per_gpu=auto", pass_s=1.5)
    assert done.returncode == 0, done.stderr
    job = job_of(run_dir)
    until_activity(run_dir, "trying micro-batches of 1")
    assert cluster.run("scancel", "--signal=USR2", job).returncode == 0
    until(lambda: RunDir(run_dir).read_status().get("requeues") == 1)
    assert not (folder / "cache" / "okazaki" / "micro_batch_sizes").exists()
    assert until_state(cluster, job, "COMPLETED", "FAILED", timeout_s=400) == "COMPLETED", told(run_dir)
    same(lines(run_dir), whole)
    assert {line["micro_batch_size"] for (kind, _), line in lines(run_dir).items() if kind == "train"} == {2}
    (found,) = (folder / "cache" / "okazaki" / "micro_batch_sizes").iterdir()
    assert json.loads(found.read_text()) == {"micro_batch_size": 2}


def test_a_run_that_is_cancelled_is_saved_and_stays_out_of_the_queue(
    cluster: slurm.Cluster, folder: Path, whole: Lines
) -> None:
    submit(cluster, folder, "cancelled", "cluster.ranks_per_node=2", pass_s=0.2)
    run_dir, job = folder / "cancelled", job_of(folder / "cancelled")
    until_step(run_dir, 3)
    again = submit(cluster, folder, "cancelled", "cluster.ranks_per_node=2")
    assert again.returncode == 2
    assert again.stderr == (
        f"hydra.run.dir={run_dir}: a live launcher holds it (pid {holder(run_dir)}); give another directory\n"
    )
    cluster.run("scancel", job)
    until_state(cluster, job, "CANCELLED")
    status = RunDir(run_dir).read_status()
    assert (status["state"], status["checkpoint"]) == ("preempted", status["step"])
    assert status["reason"].startswith("SIGTERM to rank ")
    again = submit(cluster, folder, "cancelled", "cluster.ranks_per_node=2")
    assert again.returncode == 0, again.stderr
    assert f"the newest checkpoint is {run_dir}/checkpoints/step_{status['step']:08d}" in again.stdout
    until_state(cluster, job_of(run_dir), "COMPLETED", "FAILED")
    same(lines(run_dir), whole)
    assert state(cluster, job) == "CANCELLED", "nobody has woken it"


def holder(run_dir: Path) -> str:
    return (run_dir / "lock").read_text().strip().removeprefix("pid ")


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["low", "cancel"])
def test_a_run_that_is_preempted_goes_on_when_the_nodes_are_free_again(
    cluster: slurm.Cluster, folder: Path, whole: Lines, partition: str
) -> None:
    name = f"preempted_{partition}"
    submit(cluster, folder, name, "cluster.nodes=2", f"cluster.partition={partition}", pass_s=0.2)
    run_dir, job = folder / name, job_of(folder / name)
    until_step(run_dir, 3)
    other = cluster.submit(
        "#!/bin/sh\nsleep 3\n", "--output=/dev/null", "--partition=high", "--nodes=4", "--cpus-per-task=4"
    )
    until_state(cluster, other, "COMPLETED")
    assert until_state(cluster, job, "COMPLETED", "FAILED", "PREEMPTED") == "COMPLETED", told(run_dir)
    assert RunDir(run_dir).read_status()["restarts"] == 1
    same(lines(run_dir), whole)


def test_a_run_that_fails_fails_its_job_and_what_depends_on_it_never_starts(
    cluster: slurm.Cluster, folder: Path
) -> None:
    # With the options of a shell that many sites recommend, which end a script where a command has failed.
    submit(cluster, folder, "failing", "cluster.nodes=2", "model=failing", "cluster.setup=['set -euo pipefail']")
    run_dir, job = folder / "failing", job_of(folder / "failing")
    after = submit(cluster, folder, "after", f"cluster.dependency=afterok:{job}")
    assert after.returncode == 0, after.stderr
    assert until_state(cluster, job, "COMPLETED", "FAILED") == "FAILED"
    assert field(cluster.show(job), "ExitCode") == "1:0"
    reason = f"rank 1 failed: ValueError: no such base (log: {run_dir}/logs/rank_00001.log)"
    assert RunDir(run_dir).read_status()["reason"] == reason
    assert reason in told(run_dir).splitlines()
    waiting = job_of(folder / "after")
    until(lambda: field(cluster.show(waiting), "Reason") == "DependencyNeverSatisfied")
    cluster.run("scancel", waiting)


def test_a_sweep_is_one_array_and_a_point_that_fails_is_named(cluster: slurm.Cluster, folder: Path) -> None:
    argv = ["-m", *COMMAND.split(), "cluster=slurm", "train.max_steps=2", "lr_schedule.warmup_steps=0"]
    argv += ["model=net,failing", "cluster.ranks_per_node=2", "hydra.sweep.dir=sweep"]
    variables = environment(cluster.environment)
    impossible = launch(folder, variables, *argv, "batch.train_batch_size=8,9")
    assert impossible.returncode == 2
    assert len(impossible.stderr.splitlines()) == 2
    assert not (folder / "sweep").exists()
    done = launch(folder, variables, *argv, "sweep.wait=true")
    assert done.returncode == 1
    assert "1 of 2 points failed: point 1 (" in done.stderr
    last = {
        line["point"]: line for line in map(json.loads, (folder / "sweep" / "sweep.jsonl").read_text().splitlines())
    }
    assert [last[point]["state"] for point in (0, 1)] == ["completed", "failed"]
    (array,) = {line["job"].partition("_")[0] for line in last.values()}
    assert [last[point]["job"] for point in (0, 1)] == [f"{array}_0", f"{array}_1"]
    assert last[0]["eval_loss"] == RunDir(folder / "sweep" / "0000").last_eval_loss()
    assert last[1]["reason"].startswith("rank 1 failed: ValueError: no such base")


@pytest.mark.slow
def test_a_task_of_an_array_goes_back_into_the_queue_alone(cluster: slurm.Cluster, folder: Path, whole: Lines) -> None:
    """The first one has the number of the whole array."""
    argv = ["-m", *COMMAND.split(), "cluster=slurm", "seed=0,1", "hydra.sweep.dir=queued"]
    done = launch(folder, environment(cluster.environment, pass_s=0.2), *argv)
    assert done.returncode == 0, done.stderr
    run_dirs = [folder / "queued" / f"{number:04d}" for number in range(2)]
    for run_dir in run_dirs:
        until_step(run_dir, 3)
    first, second = map(job_of, run_dirs)
    assert first.endswith("_0")
    cluster.run("scancel", "--signal=USR2", second)
    until(lambda: RunDir(run_dirs[1]).read_status().get("restarts") == 1)
    assert RunDir(run_dirs[0]).read_status()["restarts"] == 0
    until(lambda: all(RunDir(run_dir).read_status()["state"] == "completed" for run_dir in run_dirs))
    assert RunDir(run_dirs[0]).read_status()["restarts"] == 0, "nobody has disturbed it"
    same(lines(run_dirs[0]), whole)


def test_what_slurm_refuses_is_said_in_its_words_and_nothing_is_written(cluster: slurm.Cluster, folder: Path) -> None:
    for words, said in {
        "cluster.partition=nope": "invalid partition specified: nope",
        "cluster.nodes=8": "Node count specification invalid",
        "cluster.constraint=h100": "Invalid feature specification",
        "cluster.mem=64T": "Memory specification can not be satisfied",
        "cluster.setup=['if true; then']": "syntax error: unexpected end of file",
    }.items():
        done = submit(cluster, folder, "refused", words)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert line.startswith(("cluster=slurm: sbatch refuses: ", "cluster.setup: it is no shell that can be read: "))
        assert said in line or "Requested node configuration is not available" in line
        assert not (folder / "refused").exists()


def test_a_job_that_slurm_takes_and_will_not_start_is_told(cluster: slurm.Cluster, folder: Path) -> None:
    done = submit(cluster, folder, "held", "cluster.partition=short", "cluster.time=60")
    assert done.returncode == 0, done.stderr
    job = job_of(folder / "held")
    # In time PartitionConfig becomes PartitionTimeLimit.
    reasons = ("PartitionConfig", "PartitionTimeLimit")
    expected = {f"submitted as job {job}; it waits, says Slurm: {reason}" for reason in reasons}
    assert expected & set(done.stdout.splitlines())
    assert field(cluster.show(job), "Reason") in reasons
    for told in ("submitted", "preempted", "running"):  # the latter two where it has been queued again
        RunDir(folder / "held").write_status(state=told)
        here = launch(folder, environment(cluster.environment), *COMMAND.split(), "hydra.run.dir=held")
        assert here.returncode == 2
        assert f"job {job} is at work on it; wait, or scancel {job}, or give another hydra.run.dir" in here.stderr
    cluster.run("scancel", job)


# As needs_slurm: left out on a user's own machine alone, which need not have a database for accounts.
@pytest.mark.slow
@pytest.mark.skipif(
    any(shutil.which(program, path=slurm.PATH) is None for program in ("slurmdbd", "mariadbd")) and not slurm.in_ci(),
    reason="accounts need slurmdbd, slurm-wlm-mysql-plugin and mariadb-server",
)
def test_who_may_not_pay_or_wants_too_long_is_refused_in_the_words_of_slurm(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    where = tmp_path_factory.mktemp("accounts")
    with slurm.Cluster(where, NODES=2, CPUS=4, MEM=8000, GPUS=0, DBD=1, EXTRA_CONF="EnforcePartLimits=ALL") as cluster:
        for command in ("add qos brief MaxWall=5 Flags=DenyOnLimit", "modify user root set qos+=brief"):
            assert cluster.run("sacctmgr", "-iQ", *command.split()).returncode == 0
        for words, said in {
            ("cluster.account=nope",): "Invalid account or account/partition combination specified",
            ("cluster.qos=nope",): "Invalid qos specification",
            ("cluster.qos=brief", "cluster.time=60"): "QOSMaxWallDurationPerJobLimit",
            ("cluster.partition=short", "cluster.time=60"): "Requested time limit is invalid",
        }.items():
            done = submit(cluster, folder, "unpaid", *words)
            assert done.returncode == 2
            (line,) = done.stderr.splitlines()
            assert line.startswith("cluster=slurm: sbatch refuses: ")
            assert said in line
            assert not (folder / "unpaid").exists()


@pytest.mark.parametrize("name", ["a b 'c' \"d\" $HOME ; touch no", pytest.param("new\nline", marks=pytest.mark.slow)])
def test_odd_directories_run_like_any_other(cluster: slurm.Cluster, folder: Path, whole: Lines, name: str) -> None:
    home = folder / name
    home.mkdir()
    for part in ("nets.py", "conf"):
        (home / part).symlink_to(folder / part)
    argv = [*COMMAND.split(), "cluster=slurm", "name=odd"]
    done = launch(home, environment(cluster.environment), *argv)
    assert (done.returncode, done.stderr) == (0, "")
    (run_dir,) = (home / "runs" / "odd").iterdir()
    until_state(cluster, job_of(run_dir), "COMPLETED", "FAILED")
    same(lines(run_dir), whole)
    assert not any(path.name == "no" for path in folder.rglob("*"))


@pytest.mark.slow
def test_a_run_longer_than_its_time_limit_goes_through_as_many_jobs_as_it_takes(
    cluster: slurm.Cluster, folder: Path
) -> None:
    """Forty steps, of which a job has time for about fifteen; one tracker id, one log a rank."""
    forty = ("train.max_steps=40", "cluster.ranks_per_node=2")
    done = launch(folder, environment({}), *COMMAND.split(), *forty, "hydra.run.dir=forty")
    assert done.returncode == 0, done.stderr
    # Slurm looks about twice a minute, and may send its signal a minute early.
    words = (*forty, "cluster.time=2", "cluster.signal_lead=40", "logging.wandb=true")
    done = submit(cluster, folder, "limited", *words, pass_s=3)
    assert done.returncode == 0, done.stderr
    run_dir, job = folder / "limited", job_of(folder / "limited")
    assert until_state(cluster, job, "COMPLETED", "FAILED", "TIMEOUT", timeout_s=900) == "COMPLETED", told(run_dir)
    status = RunDir(run_dir).read_status()
    assert status["restarts"] >= 2
    assert status["attempt"] == status["restarts"] + 1
    same(lines(run_dir), lines(folder / "forty"))
    assert len(list((run_dir / "logs").glob("rank_*.log"))) == 2
    tracker = RunDir(run_dir).tracker
    tracked = [path.name for path in (tracker / "wandb").glob("offline-run-*")]
    assert len(tracked) == status["attempt"]
    identity = (tracker / "wandb_id").read_text()
    assert all(name.endswith(f"-{identity}") for name in tracked)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["node-kill", "slurmd-kill"])
def test_a_run_survives_a_node_that_is_lost(cluster: slurm.Cluster, folder: Path, whole: Lines, fault: str) -> None:
    name = fault.replace("-", "_")
    submit(cluster, folder, name, "cluster.nodes=2", pass_s=0.5)
    run_dir, job = folder / name, job_of(folder / name)
    until_step(run_dir, 6)
    nodes = cluster.run("scontrol", "show", "hostnames", field(cluster.show(job), "NodeList")).stdout.split()
    cluster.control(fault, nodes[1])
    try:
        assert until_state(cluster, job, "COMPLETED", "FAILED", timeout_s=400) == "COMPLETED", told(run_dir)
    finally:
        cluster.control(fault.replace("kill", "start"), nodes[1])
    same(lines(run_dir), whole)


@pytest.mark.slow
def test_a_run_survives_the_loss_of_the_controller(cluster: slurm.Cluster, folder: Path, whole: Lines) -> None:
    submit(cluster, folder, "controller", "cluster.nodes=2", pass_s=0.5)
    run_dir, job = folder / "controller", job_of(folder / "controller")
    until_step(run_dir, 3)
    cluster.control("ctld-kill")
    refused = submit(cluster, folder, "meanwhile")
    assert refused.returncode == 2
    assert refused.stderr.startswith("cluster=slurm: sbatch refuses: ")
    assert len(refused.stderr.splitlines()) == 1
    time.sleep(10)
    cluster.control("ctld-start")
    assert until_state(cluster, job, "COMPLETED", "FAILED") == "COMPLETED", told(run_dir)
    same(lines(run_dir), whole)


@pytest.mark.slow
def test_twenty_submissions_in_a_second_get_twenty_directories_and_no_port_twice(
    cluster: slurm.Cluster, folder: Path
) -> None:
    command = [sys.executable, "-m", "launcher", *COMMAND.split(), "cluster=slurm", "train.max_steps=2"]
    command += ["lr_schedule.warmup_steps=0", "name=twenty", "cluster.ranks_per_node=2"]
    processes = [
        subprocess.Popen(command, cwd=folder, env=environment(cluster.environment), stdout=subprocess.PIPE, text=True)
        for _ in range(20)
    ]
    assert [process.wait() for process in processes] == [0] * 20
    run_dirs = list((folder / "runs" / "twenty").iterdir())
    assert len(run_dirs) == 20
    until(lambda: all(RunDir(path).read_status()["state"] in ("completed", "failed") for path in run_dirs), 1200)
    assert {RunDir(path).read_status()["state"] for path in run_dirs} == {"completed"}


@pytest.mark.slow
def test_a_job_with_fewer_nodes_cuts_the_same_batch_over_them(
    cluster: slurm.Cluster, folder: Path, whole: Lines
) -> None:
    blocker = cluster.submit("#!/bin/sh\nsleep 3600\n", "--output=/dev/null", "--nodes=2", "--exclusive")
    try:
        submit(
            cluster, folder, "elastic", "cluster.nodes=2-4", "cluster.exclusive=true", "cluster.allow_fewer_ranks=true"
        )
        run_dir, job = folder / "elastic", job_of(folder / "elastic")
        assert until_state(cluster, job, "COMPLETED", "FAILED") == "COMPLETED", told(run_dir)
        assert json.loads((run_dir / "plan.json").read_text())["batch"]["data_parallel_size"] == 2
        same(lines(run_dir), whole)
    finally:
        cluster.run("scancel", blocker)


@pytest.mark.slow
def test_optuna_goes_by_the_values_of_six_trials_on_the_cluster(cluster: slurm.Cluster, folder: Path) -> None:
    argv = ["-m", "hydra/sweeper=optuna", *COMMAND.split(), "cluster=slurm", "train.max_steps=2"]
    argv += [
        "lr_schedule.warmup_steps=0",
        "hydra.sweep.dir=optuna",
        "hydra.sweeper.n_trials=6",
        "hydra.sweeper.n_jobs=3",
    ]
    argv += ["optimizer.lr=interval(1e-4,1e-2)", "hydra.sweeper.sampler.seed=1"]
    done = launch(folder, environment(cluster.environment), *argv)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in (folder / "optuna" / "sweep.jsonl").read_text().splitlines()]
    last = {line["point"]: line for line in found}
    assert [last[point]["state"] for point in range(6)] == ["completed"] * 6
    values = [RunDir(Path(last[point]["run_dir"])).last_eval_loss() for point in range(6)]
    assert [last[point]["eval_loss"] for point in range(6)] == values
    best = (folder / "optuna" / "optimization_results.yaml").read_text()
    assert f"best_value: {min(value for value in values if value is not None)}" in best
