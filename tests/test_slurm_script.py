"""The script that is submitted, as text: ten configurations against files, shellcheck, odd values read by a shell."""

import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher import slurm_options, slurm_script
from launcher.compose import shipped
from launcher.schema import Cluster, ClusterType
from tests.slurm import in_ci

GOLDEN = Path(__file__).parent / "golden" / "slurm"
TEMPLATE = (shipped("slurm") / "submit.sbatch").read_text()
PLAIN = Cluster(type=ClusterType.SLURM)

CASES: dict[str, tuple[Cluster, dict[str, Any]]] = {
    "plain": (PLAIN, {}),
    "gpus": (
        replace(
            PLAIN, nodes=2, partition="gpu", account="ml", qos="normal", time="1-12:00:00", gpus_per_node="a100:4",
            cpus_per_task=8, mem="480G",
        ),
        {"ranks_per_node": 4, "signal_lead": 300},
    ),
    "elastic": (replace(PLAIN, nodes="2-4", time=90, time_min="1:00:00", requeue=False), {}),
    "array": (
        replace(PLAIN, max_parallel=2),
        {"run_dirs": [Path(f"/runs/sweep/{number:04d}") for number in range(3)], "array": "0-2%2"},
    ),
    "setup": (
        replace(
            PLAIN, setup=["module load cuda/12.4", 'source "$HOME/env/bin/activate"'],
            environment={"NCCL_DEBUG": "WARN", "GREETING": "it's $5; `date`"},
        ),
        {},
    ),
    "apptainer": (replace(PLAIN, container=["apptainer", "exec", "--nv", "/images/train v2.sif"]), {}),
    "pyxis": (
        replace(PLAIN, container_image="nvcr.io#nvidia/pytorch:25.01", container_mounts="/data:/data"),
        {"python": "python3"},
    ),
    "placed": (
        replace(
            PLAIN, constraint="ib&a100", exclusive=True, nodelist="n[1-2]", exclude="n7", reservation="class",
            licenses="fasta:2", begin="now+1hour", dependency="afterok:12:13", nice=100,
        ),
        {},
    ),
    "told": (
        replace(
            PLAIN, mail_type="END,FAIL", mail_user="a@b.org", comment='3\' end "lagging" # not a comment', wckey="dna",
            extra={"spread_job": True, "switches": "1@10:00", "hint": "nomultithread", "reboot": False},
        ),
        {"name": "strand # 5"},
    ),
    "odd_paths": (
        PLAIN,
        {
            "folder": Path("/home/o'hara/my $PROJECT; rm -rf"),
            "run_dirs": [Path('/scratch/a b/"quoted"/`x`/new\nline/%j')],
            "python": "/opt/py thon/bin/python",
        },
    ),
}  # fmt: skip


def rendered(name: str) -> str:
    cluster, changes = CASES[name]
    assert slurm_options.check(cluster) == []
    options: dict[str, Any] = {
        "name": "dna_8k",
        "python": "/env/bin/python",
        "folder": Path("/home/lab"),
        "run_dirs": [Path("/home/lab/runs/dna_8k/1")],
        "ranks_per_node": 1,
        "signal_lead": 120,
    }
    return slurm_script.render(TEMPLATE, cluster, **{**options, **changes})


def test_every_file_has_a_case() -> None:
    assert {path.stem for path in GOLDEN.glob("*.sbatch")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_script_is_what_it_was(name: str) -> None:
    assert rendered(name) == (GOLDEN / f"{name}.sbatch").read_text()


# Never left out in continuous integration, which installs it.
@pytest.mark.skipif(shutil.which("shellcheck") is None and not in_ci(), reason="shellcheck is not installed")
@pytest.mark.parametrize("name", CASES)
def test_shellcheck_has_no_complaint(name: str, tmp_path: Path) -> None:
    file = tmp_path / "submit.sbatch"
    file.write_text(rendered(name))
    # Files that a user's own setup names are not there, and what is quoted is not meant to be expanded.
    command = ["shellcheck", "--exclude=SC1091,SC2016", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


WORDS = [
    "plain",
    "a b",
    "it's",
    '"quoted"',
    "$HOME ${HOME} $(echo no) `echo no`",
    "; touch no; #",
    "new\nline",
    "back\\slash\\",
    "* ? [a-z] ~ {a,b}",
    "--option",
    "@folder@",
    "日本語 🧬",
    "\t",
]


@pytest.mark.parametrize("word", WORDS)
def test_a_shell_reads_every_value_as_it_is(word: str, tmp_path: Path) -> None:
    """What stands above the start of the job, run for real after the strict setup that some sites have."""
    strict = ["set -euo pipefail", "IFS=,", "python=other"]
    cluster = replace(PLAIN, environment={"OWN": word}, container=["env", word], setup=strict)
    text = slurm_script.render(
        TEMPLATE,
        cluster,
        name="odd",
        python=word,
        folder=tmp_path,
        run_dirs=[Path(f"/{word}"), Path("/second")],
        ranks_per_node=1,
        signal_lead=60,
    )
    head, rest, _ = text.partition("\nrun_dir=")
    assert rest
    show = 'false; printf "%s\\0" "${run_dirs[@]}" "${python[@]}" "$OWN" "$PWD" "$IFS"'
    done = subprocess.run(["bash", "-c", f"{head}\n{show}"], capture_output=True, text=True, check=True, cwd="/")
    run_dir = str(Path(f"/{word}"))
    assert done.stdout.split("\0")[:-1] == [run_dir, "/second", "env", word, word, word, str(tmp_path), " \t\n"]
    assert list(tmp_path.iterdir()) == []


def test_lines_of_setup_are_the_users_own_shell() -> None:
    assert '\nsource "$HOME/env/bin/activate"\n' in rendered("setup")
    assert shlex.split(rendered("setup").partition("export GREETING=")[2].partition("\n")[0]) == ["it's $5; `date`"]
