"""Saves and loads checkpoints (``launcher.checkpoints``) of an engine, on all its ranks together.

Every rank copies the slices that it owns and a thread of it writes them, while training goes on. What one cut has
written any other can load: a rank takes from all files what overlaps with what it owns itself.
"""

import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from safetensors import safe_open
from safetensors.torch import save_file

from launcher import checkpoints, rundir
from launcher.checkpoints import REST, Checkpoint, file_of
from launcher.errors import RunError
from launcher.worker import slices
from launcher.worker.engine import Engine
from launcher.worker.slices import Record, Slice

log = logging.getLogger(__name__)

LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What DeepSpeed's dynamic loss scaler goes by."""


@dataclass(frozen=True)
class Saved:
    """What became of a save. ``fault`` says why there is no checkpoint of that step."""

    step: int
    stall_s: float
    """Time for which training stood still."""
    total_s: float
    num_bytes: int
    fault: str | None = None


class Saver:
    """Writes the checkpoints of a run, one at a time.

    ``begin`` returns when everything is copied. The checkpoint is there after ``finish``, which is collective: the
    ranks have to agree on when to call it, best when ``busy`` is false on all of them.
    """

    def __init__(
        self, engine: Engine, folder: Path, texts: Mapping[str, str], keep: int | None, keep_every: int | None
    ) -> None:
        """``texts`` are files that belong to a checkpoint, by name."""
        self._engine, self._folder, self._texts = engine.deepspeed, folder, texts
        self._keep, self._keep_every = keep, keep_every
        self._pending: _Pending | None = None

    @property
    def pending(self) -> bool:
        """A checkpoint was begun and not finished; the same on all ranks."""
        return self._pending is not None

    @property
    def busy(self) -> bool:
        """This rank is still writing."""
        return self._pending is not None and self._pending.thread.is_alive()

    def begin(self, step: int, state: Mapping[str, Any]) -> None:
        """Copy all that belongs to a checkpoint and start to write it; ``state`` is plain and the same on all ranks."""
        assert self._pending is None, "the checkpoint before has to be finished first"
        start = time.perf_counter()
        aside = self._folder / (checkpoints.name(step) + checkpoints.PARTIAL)
        fault = _attempt(lambda: _empty(aside)) if dist.get_rank() == 0 else None
        dist.barrier()  # nobody writes before debris is gone
        tensors, records = _copy(self._engine)
        rest = slices.rest(self._engine.module)
        files: dict[str, dict[str, torch.Tensor] | str] = {file_of(dist.get_rank()): tensors}
        if dist.get_rank() == 0:
            files |= {REST: rest, **self._texts}
        manifest = {
            "format": checkpoints.FORMAT,
            "step": step,
            "state": {**state, "loss_scale": _loss_scale(self._engine)},
        }
        self._pending = _Pending(aside, manifest, files, records, start, fault)
        self._pending.stall_s = time.perf_counter() - start

    def finish(self) -> Saved:
        """Wait until every rank has written, and make it a checkpoint, or none if a rank could not write its part."""
        pending = self._pending
        assert pending is not None
        start = time.perf_counter()
        pending.thread.join()
        self._pending = None
        written = pending.written if pending.fault is None else pending.fault
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(written, everyones if dist.get_rank() == 0 else None)
        outcome: list[Any] = [None]
        if dist.get_rank() == 0:
            outcome = [self._complete(pending, everyones)]
        dist.broadcast_object_list(outcome)
        fault, num_bytes = outcome[0]
        now = time.perf_counter()
        return Saved(pending.manifest["step"], pending.stall_s + now - start, now - pending.start, num_bytes, fault)

    def _complete(self, pending: "_Pending", everyones: list[Any]) -> tuple[str | None, int]:
        faults = [f"rank {rank}: {told}" for rank, told in enumerate(everyones) if isinstance(told, str)]
        if not faults:
            files = {file: facts for one in everyones for file, facts in one["files"].items()}
            manifest = {**pending.manifest, "files": files, "parameters": _index([one["slices"] for one in everyones])}
            fault = _attempt(lambda: checkpoints.complete(pending.aside, manifest))
            if fault is None:
                kept = _attempt(lambda: checkpoints.prune(self._folder, manifest["step"], self._keep, self._keep_every))
                if kept is not None:
                    log.warning("checkpoints that are to go cannot be removed: %s", kept)
                return None, sum(facts["bytes"] for facts in files.values())
            faults = [fault]
        _attempt(lambda: rundir.remove(pending.aside))
        others = f" (and {len(faults) - 1} other ranks)" if len(faults) > 1 else ""
        return faults[0] + others, 0


