"""The package as an installed wheel, used from another directory, with only what the base installation brings."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with the wheel and the packages that it requires without extras, and what those require."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "environment")], check=True)
    (site,) = (folder / "environment").glob("lib/python*/site-packages")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    (installed,) = metadata.distributions(name="okazaki", path=[str(site)])
    waiting, seen = [*(installed.requires or [])], set()
    while waiting:
        requirement = Requirement(waiting.pop())
        if requirement.name in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(requirement.name)
        distribution = metadata.distribution(requirement.name)
        waiting += distribution.requires or []
        for top in {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    return folder / "environment" / "bin" / "python"


def run(python: Path, folder: Path, *argv: str) -> "subprocess.CompletedProcess[str]":
    command = [str(python), "-m", "launcher", *argv]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_an_installed_wheel_plans_from_another_directory_without_torch(python: Path, tmp_path: Path) -> None:
    done = run(python, tmp_path, "+experiment=dna_8k", "zero=stage3", "mode=plan")
    assert (done.returncode, done.stderr) == (0, "")
    assert "8,192" in done.stdout
    assert list(tmp_path.iterdir()) == []
    absent = "import importlib.util as u, sys; sys.exit(any(u.find_spec(n) for n in ('torch', 'deepspeed', 'wandb')))"
    subprocess.run([str(python), "-c", absent], cwd=tmp_path, check=True)


def test_an_installed_wheel_plans_the_example_of_ones_own_parts(python: Path, tmp_path: Path) -> None:
    done = run(python, tmp_path, "+experiment=digits_resnet", "mode=plan")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("digits_resnet on 1 rank\n")


def test_an_installed_wheel_takes_a_users_own_experiment_and_refuses_in_one_line(python: Path, tmp_path: Path) -> None:
    (tmp_path / "my_conf" / "experiment").mkdir(parents=True)
    experiment = (
        "# @package _global_\ndefaults:\n  - override /data: lambda\nname: mine\nbatch:\n  train_batch_size: 6\n"
    )
    (tmp_path / "my_conf" / "experiment" / "mine.yaml").write_text(experiment + "train:\n  max_steps: 3\n")
    shown = run(python, tmp_path, "--config-dir", "my_conf", "+experiment=mine", "--cfg", "job")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "train_batch_size: 6" in shown.stdout
    refused = run(python, tmp_path, "--config-dir", "my_conf", "+experiment=mine", "zero.stge=2")
    assert refused.returncode == 2
    assert refused.stderr.splitlines() == ["zero.stge=2: there is no such key; nearest: zero.stage"]


def test_training_without_the_train_extra_says_what_to_install(python: Path, tmp_path: Path) -> None:
    done = run(python, tmp_path, "+experiment=dna_8k", "data=lambda", "train.max_steps=9")
    assert done.returncode == 2
    assert done.stderr == (
        f"training needs torch, deepspeed, transformers, not installed for {python}: pip install 'okazaki[train]'\n"
    )
    assert list(tmp_path.iterdir()) == []
