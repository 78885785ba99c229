"""Checkpoints of real engines on two ranks: complete or not there, and training goes on from them unchanged."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher import plan
from launcher.ranks import Rank
from launcher.rundir import RunDir
from launcher.schema import Batch, Call, Checkpoint, Config, LrSchedule, LrScheduleType, Train
from tests.ranks import on_ranks
from tests.worker import runs

pytestmark = pytest.mark.ranks

STAGES = (0, 1, 3)
FULL_DISK = "no space left on device"


def configure(stage: int) -> Config:
    return replace(
        runs.BASE,
        model=Call("tests.worker.plain.Net"),
        zero=replace(runs.BASE.zero, stage=stage),
        batch=Batch(train_batch_size=8, gradient_accumulation_steps=2),
        cluster=replace(runs.BASE.cluster, ranks_per_node=2),
        lr_schedule=LrSchedule(type=LrScheduleType.CONSTANT),
        train=Train(max_steps=6),
        checkpoint=Checkpoint(every=3),
    )


def fresh(rank: Rank, config: Config, folder: Path) -> Any:
    """A trainer that has not trained."""
    from launcher.worker.data import open_task
    from launcher.worker.train import Trainer

    folder.mkdir(exist_ok=True)
    planned = plan.make(config)
    task = open_task(config, plan.summary(planned)["data"])
    if rank.is_first:
        RunDir(folder).write_files(plan.files(planned))
    return Trainer(config, planned.cut, planned.deepspeed.values, rank, RunDir(folder), task)


def weights(trainer: Any) -> dict[str, Any]:
    import deepspeed.utils  # type: ignore[import-untyped]

    engine = trainer.engine.deepspeed
    return {
        name: deepspeed.utils.safe_get_full_fp32_param(parameter).numpy()
        if engine.zero_optimization()
        else parameter.detach().clone().numpy()
        for name, parameter in engine.module.named_parameters()
    }


def train_and_go_on(rank: Rank, stage: int, folder: Path) -> dict[str, Any]:
    """Six steps at once, and the last three again in a new engine from the checkpoint of the third."""
    from launcher.worker import step
    from launcher.worker.windows import Shares

    config = configure(stage)
    whole = runs.train(rank, config, folder / f"whole{stage}")
    again = fresh(rank, config, folder / f"again{stage}")
    initial = weights(again)
    checkpoints = RunDir(folder / f"whole{stage}").checkpoints
    _, state = again.engine.deepspeed.load_checkpoint(str(checkpoints), tag="step_00000003")
    shares = Shares(again.task.train, again.task.objective, again.course.steps, again.cut, rank.rank)
    for number in (3, 4, 5):
        step.train_step(again.engine, again.task.objective, shares[number], config.optimizer.lr)
    return {
        "whole": whole["weights"],
        "again": weights(again),
        "initial": initial,
        "state": {name: state[name] for name in ("step", "tokens_seen", "sequences_seen")},
        "lines": whole["lines"],
    }


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fail_to_save(rank: Rank, folder: Path) -> dict[str, Any]:
    """Save after step 1; fail while saving after step 2, as on a full disk; start again, and save after step 2."""
    import torch.distributed as dist

    from launcher.worker import checkpoint

    trainer = fresh(rank, configure(1), folder / "failing")
    checkpoints = folder / "failing" / "checkpoints"
    seen: dict[str, Any] = {}

    def look(when: str) -> None:
        dist.barrier()
        seen[when] = contents(checkpoints)

    def save(step: int) -> None:
        checkpoint.save(trainer.engine, checkpoints, step, {"step": step})

    def run_out_of_space(folder: str, tag: str, **_: Any) -> None:
        aside = Path(folder) / tag
        aside.mkdir(exist_ok=True)
        (aside / f"half_of_rank_{rank.rank}").write_text("half")
        raise OSError(FULL_DISK)

    save(1)
    look("saved")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.engine.deepspeed, "save_checkpoint", run_out_of_space)
        with pytest.raises(OSError, match=FULL_DISK):
            save(2)
    look("failed")
    _, state = trainer.engine.deepspeed.load_checkpoint(str(checkpoints))
    seen["latest after failure"] = state["step"]
    save(2)
    look("saved again")
    return seen


def all_cells(rank: Rank, folder: Path) -> dict[str, Any]:
    return {
        "stages": {stage: train_and_go_on(rank, stage, folder) for stage in STAGES},
        "failing": fail_to_save(rank, folder),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def done(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = on_ranks(2, all_cells, folder)[0]
    return result


@pytest.mark.parametrize("stage", STAGES)
def test_training_goes_on_from_a_checkpoint_as_if_it_had_never_stopped(done: dict[str, Any], stage: int) -> None:
    ours = done["stages"][stage]
    assert runs.relative_error(ours["whole"], ours["initial"]) > 1e-3
    assert runs.relative_error(ours["again"], ours["whole"]) == 0


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_knows_how_far_training_had_come(done: dict[str, Any], stage: int) -> None:
    ours = done["stages"][stage]
    tokens = sum(line["tokens"] for line in ours["lines"][:3])
    assert ours["state"] == {"step": 3, "tokens_seen": tokens, "sequences_seen": 3 * 8}


@pytest.mark.parametrize("stage", STAGES)
def test_latest_names_the_last_of_the_checkpoints(done: dict[str, Any], folder: Path, stage: int) -> None:
    checkpoints = folder / f"whole{stage}" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir() if path.is_dir()) == ["step_00000003", "step_00000006"]
    assert (checkpoints / "latest").read_text() == "step_00000006"


def test_a_save_that_fails_leaves_the_older_checkpoint_and_latest_as_they_were(done: dict[str, Any]) -> None:
    before, after = done["failing"]["saved"], done["failing"]["failed"]
    assert before["latest"] == b"step_00000001"
    assert {name: after[name] for name in before} == before
    assert done["failing"]["latest after failure"] == 1


def test_what_was_not_saved_whole_has_not_the_name_of_a_checkpoint(done: dict[str, Any]) -> None:
    new = done["failing"]["failed"].keys() - done["failing"]["saved"].keys()
    assert new == {f"step_00000002.partial/half_of_rank_{rank}" for rank in (0, 1)}


def test_what_a_killed_run_left_is_replaced_by_the_next_save(done: dict[str, Any]) -> None:
    before, after = done["failing"]["saved"], done["failing"]["saved again"]
    assert after["latest"] == b"step_00000002"
    assert not [name for name in after if "partial" in name or "half" in name]
    names = {name.removeprefix("step_00000001/") for name in before if name.startswith("step_00000001/")}
    assert {name.removeprefix("step_00000002/") for name in after if name.startswith("step_00000002/")} == names
    assert {name: after[name] for name in before if name != "latest"} == {
        name: before[name] for name in before if name != "latest"
    }
