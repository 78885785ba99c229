"""Points of a sweep as arrays of jobs: which go together, and what is left where Slurm does not take them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from launcher import arrays, job, plan, slurm
from launcher.arrays import Array
from launcher.errors import RequestError
from launcher.ledger import Ledger, Point
from launcher.rundir import RunDir
from launcher.schema import Cluster
from tests import slurm as slurm_cluster

BASE = slurm_cluster.RUN


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def points(folder: Path, *clusters: Cluster) -> list[Point]:
    configs = [replace(BASE, cluster=cluster, seed=number) for number, cluster in enumerate(clusters)]
    return [
        Point(number, (f"seed={number}",), job.Job(config, plan.make(config), folder / f"{number:04d}"))
        for number, config in enumerate(configs)
    ]


def test_points_that_ask_for_the_same_resources_are_one_array(tmp_path: Path) -> None:
    small, large = BASE.cluster, replace(BASE.cluster, nodes=2)
    made = arrays.of(points(tmp_path, small, large, Cluster(), small), tmp_path)
    assert [[point.index for point in array.points] for array in made] == [[0, 3], [1]]
    assert [array.folder.name for array in made] == ["array_0", "array_1"]


def test_a_later_command_in_the_same_directory_has_arrays_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "array_0").mkdir()
    (array,) = arrays.of(points(tmp_path, BASE.cluster), tmp_path)
    assert array.folder.name == "array_1"


def test_points_of_an_array_that_slurm_refuses_are_told_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it can after its --test-only: the limit of jobs of a user is reached by then."""

    def refuse(script: str, folder: Path) -> str:
        raise RequestError("cluster=slurm: sbatch refuses: job submit limit")

    monkeypatch.setattr(slurm, "submit", refuse)
    (array,) = arrays.of(points(tmp_path, BASE.cluster, BASE.cluster), tmp_path)
    ledger = Ledger(tmp_path)
    with pytest.raises(RequestError, match="job submit limit"):
        array.submit(ledger)
    lines = [json.loads(line) for line in ledger.path.read_text().splitlines()]
    assert [(line["point"], line["state"]) for line in lines] == [(0, "failed"), (1, "failed")]
    for number in range(2):
        run_dir = RunDir(tmp_path / f"{number:04d}")
        assert run_dir.read_status()["state"] == "failed"
        assert "job submit limit" in run_dir.read_status()["reason"]
        RunDir.create(run_dir.path, may_continue=True).release()  # nobody holds it


@pytest.fixture
def submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Array, Ledger]:
    """Two points as array 7, and a launcher that does not take its time."""
    monkeypatch.setattr(slurm, "submit", lambda script, folder: "7")
    monkeypatch.setattr(arrays, "LOOK_S", 0.0)
    monkeypatch.setattr(arrays, "ASK_S", 0.0)
    (array,) = arrays.of(points(tmp_path, BASE.cluster, BASE.cluster), tmp_path)
    ledger = Ledger(tmp_path)
    array.submit(ledger)
    return array, ledger


def test_waiting_outlasts_a_controller_that_does_not_answer(
    submitted: tuple[Array, Ledger], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    array, ledger = submitted
    answers = iter([RequestError("cluster=slurm: squeue fails: Connection refused"), {"7_0"}, set()])

    def alive(jobs: list[str]) -> set[str]:
        answer = next(answers)
        if isinstance(answer, RequestError):
            raise answer
        RunDir(tmp_path / "0000").write_status(state="completed")
        return answer

    monkeypatch.setattr(slurm, "alive", alive)
    outcomes = arrays.wait([array], ledger)
    assert "squeue fails: Connection refused; waiting on" in capsys.readouterr().out
    assert [outcomes[number].state for number in range(2)] == ["completed", "failed"]
    log = tmp_path / "array_0" / "logs" / "slurm_7_1.log"
    assert outcomes[1].reason == f"its job has ended, and the run has not (log: {log})"


def test_an_array_one_of_whose_runs_is_at_work_is_refused_before_any_of_them_is_touched(
    submitted: tuple[Array, Ledger], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "check", lambda script, folder: None)
    first, second = RunDir(tmp_path / "0000"), RunDir(tmp_path / "0001")
    first.write_status(state="failed", reason="no such base")
    (again,) = arrays.of(points(tmp_path, BASE.cluster, BASE.cluster), tmp_path)

    def untouched() -> bool:
        return (first.read_status()["state"], first.read_status()["reason"]) == ("failed", "no such base")

    assert second.read_status()["job"] == "7_1"
    monkeypatch.setattr(slurm, "alive", lambda jobs: {"7_1"} & set(jobs))
    with pytest.raises(RequestError, match=r"0001: job 7_1 is at work on it; wait, or scancel 7_1"):
        again.check()
    assert untouched()
    monkeypatch.setattr(slurm, "alive", lambda jobs: set())
    again.check()
    held = RunDir.create(second.path, may_continue=True)
    with pytest.raises(RequestError, match="0001: a live launcher holds it"):
        again.check()
    with pytest.raises(RequestError, match="0001: a live launcher holds it"):
        again.submit(Ledger(tmp_path))
    assert untouched()
    held.release()
