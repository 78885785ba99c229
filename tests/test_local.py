"""The local runner: ranks start together, and end together whatever happens. Workers here are small scripts."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from launcher import devices, guard, local, progress
from launcher.errors import OutOfMemoryError, RequestError, RunError, RunPreemptedError
from launcher.rundir import RunDir
from launcher.schema import Call, Config, Logging, Train

CONFIG = Config(model=Call("nets.Net"))

Worker = Callable[[str], list[str]]

PRELUDE = """
import json, os, signal, socket, subprocess, sys, time
from pathlib import Path
run_dir, rank = Path(sys.argv[1]), int(os.environ["RANK"])
def put(name, text):
    (run_dir / f"new_{rank}").write_text(text)
    (run_dir / f"new_{rank}").rename(run_dir / name)
def note(kind, reason, signal=None):
    put(f"logs/rank_{rank:05d}.failure.json",
        json.dumps({"rank": rank, "time": time.time(), "kind": kind, "reason": reason, "signal": signal}))
def metrics(**values):
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(values) + "\\n")
def status(**values):
    put("status.json", json.dumps(json.loads((run_dir / "status.json").read_text()) | values))
def wait_for(name):
    while not (run_dir / name).exists():
        time.sleep(0.01)

def wait_until_gone(name):
    wait_for(name)
    stat = Path("/proc") / (run_dir / name).read_text() / "stat"
    while stat.exists() and ") Z " not in stat.read_text():
        pass

