"""Which windows a genome has: stretches of bases, cut into training and validation, tiled with windows.

A stretch is a run of bases of one contig in one split: a contig, a region, or a part of one. Windows never leave their
stretch and stretches never overlap, so no base is read in both splits. Positions count bases of the file of codes.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from launcher.errors import RequestError
from launcher.genome import alphabet, bed
from launcher.genome.cache import CODES, CONTIGS, DIGEST_BYTES
from launcher.genome.progress import Progress
from launcher.schema import Data

SHORTEST = 2
"""Bases of the shortest window: the first one predicts the second."""
CHUNK_WINDOWS = 1 << 17
CHUNK_BASES = 1 << 22

Int64s = NDArray[np.int64]


class Stretches(NamedTuple):
    """Runs of bases [start, end), in order and without overlap, each on one contig."""

    starts: Int64s
    ends: Int64s


class Contigs(NamedTuple):
    names: Sequence[str]
    ends: Int64s
    """Where each contig ends in the file of codes."""

    @classmethod
    def of(cls, names: Sequence[str], lengths: Sequence[int]) -> "Contigs":
        return cls(names, np.cumsum(lengths, dtype=np.int64))

    @property
    def starts(self) -> Int64s:
        return np.concatenate([np.zeros(1, dtype=np.int64), self.ends[:-1]])

    @property
    def lengths(self) -> Mapping[str, int]:
        return dict(zip(self.names, (self.ends - self.starts).tolist(), strict=True))


class Beds(NamedTuple):
    """The BED files of a request; None where there is none."""

    regions: bed.Bed | None
    validation: bed.Bed | None


class Split(NamedTuple):
    """What was found for one split, and what was left out of it."""

    num_windows: int
    digest: str
    num_stretches: int
    num_bases: int
    num_left_out: int
    """Windows with too many bases that are not A, C, G or T."""


def split(data: Data, beds: Beds, contigs: Contigs) -> tuple[Stretches, Stretches | None]:
    """The training and the validation stretches. Raises RequestError with every fault of regions and validation."""
    lengths = contigs.lengths
    faults = [fault for found in beds if found is not None for fault in bed.check(found, lengths)]
    held_out = _names(data.validation) if beds.validation is None else []
    faults += [f"data.validation={name}: {bed.no_contig(name, lengths)}" for name in held_out if name not in lengths]
    if faults:
        raise RequestError(*faults)

    everything = (
        Stretches(contigs.starts, contigs.ends) if beds.regions is None else place(beds.regions.regions, contigs)
    )
    if data.validation is None:
        return everything, None
    if isinstance(data.validation, float | int):
        return split_ends(everything, data.validation)
    if beds.validation is not None:
        apart = place(beds.validation.regions, contigs)
    else:
        apart = place([bed.Region(0, name, 0, lengths[name]) for name in held_out], contigs)
    train = subtract(everything, apart)
    return train, subtract(everything, train)


def _names(validation: float | str | Sequence[str] | None) -> Sequence[str]:
    if validation is None or isinstance(validation, float | int):
        return []
    return [validation] if isinstance(validation, str) else validation


def place(regions: Sequence[bed.Region], contigs: Contigs) -> Stretches:
    """Regions as stretches; those that overlap or touch are one."""
    origins = dict(zip(contigs.names, contigs.starts.tolist(), strict=True))
    merged: list[tuple[str, int, int]] = []
    for contig, start, end in sorted(
        ((region.contig, region.start, region.end) for region in regions),
        key=lambda region: (origins[region[0]], region[1]),
    ):
        if merged and merged[-1][0] == contig and start <= merged[-1][2]:
            merged[-1] = (contig, merged[-1][1], max(end, merged[-1][2]))
        else:
            merged.append((contig, start, end))
    return _stretches([(origins[contig] + start, origins[contig] + end) for contig, start, end in merged])


def split_ends(stretches: Stretches, fraction: float) -> tuple[Stretches, Stretches]:
    """The last ``fraction`` of the bases of every stretch apart; none where either part would be too short to read."""
    lengths = stretches.ends - stretches.starts
    apart = np.rint(lengths * fraction).astype(np.int64)
    apart[(apart < SHORTEST) | (lengths - apart < SHORTEST)] = 0
    cuts = stretches.ends - apart
    return Stretches(stretches.starts, cuts), Stretches(cuts[apart > 0], stretches.ends[apart > 0])


def subtract(stretches: Stretches, holes: Stretches) -> Stretches:
    """What is left of ``stretches`` outside ``holes``."""
    left: list[tuple[int, int]] = []
    first_holes = np.searchsorted(holes.ends, stretches.starts, side="right")
    last_holes = np.searchsorted(holes.starts, stretches.ends)
    for start, end, first, last in zip(*stretches, first_holes, last_holes, strict=True):
        # What lies between the holes, from the start of the stretch to its end.
        left += zip([start, *holes.ends[first:last]], [*holes.starts[first:last], end], strict=True)
    return _stretches([(start, end) for start, end in left if start < end])


def tile(stretches: Stretches, sequence_length: int, stride: int) -> Iterator[tuple[Int64s, NDArray[np.int32]]]:
    """(starts, lengths) of the windows of all stretches, in order, in chunks.

    The windows of a stretch start ``stride`` apart. The last one is shorter than ``sequence_length`` where the stretch
    ends; it is there if it has at least 2 bases and reads one that the window before it does not.
    """
    bases = stretches.ends - stretches.starts
    num_full = np.where(bases >= sequence_length, (bases - sequence_length) // stride + 1, 0)
    covered = np.where(num_full > 0, (num_full - 1) * stride + sequence_length, 0)
    has_tail = (bases - num_full * stride >= SHORTEST) & (covered < bases)
    num_windows = num_full + has_tail
    ends = np.cumsum(num_windows)
    for first in range(0, int(ends[-1]) if len(ends) else 0, CHUNK_WINDOWS):
        window = np.arange(first, min(first + CHUNK_WINDOWS, int(ends[-1])), dtype=np.int64)
        stretch = np.searchsorted(ends, window, side="right")
        place_in_stretch = window - (ends - num_windows)[stretch]
        starts = stretches.starts[stretch] + place_in_stretch * stride
        yield starts, np.minimum(sequence_length, stretches.ends[stretch] - starts).astype(np.int32)


def write(folder: Path, bases: Path, data: Data, beds: Beds) -> dict[str, object]:
    """Fill an entry with the windows of ``data``; ``bases`` is the entry of the genome. Returns what to note of it.

    For each split there are ``NAME.starts`` (int64, bases of the file of codes) and ``NAME.lengths`` (int32).
    Raises RequestError with every fault of regions and validation, or for splits without any window.
    """
    contigs = Contigs.of(**json.loads((bases / CONTIGS).read_bytes()))
    train, validation = split(data, beds, contigs)
    stride = data.stride or data.sequence_length
    found = {}
    with Progress("looking for N in", [bases / CODES]) as progress:
        found["train"] = _write_split(folder, "train", train, data, stride, bases / CODES, progress)
        if validation is not None:
            # Every held-out base is predicted once, whatever the stride of training.
            stride = max(stride, data.sequence_length)
            found["validation"] = _write_split(folder, "validation", validation, data, stride, bases / CODES, progress)
    faults = [why_empty(name, data, result) for name, result in found.items() if result.num_windows == 0]
    if faults:
        raise RequestError(*faults)
    return {
        "kind": "windows",
        "num_windows": {name: result.num_windows for name, result in found.items()},
        "digests": {name: result.digest for name, result in found.items()},
    }


def _write_split(
    folder: Path, name: str, stretches: Stretches, data: Data, stride: int, codes: Path, progress: Progress
) -> Split:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    num_windows = num_left_out = 0
    with open(folder / f"{name}.starts", "wb") as starts_file, open(folder / f"{name}.lengths", "wb") as lengths_file:
        for starts, lengths in tile(stretches, data.sequence_length, stride):
            if data.max_n_fraction < 1:
                is_read = count_not_acgt(codes, starts, lengths, progress) / lengths <= data.max_n_fraction
            else:
                is_read = np.ones(len(starts), dtype=bool)
            num_windows += int(np.count_nonzero(is_read))
            num_left_out += int(np.count_nonzero(~is_read))
            for file, values in ((starts_file, starts[is_read]), (lengths_file, lengths[is_read])):
                digest.update(values.data)
                file.write(values.data)
    num_bases = int((stretches.ends - stretches.starts).sum())
    return Split(num_windows, digest.hexdigest(), len(stretches.starts), num_bases, num_left_out)


def count_not_acgt(codes: Path, starts: Int64s, lengths: NDArray[np.int32], progress: Progress) -> Int64s:
    """(windows,) bases other than A, C, G and T in each window; ``starts`` ascend."""
    counts = np.zeros(len(starts), dtype=np.int64)
    first = 0
    while first < len(starts):
        # As many windows as start within a chunk are counted from one read.
        last = int(np.searchsorted(starts, starts[first] + CHUNK_BASES))
        origin = int(starts[first])
        num_bases = int(starts[last - 1] + lengths[last - 1]) - origin
        bases = np.fromfile(codes, dtype=np.uint8, count=num_bases, offset=origin).tobytes()
        is_other = bases.translate(_IS_OTHER)
        if 1 in is_other:
            before = np.concatenate([[0], np.cumsum(np.frombuffer(is_other, dtype=np.uint8), dtype=np.int64)])
            begin = starts[first:last] - origin
            counts[first:last] = before[begin + lengths[first:last]] - before[begin]
        progress.advance(num_bases)
        first = last
    return counts


_IS_OTHER = (~alphabet.IS_TARGET).astype(np.uint8).tobytes()


def why_empty(name: str, data: Data, found: Split) -> str:
    """The fault line of a split without a window: what there was, and what removed it."""
    place = "validation" if name == "validation" else "training"
    if found.num_left_out:
        return (
            f"data.max_n_fraction={data.max_n_fraction}: no {place} window is left: all {found.num_left_out} have a "
            "larger part of bases other than A, C, G and T; raise it, or choose other data.regions"
        )
    if found.num_stretches:
        return (
            f"data.sequence_length={data.sequence_length}: there is no {place} window: the {found.num_stretches} "
            f"{'stretch has' if found.num_stretches == 1 else 'stretches have'} {found.num_bases} bases in all, and a "
            f"window needs {SHORTEST} in one of them; choose other data.regions or data.validation"
        )
    return (
        f"data.validation={data.validation}: it leaves no base for {place}"
        f"{' inside data.regions' if data.regions else ''}; choose another part"
    )


def _stretches(pairs: Sequence[tuple[int, int]]) -> Stretches:
    both = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return Stretches(both[:, 0], both[:, 1])
