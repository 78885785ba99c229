"""Whether a run can go on from what an earlier attempt has left, told before anything is started."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from yaml import YAMLError

from launcher import checkpoints, decode
from launcher.checkpoints import Checkpoint
from launcher.errors import RequestError
from launcher.plan import Plan
from launcher.rundir import KEY, RunDir
from launcher.schema import Config, CustomData

AUTO, REQUIRED, NEVER = "auto", "required", "never"
WISH = "checkpoint.resume"

TRAJECTORY = (
    "seed",
    "model",
    "loss",
    "data",
    "optimizer.type",
    "batch_schedule",
    "accumulation.tail",
    "train.batch_norm",
)
"""The nodes that say what the steps of a run are. The others say how a step is cut, when the run ends, how fast it
learns and what is told of it; those may change."""

LEARNING = (
    "optimizer.",
    "lr_schedule.",
    "train.max_",  # the horizon of the learning rate
    "train.epochs",
    "train.gradient_clipping",
    "precision.",
    "batch.lr_scaling",
    "batch.reference",
)
"""Keys that may change, and are told where they do."""

UNREADABLE = (OSError, ValueError, KeyError, TypeError, RecursionError, YAMLError, RequestError)
"""What reading the frozen files of a run raises, that somebody has changed or a full disk has cut off."""

HOW_DATA_IS_READ = {"fasta", "cache_dir", "num_workers"}
"""Keys of ``data`` that do not change what is read; the bases are compared by their fingerprint."""


class Origin(NamedTuple):
    """What a run goes on from: a checkpoint, or an attempt that has not left any."""

    folder: Path
    """With the config.yaml and the plan.json of it."""
    checkpoint: Checkpoint | None
    notes: list[str]
    """Why newer checkpoints are not taken."""


def origin(config: Config, run_dir: Path) -> Origin | None:
    """Looks only; the checksums are left to the ranks.

    Raises RequestError where what is wished for is not there.
    """
    wish, directory = config.checkpoint.resume, RunDir(run_dir)
    if wish == NEVER:
        return None
    notes: list[str] = []
    newest = next(checkpoints.candidates(directory.checkpoints, notes), None)
    if newest is not None:
        note = checkpoints.note_on_latest(directory.checkpoints, newest.path)
        return Origin(newest.path, newest, notes + ([note] if note else []))
    if wish not in (AUTO, REQUIRED) and not notes:
        given = checkpoints.read(Path(wish))
        if isinstance(given, str):
            inside = [*checkpoints.found(Path(wish)), *checkpoints.found(RunDir(Path(wish)).checkpoints)]
            near = f"; nearest: {inside[0]}" if inside else ""
            raise RequestError(
                f"{WISH}={wish}: {given}; give the path of a checkpoint, or auto, required or never{near}"
            )
        return Origin(given.path, given, [])
    if wish == REQUIRED or notes:
        raise RequestError(f"{WISH}={wish}: {none_in(directory.checkpoints, notes)}")
    if directory.config.exists() and (began_at := _path_in(directory.config)) is not None:
        raise RequestError(
            f"{WISH}={wish}: the run in {run_dir} began at {began_at} and has no checkpoint of its own yet; set "
            f"{WISH}={began_at}, or start a new run in another {KEY}"
        )
    # One that was killed while its first files were written has not begun.
    begun = directory.metrics.exists() or (directory.config.exists() and directory.plan.exists())
    return Origin(run_dir, None, []) if begun else None


def _path_in(config: Path) -> str | None:
    """The checkpoint that a run was to begin at, as its frozen configuration says, if that can be read."""
    try:
        wish = decode.load(config).checkpoint.resume
    except UNREADABLE:  # ``check`` tells
        return None
    return None if wish in (AUTO, REQUIRED, NEVER) else wish


def again(config: Config) -> Config:
    """What a later attempt at the same run goes by: by now there may be checkpoints of its own, also where those of an
    earlier run were not wanted. A path stays: the run begins there as long as it has none."""
    if config.checkpoint.resume != NEVER:
        return config
    return dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, resume=AUTO))


def none_in(folder: Path, notes: list[str]) -> str:
    """What is said where a run has checkpoints, and none of them can be used: it is not begun anew without a word."""
    others = f" (and {len(notes) - 1} others)" if len(notes) > 1 else ""
    why = f"; {notes[0]}{others}" if notes else ""
    return f"{folder} holds no checkpoint that can be used{why}; mend one, or give another {KEY}"


def check(plan: Plan, found: Origin) -> list[str]:
    """Fault lines for what makes the run another one than that which it is to go on from."""
    ours = _trajectory(plan.config) | {"batch.train_batch_size": plan.cut.train_batch_size}
    try:
        planned = json.loads((found.folder / "plan.json").read_bytes())
        theirs = _trajectory(decode.load(found.folder / "config.yaml"))
        theirs["batch.train_batch_size"] = planned["batch"]["train_batch_size"]
        there = planned["data"]["fingerprint"]
    except UNREADABLE as error:
        what = f"what the run in {found.folder} was made with cannot be read ({' '.join(str(error).split())})"
        return [f"{KEY}={found.folder}: {what}; mend its config.yaml and plan.json, or give another {KEY}"]
    faults = [
        f"{key}={_shown(ours.get(key))}: the run in {found.folder} was made with {_shown(theirs.get(key))}, and with "
        f"another it would not be the same run; set it back, or start a new run in another {KEY}"
        for key in dict.fromkeys([*ours, *theirs])
        if ours.get(key) != theirs.get(key)
    ]
    fingerprint = plan.genome.fingerprint if plan.genome else None
    if fingerprint != there and not faults:
        faults.append(
            f"data.fasta: its bases are not those that the run in {found.folder} was made with (fingerprint "
            f"{fingerprint} instead of {there}); restore them, or start a new run in another {KEY}"
        )
    return faults


def describe(found: Origin) -> str:
    if found.checkpoint is None:
        return f"{found.folder} holds no checkpoint: starting anew"
    return f"the newest checkpoint is {found.folder}, after step {found.checkpoint.step}"


def changes(plan: Plan, found: Origin) -> str | None:
    """What is another from now on, and changes what is learnt, though not from which steps."""
    before, now = (
        dict(_flat("", decode.encode(config))) for config in (decode.load(found.folder / "config.yaml"), plan.config)
    )
    other = [
        f"{key[1:]}={_shown(now.get(key))} ({_shown(before.get(key))} before)"
        for key in dict.fromkeys([*now, *before])
        if key[1:].startswith(LEARNING) and now.get(key) != before.get(key)
    ]
    return f"from now on {', '.join(other)}" if other else None


def is_done(config: Config, found: Origin) -> bool:
    """The run has reached its end already, and its limits are the same still."""
    if found.checkpoint is None:
        return False
    limit, updates = config.train.max_steps, found.checkpoint.state.get("num_updates", 0)
    if limit is not None and updates > limit:
        return True
    if not found.checkpoint.state["is_last"]:
        return False
    before = decode.load(found.folder / "config.yaml").train
    return (before.max_steps, before.max_tokens, before.epochs) == (
        config.train.max_steps,
        config.train.max_tokens,
        config.train.epochs,
    )


def _trajectory(config: Config) -> dict[str, Any]:
    """The keys of TRAJECTORY and their values."""
    node = decode.encode(config)
    found: dict[str, Any] = {}
    for key in TRAJECTORY:
        value: Any = node
        for part in key.split("."):
            value = value[part]
        found |= dict(_flat(key, value))
    if not isinstance(config.data, CustomData):
        found = {key: value for key, value in found.items() if key not in {f"data.{k}" for k in HOW_DATA_IS_READ}}
    return found


def _flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flat(f"{key}.{name}", inner)
    else:
        yield key, value


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