put(f"pid_{rank}", str(os.getpid()))
"""
"""What every worker can do."""

FAMILY = """
grandchild = '''
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(600)
'''
child = f'''
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
process = subprocess.Popen([sys.executable, "-S", "-c", {grandchild!r}], stdout=subprocess.PIPE)
process.stdout.readline()
print(process.pid, flush=True)
time.sleep(600)
'''
process = subprocess.Popen([sys.executable, "-S", "-c", child], stdout=subprocess.PIPE, text=True)
put(f"children_{rank}", f"{process.pid} {process.stdout.readline()}")
"""
"""A rank with a child and a grandchild, which both ignore SIGTERM."""

STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)" + FAMILY
"""The same, and the rank ignores it too."""


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run")


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    """Writes the script of a worker and returns the command that runs it."""

    def write(code: str) -> list[str]:
        script = tmp_path / "worker.py"
        script.write_text(PRELUDE + textwrap.dedent(code))
        return [sys.executable, "-S", str(script)]

    return write


def run(run_dir: RunDir, ranks: int, worker: list[str], config: Config = CONFIG) -> None:
    local.run(config, [ranks], 2, run_dir, worker)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def pids(run_dir: RunDir) -> list[int]:
    """Every process of a run that wrote down its number."""
    files = [*run_dir.path.glob("pid_*"), *run_dir.path.glob("children_*")]
    return [int(pid) for file in files for pid in file.read_text().split()]


def wait_until(condition: Callable[[], object], timeout_s: float = 15) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)


def test_ranks_are_told_who_they_are_and_meet_on_the_inherited_socket(
    run_dir: RunDir, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "DS_ACCELERATOR", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(devices, "visible_gpus", lambda: 0)
    run(
        run_dir,
        2,
        worker("""
            names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR OMP_NUM_THREADS DS_ACCELERATOR".split()
            print({name: os.environ[name] for name in [*names, "GLOO_SOCKET_IFNAME"]})
            if rank == 0:
                server = socket.socket(fileno=int(os.environ["OKAZAKI_STORE_FD"]))
                print(server.accept()[0].recv(100))
            else:
                assert "OKAZAKI_STORE_FD" not in os.environ
                address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
                socket.create_connection(address).sendall(b"hello")
        """),
    )
    cores = len(os.sched_getaffinity(0))
    for rank in range(2):
        told = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": str(max(1, cores // 2)),
            "DS_ACCELERATOR": "cpu",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        assert run_dir.log(rank).read_text() == f"{told}\n" + ("b'hello'\n" if rank == 0 else "")
    status = run_dir.read_status()
    assert (status["state"], status["pid"]) == ("completed", os.getpid())


def test_what_the_user_set_in_the_environment_stays(
    run_dir: RunDir, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    run(run_dir, 1, worker("print(os.environ['OMP_NUM_THREADS'], os.environ['GLOO_SOCKET_IFNAME'])"))
    assert run_dir.log(0).read_text() == "7 eth7\n"


def test_a_rank_may_be_done_before_the_others(run_dir: RunDir, worker: Worker) -> None:
    run(run_dir, 2, worker("time.sleep(0.5 * rank); put(f'done_{rank}', '')"))
    assert (run_dir.path / "done_1").exists()


def test_a_rank_that_fails_ends_the_others_and_their_children_in_seconds(
    run_dir: RunDir, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "GRACE_S", 1.0)
    fails = "if rank == 1:\n    wait_for('children_0')\n    print('out of ideas')\n    sys.exit(3)\n"
    start = time.monotonic()
    with pytest.raises(RunError) as raised:
        run(run_dir, 2, worker(fails + STUBBORN + "time.sleep(600)"))
    assert time.monotonic() - start < 8
    assert str(raised.value) == f"rank 1 failed: exit code 3: out of ideas (log: {run_dir.log(1)})"
    assert len(pids(run_dir)) == 4
    assert all(is_gone(pid) for pid in pids(run_dir))
    status = run_dir.read_status()
    assert (status["state"], status["reason"], status["activity"]) == ("failed", str(raised.value), None)


def test_the_status_of_a_failed_run_tells_the_last_step_that_was_done(run_dir: RunDir, worker: Worker) -> None:
    with pytest.raises(RunError, match="rank 0 failed"):
        run(
            run_dir,
            1,
            worker("""
                figures = dict.fromkeys("loss bits_per_base lr grad_norm tokens_per_s skipped".split())
                lines = [{"kind": "train", "step": step, "time": 0.0, **figures} for step in (1, 2, 3)]
                text = "".join(json.dumps(line) + chr(10) for line in lines)
                (run_dir / "metrics.jsonl").write_text(text + '{"kind": "train", "st')
                sys.exit(1)
            """),
        )
    assert run_dir.read_status()["step"] == 3


def test_the_rank_that_failed_first_is_named_although_another_ended_first(run_dir: RunDir, worker: Worker) -> None:
    command = worker("""
        if rank == 1:
            note("failure", "ValueError: the first cause")
            put("noted", "")
            time.sleep(600)
        wait_for("noted")
        note("failure", "RuntimeError: connection closed by peer")
        sys.exit(1)
    """)
    with pytest.raises(RunError) as raised:
        run(run_dir, 2, command)
    assert str(raised.value) == f"rank 1 failed: ValueError: the first cause (log: {run_dir.log(1)})"


def test_a_rank_that_was_killed_is_named_and_not_those_that_lost_it(run_dir: RunDir, worker: Worker) -> None:
    command = worker("""
        if rank == 1:
            wait_for("pid_0")
            os.kill(os.getpid(), signal.SIGKILL)
        wait_until_gone("pid_1")
        note("failure", "RuntimeError: connection closed by peer")
        sys.exit(1)
    """)
    with pytest.raises(RunError) as raised:
        run(run_dir, 2, command)
    assert str(raised.value) == (
        f"rank 1 failed: killed by SIGKILL, often a sign of too little memory (log: {run_dir.log(1)})"
    )


def test_a_rank_that_aborts_is_not_named_before_the_one_that_it_lost(run_dir: RunDir, worker: Worker) -> None:
    command = worker("""
        if rank == 1:
            note("failure", "ValueError: the first cause")
            put("noted", "")
            time.sleep(600)
        wait_for("noted")
        os.abort()
    """)
    with pytest.raises(RunError) as raised:
        run(run_dir, 2, command)
    assert str(raised.value) == f"rank 1 failed: ValueError: the first cause (log: {run_dir.log(1)})"


def test_a_rank_that_aborts_is_named_with_its_last_words_where_the_others_only_lost_it(
    run_dir: RunDir, worker: Worker
) -> None:
    """So gloo ends a rank that was sent more or less than it waited for."""
    command = worker("""
        if rank == 1:
            wait_for("noted")
            print("terminate called\\n  what():  1380 vs 1108. A mismatch\\n", flush=True)
            os.abort()
        note("failure", "RuntimeError: [pair.cc:544] Connection reset by peer [127.0.0.1]")
        put("noted", "")
        time.sleep(600)
    """)
    with pytest.raises(RunError) as raised:
        run(run_dir, 2, command)
    reason = "killed by SIGABRT, 1380 vs 1108. A mismatch"
    assert str(raised.value) == f"rank 1 failed: {reason} (log: {run_dir.log(1)})"


def test_ranks_that_communicate_different_things_are_told_what_helps(run_dir: RunDir, worker: Worker) -> None:
    command = worker("""
        print("terminate called\\n  what():  op.preamble.length <= op.nbytes. 636 vs 364\\n", flush=True)
        os.abort()
    """)
    with pytest.raises(RunError, match=r"SIGABRT, op\..* 636 vs 364: ranks .* set zero=stage1, or accumulation\.sync="):
        run(run_dir, 1, command)


def test_a_rank_that_ends_before_the_run_does_is_named_and_not_those_that_lost_it(
    run_dir: RunDir, worker: Worker
) -> None:
    command = worker("""
        if rank == 1:
            os._exit(0)
        wait_until_gone("pid_1")
        note("failure", "RuntimeError: [pair.cc:544] Connection reset by peer [127.0.0.1]")
        sys.exit(1)
    """)
    with pytest.raises(RunError) as raised:
        run(run_dir, 2, command)
    assert str(raised.value) == (
        f"rank 1 failed: it ended before the run did, with exit code 0 (log: {run_dir.log(1)})"
    )


def test_what_a_rank_says_when_it_is_ended_is_no_first_cause(run_dir: RunDir, worker: Worker) -> None:
    command = worker("""
        if rank == 0:
            wait_for("ready")
            sys.exit("out of ideas")
        signal.signal(signal.SIGTERM, lambda *_: (note("failure", "told to end"), sys.exit(1)))
        put("ready", "")
        time.sleep(600)
    """)
    with pytest.raises(RunError) as raised:
        run(run_dir, 2, command)
    assert str(raised.value) == f"rank 0 failed: exit code 1: out of ideas (log: {run_dir.log(0)})"


def test_a_rank_that_was_to_stop_and_ran_out_of_memory_first_has_stopped(run_dir: RunDir, worker: Worker) -> None:
    code = """
    if rank == 1:
        note("memory", "OutOfMemoryError: no room", "SIGUSR2")
        sys.exit(1)
    time.sleep(60)
    """
    with pytest.raises(RunPreemptedError) as raised:
        run(run_dir, 2, worker(code))
    assert str(raised.value) == "stopped by SIGUSR2 to rank 1"
    status = run_dir.read_status()
    assert (status["state"], status["reason"]) == ("preempted", "SIGUSR2 to rank 1")


def test_a_rank_that_runs_out_of_memory_while_the_launcher_is_to_stop_has_stopped(
    run_dir: RunDir, worker: Worker
) -> None:
    code = """
    def fail(*_):
        note("memory", "OutOfMemoryError: no room")
        os._exit(1)
    signal.signal(signal.SIGTERM, fail)
    os.kill(os.getppid(), signal.SIGUSR2)
    time.sleep(60)
    """
    with pytest.raises(RunPreemptedError) as raised:
        run(run_dir, 1, worker(code))
    assert str(raised.value) == "stopped by SIGUSR2 to the launcher"


def test_a_signal_that_comes_too_late_for_ranks_that_try_something_stops_what_comes_after_them(
    run_dir: RunDir, worker: Worker
) -> None:
    code = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(0.5)
    """
    with pytest.raises(RunPreemptedError) as raised:
        local.run(CONFIG, [1], None, run_dir, worker(code), is_all=False)
    assert str(raised.value) == "stopped by SIGINT to the launcher"
    assert run_dir.read_status()["state"] == "preempted"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2])
