"""Plain nodes (what YAML, Hydra and JSON hold) as a user sees them: their keys, values as text, and secrets."""

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any


def show(value: Any) -> str:
    """A plain value as the command line writes it, cut to a line's length."""
    if value is None or isinstance(value, bool):
        text = {None: "null", True: "true", False: "false"}[value]
    elif isinstance(value, Mapping):
        text = "{" + ",".join(f"{name}:{show(item)}" for name, item in value.items()) + "}"
    elif isinstance(value, list):
        text = "[" + ",".join(map(show, value)) + "]"
    else:
        text = str(value).replace("\n", "\\n")
    return text if len(text) <= 80 else f"{text[:77]}..."


def keys(node: Any) -> list[str]:
    """The dotted keys of a plain node, inner nodes included."""

    def walk(node: Any, prefix: str) -> Iterator[str]:
        for name, item in node.items():
            yield f"{prefix}{name}"
            if isinstance(item, Mapping):
                yield from walk(item, f"{prefix}{name}.")

    return list(walk(node, ""))


def nearest_keys(key: str, known: Collection[str]) -> str:
    """``"; nearest: KEYS"`` for a dotted key that does not exist, or an empty string.

    A key of the same name elsewhere comes first, then names like it under the same node, then keys like it as a whole.
    """
    parent, _, name = key.rpartition(".")
    same_name = [other for other in known if other.rpartition(".")[2] == name]
    siblings = {other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == parent}
    near = [siblings[other] for other in difflib.get_close_matches(name, siblings)]
    others = [other for other in known if not key.startswith(f"{other}.")]
    found = list(dict.fromkeys(same_name + near)) or difflib.get_close_matches(key, others, cutoff=0.75)
    if not found and parent:
        found = sorted(siblings.values())
    return f"; nearest: {', '.join(found)}" if found else ""


def secrets(node: Any, environment: Mapping[str, str]) -> list[str]:
    """Fault lines for the secrets of this environment that an interpolation brought into ``node``."""
    hidden = {
        value: name
        for name, value in environment.items()
        if re.search("KEY|TOKEN|SECRET|PASSWORD", name, re.IGNORECASE) and len(value) >= 8
    }
    return [
        f"{key}: it holds the value of the environment variable {name}, and would be written to config.yaml; "
        "leave it out: ranks see the environment"
        for key, value in _leaves(node, "")
        for secret, name in hidden.items()
        if isinstance(value, str) and secret in value
    ]


def _leaves(node: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping):
        for name, item in node.items():
            yield from _leaves(item, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list):
        for index, item in enumerate(node):
            yield from _leaves(item, f"{key}[{index}]")
    else:
        yield key, node
