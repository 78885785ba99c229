"""The largest micro-batch that fits: looked for by trying sizes, and remembered by what it depends on."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher import decode, devices
from launcher.rundir import write_text
from launcher.schema import Config, CustomData

DEPENDS_ON = (
    "model",
    "loss",
    "zero",
    "offload",
    "precision",
    "activation",
    "optimizer.type",
    "accumulation.sync",
    "train.batch_norm",
)
"""The keys that decide how much memory a micro-batch takes, beside the length of its sequences."""

Trial = Callable[[Sequence[int]], int | None]
"""Given sizes in order, tries them until one does not fit; returns the last one that did."""


def largest(sizes: Sequence[int], trial: Trial) -> int | None:
    """The largest of ``sizes`` (ascending) that fits; None if none does.

    At least doubled from the smallest on until one does not fit, and then halved between the two.
    """
    ladder = [sizes[0]]
    for size in sizes:
        if size >= 2 * ladder[-1]:
            ladder.append(size)
    fits = trial(ladder)
    if fits is None:
        return None
    too_large = next((size for size in ladder if size > fits), sizes[-1] + 1)
    left = [size for size in sizes if fits < size < too_large]
    while left:
        middle = len(left) // 2
        if trial([left[middle]]) is None:
            left = left[:middle]
        else:
            fits, left = left[middle], left[middle + 1 :]
    return fits


def key(config: Config, num_ranks: int) -> str:
    """What a size was found for: the model, the cut of its states, and the kind of device."""
    node = decode.encode(config)
    sequences = node["data"] if isinstance(config.data, CustomData) else config.data.sequence_length
    facts = {name: _at(node, name) for name in DEPENDS_ON}
    facts |= {"sequences": sequences, "ranks": num_ranks, "devices": devices.kinds()}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _at(node: Mapping[str, Any], key: str) -> Any:
    for part in key.split("."):
        node = node[part]
    return node


def remembered(key: str, sizes: Sequence[int]) -> int | None:
    """A size found earlier, if it is one of ``sizes``."""
    found = _read(key)
    return found if found in sizes else None


def lower(key: str, size: int) -> None:
    """What was found is too large by now: ``size`` is the most that may fit."""
    found = _read(key)
    if found is not None and found > size:
        remember(key, size)


def _read(key: str) -> int | None:
    try:
        found = json.loads(_file(key).read_text(encoding="utf-8"))["micro_batch_size"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if type(found) is int else None


def remember(key: str, size: int) -> None:
    """For later runs; where the user's cache folder cannot be written, they look for it anew."""
    file = _file(key)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps({"micro_batch_size": size}) + "\n")
    except OSError:
        return


def _file(key: str) -> Path:
    users = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(users).expanduser() / "okazaki" / "micro_batch_sizes" / f"{key}.json"
