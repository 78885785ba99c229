"""BED files: regions as 0-based half-open intervals (contig, start, end), checked line by line."""

import hashlib
import itertools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from launcher.errors import RequestError, nearest
from launcher.genome.cache import DIGEST_BYTES, is_pipe

MOST_FAULTS = 10
"""Lines told about one file."""


class Region(NamedTuple):
    line: int
    contig: str
    start: int
    end: int


@dataclass(frozen=True)
class Bed:
    """A BED file that was read, but not yet held against contigs."""

    key: str
    path: Path
    digest: str
    """Of the file as it lies on disk."""
    regions: list[Region]


def is_bed(text: str) -> bool:
    """Whether ``data.validation`` as text names a BED file, and not a contig."""
    return text.endswith((".bed", ".bed.gz")) or "/" in text


def read(key: str, path: Path) -> Bed:
    """The regions of a BED file, plain, gzip or bgzip; comments, ``track`` and ``browser`` lines are passed over.

    Raises RequestError with one line for every line that is no region.
    """
    from launcher.genome import fasta  # imports a parser, and is not needed where the windows are cached

    if is_pipe(path):
        raise RequestError(f"{key}={path}: every rank reads it, and a pipe can be read only once; give a file")
    regions, faults = [], []
    number = 0
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    try:
        with fasta.open_input(path, digest.update) as stream:
            for number, raw in enumerate(stream, start=1):
                line = raw.decode("ascii").strip()
                if not line or line.startswith("#") or re.match(r"(track|browser)\b", line):
                    continue
                region = _region(number, line)
                if isinstance(region, Region):
                    regions.append(region)
                else:
                    faults.append(f"{key}={path}, line {number}: {region}")
    except (fasta.FormatError, OSError, *fasta.DECOMPRESSION_ERRORS) as error:
        faults.append(f"{key}={path}{_unreadable(path, number + 1, error)}")
    if not regions and not faults:
        faults.append(f"{key}={path}: it holds no region; a line is 'contig start end'")
    if faults:
        raise RequestError(*faults[:MOST_FAULTS], *_more(len(faults), key, path))
    return Bed(key, path, digest.hexdigest(), regions)


def check(found: Bed, lengths: Mapping[str, int]) -> list[str]:
    """Fault lines for regions that do not lie on a contig; ``lengths`` in bases by name of contig."""
    wrong = [region for region in found.regions if region.end > lengths.get(region.contig, -1)]
    faults = []
    for line, contig, _, end in wrong[:MOST_FAULTS]:
        where = f"{found.key}={found.path}, line {line}"
        if contig not in lengths:
            faults.append(f"{where}: {no_contig(contig, lengths)}")
        else:
            length = lengths[contig]
            faults.append(f"{where}: the region ends at {end}, but contig {contig} at {length}; end it there")
    return faults + _more(len(wrong), found.key, found.path)


def no_contig(name: str, known: Collection[str]) -> str:
    """What to say of a contig that is not there."""
    some = ", ".join(itertools.islice(known, 5)) + (", ..." if len(known) > 5 else "")
    return f"there is no contig {name}{nearest(name, known) or f'; there are: {some}'}"


def _region(number: int, line: str) -> Region | str:
    """The region of a line, or what is wrong with it."""
    columns = line.split("\t") if "\t" in line else line.split()
    if len(columns) < 3:
        return f"{line[:40]!r} is no region; a line is 'contig start end'"
    contig, start, end = (column.strip() for column in columns[:3])
    if not (re.fullmatch(r"-?\d+", start) and re.fullmatch(r"-?\d+", end)):
        return f"start {start!r} and end {end!r} must be whole numbers"
    if int(start) < 0:
        return f"start {start} is below 0; positions count from 0"
    if int(start) >= int(end):
        return f"start {start} must be below end {end}; regions are 0-based and half-open"
    return Region(number, contig, int(start), int(end))


def _unreadable(path: Path, line: int, error: Exception) -> str:
    from launcher.genome import fasta

    if isinstance(error, OSError) and not isinstance(error, fasta.DECOMPRESSION_ERRORS):
        return fasta.cannot_open(path, error)
    return f", line {line}: {fasta.explain(error)}"


def _more(num_faults: int, key: str, path: Path) -> list[str]:
    left = num_faults - MOST_FAULTS
    return [f"{key}={path}: {left} more lines are wrong"] if left > 0 else []
