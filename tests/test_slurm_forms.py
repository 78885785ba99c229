"""What a real sbatch makes of the lines that this program writes. Jobs are held: nothing of them runs."""

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from launcher import slurm_options
from tests import slurm
from tests.slurm import field
from tests.test_slurm_options import BEGINS, DEPENDENCIES, MEMORY, SLURM, TIMES

pytestmark = [pytest.mark.ranks, slurm.needs_slurm]

NEWER = """
    consolidate_segments container_id mem_update oom_kill_step resources resv_ports runtime segment spread_segments
    stepmgr tres_bind tres_per_task
"""
"""Options that came after Slurm 22.05."""

ODD = [
    "5' to 3' \"lagging\" strand",
    "# not a comment",
    "a#b",
    "#SBATCH --time=1",
    "$HOME `id` $(id) ${SLURM_JOB_ID} %j %%x !! ~ *",
    "a\\nb \\\\ c\\",
    "\\",
    '"',
    "'",
    '\\"',
    " leading and trailing ",
    "a  b   c",
    ": --hold : hetjob packjob",
    "hetjob",
    "--hold",
    "=,;|&<>(){}[]^",
    "Ångström 日本語 🧬",
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Cluster]:
    with slurm.Cluster(tmp_path_factory.mktemp("slurm"), CPUS=64, MEM=10_000_000, GPUS=0) as cluster:
        yield cluster


def script(**changes: Any) -> str:
    own = {name: changes.pop(name) for name in ("job_name", "signal") if name in changes}
    options = replace(SLURM, **changes, extra={"hold": True})
    assert slurm_options.check(options) == []
    return "\n".join(["#!/bin/sh", *slurm_options.directives(options, output="/dev/null", **own), "true", ""])


def asked_for(cluster: slurm.Cluster, **changes: Any) -> str:
    """What Slurm holds of a job with these options."""
    return cluster.show(cluster.submit(script(**changes)))


@pytest.mark.parametrize("key", ["TimeLimit", "TimeMin"])
def test_a_time_is_what_slurm_grants(cluster: slurm.Cluster, key: str) -> None:
    granted = {}
    for time in TIMES:
        limits = {"time": time} if key == "TimeLimit" else {"time": "UNLIMITED", "time_min": time}
        days, clock = re.fullmatch(r"(?:(\d+)-)?(.*)", field(asked_for(cluster, **limits), key)).groups()
        hours, minutes, seconds = map(int, clock.split(":")) if ":" in clock else (0, 0, 0)
        granted[time] = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds or clock
    assert granted == {time: -(-wanted // 60) * 60 if wanted else "UNLIMITED" for time, wanted in TIMES.items()}


def test_an_amount_of_memory_is_what_slurm_keeps(cluster: slurm.Cluster) -> None:
    kept = {}
    for memory in MEMORY:
        size, unit = re.fullmatch(r"([\d.]+)([MGT]?)", field(asked_for(cluster, mem=memory), "MinMemoryNode")).groups()
        kept[memory] = float(size) * 1024 ** " MGT".index(unit or " ") / 1024
    assert kept == pytest.approx(MEMORY, rel=1e-3)


@pytest.mark.parametrize(("key", "name"), [("mem_per_cpu", "MinMemoryCPU"), ("tmp", "MinTmpDiskNode")])
def test_amounts_of_other_things_are_read_alike(cluster: slurm.Cluster, key: str, name: str) -> None:
    assert field(asked_for(cluster, **{key: "1025K"}), name) == "2M"
    assert field(asked_for(cluster, **{key: "2G"}), name) == "2G"


def test_every_beginning_and_dependency_that_is_let_through_is_understood(cluster: slurm.Cluster) -> None:
    for begin in BEGINS:
        asked_for(cluster, begin=begin)
    for dependency in DEPENDENCIES:
        assert "unfulfilled" in field(asked_for(cluster, dependency=dependency), "Dependency")


def test_text_reaches_slurm_as_it_is(cluster: slurm.Cluster) -> None:
    rng = random.Random(0)
    letters = "ab \"'\\#$`:=-%*" + "é"
    texts = ODD + ["".join(rng.choices(letters, k=rng.randint(1, 12))) for _ in range(60)]
    reached = {text: asked_for(cluster, comment=text, job_name=text) for text in texts}
    assert {text: field(job, "Comment") for text, job in reached.items()} == {text: text for text in texts}
    assert {text: field(job, "JobName") for text, job in reached.items()} == {text: text for text in texts}


def test_other_options_reach_slurm(cluster: slurm.Cluster) -> None:
    job = asked_for(
        cluster,
        nodes="1-3",
        cpus_per_task=2,
        partition="low",
        exclusive=True,
        nodelist="n1",
        mail_type="end,FAIL,TIME_LIMIT_80",
        mail_user="me@example.org",
        nice=7,
        requeue=False,
        account="lab",
        wckey="dna",
    )
    expected = {
        "NumNodes": "1-3",
        "CPUs/Task": "2",
        "Partition": "low",
        "OverSubscribe": "NO",
        "ReqNodeList": "n1",
        "MailType": "END,FAIL,TIME_LIMIT_80",
        "MailUser": "me@example.org",
        "Nice": "7",
        "Requeue": "0",
        "Account": "lab",
    }
    assert {name: field(job, name) for name in expected} == expected


def test_slurm_knows_every_option_of_the_lists_but_newer_ones(cluster: slurm.Cluster) -> None:
    kinds = {}
    for name in (*slurm_options.FLAGS, *slurm_options.MAY_TAKE_A_VALUE, *slurm_options.TAKE_A_VALUE):
        # There is no script, so that nothing is submitted.
        option = f"--{name.replace('_', '-')}"
        said = cluster.run("sbatch", option, text="").stderr + cluster.run("sbatch", f"{option}=1", text="").stderr
        kinds[name] = (
            "unknown" if "unrecognized option '" in said else re.findall("(requires|doesn't allow) an argument", said)
        )
    known = {name for name, kind in kinds.items() if kind != "unknown"}
    assert set(kinds) - known == set(NEWER.split())
    assert {name for name in known if kinds[name] == ["requires"]} == known & set(slurm_options.TAKE_A_VALUE)
    assert {name for name in known if kinds[name] == ["doesn't allow"]} == known & set(slurm_options.FLAGS)
