"""Files for the tests of genomes, and what is in them, worked out without the code under test."""

import contextlib
import gzip
import os
import struct
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.errors import RequestError
from launcher.genome import fasta

REPOSITORY = Path(__file__).parents[2]
LAMBDA = REPOSITORY / "genomes/lambda_phage.fa.gz"
ECOLI = REPOSITORY / "genomes/ecoli_mg1655.fa.gz"
CONTIGS = REPOSITORY / "tests/data/ecoli_mg1655_contigs.fa.gz"


def text_of(path: Path) -> dict[str, str]:
    """Name to sequence, by the plainest possible reading of a gzipped FASTA file."""
    parts: dict[str, list[str]] = {}
    for line in gzip.decompress(path.read_bytes()).decode("ascii").splitlines():
        if line.startswith(">"):
            parts[line[1:].split()[0]] = lines = []
        else:
            lines.append(line)
    return {name: "".join(lines) for name, lines in parts.items()}


def bgzip(text: bytes, block_bytes: int = 0x4000) -> tuple[bytes, list[int]]:
    """A bgzip file (SAM specification, section 4.1) and where its blocks end; the last one is the end-of-file block."""
    packed, ends = b"", []
    for start in [*range(0, len(text), block_bytes), len(text)]:
        block = text[start : start + block_bytes]
        deflate = zlib.compressobj(wbits=-15)
        data = deflate.compress(block) + deflate.flush()
        header = b"\x1f\x8b\x08\x04\0\0\0\0\0\xff\x06\0BC\x02\0" + struct.pack("<H", len(data) + 25)
        packed += header + data + struct.pack("<II", zlib.crc32(block), len(block))
        ends.append(len(packed))
    return packed, ends


def faults_of(path: Path) -> list[str]:
    """What reading a FASTA file is refused with."""
    with pytest.raises(RequestError) as refused:
        list(fasta.records(path))
    return refused.value.faults


@contextlib.contextmanager
def ordinary_user() -> Iterator[None]:
    """Permissions count inside, also where the tests are run by root."""
    if os.geteuid() != 0:
        yield
        return
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def let_enter(*folders: Path) -> None:
    """Everybody may look into these temporary folders, and nobody else may write there."""
    for folder in folders:
        for path in (folder, *folder.parents):
            if path == Path(tempfile.gettempdir()):
                break
            path.chmod(0o755)
