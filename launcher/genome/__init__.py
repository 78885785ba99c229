"""Genomes: FASTA files read once into a cache, and windows of them by number."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import RequestError
from launcher.genome import bed, cache, store
from launcher.genome.windows import Windows
from launcher.schema import Data, SoftMask

if TYPE_CHECKING:
    from launcher.genome.index import Beds

INDEX_FORMAT = 1
LONGEST_WINDOW = 1 << 30
"""Bases; a window is read in one piece."""


@dataclass(frozen=True)
class Genome:
    """The windows of a request, and what they are windows of."""

    train: Windows
    validation: Windows | None
    fingerprint: str
    """Of what the number of a training or validation window means: the bases that it reads."""
    num_bases: int
    fasta: list[str]
    """What another process gives as ``data.fasta`` to read the same bases: the files, or, for a pipe, which can be
    read only once, the folder in which its bases are cached."""
    entries: tuple[str, str]
    """The folders of the cache that hold the bases and the windows."""

    @property
    def contigs(self) -> list[tuple[str, int]]:
        """Names and lengths in bases."""
        contigs = json.loads(self.train.contigs_path.read_bytes())
        return list(zip(contigs["names"], contigs["lengths"], strict=True))


def check(data: Data) -> list[str]:
    """Fault lines for values outside their range; reads nothing."""
    faults = []

    def rule(name: str, value: object, holds: bool, text: str) -> None:
        if not holds:
            faults.append(f"data.{name}={value}: {text}")

    length, stride, validation = data.sequence_length, data.stride, data.validation
    rule("fasta", data.fasta, bool(data.fasta), "name at least one file")
    rule("sequence_length", length, 2 <= length <= LONGEST_WINDOW, f"it must lie in [2, {LONGEST_WINDOW}] bases")
    rule("stride", stride, stride is None or stride >= 1, "it must be at least 1 base; null makes windows adjoin")
    if isinstance(validation, float | int):
        rule(
            "validation", validation, 0 < validation < 1, "a fraction lies between 0 and 1; names of contigs are a list"
        )
    rule("validation", validation, validation not in ([], ""), "name at least one contig; null validates nothing")
    rule("max_n_fraction", data.max_n_fraction, 0 <= data.max_n_fraction <= 1, "it must lie in [0, 1]")
    rule(
        "soft_mask_weight",
        data.soft_mask_weight,
        math.isfinite(data.soft_mask_weight) and data.soft_mask_weight >= 0,
        f"it must be a number of at least 0; data.soft_mask={SoftMask.IGNORE.value} makes lower case no target",
    )
    rule("mask_fraction", data.mask_fraction, 0 < data.mask_fraction <= 1, "it must be above 0 and at most 1")
    rule("num_workers", data.num_workers, data.num_workers >= 0, "it must be at least 0")
    return faults


def load(data: Data, *, keep: bool = True) -> Genome:
    """The windows that ``data`` asks for; the cache is made, or made anew, where the files are not those cached.

    With ``keep=False`` a cache that is there is used, and one that has to be made is removed when the process ends.
    Raises RequestError with every fault of the values, the files and the regions.
    """
    faults = check(data)
    if faults:
        raise RequestError(*faults)

    def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except RequestError as error:
            faults.extend(error.faults)
            return None

    files: list[Path] | None = attempt(cache.resolve, data.fasta)
    if files is None:
        raise RequestError(*faults)
    place = store.Store(store.roots(data.cache_dir, files[0]), keep)
    bases: store.Entry | None = attempt(cache.open_bases, files, place)
    if bases is None:
        attempt(_read_beds, data)  # so that its faults are told at once too
        raise RequestError(*faults)
    name = _windows_name(bases, data, _bed_digests(data))
    windows = place.find(name) if name is not None else None
    return _genome(bases, windows or _make_windows(bases, data, place), data, files)


def reopen(data: Data, entries: Sequence[str], fingerprint: str) -> Genome:
    """The genome that another process has loaded: from its cache, without reading the files again, if that is there.

    So a thousand ranks need not hash them. Raises RequestError if the files have changed since, and as ``load`` does.
    """
    bases, windows = (store.read(Path(entry)) for entry in entries)
    read = _genome(bases, windows, data, cache.resolve(data.fasta)) if bases and windows else load(data)
    if read.fingerprint != fingerprint:
        raise RequestError("data.fasta: the windows are no longer those that the run was planned with; start it anew")
    return read


def reads_a_pipe(data: Data) -> bool:
    """Whether an input can be read only once, so that other processes have to be given ``Genome.fasta``."""
    names = [data.fasta] if isinstance(data.fasta, str) else data.fasta
    return any(cache.is_pipe(Path(name)) for name in names)


def _genome(bases: store.Entry, windows: store.Entry, data: Data, files: Sequence[Path]) -> Genome:
    def split(name: str) -> Windows:
        return Windows(
            codes_path=bases.path / cache.CODES,
            contigs_path=bases.path / cache.CONTIGS,
            starts_path=windows.path / f"{name}.starts",
            lengths_path=windows.path / f"{name}.lengths",
            num_windows=windows.meta["num_windows"][name],
            sequence_length=data.sequence_length,
        )

    meaning = [bases.meta["bases"], data.sequence_length, windows.meta["digests"]]
    return Genome(
        train=split("train"),
        validation=split("validation") if "validation" in windows.meta["num_windows"] else None,
        fingerprint=_hash(meaning),
        num_bases=bases.meta["num_bases"],
        fasta=[str(bases.path)] if any(cache.is_pipe(file) for file in files) else [str(file) for file in files],
        entries=(str(bases.path), str(windows.path)),
    )


def _make_windows(bases: store.Entry, data: Data, place: store.Store) -> store.Entry:
    from launcher.genome import index  # not needed, and slow to import, where the windows are cached

    beds = _read_beds(data)

    def write(folder: Path) -> tuple[str, dict[str, object]]:
        meta = index.write(folder, bases.path, data, beds)
        name = _windows_name(bases, data, [found.digest if found else "" for found in beds])
        assert name is not None, "the BED files have been read"
        return name, meta

    return place.make(write)


def _windows_name(bases: store.Entry, data: Data, beds: Sequence[str | None]) -> str | None:
    """The entry of the windows; None if a BED file could not be read."""
    if None in beds:
        return None
    asked = [data.sequence_length, data.stride, data.max_n_fraction, data.validation if not beds[1] else None]
    return f"{bases.path.name}-windows-{_hash([INDEX_FORMAT, *asked, *beds])}"


def _bed_paths(data: Data) -> dict[str, Path | None]:
    """The BED files of a request by their key; None where there is none."""
    validation = data.validation if isinstance(data.validation, str) and bed.is_bed(data.validation) else None
    return {
        key: None if path is None else Path(os.path.expandvars(path))
        for key, path in (("data.regions", data.regions), ("data.validation", validation))
    }


def _bed_digests(data: Data) -> list[str | None]:
    """Of the content of regions and validation; empty where there is no file, None where it cannot be read."""
    digests: list[str | None] = []
    for path in _bed_paths(data).values():
        try:
            digests.append("" if path is None else cache.file_digest(path).hex())
        except OSError:
            digests.append(None)  # reading the regions tells why
    return digests


def _read_beds(data: Data) -> "Beds":
    from launcher.genome.index import Beds

    found, faults = [], []
    for key, path in _bed_paths(data).items():
        try:
            found.append(None if path is None else bed.read(key, path))
        except RequestError as error:
            faults += error.faults
    if faults:
        raise RequestError(*faults)
    return Beds(*found)


def _hash(values: object) -> str:
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=cache.DIGEST_BYTES).hexdigest()
