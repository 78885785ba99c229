"""Windows of a genome by number, read from the cache."""

import json
import os
import weakref
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import RunError

if TYPE_CHECKING:
    # Counting windows, all that a plan does, needs no numpy; importing it takes longer than the plan.
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    from launcher.genome.alphabet import Codes


@dataclass(frozen=True)
class Windows:
    """The windows of one split, in the order of the genome.

    The index is memory-mapped; bases are read by position into the caller's array, so that the memory of a process
    does not grow with the part of the genome it has seen. Both are safe in forked processes; a pickle holds paths.
    """

    codes_path: Path
    contigs_path: Path
    starts_path: Path
    lengths_path: Path
    num_windows: int
    sequence_length: int

    def __len__(self) -> int:
        return self.num_windows

    def read(self, index: int, reverse: bool = False) -> "Codes":
        """One window as codes (sequence_length,) uint8, PAD on the right.

        ``reverse`` reads its bases from the opposite strand. Raises IndexError for a window that is not there.
        """
        row: Codes = self.read_many([index], [reverse])[0]
        return row

    def read_many(self, indices: "ArrayLike", reverse: "ArrayLike | None" = None) -> "Codes":
        """Windows by number (n,), and for each whether it is read from the opposite strand (n,).

        Returns codes (n, sequence_length) uint8, PAD on the right. Raises IndexError for a window that is not there,
        RunError if the cache was cut short behind our back.
        """
        import numpy as np

        wanted = np.asarray(indices)
        backwards = [False] * len(wanted) if reverse is None else np.asarray(reverse).tolist()
        starts, lengths = self._starts[wanted].tolist(), self._lengths[wanted].tolist()
        rows = np.zeros((len(wanted), self.sequence_length), dtype=np.uint8)
        for row, start, length, is_reverse in zip(rows, starts, lengths, backwards, strict=True):
            bases = row[:length]
            if os.preadv(self._descriptor, [bases.data], start) != length:
                raise RunError(f"{self.codes_path} ends early: the cache of the genome was changed; remove its folder")
            if is_reverse:
                bases[:] = self._reverse_complement(bases)
        return rows

    def locate(self, index: int) -> tuple[str, int, int]:
        """(contig, start, end) of a window, 0-based and half-open, on the forward strand."""
        import numpy as np

        names, ends = self._contigs
        start = int(self._starts[index])
        contig = int(np.searchsorted(ends, start, side="right"))
        origin = int(ends[contig - 1]) if contig else 0
        return names[contig], start - origin, start - origin + int(self._lengths[index])

    @cached_property
    def codes(self) -> "Codes":
        """The codes (bases,) uint8 of the whole genome, all contigs one after another; memory-mapped."""
        import numpy as np

        return np.asarray(np.memmap(self.codes_path, dtype=np.uint8, mode="r"))

    @cached_property
    def _starts(self) -> "NDArray[np.int64]":
        import numpy as np

        return np.asarray(np.memmap(self.starts_path, dtype=np.int64, mode="r"))

    @cached_property
    def _lengths(self) -> "NDArray[np.int32]":
        import numpy as np

        return np.asarray(np.memmap(self.lengths_path, dtype=np.int32, mode="r"))

    @cached_property
    def _contigs(self) -> "tuple[list[str], NDArray[np.int64]]":
        """Names, and where each contig ends in the file of codes."""
        import numpy as np

        contigs = json.loads(self.contigs_path.read_bytes())
        return contigs["names"], np.cumsum(contigs["lengths"], dtype=np.int64)

    @cached_property
    def _descriptor(self) -> int:
        """The open file of codes; it is only read by position, so that processes can share it."""
        descriptor = os.open(self.codes_path, os.O_RDONLY)
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    @cached_property
    def _reverse_complement(self) -> "Any":
        from launcher.genome.alphabet import reverse_complement

        return reverse_complement

    def __getstate__(self) -> dict[str, Any]:
        """The fields: what was opened is opened again where it is needed."""
        return {name: vars(self)[name] for name in self.__dataclass_fields__}