def test_a_signal_between_two_groups_of_ranks_stops_the_run(run_dir: RunDir, number: signal.Signals) -> None:
    run_dir.write_status(state="running")
    with pytest.raises(RunPreemptedError) as raised, local.stoppable(run_dir):  # noqa: PT012
        os.kill(os.getpid(), number)
        time.sleep(5)
    assert str(raised.value) == f"stopped by {number.name} to the launcher"
    status = run_dir.read_status()
    assert (status["state"], status["reason"]) == ("preempted", f"{number.name} to the launcher")


def test_a_rank_that_is_ended_because_another_ran_out_of_memory_was_not_to_stop(
    run_dir: RunDir, worker: Worker
) -> None:
    code = """
    if rank == 0:
        note("memory", "OutOfMemoryError: no room")
        put("done", "")
        time.sleep(60)
    wait_for("done")
    note("failure", "RuntimeError: Connection closed by peer", "SIGTERM")
    sys.exit(1)
    """
    with pytest.raises(OutOfMemoryError) as raised:
        run(run_dir, 2, worker(code))
    assert "rank 0 failed: OutOfMemoryError: no room" in str(raised.value)


def test_what_ranks_have_failed_of_before_is_not_the_cause(run_dir: RunDir, worker: Worker) -> None:
    """Those that tried out micro-batches, for instance, before the ones that train."""
    with pytest.raises(OutOfMemoryError):
        run(run_dir, 1, worker('note("memory", "OutOfMemoryError: no room"); sys.exit(1)'))
    with pytest.raises(RunError) as raised:
        run(run_dir, 1, worker('print("no such base"); sys.exit(3)'))
    assert str(raised.value) == f"rank 0 failed: exit code 3: no such base (log: {run_dir.log(0)})"


