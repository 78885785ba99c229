"""The operators that DeepSpeed compiles: built once, whatever was killed before, and refused in one line."""

import multiprocessing
import shutil
from pathlib import Path

import pytest
from deepspeed.ops.op_builder.builder import OpBuilder

from launcher.errors import RequestError
from launcher.worker import build

SHARED_MEMORY = "ShareMemCommBuilder"


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


@pytest.mark.parametrize(
    ("optimizer", "parameters", "expected"),
    [
        ("none", "none", [SHARED_MEMORY]),
        ("cpu", "none", [SHARED_MEMORY, "CPUAdamBuilder"]),
        ("none", "nvme", [SHARED_MEMORY, "PinMemoryBuilder", "AsyncIOBuilder"]),
        ("nvme", "nvme", [SHARED_MEMORY, "CPUAdamBuilder", "PinMemoryBuilder", "AsyncIOBuilder"]),
    ],
)
def test_a_run_builds_what_its_offloading_uses(optimizer: str, parameters: str, expected: list[str]) -> None:
    zero = {"offload_optimizer": {"device": optimizer}, "offload_param": {"device": parameters}}
    assert build.needed({"zero_optimization": zero}) == expected


def test_a_build_that_was_killed_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.build([SHARED_MEMORY], print)
    folder = Path(build.torch.utils.cpp_extension._get_build_directory("deepspeed_shm_comm", False))
    shutil.copytree(folder, tmp_path / "deepspeed_shm_comm")
    (tmp_path / "deepspeed_shm_comm" / "lock").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    process = multiprocessing.get_context("spawn").Process(target=build.build, args=([SHARED_MEMORY], print))
    process.start()
    process.join(120)
    waits = process.is_alive()
    process.kill()
    process.join()
    assert not waits
    assert process.exitcode == 0
    assert not (tmp_path / "deepspeed_shm_comm" / "lock").exists()


def test_an_operator_that_does_not_compile_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setattr(OpBuilder, "_loaded_ops", {})
    told: list[str] = []
    with pytest.raises(RequestError) as refused:
        build.build([SHARED_MEMORY], told.append)
    assert len(refused.value.faults) == 1
    assert refused.value.faults[0].startswith("DeepSpeed's shared-memory collective could not be built")
    assert told == ["building DeepSpeed's shared-memory collective, once in this environment (a minute or more)"]


def test_an_operator_whose_library_is_missing_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CC", "false")  # with which DeepSpeed looks for libaio
    with pytest.raises(RequestError, match=r"asynchronous NVMe access cannot be built .*libaio-dev"):
        build.build(["AsyncIOBuilder"], print)
