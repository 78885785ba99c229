"""What a Slurm job decides before and after its ranks, in directories of runs as a submission leaves them."""

import json
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher import decode, job, micro_batch, plan, ranks, slurm_job
from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, EXIT_REFUSED
from launcher.rundir import RunDir
from launcher.schema import Batch, Checkpoint, Cluster, ClusterType, Config, MicroBatch, Mode
from tests.slurm import RUN
from tests.test_resume import leave

BASE = replace(RUN, cluster=replace(RUN.cluster, nodes="1-4", ranks_per_node=2))

Output = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _in_a_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    granted(monkeypatch, nodes=4, tasks=8)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv(slurm_job.JOB, "77")
    monkeypatch.setenv(ranks.ATTEMPT, "77.0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def granted(monkeypatch: pytest.MonkeyPatch, nodes: int, tasks: int) -> None:
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", str(nodes))
    monkeypatch.setenv("SLURM_NTASKS", str(tasks))


def submitted(path: Path, config: Config = BASE) -> RunDir:
    made = plan.make(config)
    run_dir = RunDir.create(path)
    job.set_up(job.Job(config, made, path), run_dir)
    run_dir.release()
    return run_dir


def call(*argv: object) -> int:
    return slurm_job.main([str(word) for word in argv])


def test_a_job_begins_with_a_free_port_and_the_planned_ranks(tmp_path: Path, capsys: Output) -> None:
    run_dir = submitted(tmp_path / "run")
    capsys.readouterr()
    assert call("begin", run_dir.path) == EXIT_DONE
    port, num_ranks = map(int, capsys.readouterr().out.split())
    assert num_ranks == 8
    with socket.create_server(("", port)):
        pass
    status = run_dir.read_status()
    assert (status["state"], status["attempt"], status["job"], status["restarts"]) == ("running", 1, "77", 0)
    assert run_dir.seal("77.0").exists()
    assert not run_dir.seal("77.1").exists()


def test_jobs_look_for_ports_at_places_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = []
    for number in range(1, 21):
        monkeypatch.setenv("SLURM_JOB_ID", str(number))
        ports.append(slurm_job._free_port(taken=0))
    assert len(set(ports)) == 20
    with socket.create_server(("", ports[-1])):
        assert slurm_job._free_port(taken=0) not in ports


@pytest.mark.parametrize(
    ("nodes", "tasks", "said"),
    [
        (5, 10, "cluster.nodes=1-4: the job has 5 nodes; submit it anew"),
        (4, 4, "the run was planned for 8 ranks, but the job has 4 tasks"),
    ],
)
def test_a_job_that_is_not_what_was_planned_is_refused_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output, nodes: int, tasks: int, said: str
) -> None:
    run_dir = submitted(tmp_path / "run")
    granted(monkeypatch, nodes, tasks)
    assert call("begin", run_dir.path) == EXIT_REFUSED
    assert capsys.readouterr().err.splitlines()[-1] == said
    assert (run_dir.read_status()["state"], run_dir.read_status()["reason"]) == ("failed", said)


def test_fewer_nodes_share_the_same_batch_and_what_was_asked_for_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    run_dir = submitted(tmp_path / "run")
    granted(monkeypatch, nodes=2, tasks=4)
    assert call("begin", run_dir.path) == EXIT_DONE
    assert capsys.readouterr().out.split()[-1] == "4"
    batch = plan.read(run_dir)["batch"]
    assert (batch["train_batch_size"], batch["data_parallel_size"]) == (24, 4)
    assert json.loads(run_dir.deepspeed.read_text())["gradient_accumulation_steps"] == 6
    assert "nodes: 1-4" in run_dir.config.read_text()


def test_a_disk_that_is_full_is_one_line_in_the_log_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    def full(*arguments: object, **facts: object) -> None:
        raise OSError(28, "No space left on device")

    run_dir = submitted(tmp_path / "run")
    monkeypatch.setattr(job, "freeze", full)
    assert call("begin", run_dir.path) == EXIT_FAILED
    said = f"the run in {run_dir.path} cannot go on: [Errno 28] No space left on device"
    assert capsys.readouterr().err.splitlines()[-1] == said


def test_a_directory_that_the_node_does_not_see_is_named(tmp_path: Path, capsys: Output) -> None:
    assert call("begin", tmp_path / "elsewhere") == EXIT_REFUSED
    assert f"{tmp_path}/elsewhere is not on {socket.gethostname()}" in capsys.readouterr().err


