"""How many ranks there are, and what they need on the machine that they run on."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from launcher import devices, placement
from launcher.errors import RequestError
from launcher.schema import Cluster, ClusterType, Config, Device, Mode, Offload

SLURM = Cluster(type=ClusterType.SLURM, nodes=2, gpus_per_node="a100:2")


def nvme(path: str | Path) -> Config:
    return Config(mode=Mode.PLAN, offload=Offload(optimizer=Device.NVME, nvme_path=str(path)))


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "visible_gpus", lambda: 2)
    assert placement.num_ranks(Config()) == 2
    assert placement.num_ranks(Config(cluster=Cluster(ranks_per_node=1))) == 1
    with pytest.raises(RequestError, match=r"cluster.ranks_per_node=4: only 2 GPUs are visible here; set at most 2"):
        placement.num_ranks(Config(cluster=Cluster(ranks_per_node=4)))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 4),
        ({"nodes": "2-5"}, 10),
        ({"ranks_per_node": 1}, 2),
        ({"gpus_per_node": None}, 2),
        ({"gpus_per_node": None, "gres": "gpu:4,disk:1"}, 8),
    ],
)
def test_a_job_has_a_rank_for_each_gpu_of_the_most_nodes_that_it_asks_for(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, int | str | None], expected: int
) -> None:
    monkeypatch.setattr(devices, "visible_gpus", lambda: 1)  # of the machine that submits, which does not matter
    assert placement.num_ranks(Config(cluster=replace(SLURM, **changes))) == expected  # type: ignore[arg-type]


def test_an_nvme_path_has_to_be_a_folder_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    monkeypatch.setenv("NEAR", "here")
    assert placement.check(nvme(tmp_path)) == placement.check(nvme("$SCRATCH")) == []
    missing = "there is no such folder; make it, or name one on a local disk"
    for path, fault in {
        f"{tmp_path}/no": missing,
        "$SCRATCH/no": missing,
        "$NEAR": "it stands for here; it must be an absolute path",
        "$NOT_SET/nvme": "it stands for $NOT_SET/nvme; it must be an absolute path",
    }.items():
        assert placement.check(nvme(path)) == [f"offload.nvme_path={path}: {fault}"]


def test_an_nvme_path_that_cannot_be_written_is_refused_for_root_too() -> None:
    (fault,) = placement.check(nvme("/proc"))
    assert fault.startswith("offload.nvme_path=/proc: it cannot be written (")
    assert fault.endswith("); name another folder on a local disk")


def test_what_only_the_nodes_have_is_not_asked_of_the_machine_that_submits(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    missing = ("torch", "deepspeed", "transformers")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in missing else find(name))
    config = replace(nvme("$LOCAL_DISK"), mode=Mode.TRAIN, cluster=SLURM)
    (fault,) = placement.check(config)
    assert fault.startswith("training needs torch, deepspeed, transformers, not installed for ")
    assert fault.endswith("; or set cluster.python, setup or container to what the nodes have")
    assert placement.check(replace(config, cluster=replace(SLURM, setup=["module load okazaki"]))) == []
