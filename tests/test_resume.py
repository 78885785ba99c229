"""Whether a run can go on from what is in its directory: what is taken, and what is refused before anything starts."""

import dataclasses
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from launcher import checkpoints, decode, plan, resume
from launcher.errors import RequestError
from launcher.resume import Origin
from launcher.rundir import RunDir
from launcher.schema import (
    Accumulation,
    Batch,
    Call,
    Checkpoint,
    Config,
    Data,
    Dtype,
    LrSchedule,
    Mode,
    Optimizer,
    OptimizerType,
    Precision,
    Tail,
    Train,
    Zero,
)

FASTA = Path(__file__).parent / "data" / "ecoli_short_contigs.fa.gz"

BASE = Config(
    mode=Mode.PLAN,  # nothing is kept
    model=Call("launcher.worker.models.hugging_face", {"model_type": "llama", "hidden_size": 32}),
    data=Data(fasta=str(FASTA), sequence_length=300, validation=None),
    batch=Batch(train_batch_size=8),
    train=Train(max_steps=10),
)


def leave(run_dir: Path, config: Config = BASE, steps: tuple[int, ...] = (5,), is_last: bool = False) -> None:
    """What a run leaves behind: its frozen files and its checkpoints."""
    made = plan.make(config)
    files = {"config.yaml": decode.dump(made.config), **plan.files(made)}
    run_dir.mkdir(parents=True, exist_ok=True)
    RunDir(run_dir).write_files(files)
    for step in steps:
        aside = run_dir / "checkpoints" / (checkpoints.name(step) + checkpoints.PARTIAL)
        aside.mkdir(parents=True)
        RunDir(aside).write_files({name: files[name] for name in ("config.yaml", "plan.json")})
        sizes = {}
        for name in ("config.yaml", "plan.json", "rank_00000.safetensors", "rest.safetensors"):
            (aside / name).touch()
            sizes[name] = {"bytes": (aside / name).stat().st_size, "sha256": checkpoints.checksum(aside / name)}
        checkpoints.complete(
            aside, {"format": 1, "step": step, "state": {"is_last": is_last}, "files": sizes, "parameters": {}}
        )


def wishing(wish: str, config: Config = BASE) -> Config:
    return replace(config, checkpoint=Checkpoint(resume=wish))


def origin(run_dir: Path, wish: str = "auto") -> Origin | None:
    return resume.origin(wishing(wish), run_dir)


def refusal(run_dir: Path, wish: str) -> str:
    with pytest.raises(RequestError) as raised:
        origin(run_dir, wish)
    return str(raised.value)


def test_a_new_directory_is_the_beginning_of_a_run(tmp_path: Path) -> None:
    assert origin(tmp_path / "new") is None
    assert origin(tmp_path / "new", "never") is None
    line = f"checkpoint.resume=required: {tmp_path}/new/checkpoints holds no checkpoint that can be used; mend one, or "
    assert refusal(tmp_path / "new", "required") == line + "give another hydra.run.dir"


def test_the_newest_whole_checkpoint_is_taken_and_what_was_passed_over_is_said(tmp_path: Path) -> None:
    leave(tmp_path, steps=(5, 10, 15))
    (tmp_path / "checkpoints" / "step_00000015" / "plan.json").unlink()
    for wish in ("auto", "required"):
        found = origin(tmp_path, wish)
        assert found is not None
        assert found.folder == tmp_path / "checkpoints" / "step_00000010"
        assert found.notes == [
            "step_00000015 cannot be used: plan.json is missing",
            "latest names step_00000015",
        ]
        assert resume.describe(found) == f"the newest checkpoint is {found.folder}, after step 10"


def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_anew_without_a_word(tmp_path: Path) -> None:
    leave(tmp_path)
    (tmp_path / "checkpoints" / "step_00000005" / "plan.json").unlink()
    assert "step_00000005 cannot be used: plan.json is missing" in refusal(tmp_path, "auto")