def test_a_job_that_is_started_again_is_another_attempt_and_goes_on_with_its_own_run(tmp_path: Path) -> None:
    """Or begins where the first attempt did, as long as it has no checkpoint of its own."""
    leave(tmp_path / "old")
    path = str(tmp_path / "old" / "checkpoints" / "step_00000005")
    for wish, later in (("never", "auto"), (path, path)):
        run_dir = submitted(tmp_path / later.replace("/", "_"), replace(BASE, checkpoint=Checkpoint(resume=wish)))
        for _ in range(3):
            assert call("begin", run_dir.path) == EXIT_DONE
        assert run_dir.read_status()["attempt"] == 3
        configs = [run_dir.path / "attempts" / "1" / "config.yaml", run_dir.config]
        assert [decode.load(config).checkpoint.resume for config in configs] == [wish, later]


def ended(run_dir: RunDir, capsys: Output, code: int = 0) -> tuple[int, str, str]:
    capsys.readouterr()
    result = call("end", run_dir.path, code)
    said = capsys.readouterr()
    return result, said.out.strip(), said.err.strip()


def preempted(run_dir: RunDir, step: int) -> None:
    """What rank 0 writes when a signal has stopped a run."""
    run_dir.metrics.write_text("".join(json.dumps({"kind": "train", "step": k + 1}) + "\n" for k in range(step)))
    run_dir.write_status(state="preempted", reason="SIGUSR2 to rank 1", step=step, checkpoint=step)


def test_a_run_that_is_saved_goes_back_into_the_queue_as_long_as_it_gets_on(tmp_path: Path, capsys: Output) -> None:
    run_dir = submitted(tmp_path / "run")
    for step in (3, 5):
        call("begin", run_dir.path)
        preempted(run_dir, step)
        assert ended(run_dir, capsys) == (EXIT_PREEMPTED, "requeue", "")
    call("begin", run_dir.path)
    preempted(run_dir, 5)
    assert ended(run_dir, capsys) == (
        EXIT_PREEMPTED,
        "",
        "stopped by SIGUSR2 to rank 1, saved at step 5; it made no progress since it was queued again, and is not "
        "another time",
    )


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ({"requeue": False}, "cluster.requeue=false: submit it again to go on"),
        ({"max_requeues": 0}, "it was queued again 0 times (cluster.max_requeues)"),
    ],
)
def test_a_run_that_is_not_to_be_queued_again_is_not(
    tmp_path: Path, capsys: Output, cluster: dict[str, Any], said: str
) -> None:
    run_dir = submitted(tmp_path / "run", replace(BASE, cluster=replace(BASE.cluster, **cluster)))
    call("begin", run_dir.path)
    preempted(run_dir, 3)
    code, out, err = ended(run_dir, capsys)
    assert (code, out) == (EXIT_PREEMPTED, "")
    assert err == f"stopped by SIGUSR2 to rank 1, saved at step 3; {said}"


@pytest.mark.parametrize("code", [128 + 12, 128 + 15])
def test_ranks_that_a_signal_ended_before_they_could_listen_have_lost_nothing(
    tmp_path: Path, capsys: Output, code: int
) -> None:
    run_dir = submitted(tmp_path / "run")
    call("begin", run_dir.path)
    assert ended(run_dir, capsys, code)[:2] == (EXIT_PREEMPTED, "requeue")


def test_a_port_that_somebody_took_before_rank_0_had_it_is_no_failure(tmp_path: Path, capsys: Output) -> None:
    run_dir = submitted(tmp_path / "run")
    ports = set()
    for _ in range(slurm_job.MAX_PORTS + 1):
        capsys.readouterr()
        call("begin", run_dir.path)
        ports.add(capsys.readouterr().out.split()[0])
        note(run_dir, 0, "failure", "DistNetworkError: The server socket has failed to listen (errno: 98): EADDRINUSE")
        code, out, _ = ended(run_dir, capsys, 1)
        if out != "again":
            break
    assert len(ports) == slurm_job.MAX_PORTS + 1
    assert (code, out) == (EXIT_FAILED, ""), "it is not tried for ever"


