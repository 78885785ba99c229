"""The cache of a genome: whole or not there, found by content, made by many at once, never where it must not be."""

import gzip
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import threading
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from launcher import genome
from launcher.errors import RequestError
from launcher.genome import alphabet, cache, store
from launcher.schema import Data
from tests.genome.files import CONTIGS, LAMBDA, REPOSITORY, let_enter, ordinary_user, text_of


def write_fasta(path: Path, text: str = ">a\nACGTACGTAC\n>b\nGGGGCCCC\n") -> Path:
    path.write_text(text)
    return path


def load(fasta: Path | str | list[str], keep: bool = True, cache_dir: Path | None = None) -> genome.Genome:
    named = fasta if isinstance(fasta, list) else str(fasta)
    return genome.load(Data(fasta=named, sequence_length=4, cache_dir=str(cache_dir) if cache_dir else None), keep=keep)


def bases(found: genome.Genome) -> str:
    return alphabet.decode(found.train.codes)


def refusal(fasta: Path | str | list[str], **options: object) -> list[str]:
    with pytest.raises(RequestError) as refused:
        load(fasta, **options)  # type: ignore[arg-type]
    return refused.value.faults


def files_under(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_genome_is_one_byte_a_base_contig_after_contig(tmp_path: Path) -> None:
    found = load(CONTIGS, cache_dir=tmp_path)
    expected = text_of(CONTIGS)
    assert bases(found) == "".join(expected.values())
    assert found.num_bases == sum(map(len, expected.values())) == (found.train.codes_path).stat().st_size
    assert found.contigs == [(name, len(sequence)) for name, sequence in expected.items()]


def test_lists_and_globs_are_read_in_order_and_variables_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("b", "a", "c[1]"):
        write_fasta(tmp_path / f"{name}.fa", f">{name}\nACGT\n")
    monkeypatch.setenv("GENOMES", str(tmp_path))

    def names(fasta: str | list[str]) -> list[str]:
        return [name for name, _ in load(fasta).contigs]

    # The second time there is a cache folder beside the files, which the glob matches too.
    for _ in range(2):
        assert names(f"{tmp_path}/*") == ["a", "b", "c[1]"]
    assert names([f"{tmp_path}/b.fa", f"{tmp_path}/a.*a"]) == ["b", "a"]
    assert names("$GENOMES/b.fa") == ["b"]
    assert names(f"{tmp_path}/c[1].fa") == ["c[1]"]
    assert refusal(f"{tmp_path}/*.fasta") == [f"data.fasta={tmp_path}/*.fasta: no file matches"]


def test_the_cache_lies_beside_the_genome(tmp_path: Path, users_cache: Path) -> None:
    path = write_fasta(tmp_path / "x.fa")
    found = load(path)
    assert found.train.codes_path.parent.parent == tmp_path / "x.fa.okazaki"
    assert files_under(users_cache) == []


def test_the_cache_is_used_again(tmp_path: Path) -> None:
    path = write_fasta(tmp_path / "x.fa")
    first = load(path).train.codes_path.stat()
    second = load(path).train.codes_path.stat()
    assert (first.st_ino, first.st_mtime_ns) == (second.st_ino, second.st_mtime_ns)


def test_a_change_is_seen_though_size_and_time_stamps_stay(tmp_path: Path) -> None:
    path = write_fasta(tmp_path / "x.fa", ">a\nACGTACGTAC\n")
    before, was = load(path), path.stat()
    path.write_text(">a\nACGTACGTAG\n")
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert path.stat().st_size == was.st_size
    after = load(path)
    assert bases(before) == "ACGTACGTAC"
    assert bases(after) == "ACGTACGTAG"
    assert before.fingerprint != after.fingerprint


def test_the_same_bases_have_one_fingerprint_however_they_are_packed(tmp_path: Path) -> None:
    plain, packed = tmp_path / "x.fa", tmp_path / "x.fa.gz"
    plain.write_bytes(gzip.decompress(LAMBDA.read_bytes()))
    packed.write_bytes(LAMBDA.read_bytes())
    assert load(plain).fingerprint == load(packed).fingerprint


@pytest.mark.parametrize("keep", [True, False])
def test_a_read_only_folder_leaves_the_cache_to_the_users_own(tmp_path: Path, users_cache: Path, keep: bool) -> None:
    path = write_fasta(tmp_path / "x.fa")
    let_enter(tmp_path, users_cache)
    tmp_path.chmod(0o555)
    users_cache.chmod(0o777)
    with ordinary_user():
        found = load(path, keep=keep)
        assert bases(found) == "ACGTACGTACGGGGCCCC"
    tmp_path.chmod(0o755)
    assert files_under(tmp_path) == ["x.fa"]
    assert found.train.codes_path.is_relative_to(users_cache / "okazaki") is keep
    assert (files_under(users_cache) != []) is keep


def test_windows_of_a_cache_that_cannot_be_written_go_to_the_users_own(tmp_path: Path, users_cache: Path) -> None:
    path = write_fasta(tmp_path / "x.fa")
    load(path)
    (tmp_path / "x.fa.okazaki").chmod(0o555)
    let_enter(tmp_path, users_cache)
    users_cache.chmod(0o777)
    with ordinary_user():
        other = genome.load(Data(fasta=str(path), sequence_length=3))
    assert other.train.codes_path.is_relative_to(tmp_path)
    assert other.train.starts_path.is_relative_to(users_cache)


def test_where_nothing_can_be_written_the_folders_are_named(tmp_path: Path) -> None:
    path = write_fasta(tmp_path / "x.fa", ">a\nACGTACGTACGTAAAA\n")
    sealed = tmp_path / "sealed"
    sealed.mkdir(mode=0o555)
    let_enter(tmp_path)
    with ordinary_user():
        (kept,) = refusal(path, cache_dir=sealed / "cache")
        (planned,) = refusal(path, cache_dir=sealed / "cache", keep=False)
    for fault, reason in ((kept, " (Permission denied)"), (planned, "")):
        assert fault == (
            f"data.cache_dir: the genome cannot be cached in {sealed}/cache{reason}; "
            "set it to a folder that can be written"
        )


def test_a_full_disk_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        (fault,) = refusal(CONTIGS, cache_dir=tmp_path / "deep" / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert fault == (
        f"data.cache_dir: the genome cannot be written to {tmp_path}/deep/cache: File too large; "
        "set it to a folder with room for one byte a base"
    )
    assert files_under(tmp_path) == []


def test_a_refused_genome_leaves_nothing(tmp_path: Path) -> None:
    path = write_fasta(tmp_path / "x.fa", ">a\nACGT\n>b\nELF\n")
    refusal(path)
    refusal(path, cache_dir=tmp_path / "deep" / "cache")
    assert files_under(tmp_path) == ["x.fa"]


def test_what_is_read_without_keeping_is_gone_when_the_process_ends(tmp_path: Path) -> None:
    path = write_fasta(tmp_path / "x.fa")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    program = (
        "import os, sys\n"
        "from launcher import genome\n"
        "from launcher.schema import Data\n"
        "found = genome.load(Data(fasta=sys.argv[1], sequence_length=4), keep=False)\n"
        "again = genome.load(Data(fasta=sys.argv[1], sequence_length=4), keep=False)\n"
        "assert found == again, 'it is made once in a process'\n"
        "assert len(os.listdir(os.environ['TMPDIR'])) == 1\n"
        "if os.fork() == 0:\n"
        "    sys.exit()\n"
        "os.wait()\n"
        "assert found.train.read(0).tolist() == [2, 3, 4, 5], 'a child that ends leaves the folder to its parent'\n"
    )
    subprocess.run(
        [sys.executable, "-c", program, str(path)],
        check=True,
        cwd=REPOSITORY,
        env=os.environ | {"TMPDIR": str(scratch)},
    )
    assert files_under(tmp_path) == ["scratch", "x.fa"]


def test_a_cache_that_is_there_is_used_without_keeping(tmp_path: Path) -> None:
    path = write_fasta(tmp_path / "x.fa")
    kept = load(path)
    assert load(path, keep=False) == kept


def test_a_cached_genome_is_opened_without_numpy_or_scratch_folders(tmp_path: Path) -> None:
    path = write_fasta(tmp_path / "x.fa")
    load(path)
    program = (
        "import sys\n"
        "from launcher import genome\n"
        "from launcher.schema import Data\n"
        "assert len(genome.load(Data(fasta=sys.argv[1], sequence_length=4), keep=False).train) == 5\n"
        "assert not {'numpy', 'dnaio', 'rich', 'torch', 'tempfile'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(path)], check=True, cwd=REPOSITORY)


def _load_at_once(barrier: Barrier, results: "multiprocessing.Queue[str]", cache_dir: Path) -> None:
    barrier.wait()
    found = load(CONTIGS, cache_dir=cache_dir)
    results.put(found.fingerprint + bases(found))


@pytest.mark.parametrize("damaged", [False, True])
def test_processes_that_make_the_cache_at_once_all_get_it(tmp_path: Path, damaged: bool) -> None:
    if damaged:
        os.truncate(load(CONTIGS, cache_dir=tmp_path).train.codes_path, 1000)
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(5), context.Queue()
    processes = [context.Process(target=_load_at_once, args=(barrier, results, tmp_path)) for _ in range(5)]
    for process in processes:
        process.start()
    seen = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert len(set(seen)) == 1
    assert seen[0].endswith("".join(text_of(CONTIGS).values()))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 2, "one genome and its windows, nothing half-made"
    assert names[1].startswith(f"{names[0]}-windows-")


@pytest.mark.parametrize("file", [cache.CODES, cache.CONTIGS, store.META, "train.starts"])
@pytest.mark.parametrize("damage", ["cut", "remove", "other format"])
def test_a_damaged_cache_is_made_anew(tmp_path: Path, file: str, damage: str) -> None:
    path = write_fasta(tmp_path / "x.fa")
    sound = load(path)
    for target in (tmp_path / "x.fa.okazaki").rglob(file):
        if damage == "cut":
            os.truncate(target, target.stat().st_size - 1)
        elif damage == "remove":
            target.unlink()
        else:
            meta = json.loads((target.parent / store.META).read_text())
            (target.parent / store.META).write_text(json.dumps(meta | {"format": "another"}))
    mended = load(path)
    assert mended == sound
    assert bases(mended) == "ACGTACGTACGGGGCCCC"
    assert mended.train.read_many(range(5)).shape == (5, 4)


def test_only_abandoned_folders_are_cleared_away(tmp_path: Path) -> None:
    path = write_fasta(tmp_path / "x.fa")
    for name, age_s in (("old", 2 * store.ABANDONED_S), ("young", 60)):
        folder = tmp_path / "cache" / f"{store.ASIDE}{name}"
        folder.mkdir(parents=True)
        (folder / cache.CODES).touch()
        for made in (folder / cache.CODES, folder):
            os.utime(made, (time.time() - age_s,) * 2)
    load(path, cache_dir=tmp_path / "cache")
    aside = [path.name for path in (tmp_path / "cache").iterdir() if path.name.startswith(store.ASIDE)]
    assert aside == [f"{store.ASIDE}young"]


def test_a_pipe_is_read_once_and_its_cache_named_for_the_others(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(LAMBDA.read_bytes(),))
    writer.start()
    found = load(pipe)
    writer.join()
    assert bases(found) == "".join(text_of(LAMBDA).values())
    again = load(found.fasta)
    assert (again.fingerprint, again.train) == (found.fingerprint, found.train)
    assert again.fasta == found.fasta
    assert load(LAMBDA, cache_dir=tmp_path / "c").fasta == [str(LAMBDA)]


def test_a_folder_that_is_no_cache_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path) == [f"data.fasta={tmp_path}: this is a folder, and a file is needed"]


def test_every_file_is_told_about_at_once(tmp_path: Path) -> None:
    good = write_fasta(tmp_path / "good.fa")
    protein = write_fasta(tmp_path / "protein.fa", ">p\nELF\n")
    empty = write_fasta(tmp_path / "empty.fa", "")
    faults = refusal([str(path) for path in (good, protein, tmp_path / "gone.fa", empty)])
    assert [fault.split(": ")[0] for fault in faults] == [
        f"data.fasta={protein}, line 2",
        f"data.fasta={tmp_path}/gone.fa",
        f"data.fasta={empty}",
    ]


def test_a_contig_name_may_be_used_once_in_all_files(tmp_path: Path) -> None:
    one = write_fasta(tmp_path / "one.fa", ">x\nAC\n>y\nAC\n")
    two = write_fasta(tmp_path / "two.fa", ">z\nAC\nAC\n>x again\nAC\n>y\nAC\n")
    within = write_fasta(tmp_path / "within.fa", ">x\nAC\n>w\nAC\n>x\nAC\n")
    rule = "a name may be used once: rename it, or leave the file out"
    assert refusal([str(one), str(two)]) == [
        f"data.fasta={two}, line 4: contig x is there already, in {one}, line 1 (and 1 more); {rule}"
    ]
    assert refusal(within) == [f"data.fasta={within}, line 5: contig x is there already, in {within}, line 1; {rule}"]


def test_nothing_is_shown_for_a_second_and_then_one_plain_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(LAMBDA, cache_dir=tmp_path / "fast")
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr("launcher.genome.progress.PATIENCE_S", 0.0)
    load(LAMBDA, cache_dir=tmp_path / "slow")
    shown = capfd.readouterr()
    assert shown.out == ""
    assert f"reading {LAMBDA} ({LAMBDA.stat().st_size:,} bytes)\n" in shown.err
    assert shown.err.count("\n") == 2, "reading, and looking for N"


def test_a_terminal_is_shown_a_bar(tmp_path: Path) -> None:
    import pty

    program = (
        "import sys\n"
        "from launcher import genome\n"
        "from launcher.genome import progress\n"
        "from launcher.schema import Data\n"
        "progress.PATIENCE_S = 0.0\n"
        f"genome.load(Data(fasta={str(LAMBDA)!r}, cache_dir=sys.argv[1]))\n"
    )
    terminal, end = pty.openpty()
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        check=True,
        cwd=REPOSITORY,
        stderr=end,
        env=os.environ | {"COLUMNS": "200", "TERM": "xterm"},
    )
    os.close(end)
    with open(terminal, "rb", buffering=0) as shown:
        text = shown.read(1 << 16).decode()
    assert "reading" in text
    assert "━" in text
