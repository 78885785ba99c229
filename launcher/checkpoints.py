"""The checkpoints of a run on disk: which of them are whole, which one training goes on from, which may go.

A checkpoint is a folder ``step_00000010`` with

    checkpoint.json              this page: the step, the state of the run, every file's size and checksum, and where
                                 each parameter lies in which file
    config.yaml, plan.json       what it was made with
    rank_00000.safetensors ...   by each rank the slices that it owned, in fp32, named "KIND:PARAMETER"
    rest.safetensors             frozen parameters and buffers, whole

It is written beside its place and renamed when all of it is on disk. What is called ``step_00000010`` is complete.
"""

import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import rundir

MANIFEST = "checkpoint.json"
LATEST = "latest"
PARTIAL, BEFORE = ".partial", ".before"
"""What is being written; and what was there before of the same step, as long as that is put into its place."""
MADE_WITH = ("config.yaml", "plan.json")
REST = "rest.safetensors"
"""Frozen parameters and buffers, written by rank 0."""
FORMAT = 1
_NAME = re.compile(r"step_(\d{8,})")
_BEFORE = re.compile(rf"\.step_(\d{{8,}}){re.escape(BEFORE)}")
_FILE = re.compile(r"rank_\d{5,}\.safetensors")

log = logging.getLogger(__name__)


def name(step: int) -> str:
    return f"step_{step:08d}"


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps that were done."""
        return int(self.manifest["step"])

    @property
    def state(self) -> dict[str, Any]:
        """Of the run, as ``launcher.worker.train`` wrote it."""
        state: dict[str, Any] = self.manifest["state"]
        return state

    def damage(self, file: str) -> str | None:
        """What is wrong with the contents of a file, or None."""
        path, recorded = self.path / file, self.manifest["files"][file]
        try:
            return None if checksum(path) == recorded["sha256"] else f"{file} has changed since it was written"
        except OSError as error:
            return f"{file} cannot be read ({error.strerror})"


def file_of(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def read(path: Path) -> Checkpoint | str:
    """The checkpoint in a folder if its manifest is sound and all its files are there in their sizes, or what is wrong
    with it."""
    if path.exists() and not path.is_dir():
        return "it is no folder"
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        fault = _fault_of(manifest, path.name.removeprefix(".").removesuffix(BEFORE))
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__}: {str(error)[:100]})"
    if fault is not None:
        return fault
    for file, recorded in manifest["files"].items():
        try:
            found = (path / file).stat().st_size
        except FileNotFoundError:
            return f"{file} is missing"
        except OSError as error:
            return f"{file} cannot be read ({error.strerror})"
        if not os.access(path / file, os.R_OK):
            return f"{file} cannot be read"
        if found != recorded["bytes"]:
            return f"{file} has {found} bytes instead of {recorded['bytes']}"
    checkpoint = Checkpoint(path, manifest)
    # These are small, and what they say is gone by before any rank has looked at the others.
    return next((fault for file in MADE_WITH if (fault := checkpoint.damage(file)) is not None), checkpoint)


def _fault_of(manifest: dict[str, Any], name: str) -> str | None:
    """What is wrong with a manifest in itself. Raises what Python does where a value is not of its kind."""
    if manifest["format"] != FORMAT:
        return f"it has format {manifest['format']}, and this version reads {FORMAT}"
    if manifest["digest"] != sealed(manifest)["digest"]:
        return f"{MANIFEST} has changed since it was written"
    match = _NAME.fullmatch(name)
    if match and int(match[1]) != manifest["step"]:
        return f"{MANIFEST} says that it is of step {manifest['step']}"
    bool(manifest["state"]["is_last"])
    for recorded in manifest["files"].values():
        int(recorded["bytes"]), str(recorded["sha256"])
    ranks = {0}
    for parameter, entry in manifest["parameters"].items():
        numel = math.prod(entry["shape"])
        for kind, runs in entry["kinds"].items():
            place = 0
            for rank, start, stop in runs:  # in the order of their starts; they may overlap
                ranks.add(rank)
                if start > place:
                    break
                place = max(place, stop)
            if place < numel and (runs or kind == "weight"):
                return f"{MANIFEST} lacks elements of {parameter} ({kind}) from {place} on"
    needed = {REST, *MADE_WITH, *map(file_of, ranks)}
    if missing := needed - manifest["files"].keys():
        return f"{MANIFEST} does not list {min(missing)}"
    if strange := [file for file in manifest["files"] if file not in needed and not _FILE.fullmatch(file)]:
        return f"{MANIFEST} lists {strange[0]}, which is no file of a checkpoint"
    return None


def found(folder: Path) -> list[Path]:
    """The folders of complete checkpoints, the newest first."""
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if path.is_dir()]
    steps = {int(match[1]): path for path in paths if (match := _NAME.fullmatch(path.name))}
    # A kill between two renames has left a step without its name.
    before = {int(match[1]): path for path in paths if (match := _BEFORE.fullmatch(path.name))}
    return [path for _, path in sorted((before | steps).items(), reverse=True)]


def candidates(folder: Path, notes: list[str]) -> Iterator[Checkpoint]:
    """The checkpoints that training can go on from, the newest first; ``notes`` tells why others cannot be taken."""
    for path in found(folder):
        checkpoint = read(path)
        if isinstance(checkpoint, Checkpoint):
            yield checkpoint
        else:
            notes.append(f"{path.name} cannot be used: {checkpoint}")


def note_on_latest(folder: Path, chosen: Path) -> str | None:
    """What is to be said where ``latest`` does not name the checkpoint that was chosen."""
    try:
        named = (folder / LATEST).read_text(encoding="utf-8").strip()
        is_there = (folder / named).exists()
    except FileNotFoundError:
        return f"{LATEST} is missing"
    except (OSError, ValueError) as error:
        return f"{LATEST} cannot be read ({type(error).__name__})"
    if not named:
        return f"{LATEST} is empty"
    if named == chosen.name:
        return None
    return f"{LATEST} names {named}" + ("" if is_there else ", which is not there")


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with a digest of all else that it says."""
    text = json.dumps({key: value for key, value in manifest.items() if key != "digest"}, sort_keys=True)
    return manifest | {"digest": hashlib.sha256(text.encode()).hexdigest()}


