"""Does a dotted ``_target_`` exist? Answered without importing it, since that would import torch on a login node."""

import ast
import importlib.util
from pathlib import Path

from launcher.errors import nearest


def check(key: str, target: str) -> list[str]:
    """Fault lines of ``key=target``, a callable by its dotted name.

    Only what files can tell: a name that a module makes when it is imported (star imports, ``__getattr__``, compiled
    modules) is left to the job.
    """
    parts = target.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        return [f"{key}={target}: it must be the dotted name of something importable, as in package.module.Name"]
    spec = importlib.util.find_spec(parts[0])
    if spec is None:
        return [f"{key}={target}: there is no package {parts[0]} on this Python's path; install it or correct the name"]
    folders = [Path(folder) for folder in spec.submodule_search_locations or []]
    module = Path(spec.origin) if spec.origin else None
    for position, part in enumerate(parts[1:], start=1):
        submodule = _submodule(folders, part)
        if submodule is None:
            return _check_name(key, target, module, folders, ".".join(parts[:position]), part)
        module, folders = submodule, [submodule.parent] if submodule.name == "__init__.py" else []
    return [f"{key}={target}: it is a module; name something callable in it"]


def _submodule(folders: list[Path], name: str) -> Path | None:
    for folder in folders:
        for file in (folder / name / "__init__.py", folder / f"{name}.py"):
            if file.is_file():
                return file
    return None


def _check_name(
    key: str, target: str, module: Path | None, folders: list[Path], module_name: str, name: str
) -> list[str]:
    if module is None or module.suffix != ".py":
        return []
    names = _names(ast.parse(module.read_bytes()).body)
    if name in names or "*" in names or "__getattr__" in names:
        return []
    files = [file for folder in folders for file in (*folder.glob("*.py"), *folder.glob("*/__init__.py"))]
    siblings = [file.parent.name if file.name == "__init__.py" else file.stem for file in files]
    return [f"{key}={target}: {module_name} has no {name}{nearest(name, [*sorted(names), *siblings])}"]


def _names(body: list[ast.stmt]) -> set[str]:
    """The names that statements bind at the top level of a module."""
    names: set[str] = set()
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name.split(".")[0] for alias in statement.names)
        else:
            names.update(node.id for node in ast.walk(statement) if isinstance(node, ast.Name))
            names.update(
                alias.asname or alias.name for node in ast.walk(statement) for alias in getattr(node, "names", [])
            )
            for block in ("body", "orelse", "handlers", "finalbody"):
                inner = getattr(statement, block, [])
                names |= _names([s for s in inner if isinstance(s, ast.stmt)])
                names |= _names([s for h in inner if isinstance(h, ast.ExceptHandler) for s in h.body])
    return names