def test_a_request_that_a_rank_finds_wrong_is_no_failed_run(run_dir: RunDir, worker: Worker) -> None:
    with pytest.raises(RequestError) as raised:
        run(run_dir, 1, worker("note('request', 'a=1: no\\nb=2: no'); sys.exit(2)"))
    assert raised.value.faults == ["a=1: no", "b=2: no"]
    assert run_dir.read_status()["state"] == "failed"


def test_children_that_a_rank_leaves_behind_are_ended(
    run_dir: RunDir, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "GRACE_S", 0.3)
    run(run_dir, 1, worker(STUBBORN))
    assert len(pids(run_dir)) == 3
    assert all(is_gone(pid) for pid in pids(run_dir))


DRIVER = """
import sys
from pathlib import Path
from launcher import local
from launcher.errors import RequestError, RunError
from launcher.rundir import RunDir
from launcher.schema import Call, Config
run_dir = RunDir.create(Path(sys.argv[1]))
try:
    local.run(Config(model=Call("nets.Net")), [int(sys.argv[2])], 2, run_dir, sys.argv[3:])
except (RequestError, RunError) as error:
    print(error)
    sys.exit(error.exit_code)
"""
"""A launcher in a process of its own: RUN_DIR RANKS WORKER..."""


def drive(run_dir: Path, worker: list[str]) -> "subprocess.Popen[str]":
    """Such a launcher, once both of its ranks have children."""
    command = [sys.executable, "-c", DRIVER, str(run_dir), "2", *worker]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    wait_until(lambda: len(list(run_dir.glob("children_*"))) == 2)
    return process


@pytest.mark.parametrize(
    ("number", "code", "state", "reason"),
    [
        (signal.SIGINT, 130, "failed", "stopped by SIGINT"),
        (signal.SIGTERM, 75, "preempted", "stopped by SIGTERM before training had begun"),
        (signal.SIGHUP, 75, "preempted", "stopped by SIGHUP before training had begun"),
    ],
)
def test_a_signal_to_the_launcher_ends_every_process(
    tmp_path: Path, worker: Worker, number: signal.Signals, code: int, state: str, reason: str
) -> None:
    """Twice: a second interrupt says now, and any other signal that comes again changes nothing, not even while the
    launcher leaves."""
    run_dir = RunDir(tmp_path / "run")
    process = drive(run_dir.path, worker(FAMILY + "time.sleep(600)"))
    everybody = {*pids(run_dir), *(child.pid for child in psutil.Process(process.pid).children())}
    process.send_signal(number)
    ranks = [int(file.read_text()) for file in run_dir.path.glob("pid_*")]
    wait_until(lambda: all(is_gone(rank) for rank in ranks), 3)
    while process.poll() is None:
        process.send_signal(number)
        time.sleep(0.001)
    output, _ = process.communicate(timeout=15)
    assert process.returncode == code
    assert output.splitlines()[-1] == reason
    assert len(everybody) == 7  # two ranks, their children and grandchildren, and the guard
    assert all(is_gone(pid) for pid in everybody)
    status = run_dir.read_status()
    assert (status["state"], status["reason"]) == (state, reason if state == "failed" else number.name)


def test_nothing_outlives_a_launcher_that_is_killed(tmp_path: Path, worker: Worker) -> None:
    run_dir = RunDir(tmp_path / "run")
    process = drive(run_dir.path, worker(STUBBORN + "time.sleep(600)"))
    everybody = {*pids(run_dir), *(child.pid for child in psutil.Process(process.pid).children())}
    process.kill()
    process.wait()
    wait_until(lambda: all(is_gone(pid) for pid in everybody), guard.GRACE_S + 5)


def test_two_runs_at_once_never_share_a_port(tmp_path: Path, worker: Worker) -> None:
    command = worker("print(os.environ['MASTER_PORT']); put(f'children_{rank}', ''); time.sleep(600)")
    drivers = [drive(tmp_path / name, command) for name in "ab"]
    logs = [RunDir(tmp_path / name).log(rank) for name in "ab" for rank in range(2)]
    wait_until(lambda: all(log.read_text() for log in logs))
    ports = [log.read_text() for log in logs]
    for driver in drivers:
        driver.terminate()
        driver.communicate()
    assert ports[0] == ports[1] != ports[2] == ports[3]


TRAIN = {
    "kind": "train",
    "bits_per_base": 2.0,
    "lr": 1e-3,
    "grad_norm": 0.5,
    "tokens_per_s": 12345.6,
    "skipped": False,
    "time": 0.0,
}


