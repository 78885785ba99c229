"""Telling all faults together: what is at fault in a request is replaced, so that the rest of it can be checked too."""

import copy
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.decode import TARGET, decode
from launcher.errors import RequestError
from launcher.schema import Config


def salvage(node: Mapping[str, Any]) -> tuple[Config, list[str]]:
    """The configuration of a composed node, and its faults; what is at fault is replaced, so that the rest can be
    checked too. Lines about the replacements are to be dropped with ``unrelated``.

    Raises RequestError with every fault where nothing can stand in.
    """
    try:
        return decode(node), []
    except RequestError as error:
        faults = error.faults
    mended = copy.deepcopy(dict(node))
    for fault in faults:
        _replace(mended, _key_of(fault))
    try:
        return decode(mended), faults
    except RequestError:
        raise RequestError(*faults) from None


def unrelated(faults: Sequence[str], others: Sequence[str]) -> list[str]:
    """Those of ``faults`` that are not about a key at fault in ``others``, or about what follows from it."""
    known = {_key_of(fault) for fault in others}
    # The numbers of the batch follow from each other, and a faulty model is replaced whole.
    known |= {node for node in ("batch", "model") if any(key.startswith(f"{node}.") for key in known)}

    def follows(key: str) -> bool:
        return any(key == other or key.startswith(f"{other}.") for other in known)

    return [fault for fault in faults if not follows(_key_of(fault))]


def _key_of(fault: str) -> str:
    """The key that a fault line begins with; an element of a list counts as the list."""
    return re.split(r"[=:\[]", fault, maxsplit=1)[0].strip()


def _replace(node: dict[str, Any], key: str) -> None:
    """Take a key out of a composed node, so that its default holds; something harmless where there is none."""
    top, *inner = key.split(".")
    if top == "model":
        node["model"] = {TARGET: "json.loads"}
    elif top == "data" and (inner in ([], ["fasta"]) or TARGET in (node.get("data") or {})):
        node["data"] = {**(node["data"] if inner == ["fasta"] else {}), "fasta": os.devnull}
    else:
        parent: Any = node
        for name in (top, *inner)[:-1]:
            parent = parent.get(name) if isinstance(parent, dict) else None
        if isinstance(parent, dict):
            parent.pop((top, *inner)[-1], None)