class _Pending:
    """A checkpoint that is being written by a thread of this rank."""

    def __init__(
        self,
        aside: Path,
        manifest: dict[str, Any],
        files: dict[str, dict[str, torch.Tensor] | str],
        records: dict[str, Any],
        start: float,
        fault: str | None,
    ) -> None:
        self.aside, self.manifest, self.start = aside, manifest, start
        self.stall_s = 0.0
        self.fault = fault
        self.written: dict[str, Any] = {"files": {}, "slices": records}
        self.thread = threading.Thread(target=self._write, args=(files,), name="checkpoint")
        self.thread.start()

    def _write(self, files: dict[str, dict[str, torch.Tensor] | str]) -> None:
        for file, contents in files.items():
            path = self.aside / file
            if self.fault is None:
                self.fault = _attempt(lambda path=path, contents=contents: _write(path, contents))
            if self.fault is None:
                self.written["files"][file] = {"bytes": path.stat().st_size, "sha256": checkpoints.checksum(path)}
        files.clear()  # and with it the memory of the copies


def key_of(kind: str, name: str) -> str:
    return f"{kind}:{name}"


def _empty(folder: Path) -> None:
    rundir.remove(folder)
    folder.mkdir(parents=True)


def _write(path: Path, contents: dict[str, torch.Tensor] | str) -> None:
    if isinstance(contents, str):
        path.write_text(contents, encoding="utf-8")
    else:
        save_file(contents, path)
        path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors makes it for its owner alone
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _attempt(action: Any) -> str | None:
    """Do it, or say in a line why it could not be done: a save that fails must not end the run."""
    try:
        action()
    except Exception as error:  # safetensors has errors of its own for a full disk
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return None


