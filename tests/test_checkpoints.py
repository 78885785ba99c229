"""Checkpoints on disk: which are whole, which is the newest, which may go."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from launcher import checkpoints
from launcher.checkpoints import Checkpoint
from tests.genome.files import let_enter, ordinary_user

STATE = {"tokens_seen": 7, "is_last": False}
PARAMETERS = {"a.weight": {"shape": [2, 3], "count": 1.0, "kinds": {"weight": [[0, 0, 4], [0, 3, 6]], "exp_avg": []}}}


def make(folder: Path, step: int, content: bytes = b"weights") -> Path:
    """A checkpoint of one rank, and of one parameter in two slices."""
    aside = folder / (checkpoints.name(step) + checkpoints.PARTIAL)
    aside.mkdir(parents=True)
    files = {}
    for name in ("rank_00000.safetensors", "rest.safetensors", "config.yaml", "plan.json"):
        (aside / name).write_bytes(content)
        files[name] = {"bytes": len(content), "sha256": checkpoints.checksum(aside / name)}
    return checkpoints.complete(
        aside, {"format": 1, "step": step, "state": STATE, "files": files, "parameters": PARAMETERS}
    )


def newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    notes: list[str] = []
    return next(checkpoints.candidates(folder, notes), None), notes


def test_what_was_completed_is_read_back(tmp_path: Path) -> None:
    made = make(tmp_path, 10)
    assert made == tmp_path / "step_00000010"
    found, notes = newest(tmp_path)
    assert found is not None
    assert (found.path, found.step, found.state, notes) == (made, 10, STATE, [])
    assert found.damage("rank_00000.safetensors") is None
    assert (tmp_path / "latest").read_text() == "step_00000010\n"


def test_the_newest_is_the_one_of_the_largest_step_whatever_latest_says(tmp_path: Path) -> None:
    for step in (5, 100_000_000, 20):
        make(tmp_path, step)
    found, _ = newest(tmp_path)
    assert found is not None
    assert found.step == 100_000_000
    assert [path.name for path in checkpoints.found(tmp_path)] == ["step_100000000", "step_00000020", "step_00000005"]


def test_what_was_not_completed_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "step_00000010.partial").mkdir()
    (tmp_path / ".step_00000011.old").mkdir()
    (tmp_path / "step_000").mkdir()
    assert newest(tmp_path) == (None, [])


def edit(**changes: Any) -> Any:
    def apply(path: Path) -> None:
        manifest = json.loads((path / "checkpoint.json").read_text())
        (path / "checkpoint.json").write_text(json.dumps(checkpoints.sealed(manifest | changes)))

    return apply


def flip(name: str) -> Any:
    def apply(path: Path) -> None:
        contents = bytearray((path / name).read_bytes())
        contents[len(contents) // 2] ^= 1
        (path / name).write_bytes(contents)

    return apply


def change(path: Path) -> None:
    """A number that nothing else contradicts: how often a parameter was updated."""
    text = (path / "checkpoint.json").read_text()
    (path / "checkpoint.json").write_text(text.replace('"count": 1.0', '"count": 9.0'))


def link_to_itself(path: Path) -> None:
    (path / "rest.safetensors").unlink()
    (path / "rest.safetensors").symlink_to("rest.safetensors")


def add_file(name: str) -> Any:
    def apply(path: Path) -> None:
        manifest = json.loads((path / "checkpoint.json").read_text())
        edit(files=manifest["files"] | {name: {"bytes": 1, "sha256": ""}})(path)

    return apply


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: (path / "rank_00000.safetensors").unlink(), "rank_00000.safetensors is missing"),
        (
            lambda path: (path / "rank_00000.safetensors").write_bytes(b"weigh"),
            "rank_00000.safetensors has 5 bytes instead of 7",
        ),
        (flip("config.yaml"), "config.yaml has changed since it was written"),
        (flip("plan.json"), "plan.json has changed since it was written"),
        (change, "checkpoint.json has changed since it was written"),
        (link_to_itself, "rest.safetensors cannot be read (Too many levels of symbolic links)"),
        (lambda path: (path / "checkpoint.json").unlink(), "it has no checkpoint.json"),
        (lambda path: (path / "checkpoint.json").write_text('{"format": 1,'), "checkpoint.json cannot be read"),
        (lambda path: (path / "checkpoint.json").write_text("[]"), "checkpoint.json cannot be read"),
        (edit(format=2), "it has format 2, and this version reads 1"),
        (edit(step=99), "checkpoint.json says that it is of step 99"),
        (edit(state={}), "checkpoint.json cannot be read"),
        (lambda path: (path / "checkpoint.json").write_text("[" * 200_000), "checkpoint.json cannot be read"),
        (lambda path: shutil.move(path / "plan.json", path / "moved"), "plan.json is missing"),
        (
            edit(parameters={"a": {"shape": [6], "count": 1, "kinds": {"weight": [[0, 0, 2], [0, 3, 6]]}}}),
            "checkpoint.json lacks elements of a (weight) from 2 on",
        ),
        (
            edit(parameters={"a": {"shape": [6], "count": 1, "kinds": {"weight": [[0, 0, 2], [1, 2, 6]]}}}),
            "checkpoint.json does not list rank_00001.safetensors",
        ),
        (edit(files={}), "checkpoint.json does not list config.yaml"),
        (add_file("../../secrets"), "checkpoint.json lists ../../secrets, which is no file of a checkpoint"),
        (add_file("/etc/passwd"), "checkpoint.json lists /etc/passwd, which is no file of a checkpoint"),
        (edit(files={"a": None}), "checkpoint.json cannot be read"),
        (
            edit(parameters={"a": {"shape": [6], "count": 1, "kinds": {"weight": []}}}),
            "checkpoint.json lacks elements of a (weight) from 0 on",
        ),
    ],
)
def test_a_spoilt_one_is_named_and_the_one_before_is_taken(tmp_path: Path, spoil: Any, reason: str) -> None:
    make(tmp_path, 10)
    spoil(make(tmp_path, 20))
    found, notes = newest(tmp_path)
    assert found is not None
    assert found.step == 10
    (note,) = notes
    assert note.startswith(f"step_00000020 cannot be used: {reason}")


def test_a_flipped_bit_is_damage(tmp_path: Path) -> None:
    path = make(tmp_path, 10)
    (path / "rank_00000.safetensors").write_bytes(b"weighus")
    found, _ = newest(tmp_path)
    assert found is not None, "sizes alone do not tell"
    assert found.damage("rank_00000.safetensors") == "rank_00000.safetensors has changed since it was written"


def test_a_step_that_is_saved_again_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    make(tmp_path, 10, b"old")
    make(tmp_path, 10, b"new one")
    assert (tmp_path / "step_00000010" / "rank_00000.safetensors").read_bytes() == b"new one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000010"]


@pytest.mark.parametrize(
    ("latest", "note"),
    [
        (None, "latest is missing"),
        ("", "latest is empty"),
        ("step_00000099\n", "latest names step_00000099, which is not there"),
        ("step_00000010\n", "latest names step_00000010"),
        ("step_00000020\n", None),
        (b"\xff\xfe", "latest cannot be read (UnicodeDecodeError)"),
        ("FOLDER", "latest cannot be read (IsADirectoryError)"),
    ],
)
def test_what_is_wrong_with_latest_is_said(tmp_path: Path, latest: str | bytes | None, note: str | None) -> None:
    make(tmp_path, 10)
    chosen = make(tmp_path, 20)
    (tmp_path / "latest").unlink()
    if latest == "FOLDER":
        (tmp_path / "latest").mkdir()
    elif isinstance(latest, bytes):
        (tmp_path / "latest").write_bytes(latest)
    elif latest is not None:
        (tmp_path / "latest").write_text(latest)
    assert checkpoints.note_on_latest(tmp_path, chosen) == note


@pytest.mark.parametrize(
    ("keep", "keep_every", "left"),
    [
        (None, None, [5, 10, 15, 20, 25]),
        (2, None, [20, 25]),
        (1, 10, [10, 20, 25]),
        (9, None, [5, 10, 15, 20, 25]),
    ],
)
def test_the_newest_and_every_kth_are_kept(
    tmp_path: Path, keep: int | None, keep_every: int | None, left: list[int]
) -> None:
    for step in (5, 10, 15, 20, 25):
        make(tmp_path, step)
    checkpoints.prune(tmp_path, 25, keep, keep_every)
    assert sorted(int(path.name[5:]) for path in checkpoints.found(tmp_path)) == left
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == len(left), "nothing half removed is left"


def test_a_damaged_one_of_a_later_step_does_not_push_out_the_one_that_was_just_saved(tmp_path: Path) -> None:
    for step in (10, 15, 20):  # the run has gone on from 10, because 20 was damaged
        make(tmp_path, step)
    checkpoints.prune(tmp_path, 15, keep=1, keep_every=None)
    assert [path.name for path in checkpoints.found(tmp_path)] == ["step_00000020", "step_00000015"]


def test_no_folder_holds_no_checkpoint(tmp_path: Path) -> None:
    assert newest(tmp_path / "none") == (None, [])
    shutil.rmtree(tmp_path)


def test_what_a_killed_save_or_a_killed_removal_has_left_goes_with_the_next_save(tmp_path: Path) -> None:
    for step in (1, 2):
        make(tmp_path, step)
    (tmp_path / f"step_00000003{checkpoints.PARTIAL}").mkdir()
    (tmp_path / ".step_00000000.old").mkdir()
    (tmp_path / ".latest.77").touch()
    checkpoints.prune(tmp_path, 2, keep=None, keep_every=None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000001", "step_00000002"]


def test_what_only_has_the_name_of_a_checkpoint_costs_no_save(tmp_path: Path) -> None:
    tmp_path.joinpath("step_00000010").write_text("a file")
    tmp_path.joinpath("step_00000020").symlink_to(tmp_path / "nowhere")
    tmp_path.joinpath(".step_00000007.old").write_text("a file")
    assert newest(tmp_path) == (None, [])
    for step in (10, 20):
        make(tmp_path, step)
    checkpoints.prune(tmp_path, 20, keep=None, keep_every=None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000010", "step_00000020"]


def test_a_checkpoint_is_complete_also_where_latest_cannot_be_moved(tmp_path: Path) -> None:
    make(tmp_path, 10)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest" / "in the way").mkdir(parents=True)
    made = make(tmp_path, 20)
    found, _ = newest(tmp_path)
    assert found is not None
    assert found.path == made
    assert [path.name for path in tmp_path.glob(".*")] == [], "nothing is left of the attempt"


def test_a_kill_while_a_step_is_saved_again_leaves_one_of_the_two(tmp_path: Path) -> None:
    """After the first of the two renames."""
    make(tmp_path, 5)
    final = make(tmp_path, 10, b"earlier")
    final.rename(tmp_path / ".step_00000010.before")
    (tmp_path / "step_00000010.partial").mkdir()
    found, notes = newest(tmp_path)
    assert found is not None
    assert (found.step, (found.path / "plan.json").read_bytes(), notes) == (10, b"earlier", [])
    (tmp_path / "step_00000010.partial").rmdir()  # as whoever writes it anew does
    make(tmp_path, 10, b"later")
    found, notes = newest(tmp_path)
    assert found is not None
    assert (found.path.name, (found.path / "plan.json").read_bytes()) == ("step_00000010", b"later")
    make(tmp_path, 15)
    checkpoints.prune(tmp_path, 15, keep=2, keep_every=None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000010", "step_00000015"]


def test_a_name_in_latest_that_cannot_be_one_is_said(tmp_path: Path) -> None:
    made = make(tmp_path, 10)
    (tmp_path / "latest").write_text("a" * 3000)
    assert checkpoints.note_on_latest(tmp_path, made) == "latest cannot be read (OSError)"


@pytest.mark.parametrize("name", ["config.yaml", "rank_00000.safetensors", "checkpoint.json"])
def test_a_file_without_permission_is_told_like_any_other_damage(tmp_path: Path, name: str) -> None:
    path = make(tmp_path, 10)
    let_enter(path)
    (path / name).chmod(0)
    with ordinary_user():
        found, notes = newest(tmp_path)
    assert found is None
    assert len(notes) == 1
    assert f"step_00000010 cannot be used: {name} cannot be read" in notes[0]