def test_a_run_that_left_no_checkpoint_begins_anew(tmp_path: Path) -> None:
    leave(tmp_path, steps=())
    found = origin(tmp_path)
    assert found is not None
    assert resume.describe(found) == f"{tmp_path} holds no checkpoint: starting anew"
    assert resume.check(plan.make(BASE), found) == []


def test_a_path_is_where_a_run_begins_until_it_has_checkpoints_of_its_own(tmp_path: Path) -> None:
    leave(tmp_path / "old")
    path = tmp_path / "old" / "checkpoints" / "step_00000005"
    found = origin(tmp_path / "new", str(path))
    assert found is not None
    assert found.folder == path
    leave(tmp_path / "new", steps=(7,))
    found = origin(tmp_path / "new", str(path))
    assert found is not None
    assert found.folder == tmp_path / "new" / "checkpoints" / "step_00000007"


def test_a_later_attempt_takes_what_the_run_has_by_now_or_begins_where_the_first_did(tmp_path: Path) -> None:
    path = str(tmp_path / "old" / "checkpoints" / "step_00000005")
    wishes = {"auto": "auto", "required": "required", "never": "auto", path: path}
    assert {wish: resume.again(wishing(wish)).checkpoint.resume for wish in wishes} == wishes


def test_a_run_that_began_at_a_path_is_not_begun_anew_without_it(tmp_path: Path) -> None:
    """It was killed before it had a checkpoint of its own."""
    leave(tmp_path / "old")
    path = tmp_path / "old" / "checkpoints" / "step_00000005"
    leave(tmp_path / "new", wishing(str(path)), steps=())
    said = f"the run in {tmp_path}/new began at {path} and has no checkpoint of its own yet"
    assert refusal(tmp_path / "new", "auto") == (
        f"checkpoint.resume=auto: {said}; set checkpoint.resume={path}, or start a new run in another hydra.run.dir"
    )
    found = origin(tmp_path / "new", str(path))
    assert found is not None
    assert found.folder == path
    (tmp_path / "new" / "plan.json").unlink()
    assert said in refusal(tmp_path / "new", "auto")


def test_a_run_that_has_taken_steps_and_lost_its_files_is_not_begun_anew_without_a_word(tmp_path: Path) -> None:
    leave(tmp_path, steps=())
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "plan.json").unlink()
    (fault,) = faults(tmp_path, BASE)
    assert "was made with cannot be read" in fault


def test_a_path_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    wish = f"checkpoint.resume={tmp_path}/no"
    remedy = "give the path of a checkpoint, or auto, required or never"
    assert refusal(tmp_path / "new", f"{tmp_path}/no") == f"{wish}: it has no checkpoint.json; {remedy}"


def faults(run_dir: Path, config: Config) -> list[str]:
    found = origin(run_dir)
    assert found is not None
    return resume.check(plan.make(config), found)