def complete(aside: Path, manifest: dict[str, Any]) -> Path:
    """Make a checkpoint of what lies in ``aside``, now that all of it is on disk; returns its final place.

    One of the same step that was there before gives way.
    """
    plain = json.loads(json.dumps(manifest))  # as whoever reads it will find it
    rundir.write_text(aside / MANIFEST, json.dumps(sealed(plain)) + "\n")
    final = aside.with_name(aside.name.removesuffix(PARTIAL))
    if os.path.lexists(final):
        old = final.with_name(f".{final.name}{BEFORE}")
        rundir.remove(old)
        final.rename(old)
        aside.rename(final)
        rundir.remove(old)
    else:
        aside.rename(final)
    _sync(final.parent)
    try:
        rundir.write_text(final.parent / LATEST, final.name + "\n")
    except OSError as error:  # whoever goes on looks for the newest one anyway, and says that the name is another
        log.warning("%s still has its old name: %s", LATEST, error)
    return final


def prune(folder: Path, newest: int, keep: int | None, keep_every: int | None) -> None:
    """Remove all but the last ``keep`` checkpoints up to step ``newest``, which has just been saved, and those of every
    ``keep_every``-th step, and debris.

    One of a later step was passed over when the run went on: it is damaged, and must not take the place of a whole one.
    Only between saves: what is being written would be taken for debris.
    """
    steps = {int(match[1]): path for path in found(folder) if (match := _NAME.fullmatch(path.name))}
    past = [step for step in steps if step <= newest]
    for step in past[keep:] if keep is not None else []:
        if keep_every is None or step % keep_every:
            # Under another name first: what is half removed must not look like a checkpoint.
            steps[step].rename(folder / f".{steps[step].name}.old")
    for kind in (f"step_*{PARTIAL}", f".step_*{BEFORE}", ".step_*.old", rundir.aside(LATEST)):
        for debris in folder.glob(kind):
            rundir.remove(debris)


def _sync(folder: Path) -> None:
    """Have the names in a folder on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
