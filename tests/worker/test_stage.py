"""Copies for a node: made once however many ranks ask, and never half there."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launcher.errors import RequestError
from launcher.worker.stage import stage


def original(folder: Path) -> Path:
    source = folder / "cache" / "0123abcd"
    source.mkdir(parents=True)
    (source / "codes").write_bytes(bytes(range(256)) * 1000)
    return source


def test_ranks_that_ask_at_once_get_one_copy(tmp_path: Path) -> None:
    source = original(tmp_path)
    with ThreadPoolExecutor(8) as ranks:
        copies = set(ranks.map(lambda _: stage(source, str(tmp_path / "disk")), range(8)))
    (copy,) = copies
    assert copy == tmp_path / "disk" / "okazaki" / "0123abcd"
    assert (copy / "codes").read_bytes() == (source / "codes").read_bytes()
    before = (copy / "codes").stat().st_mtime_ns, (copy / "codes").stat().st_ino
    assert stage(source, str(tmp_path / "disk")) == copy
    assert before == ((copy / "codes").stat().st_mtime_ns, (copy / "codes").stat().st_ino), "it was not made again"


def test_what_a_killed_copy_has_left_is_not_taken_for_one(tmp_path: Path) -> None:
    source = original(tmp_path)
    half = tmp_path / "disk" / "okazaki" / "0123abcd.partial"
    half.mkdir(parents=True)
    (half / "codes").write_bytes(b"half")
    assert (stage(source, str(tmp_path / "disk")) / "codes").stat().st_size == 256_000


def test_variables_of_the_node_are_expanded_and_one_that_is_not_set_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = original(tmp_path)
    monkeypatch.setenv("LOCAL_DISK", str(tmp_path / "disk"))
    assert stage(source, "$LOCAL_DISK/here") == tmp_path / "disk" / "here" / "okazaki" / "0123abcd"
    monkeypatch.delenv("LOCAL_DISK")
    with pytest.raises(RequestError) as refused:
        stage(source, "$LOCAL_DISK/here")
    assert str(refused.value) == (
        "cluster.stage_to=$LOCAL_DISK/here: it stands for no absolute path on this node ($LOCAL_DISK/here/okazaki); "
        "name a folder on the node's disk, or null"
    )