@pytest.mark.parametrize(
    ("changes", "key", "ours", "theirs"),
    [
        ({"seed": 1}, "seed", "1", "0"),
        ({"data": replace(BASE.data, sequence_length=200)}, "data.sequence_length", "200", "300"),  # type: ignore[type-var]
        ({"data": replace(BASE.data, reverse_complement=True)}, "data.reverse_complement", "true", "false"),  # type: ignore[type-var]
        ({"batch": Batch(train_batch_size=16)}, "batch.train_batch_size", "16", "8"),
        ({"accumulation": Accumulation(tail=Tail.FLUSH)}, "accumulation.tail", "flush", "carry"),
        ({"optimizer": Optimizer(type=OptimizerType.LAMB)}, "optimizer.type", "lamb", "adamw"),
        (
            {"model": Call(BASE.model.target, {"model_type": "llama", "hidden_size": 64})},
            "model.hidden_size",
            "64",
            "32",
        ),
        (
            {"model": Call(BASE.model.target, {"model_type": "llama", "hidden_size": 32, "rope_theta": 1.0})},
            "model.rope_theta",
            "1.0",
            "null",
        ),
    ],
)
@pytest.mark.parametrize("steps", [(5,), ()])
def test_what_would_be_another_run_is_refused_with_the_difference(
    tmp_path: Path, changes: dict[str, object], key: str, ours: str, theirs: str, steps: tuple[int, ...]
) -> None:
    leave(tmp_path, steps=steps)
    (fault,) = faults(tmp_path, dataclasses.replace(BASE, **changes))  # type: ignore[arg-type]
    where = tmp_path / "checkpoints" / "step_00000005" if steps else tmp_path
    assert fault.startswith(f"{key}={ours}: the run in {where} was made with {theirs}, and with another it would ")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plan.json", "{}"),
        ("plan.json", "[1"),
        ("config.yaml", "a: ["),
        ("config.yaml", "seed: x"),
        ("config.yaml", ""),
    ],
)
def test_a_run_that_does_not_tell_what_it_was_made_with_is_refused(tmp_path: Path, name: str, text: str) -> None:
    leave(tmp_path, steps=())
    (tmp_path / name).write_text(text)
    (fault,) = faults(tmp_path, BASE)
    assert fault.startswith(f"hydra.run.dir={tmp_path}: what the run in {tmp_path} was made with cannot be read (")
    assert len(fault.splitlines()) == 1


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"zero": Zero(stage=3)}, None),
        ({"batch": Batch(train_batch_size=8, gradient_accumulation_steps=2)}, None),
        ({"data": replace(BASE.data, num_workers=2)}, None),  # type: ignore[type-var]
        ({"precision": Precision(dtype=Dtype.BF16)}, "precision.dtype=bf16 (fp32 before)"),
        ({"train": Train(max_steps=20)}, "train.max_steps=20 (10 before)"),
        (
            {"train": Train(max_steps=10, epochs=3, gradient_clipping=None)},
            "train.epochs=3 (null before), train.gradient_clipping=null (1.0 before)",
        ),
        ({"optimizer": Optimizer(lr=1e-4)}, "optimizer.lr=0.0001 (0.001 before)"),
        ({"lr_schedule": LrSchedule(warmup_steps=2)}, "lr_schedule.warmup_steps=2 (0 before)"),
    ],
)
def test_what_only_says_how_a_step_is_cut_or_how_it_learns_may_change_and_the_latter_is_told(
    tmp_path: Path, changes: dict[str, object], told: str | None
) -> None:
    leave(tmp_path)
    changed = dataclasses.replace(BASE, **changes)  # type: ignore[arg-type]
    assert faults(tmp_path, changed) == []
    found = origin(tmp_path)
    assert found is not None
    assert resume.changes(plan.make(changed), found) == (told and f"from now on {told}")


def test_another_genome_is_refused_wherever_it_lies_and_the_same_one_is_not(tmp_path: Path) -> None:
    leave(tmp_path / "run")
    assert isinstance(BASE.data, Data)
    moved = shutil.copy(FASTA, tmp_path / "moved.fa.gz")
    assert faults(tmp_path / "run", replace(BASE, data=replace(BASE.data, fasta=str(moved)))) == []
    other = tmp_path / "other.fa"
    other.write_text(">a\n" + "ACGT" * 1000 + "\n")
    (fault,) = faults(tmp_path / "run", replace(BASE, data=replace(BASE.data, fasta=str(other))))
    assert fault.startswith("data.fasta: its bases are not those that the run in ")


@pytest.mark.parametrize(
    ("is_last", "limits", "done"),
    [
        (True, Train(max_steps=10), True),
        (True, Train(max_steps=12), False),
        (True, Train(max_steps=10, epochs=3), False),
        (False, Train(max_steps=10), False),
    ],
)
def test_a_run_is_done_when_its_last_step_is_saved_and_its_limits_are_the_same(
    tmp_path: Path, is_last: bool, limits: Train, done: bool
) -> None:
    leave(tmp_path, is_last=is_last)
    found = origin(tmp_path)
    assert found is not None
    assert resume.is_done(replace(BASE, train=limits), found) is done