def _copy(engine: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors that this rank writes, by key, and by parameter what they are."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors: dict[str, torch.Tensor] = {}
    records: dict[str, Any] = {}
    for one in slices.owned(engine):
        first, last = 0, one.tensor.numel()
        if slices.replicated(engine):  # every rank has all of it: each writes its part
            first, last = last * rank // size, last * (rank + 1) // size
        tensors[key_of(one.kind, one.name)] = one.tensor[first:last].detach().to("cpu", copy=True)
        record = records.setdefault(one.name, {"shape": list(one.shape), "count": one.count, "kinds": {}})
        record["kinds"][one.kind] = [one.start + first, one.start + last]
    return tensors, records


def _index(everyones: list[dict[str, Any]]) -> dict[str, Any]:
    """By parameter its shape, its count, and by kind the slices [rank, start, stop] in the order of their starts."""
    index: dict[str, Any] = {}
    for rank, records in enumerate(everyones):
        for name, record in records.items():
            entry = index.setdefault(name, {"shape": record["shape"], "count": record["count"], "kinds": {}})
            for kind, (start, stop) in record["kinds"].items():
                if start < stop:
                    entry["kinds"].setdefault(kind, []).append([rank, start, stop])
    for entry in index.values():
        for runs in entry["kinds"].values():
            runs.sort(key=lambda run: run[1])
    return index


def read(path: Path) -> Checkpoint:
    """One that was asked for by its path; collective. Raises RunError where it is damaged."""
    offer: list[Any] = [checkpoints.read(path) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(offer)
    if isinstance(offer[0], str):
        raise RunError(f"{path} cannot be used: {offer[0]}")
    damages = _damages(offer[0])
    if damages:
        raise RunError(f"{path} cannot be used: {damages[0]}")
    return offer[0]


def find(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole, and what is to be said about others; collective.

    The checksums are shared out among the ranks.
    """
    notes: list[str] = []
    offers = checkpoints.candidates(folder, notes) if dist.get_rank() == 0 else None
    while True:
        offer: list[Any] = [next(offers, None) if offers is not None else None]
        dist.broadcast_object_list(offer)
        checkpoint: Checkpoint | None = offer[0]
        if checkpoint is None:
            return None, notes
        damages = _damages(checkpoint)
        if not damages:
            return checkpoint, notes
        notes.append(f"{checkpoint.path.name} cannot be used: {damages[0]}")


def _damages(checkpoint: Checkpoint) -> list[str]:
    """What is wrong with the contents of files; each rank looks at some of them."""
    mine = list(checkpoint.manifest["files"])[dist.get_rank() :: dist.get_world_size()]
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, [damage for file in mine if (damage := checkpoint.damage(file))])
    return [damage for one in everyones for damage in one]


def load(engine: Engine, checkpoint: Checkpoint) -> None:
    """Write the weights, optimizer states and buffers of a checkpoint into a new engine of any cut; collective.

    Raises RunError where the checkpoint is of another model.
    """
    parameters = checkpoint.manifest["parameters"]
    ours = {name: list(shape) for name, shape in slices.shapes(engine.deepspeed).items()}
    theirs = {name: entry["shape"] for name, entry in parameters.items()}
    if ours != theirs:
        raise RunError(f"{checkpoint.path} is of another model: {_first_difference(ours, theirs)}")
    records = {name: Record(frozenset(entry["kinds"]), entry["count"]) for name, entry in parameters.items()}
    files = _Files(checkpoint.path)
    with torch.no_grad():
        for one in slices.owned(engine.deepspeed, records):
            _fill(one, parameters[one.name]["kinds"].get(one.kind, []), files)
    slices.publish(engine.deepspeed)
    slices.restore_rest(engine.deepspeed.module, files.whole(REST))
    _set_loss_scale(engine.deepspeed, checkpoint.state["loss_scale"])


def _first_difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    for name in ours.keys() | theirs.keys():
        if ours.get(name) != theirs.get(name):
            return f"{name} has shape {ours.get(name, 'none')} here and {theirs.get(name, 'none')} there"
    raise AssertionError("they are the same")


def _fill(one: Slice, runs: list[list[int]], files: "_Files") -> None:
    """Slices may overlap: what several ranks had, all of them have written."""
    place = one.start
    for rank, start, stop in runs:
        if start <= place < min(stop, one.stop):
            end = min(stop, one.stop)
            part = files.part(rank, key_of(one.kind, one.name), place - start, end - start)
            one.tensor[place - one.start : end - one.start].copy_(part)
            place = end
    if runs and place < one.stop:
        raise RunError(f"the checkpoint lacks elements {place} to {one.stop} of {one.name} ({one.kind})")


class _Files:
    """The files of a checkpoint, opened when they are asked for and read where they are needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[int, Any] = {}

    def part(self, rank: int, key: str, first: int, last: int) -> torch.Tensor:
        if rank not in self._open:
            self._open[rank] = safe_open(self._folder / file_of(rank), framework="pt")
        found: torch.Tensor = self._open[rank].get_slice(key)[first:last]
        return found

    def whole(self, file: str) -> dict[str, torch.Tensor]:
        with safe_open(self._folder / file, framework="pt") as opened:
            return {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - it is no mapping


def _loss_scale(engine: Any) -> dict[str, float] | None:
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if not isinstance(scaler, DynamicLossScaler):
        return None
    return {name: getattr(scaler, name) for name in LOSS_SCALE}


def _set_loss_scale(engine: Any, saved: Mapping[str, float] | None) -> None:
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if saved is not None and isinstance(scaler, DynamicLossScaler):
        for name, value in saved.items():
            setattr(scaler, name, value)
