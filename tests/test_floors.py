"""The design of the package: which file may import which, and that torch stays on the worker's side."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import launcher

PACKAGE = Path(launcher.__file__).parent

FLOORS = [
    {"errors", "output", "schema", "ranks", "devices", "guard"},
    {
        "nodes",
        "decode",
        "salvage",
        "batch",
        "batch_schedule",
        "steps",
        "lr",
        "parameters",
        "traffic",
        "noise_scale",
        "rundir",
        "checkpoints",
        "targets",
        "failures",
        "slurm_options",
        "genome",
        "validate",
    },
    {
        "deepspeed_json",
        "deepspeed_raw",
        "deepspeed_refusals",
        "placement",
        "plan",
        "verify",
        "explain",
        "progress",
        "course",
        "costs",
        "slurm_script",
    },
    {"local", "slurm", "resume", "micro_batch"},
    {"compose", "job", "slurm_job", "ledger", "arrays", "sweep", "__main__"},
]
"""From the ground up. A module imports from floors below its own, and from its own only where no circle arises."""

HEAVY = ("torch", "deepspeed", "transformers", "wandb")


def modules() -> dict[str, list[Path]]:
    """The parts of the package by name, a part being a module or a folder; the worker apart."""
    parts = {path.stem: [path] for path in PACKAGE.glob("*.py") if path.stem != "__init__"}
    parts |= {
        folder.name: list(folder.rglob("*.py")) for folder in PACKAGE.iterdir() if (folder / "__init__.py").exists()
    }
    del parts["worker"]
    return parts


def imported(path: Path) -> set[str]:
    """Dotted names that a file imports, anywhere in it."""
    found = set()
    for statement in ast.walk(ast.parse(path.read_text())):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            assert statement.level == 0, f"{path}: imports are absolute"
            found |= {f"{statement.module}.{alias.name}" for alias in statement.names}
    return found


def needs(part: str) -> set[str]:
    """The other parts of the package that a part imports."""
    names = {name for path in modules()[part] for name in imported(path) if name.startswith("launcher.")}
    return {name.split(".")[1] for name in names} - {part, "__version__"}


def floor(part: str) -> int:
    return next(number for number, names in enumerate(FLOORS) if part in names)


@pytest.mark.parametrize("part", sorted(modules()))
def test_a_module_imports_nothing_from_above(part: str) -> None:
    assert {other: floor(other) for other in needs(part) if floor(other) > floor(part)} == {}


def test_no_two_modules_import_each_other() -> None:
    done: set[str] = set()

    def visit(part: str, path: tuple[str, ...]) -> None:
        assert part not in path, f"a circle: {' -> '.join([*path, part])}"
        if part not in done:
            for other in needs(part):
                visit(other, (*path, part))
            done.add(part)

    for part in modules():
        visit(part, ())


def test_every_module_has_a_floor() -> None:
    assert set(modules()) <= set().union(*FLOORS)


@pytest.mark.parametrize("part", sorted(modules()))
def test_only_the_worker_imports_torch_and_what_rests_on_it(part: str) -> None:
    for path in modules()[part]:
        assert not [name for name in imported(path) if name.split(".")[0] in HEAVY]
        assert not [name for name in imported(path) if name.startswith("launcher.worker")]


def test_hydra_s_internals_are_used_in_one_file() -> None:
    users = {path.name for path in PACKAGE.rglob("*.py") if any("hydra._internal" in name for name in imported(path))}
    assert users == {"compose.py"}


def test_importing_everything_below_the_worker_leaves_torch_out() -> None:
    names = sorted(
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for part in modules()
        for path in modules()[part]
        if path.name != "__main__.py"
    )
    code = f"import sys, importlib; [importlib.import_module(name) for name in {[*names, 'launcher.__main__']!r}]; "
    code += f"print([name for name in {HEAVY!r} if name in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert output == "[]\n"