def test_a_job_is_not_started_again_more_often_than_is_wished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """Also not by Slurm itself, on one bad node after the other."""
    run_dir = submitted(tmp_path / "run", replace(BASE, cluster=replace(BASE.cluster, max_requeues=2)))
    for restarts, code in (("0", EXIT_DONE), ("2", EXIT_DONE), ("3", EXIT_FAILED)):
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
        assert call("begin", run_dir.path) == code
    said = "the job was started again 3 times (cluster.max_requeues)"
    assert capsys.readouterr().err.splitlines()[-1] == said
    assert (run_dir.read_status()["state"], run_dir.read_status()["reason"]) == ("failed", said)


def test_the_job_that_follows_is_the_one_that_is_at_work(tmp_path: Path) -> None:
    run_dir = submitted(tmp_path / "run")
    assert call("follow", run_dir.path, "78_3") == EXIT_DONE
    assert run_dir.read_status()["job"] == "78_3"


def note(run_dir: RunDir, rank: int, kind: str, reason: str, when: float = 0.0, signal: str | None = None) -> None:
    values = {"rank": rank, "time": when, "kind": kind, "reason": reason, "signal": signal}
    run_dir.failure(rank).write_text(json.dumps(values))


def test_the_first_rank_that_failed_is_named(tmp_path: Path, capsys: Output) -> None:
    run_dir = submitted(tmp_path / "run")
    call("begin", run_dir.path)
    note(run_dir, 3, "failure", "RuntimeError: Connection closed by peer", 1.0)
    note(run_dir, 5, "failure", "ValueError: no such base", 2.0)
    said = f"rank 5 failed: ValueError: no such base (log: {run_dir.log(5)})"
    assert ended(run_dir, capsys, 1) == (EXIT_FAILED, "", said)
    assert (run_dir.read_status()["state"], run_dir.read_status()["reason"]) == ("failed", said)


def test_what_only_srun_knows_is_told_in_its_words(tmp_path: Path, capsys: Output) -> None:
    run_dir = submitted(tmp_path / "run")
    call("begin", run_dir.path)
    (run_dir.logs / "srun.log").write_text("srun: Job step aborted\nsrun: error: n2: task 3: Killed\nsrun: error: x\n")
    code, _, said = ended(run_dir, capsys, 137)
    assert (code, said) == (EXIT_FAILED, "the ranks ended with exit code 137: srun: error: n2: task 3: Killed")


def test_out_of_memory_the_same_batch_is_cut_finer_in_the_same_job(tmp_path: Path, capsys: Output) -> None:
    run_dir = submitted(tmp_path / "run", replace(BASE, batch=Batch(48, train_micro_batch_size_per_gpu=2)))
    call("begin", run_dir.path)
    note(run_dir, 0, "memory", "OutOfMemoryError: no room")
    code, out, err = ended(run_dir, capsys, 1)
    assert (code, out) == (EXIT_DONE, "again")
    assert err.endswith("the run goes on with micro-batches of 1")
    assert plan.read(run_dir)["batch"]["micro_batch_size"] == 1
    call("begin", run_dir.path)
    assert run_dir.read_status()["attempt"] == 2
    note(run_dir, 0, "memory", "OutOfMemoryError: no room")
    assert ended(run_dir, capsys, 1)[0] == EXIT_FAILED


def on_one_rank(monkeypatch: pytest.MonkeyPatch) -> Config:
    """Which is to find out its micro-batches."""
    granted(monkeypatch, nodes=1, tasks=1)
    cluster = Cluster(type=ClusterType.SLURM)
    return replace(BASE, cluster=cluster, batch=Batch(8, train_micro_batch_size_per_gpu=MicroBatch.AUTO))


def test_auto_tries_sizes_in_the_job_and_remembers_what_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """Ranks with room for three sequences of a share of eight."""
    config = on_one_rank(monkeypatch)
    run_dir = submitted(tmp_path / "run", config)
    tried = []
    while True:
        call("begin", run_dir.path)
        sizes = plan.read(run_dir).get("micro_batch_sizes")
        if sizes is None:
            break
        tried.append(sizes)
        fits = [size for size in sizes if size <= 3]
        run_dir.write_status(micro_batch_size=fits[-1] if fits else None)
        if len(fits) < len(sizes):
            note(run_dir, 0, "memory", "OutOfMemoryError: no room")
        assert ended(run_dir, capsys, 1)[1] == "again"
        assert run_dir.read_status()["attempt"] == 1
    assert tried == [[1, 2, 4, 8]]
    assert plan.read(run_dir)["batch"]["micro_batch_size"] == 2
    assert micro_batch.remembered(micro_batch.key(config, 1), [1, 2, 4, 8]) == 2


