"""The run directory: who may have it, and how its files are written."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from launcher import rundir
from launcher.errors import RequestError
from launcher.rundir import RunDir


def refusal(path: Path) -> str:
    with pytest.raises(RequestError) as raised:
        RunDir.create(path)
    return str(raised.value)


def test_parents_are_made_and_logs_have_a_place(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "a" / "b")
    assert run_dir.log(3) == tmp_path / "a" / "b" / "logs" / "rank_00003.log"
    assert run_dir.failure(3) == tmp_path / "a" / "b" / "logs" / "rank_00003.failure.json"
    assert run_dir.logs.is_dir()


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl"])
def test_a_directory_that_holds_a_run_is_refused_and_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("x")
    rule = "it holds a run already, which is not to be continued here; give another hydra.run.dir"
    line = f"hydra.run.dir={tmp_path}: {rule}"
    assert rundir.check(tmp_path) == [line]
    assert refusal(tmp_path) == line
    assert (tmp_path / name).read_text() == "x"


def test_checkpoints_are_a_run_too(tmp_path: Path) -> None:
    """Out of memory, a run that was not to go on would go on with them."""
    (tmp_path / "checkpoints" / "step_00000004").mkdir(parents=True)
    assert RunDir(tmp_path).holds_a_run()


def test_a_path_that_is_a_file_or_goes_through_one_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for path in (file, file / "run"):
        assert rundir.check(path) == [f"hydra.run.dir={path}: {file} is not a directory; give another one"]
        assert refusal(path) == f"hydra.run.dir={path}: it cannot be written (Not a directory); give another directory"
    assert file.read_text() == "x"


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests may run as root, whom no permission bit stops.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    assert rundir.check(tmp_path / "new") == [
        f"hydra.run.dir={tmp_path / 'new'}: {tmp_path} cannot be written; give another directory"
    ]


def test_nothing_is_left_of_a_directory_that_could_not_be_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / ("x" * 300)
    assert refusal(path) == f"hydra.run.dir={path}: it cannot be written (File name too long); give another directory"
    assert list(tmp_path.iterdir()) == []


def test_looking_at_a_directory_writes_nothing(tmp_path: Path) -> None:
    assert rundir.check(tmp_path / "a" / "b") == []
    assert list(tmp_path.iterdir()) == []


def test_a_second_live_launcher_is_refused_naming_the_first(tmp_path: Path) -> None:
    first = RunDir.create(tmp_path)
    assert refusal(tmp_path) == (
        f"hydra.run.dir={tmp_path}: a live launcher holds it (pid {os.getpid()} on {socket.gethostname()}); "
        "give another directory"
    )
    first.release()
    RunDir.create(tmp_path).release()


def test_the_lock_dies_with_its_launcher(tmp_path: Path) -> None:
    code = "import sys,time; from pathlib import Path; from launcher.rundir import RunDir; "
    code += "d = RunDir.create(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert f"a live launcher holds it (pid {holder.pid} on " in refusal(tmp_path)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    RunDir.create(tmp_path).release()


def test_fifty_starts_at_once_on_one_directory_give_it_to_one(tmp_path: Path) -> None:
    won: list[RunDir] = []
    refused: list[str] = []
    barrier = threading.Barrier(50)

    def start() -> None:
        barrier.wait()
        try:
            won.append(RunDir.create(tmp_path / "run"))
        except RequestError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=start) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert len(refused) == 49
    assert all("a live launcher holds it" in line for line in refused)


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    texts = [json.dumps([number] * 50_000) for number in range(2)]
    rundir.write_text(path, texts[0])
    stop = time.monotonic() + 0.5

    def write() -> None:
        turn = 0
        while time.monotonic() < stop:
            turn += 1
            rundir.write_text(path, texts[turn % 2], sync=False)

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while time.monotonic() < stop:
        seen.add(path.read_text())
    writer.join()
    assert seen <= set(texts)
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]


def test_status_keeps_the_fields_that_do_not_change(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert run_dir.read_status() == {}
    before = time.time()
    run_dir.write_status(state="running", step=3)
    run_dir.write_status(step=4, activity=None)
    status = run_dir.read_status()
    assert before <= status.pop("heartbeat") <= time.time()
    assert status == {"state": "running", "step": 4, "activity": None}


def test_the_last_evaluation_is_found(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert run_dir.last_eval_loss() is None
    lines: list[dict[str, object]] = [{"kind": "train", "loss": 1.0}]
    run_dir.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run_dir.last_eval_loss() is None
    lines += [{"kind": "eval", "eval_loss": 1.5}, {"kind": "eval", "eval_loss": 1.25}, {"kind": "train", "loss": 1.0}]
    run_dir.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run_dir.last_eval_loss() == 1.25


def test_a_line_that_was_never_written_to_its_end_is_left_out_of_the_metrics(tmp_path: Path) -> None:
    """A full disk ends a line anywhere; the attempt after it begins a new one."""
    run_dir = RunDir(tmp_path)
    run_dir.metrics.write_text('{"kind": "train", "step": 1}\n{"kind": "tra\n{"kind": "train", "step": 2}\n{"ki')
    assert run_dir.last_step() == 2


def test_lines_of_the_metrics_that_are_no_records_are_left_out(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.metrics.write_bytes(b'5\n[1]\n{}\n\xff\x00\n{"kind": "train", "step": 2}\n"train"\n')
    assert run_dir.last_step() == 2


def test_records_of_the_metrics_without_their_values_are_no_records(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.metrics.write_text('{"kind": "train", "step": 2}\n{"kind": "eval", "eval_loss": 1.5}\n{"kind": "train"}\n'
                               '{"kind": "eval"}\n' + "[" * 100_000 + "\n")  # fmt: skip
    assert (run_dir.last_step(), run_dir.last_eval_loss()) == (2, 1.5)


def test_an_evaluation_that_came_to_no_number_is_the_last_one_all_the_same(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.metrics.write_text('{"kind": "eval", "eval_loss": 1.5}\n{"kind": "eval", "eval_loss": null}\n')
    assert run_dir.last_eval_loss() is None


@pytest.mark.parametrize(
    "text", ["null", '"7"', "true", "NaN", "Infinity", "-Infinity", "1e400", "1" + "0" * 400, "[7]", '{"7": 7}']
)
def test_what_is_no_finite_number_is_none(text: str) -> None:
    assert rundir.number(json.loads(text)) is None


@pytest.mark.parametrize(("text", "value"), [("7", 7), ("-0.5", -0.5), ("1e300", 1e300)])
def test_a_number_is_itself(text: str, value: float) -> None:
    assert rundir.number(json.loads(text)) == value


@pytest.mark.parametrize("text", [b"", b'{"state": "runn', b"[1, 2]", b"\xff\xfe", b"[" * 200_000])
def test_a_status_that_a_reboot_has_emptied_says_nothing(tmp_path: Path, text: bytes) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.status.write_bytes(text)
    assert run_dir.read_status() == {}


def test_a_directory_whose_parts_or_name_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    assert rundir.check(tmp_path, may_continue=True) == [
        f"hydra.run.dir={tmp_path}: {tmp_path}/logs is not a directory; give another one"
    ]
    long = tmp_path / ("a" * 300)
    assert rundir.check(long) == [
        f"hydra.run.dir={long}: it cannot be written (File name too long); give another directory"
    ]


@pytest.mark.parametrize("name", [*rundir.FILES, "logs/rank_00003.log"])
def test_a_directory_where_a_file_should_be_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir(parents=True)
    assert rundir.check(tmp_path, may_continue=True) == [
        f"hydra.run.dir={tmp_path}: {tmp_path}/{name} is not a file; give another directory"
    ]


@pytest.mark.parametrize("name", [*rundir.FOLDERS, "attempts/1"])
def test_a_file_where_a_directory_should_be_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    assert rundir.check(tmp_path, may_continue=True) == [
        f"hydra.run.dir={tmp_path}: {tmp_path}/{name} is not a directory; give another one"
    ]


def test_a_file_of_somebody_elses_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests may run as root, whom no permission bit stops.
    (tmp_path / "metrics.jsonl").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "metrics.jsonl")
    assert rundir.check(tmp_path, may_continue=True) == [
        f"hydra.run.dir={tmp_path}: {tmp_path}/metrics.jsonl cannot be read and written; give another directory"
    ]


def test_a_disk_without_room_for_a_lock_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, text: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.write", full)
    with pytest.raises(RequestError, match=r"cannot be written \(No space left"):
        RunDir.create(tmp_path / "of" / "run")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    RunDir.create(tmp_path / "run").release()


def test_attempts_are_counted_also_where_the_status_is_garbage(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for attempt in ('"x"', "1" + "0" * 300, "-1", "null"):
        run_dir.status.write_text(f'{{"attempt": {attempt}, "state": 5}}')
        assert run_dir.begin_attempt() == 1


def test_what_writers_that_were_killed_have_left_goes_with_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDir.create(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupt)
        for path in (run_dir.status, run_dir.failure(3)):
            with pytest.raises(KeyboardInterrupt):
                rundir.write_text(path, "x")
    assert len(list(tmp_path.rglob(".*"))) == 2
    (tmp_path / ".config.yaml.99" / "a folder").mkdir(parents=True)
    run_dir.failure(5).mkdir()
    run_dir.begin_attempt()
    run_dir.forget_failures()
    assert list(tmp_path.rglob(".*")) == list(run_dir.logs.iterdir()) == []


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt
