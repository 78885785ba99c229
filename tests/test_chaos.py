"""Whole commands that SIGKILL ends, and that the same command continues: a short form of ``benchmarks/chaos.py``."""

from pathlib import Path

import pytest

from benchmarks import chaos

pytestmark = pytest.mark.ranks

SEED, RUNS = 841, 2
"""Kills of a rank, of the runner and of all, two of them in saves."""


def test_a_run_that_was_killed_ends_as_if_nobody_had_disturbed_it(tmp_path: Path) -> None:
    """The windows of every step, the losses, the parameters; nothing incomplete is loaded, and no process is left."""
    chaos.prepare(tmp_path)
    plans = [chaos.draw(SEED, number) for number in range(RUNS)]
    (stage,) = {plan.stage for plan in plans}
    whole = chaos.undisturbed(tmp_path, stage)
    for plan in plans:
        outcome = chaos.torment(tmp_path, plan, whole)
        assert outcome.faults == [], chaos.describe(outcome)
        assert any(attempt.struck for attempt in outcome.attempts), "it was killed at least once"


def test_what_is_drawn_depends_on_the_seed_and_the_number_alone() -> None:
    assert chaos.draw(1, 2) == chaos.draw(1, 2)
    assert len({chaos.draw(1, number).kills for number in range(20)}) == 20


def test_a_changed_byte_makes_a_checkpoint_incomplete_for_the_checks_too(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "step_00000003"
    folder.mkdir(parents=True)
    assert chaos.complete(tmp_path) == set()
    (folder / "file").write_text("abc")
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    (folder / "checkpoint.json").write_text(f'{{"files": {{"file": {{"sha256": "{digest}"}}}}}}')
    assert chaos.complete(tmp_path) == {3}
    (folder / "file").write_text("abd")
    assert chaos.complete(tmp_path) == set()