@pytest.mark.parametrize(
    ("code", "noted", "state", "result"),
    [
        (140, None, "running", (EXIT_PREEMPTED, "requeue")),
        (143, None, "running", (EXIT_PREEMPTED, "requeue")),
        (0, None, "preempted", (EXIT_PREEMPTED, "requeue")),
        (1, ("memory", "SIGUSR2"), "running", (EXIT_PREEMPTED, "requeue")),
        (137, None, "running", (EXIT_FAILED, "")),
        (1, ("failure", None), "running", (EXIT_FAILED, "")),
    ],
)
@pytest.mark.parametrize("fits", [None, 2])
def test_a_trial_that_ends_otherwise_than_by_its_memory_is_none(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Output,
    code: int,
    noted: tuple[str, str | None] | None,
    state: str,
    result: tuple[int, str],
    fits: int | None,
) -> None:
    """Neither what had fitted by then nor that nothing had says anything; the next attempt tries the same again."""
    run_dir = submitted(tmp_path / "run", on_one_rank(monkeypatch))
    call("begin", run_dir.path)
    tried = plan.read(run_dir)["micro_batch_sizes"]
    run_dir.write_status(micro_batch_size=fits, state=state, reason="SIGUSR2 to rank 0")
    if noted is not None:
        kind, signal = noted
        note(run_dir, 0, kind, "no room", signal=signal)
    assert ended(run_dir, capsys, code)[:2] == result
    assert run_dir.read_status()["trials"] == []
    assert not (tmp_path / "cache").exists()
    call("begin", run_dir.path)
    assert plan.read(run_dir)["micro_batch_sizes"] == tried
    assert not run_dir.failure(0).exists(), "it would be taken for what the next ranks have failed of"


def test_trials_of_other_sizes_are_not_taken_for_those_that_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """Queued again, the job gets fewer nodes, and each rank a larger share. Four sequences fit."""
    config = replace(BASE, batch=Batch(48, train_micro_batch_size_per_gpu=MicroBatch.AUTO))
    run_dir = submitted(tmp_path / "run", config)
    tried, cuts = [], []
    for nodes in (4, 1, 1, 1, 3):
        granted(monkeypatch, nodes, 2 * nodes)
        assert call("begin", run_dir.path) == EXIT_DONE
        planned = plan.read(run_dir)
        tried.append(sizes := planned.get("micro_batch_sizes"))
        cuts.append((planned["batch"]["micro_batch_size"], planned["batch"]["data_parallel_size"]))
        if sizes is not None and nodes == 1:
            run_dir.write_status(micro_batch_size=max((size for size in sizes if size <= 4), default=None))
            note(run_dir, 0, "memory", "OutOfMemoryError: no room")
            assert ended(run_dir, capsys, 1)[1] == "again"
    assert tried == [[1, 2, 6], [1, 2, 4, 8, 24], [6], None, None]
    assert cuts[-2:] == [(4, 2), (4, 6)]


def test_verifying_takes_one_rank_first_and_then_all(tmp_path: Path, capsys: Output) -> None:
    run_dir = submitted(tmp_path / "run", replace(BASE, mode=Mode.VERIFY))
    started = []
    for _ in range(2):
        capsys.readouterr()
        call("begin", run_dir.path)
        started.append(int(capsys.readouterr().out.split()[-1]))
        if len(started) < 2:
            assert ended(run_dir, capsys)[1] == "again"
    assert started == [1, 8]


def test_a_job_waits_for_the_launcher_that_still_holds_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    run_dir = submitted(tmp_path / "run")
    holder = RunDir.create(run_dir.path, may_continue=True)
    monkeypatch.setattr(slurm_job, "SUBMITTER_S", 0.5)
    start = time.monotonic()
    assert call("begin", run_dir.path) == EXIT_REFUSED
    assert time.monotonic() - start >= 0.5
    assert "a live launcher holds it" in capsys.readouterr().err
    holder.release()
    assert call("begin", run_dir.path) == EXIT_DONE