def test_steps_evaluations_and_activities_are_told_in_plain_lines(
    run_dir: RunDir, worker: Worker, capsys: pytest.CaptureFixture[str]
) -> None:
    command = worker(f"""
        train = {TRAIN!r}
        status(activity="reading the genome", num_steps=5)
        time.sleep(0.5)
        for step in (1, 2, 3):
            metrics(**train | {{"step": step, "loss": 1.0 / step, "time": 10.0 * step}})
        unknown = dict.fromkeys(["loss", "bits_per_base", "grad_norm", "tokens_per_s"])
        metrics(**train | unknown | {{"step": 4, "skipped": True, "time": 40.0}})
        metrics(**train | {{"step": 5, "loss": 0.2, "time": 50.0}})
        metrics(kind="eval", step=5, eval_loss=1.25, eval_bits_per_base=1.8)
        status(activity=None)
    """)
    run(run_dir, 1, command, Config(model=Call("nets.Net"), train=Train(log_every=2)))
    assert capsys.readouterr().out.splitlines() == [
        "starting",
        "reading the genome",
        "step 2/5  loss 0.5000  2.0000 bits/base  lr 1.00e-03  grad norm 0.5  12,346 tokens/s  ETA 0:00:30",
        "step 4/5  loss -  lr 1.00e-03  grad norm -  - tokens/s  no update  ETA 0:00:10",
        "step 5/5  loss 0.2000  2.0000 bits/base  lr 1.00e-03  grad norm 0.5  12,346 tokens/s  ETA 0:00:00",
        "evaluation after step 5: loss 1.2500, 1.8000 bits/base",
    ]


def test_a_line_that_is_still_being_written_waits_for_its_end(
    run_dir: RunDir, worker: Worker, capsys: pytest.CaptureFixture[str]
) -> None:
    command = worker("""
        line = json.dumps({"kind": "eval", "step": 1, "eval_loss": 1.0, "eval_bits_per_base": 1.5}) + "\\n"
        with (run_dir / "metrics.jsonl").open("a") as file:
            for part in (line[:20], line[20:]):
                file.write(part)
                file.flush()
                time.sleep(0.5)
    """)
    run(run_dir, 1, command)
    assert capsys.readouterr().out == "starting\nevaluation after step 1: loss 1.0000, 1.5000 bits/base\n"


def test_a_terminal_gets_a_bar(tmp_path: Path, worker: Worker) -> None:
    command = worker(f"""
        metrics(**{TRAIN!r} | {{"step": 2, "loss": 0.6931}})
        metrics(kind="eval", step=2, eval_loss=1.25, eval_bits_per_base=1.8)
        time.sleep(0.5)
    """)
    ours, theirs = os.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "160"}
    driver = [sys.executable, "-c", DRIVER, str(tmp_path / "run"), "1", *command]
    process = subprocess.Popen(driver, stdout=theirs, env=environment)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
    except OSError:  # how the end of a terminal is told
        os.close(ours)
    assert process.wait() == 0
    text = shown.decode()
    assert "loss 0.6931  2.0000 bits/base" in text
    assert "2/2" in text
    assert "evaluation after step 2: loss 1.2500, 1.8000 bits/base" in text


def test_a_summary_that_somebody_has_changed_is_left_out(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir.write_status(summary=["x"])
    progress.print_summary(run_dir)
    assert capsys.readouterr().out.split() == ["run", "directory", str(run_dir.path)]


def test_no_bar_where_the_user_wants_none(
    run_dir: RunDir, worker: Worker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    run(run_dir, 1, worker(""), Config(model=Call("nets.Net"), logging=Logging(progress_bar=False)))
    assert capsys.readouterr().out == "starting\n"


@pytest.mark.parametrize(
    ("chosen", "count"),
    [(None, 3), ("", 0), ("-1", 0), ("0", 1), ("0,2", 2), ("0,-1,2", 1), ("GPU-ab12", 1), ("MIG-a/b/c,MIG-d", 2)],
)
def test_gpus_are_counted_as_cuda_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str | None, count: int
) -> None:
    tool = tmp_path / "nvidia-smi"
    lines = "".join(f"GPU {number}: Some GPU (UUID: GPU-{number})\\n  MIG 1g.10gb\\n" for number in range(3))
    tool.write_text(f"#!/bin/sh\nprintf '{lines}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert devices.visible_gpus({} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}) == count


def test_device_files_are_counted_where_the_driver_has_no_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "DEVICES", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert devices.visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}) == 0
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert devices.visible_gpus({}) == 2
