"""How fast windows are read, how fast a genome is cached, and what a reader's memory does as genomes grow.

    python benchmarks/data_loading.py                                  # E. coli, and 500 Mb of random bases
    python benchmarks/data_loading.py --random-bases 500e6 3.2e9       # a human genome's size too; needs 3.2 GB of disk

The reading side is compared with a dataset that asks pyfaidx for each window and makes tokens of it character by
character, as HyenaDNA's does; caching with the time in which pyfaidx indexes a genome and reads it once.
"""

import argparse
import gzip
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import pyfaidx

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from launcher import genome  # noqa: E402 - runs from a checkout without installation
from launcher.genome import alphabet, fasta  # noqa: E402, F401 - the parser's import is not part of what is timed
from launcher.genome.windows import Windows  # noqa: E402
from launcher.schema import Data  # noqa: E402

LENGTH = 8192
CONTIG_BASES = 250_000_000
"""Of random genomes: about human chromosome 1."""
LINE_BASES = 70
REPEATS = 5


class CharacterDataset:
    """Windows from pyfaidx, one at a time, made into tokens character by character."""

    def __init__(self, path: Path, places: Sequence[tuple[str, int, int]]) -> None:
        self.genome = pyfaidx.Fasta(str(path))
        self.places = places
        self.ids = {name: token for token, name in enumerate(alphabet.VOCABULARY)}

    def __getitem__(self, index: int) -> np.ndarray:
        contig, start, end = self.places[index]
        tokens = []
        for character in str(self.genome[contig][start:end]).upper():
            tokens.append(self.ids.get(character, alphabet.N))
        tokens += [alphabet.PAD] * (LENGTH - len(tokens))
        return np.array(tokens, dtype=np.int64)


def windows_per_second(
    read: Callable[[int, np.ndarray], object], num_windows: int, batch: int, seconds: float
) -> float:
    """The median rate of ``read(number, indices)`` over several spells of reading in random order."""
    generator = np.random.default_rng(0)
    rates = []
    for _ in range(REPEATS):
        order = generator.permutation(num_windows)
        count, started = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - started) < seconds / REPEATS:
            first = count % (num_windows - batch + 1)
            read(count, order[first : first + batch])
            count += batch
        rates.append(count / elapsed)
    return statistics.median(rates)


def reading(plain: Path, windows: Windows) -> None:
    places = [windows.locate(index) for index in range(len(windows))]
    dataset = CharacterDataset(plain, places)
    for index in range(0, len(places), 50):
        assert np.array_equal(dataset[index], alphabet.TOKEN[windows.read(index)]), "both read the same"

    def tokens(_: int, indices: np.ndarray) -> np.ndarray:
        return alphabet.TOKEN.take(windows.read_many(indices)).astype(np.int64)

    def opposite(_: int, indices: np.ndarray) -> np.ndarray:
        return windows.read_many(indices, indices % 2 == 0)

    base = windows_per_second(lambda _, indices: dataset[int(indices[0])], len(places), 1, 5)
    print(f"\nwindows/s of {LENGTH} bases, random order, one process{'':16}     ratio")
    print(f"  pyfaidx, character by character, int64 tokens   {base:12,.0f}")
    for name, read, batch in (
        ("Windows.read_many, 8 at a time, codes", lambda _, indices: windows.read_many(indices), 8),
        ("Windows.read_many, 1 at a time, codes", lambda _, indices: windows.read_many(indices), 1),
        ("Windows.read_many, 8, every second one reversed", opposite, 8),
        ("Windows.read_many, 8, as int64 tokens", tokens, 8),
    ):
        rate = windows_per_second(read, len(places), batch, 3)
        print(f"  {name:<48}{rate:12,.0f}    {rate / base:6.0f} x")


def caching(plain: Path, packed: Path, folder: Path) -> None:
    def index_and_read() -> None:
        Path(f"{plain}.fai").unlink(missing_ok=True)
        with pyfaidx.Fasta(str(plain)) as found:
            for record in found:
                str(record[:])

    def cache(path: Path, number: int) -> None:
        load(path, folder / f"cache-{path.name}-{number}")

    # By turns, so that whatever else the machine does hits all alike.
    times: dict[str, list[float]] = {"pyfaidx": [], "plain": [], "gzip": [], "cached": []}
    for number in range(REPEATS):
        times["pyfaidx"].append(timed(index_and_read))
        times["plain"].append(timed(lambda number=number: cache(plain, number)))
        times["gzip"].append(timed(lambda number=number: cache(packed, number)))
        times["cached"].append(timed(lambda number=number: cache(packed, number)))
    base = statistics.median(times["pyfaidx"])
    print(f"\nseconds (median of {REPEATS})                                               ratio")
    print(f"  pyfaidx indexes and reads plain FASTA once      {base:12.3f}")
    for name, key in (
        ("cache and windows made, plain FASTA", "plain"),
        ("cache and windows made, gzip", "gzip"),
        ("cache there (gzip): hashed and opened", "cached"),
    ):
        median = statistics.median(times[key])
        print(f"  {name:<48}{median:12.3f}    {median / base:6.2f} x")


