"""What is asked of Slurm, and in which environment; that it is understood is shown in test_slurm_runs.py."""

from dataclasses import replace
from pathlib import Path

import pytest

from launcher import slurm
from launcher.errors import RequestError
from launcher.schema import Cluster, ClusterType

PLAIN = Cluster(type=ClusterType.SLURM)


@pytest.mark.parametrize(
    ("cluster", "measured_s", "lead"),
    [
        (PLAIN, None, 120),
        (PLAIN, 4.0, 60),
        (PLAIN, 45.2, 91),  # twice as long, in whole seconds
        (replace(PLAIN, time="1:00:00"), 45.2, 91),
        (replace(PLAIN, time=3), None, 90),  # half of three minutes
        (replace(PLAIN, signal_lead=300), 45.2, 300),
        (PLAIN, 1e300, 65535),  # no more than Slurm takes
    ],
)
def test_a_job_is_asked_to_save_in_time(cluster: Cluster, measured_s: float | None, lead: int) -> None:
    assert slurm.signal_lead(cluster, measured_s) == lead


def test_what_another_job_or_a_users_habits_have_set_does_not_reach_a_new_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of sbatch are stronger than the lines of a script; of those that say who pays, a line is stronger."""
    given = {"SBATCH_TIMELIMIT": "5", "SBATCH_ACCOUNT": "lab", "SBATCH_PARTITION": "gpu", "SLURM_NTASKS": "64"}
    given["SQUEUE_PARTITION"] = "gpu"
    kept = {"SLURM_CONF": "/etc/slurm.conf", "OWN": "1"}
    for name, value in (given | kept).items():
        monkeypatch.setenv(name, value)
    found = slurm._environment("#!/bin/bash\n#SBATCH --partition=cpu\n")
    assert {name: found.get(name) for name in given} == {**dict.fromkeys(given), "SBATCH_ACCOUNT": "lab"}
    assert kept.items() <= found.items()


def test_complaints_of_slurm_are_one_line_each_told_once() -> None:
    errors = "sbatch: error: invalid partition: x\nsbatch: error: invalid partition: x\n\nallocation failure: no\n"
    assert slurm._words(errors) == "invalid partition: x; allocation failure: no"
    assert slurm._words("") == "it says nothing"


def test_only_a_directory_without_a_pattern_can_take_a_log() -> None:
    assert slurm.check_folder(Path("/runs/a b/$x")) == []
    (fault,) = slurm.check_folder(Path("/runs/50%/1"))
    assert fault.startswith("hydra.run.dir=/runs/50%/1: Slurm does not take a % ")
    (fault,) = slurm.check_folder(Path("/runs/a\\b"))
    assert fault.startswith("hydra.run.dir=/runs/a\\b: Slurm does not take a \\ ")


@pytest.mark.parametrize("line", ["if true; then", "cat <<EOF", "echo 'a"])
def test_lines_of_setup_that_would_swallow_the_rest_of_the_script_are_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(RequestError, match=r"^cluster.setup: it is no shell that can be read: "):
        slurm.check(f"#!/bin/bash\n{line}\nset +e\nexit 0\n", tmp_path)