def memory(genomes: Sequence[tuple[str, str]]) -> None:
    """``genomes``: name, and what to give as data.fasta."""
    print("\nmemory of a process that has read 20,000 random windows, MB        windows/s")
    print("  genome            resident  of it anonymous  private (USS)")
    for name, path in genomes:
        output = subprocess.run(
            [sys.executable, __file__, "--read", path], check=True, capture_output=True, text=True
        ).stdout
        resident, anonymous, private, rate = (float(value) for value in output.split())
        print(f"  {name:<16}{resident:10.1f}{anonymous:17.1f}{private:15.1f}{rate:18,.0f}")


def read_and_report(path: str) -> None:
    """What ``memory`` starts: resident, anonymous and private memory in MB, and windows/s."""
    windows = genome.load(Data(fasta=path, sequence_length=LENGTH)).train
    generator = np.random.default_rng(0)
    started = time.perf_counter()
    for _ in range(2500):
        windows.read_many(generator.integers(0, len(windows), 8))
    rate = 20_000 / (time.perf_counter() - started)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    resident, anonymous = (int(status[key].split()[0]) / 1000 for key in ("VmRSS", "RssAnon"))
    print(resident, anonymous, psutil.Process().memory_full_info().uss / 1e6, rate)


def random_fasta(num_bases: int) -> Iterator[bytes]:
    """Random bases as FASTA, in contigs of at most CONTIG_BASES, a few megabytes at a time."""
    generator = np.random.default_rng(0)
    lines = 1 << 16
    block = np.full((lines, LINE_BASES + 1), ord("\n"), dtype=np.uint8)
    block[:, :LINE_BASES] = np.frombuffer(b"ACGT", dtype=np.uint8)[generator.integers(0, 4, (lines, LINE_BASES))]
    for number, first in enumerate(range(0, num_bases, CONTIG_BASES)):
        yield b">contig%d\n" % number
        left = min(CONTIG_BASES, num_bases - first)
        while left > 0:
            size = min(lines, -(-left // LINE_BASES))
            yield np.roll(block, int(generator.integers(lines)), axis=0)[:size].tobytes()
            left -= size * LINE_BASES


def cache_through_a_pipe(num_bases: int, folder: Path) -> str:
    """Stream a random genome into a cache; returns what to give as data.fasta to read it."""
    pipe = folder / f"random{num_bases}.fa"
    os.mkfifo(pipe)

    def write() -> None:
        with open(pipe, "wb") as out:
            for block in random_fasta(num_bases):
                out.write(block)

    writer = threading.Thread(target=write)
    writer.start()
    started = time.perf_counter()
    program = (
        "import resource, sys\n"
        "from launcher import genome\n"
        "from launcher.schema import Data\n"
        f"found = genome.load(Data(fasta=sys.argv[1], sequence_length={LENGTH}))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000, *found.fasta)\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", program, str(pipe)], check=True, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    ).stdout
    writer.join()
    peak, path = output.split(maxsplit=1)
    seconds = time.perf_counter() - started
    print(f"\n{num_bases:,} bases through a pipe: cached in {seconds:.0f} s, peak memory {float(peak):,.0f} MB")
    return path.strip()


def load(path: Path | str, cache_dir: Path) -> genome.Genome:
    return genome.load(Data(fasta=str(path), sequence_length=LENGTH, cache_dir=str(cache_dir)))


def timed(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random-bases", nargs="*", type=float, default=[500e6], metavar="N")
    parser.add_argument("--folder", type=Path, help="where the caches go; default: the temporary folder")
    parser.add_argument("--read", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        read_and_report(options.read)
        return
    sys.stdout.reconfigure(line_buffering=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        plain, packed = folder / "ecoli.fa", folder / "ecoli.fa.gz"
        packed.write_bytes((REPOSITORY / "genomes/ecoli_mg1655.fa.gz").read_bytes())
        plain.write_bytes(gzip.decompress(packed.read_bytes()))
        reading(plain, load(plain, folder / "cache").train)
        caching(plain, packed, folder)
        genomes = [("E. coli", str(packed))]
        for num_bases in map(int, options.random_bases):
            genomes.append((f"{num_bases / 1e6:,.0f} Mb random", cache_through_a_pipe(num_bases, folder)))
        memory(genomes)


if __name__ == "__main__":
    main()
