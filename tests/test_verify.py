"""``mode=verify`` on the launcher's side: what is tried, what is refused, and how a verdict comes about."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher import job, verify
from launcher.batch import Cut
from launcher.compose import Composer
from launcher.errors import RequestError, RunError
from launcher.schema import Config, Dtype, Mode, Precision, Verify

CONTIGS = Path(__file__).parent / "data" / "ecoli_short_contigs.fa.gz"

RUN = (
    f"data.fasta={CONTIGS} data=fasta data.sequence_length=200 model=plain batch.train_batch_size=8 train.max_steps=2 "
    "batch.gradient_accumulation_steps=2 cluster.ranks_per_node=2 logging=none mode=verify verify.steps=2"
).split()


def tried(cut: Cut, **options: Any) -> list[tuple[int, int, int]]:
    """Ranks, micro-batch and accumulation steps of each."""
    config = Config(mode=Mode.VERIFY, verify=Verify(**options))
    return [
        (one.data_parallel_size, one.micro_batch_size, one.gradient_accumulation_steps)
        for one in verify.cuts(config, cut)
    ]


def test_the_whole_share_the_own_cut_and_its_neighbours_are_tried_on_one_and_on_all_ranks() -> None:
    assert tried(Cut(16, 2, 4, 2)) == [
        (1, 16, 1),
        (1, 4, 4),
        (1, 2, 8),
        (1, 1, 16),
        (2, 8, 1),
        (2, 4, 2),
        (2, 2, 4),
        (2, 1, 8),
    ]
    assert tried(Cut(1, 1, 1, 1)) == [(1, 1, 1)]
    assert tried(Cut(4, 1, 4, 1)) == [(1, 4, 1), (1, 2, 2), (1, 1, 4)]


def test_the_user_may_name_the_accumulation_steps() -> None:
    assert tried(Cut(16, 2, 4, 2), cuts=[1, 8]) == [(1, 16, 1), (1, 2, 8), (2, 8, 1), (2, 1, 8)]


def test_impossible_settings_are_refused_all_at_once() -> None:
    config = Config(mode=Mode.VERIFY, verify=Verify(steps=0, learning_rate=0.0, cuts=[3, 0, 4]))
    assert verify.check(config, Cut(16, 2, 4, 2)) == [
        "verify.steps=0: it must be at least 1",
        "verify.learning_rate=0.0: it must be above 0",
        "verify.cuts=3: the 8 sequences of a rank cannot be cut into 3 accumulation steps; there are: 1, 2, 4, 8",
        "verify.cuts=0: the 8 sequences of a rank cannot be cut into 0 accumulation steps; there are: 1, 2, 4, 8",
    ]


def row(**errors: float | None) -> dict[str, Any]:
    sound: dict[str, float | None] = dict.fromkeys(verify.QUANTITIES, 0.0)
    return {"cut": {}, "loss": [1.0], "grad_norm": [1.0], "errors": sound | errors}


@pytest.mark.parametrize("quantity", verify.QUANTITIES)
def test_one_error_beyond_its_bound_fails_the_cut_and_the_whole(quantity: str) -> None:
    config = Config(mode=Mode.VERIFY)
    bound = verify.bounds(config)[quantity].largest
    found = verify.verdict(config, [row(), row(**{quantity: bound * 1.01 + 1e-30})], passes=1)
    assert [cut["failed"] for cut in found["cuts"]] == [[], [quantity]]
    assert not found["passed"]
    assert verify.verdict(config, [row(**{quantity: bound})], passes=1)["passed"]


def test_not_a_number_fails_and_what_cannot_be_known_does_not() -> None:
    config = Config(mode=Mode.VERIFY)
    assert not verify.verdict(config, [row(loss=float("nan"))], passes=1)["passed"]
    assert verify.verdict(config, [row(gradient=None)], passes=1)["passed"]


def test_bounds_in_bf16_are_wider_and_every_bound_has_a_reason() -> None:
    fp32 = verify.bounds(Config())
    bf16 = verify.bounds(replace(Config(), precision=Precision(dtype=Dtype.BF16)))
    assert all(bf16[name].largest >= fp32[name].largest for name in verify.QUANTITIES)
    assert all(bound.reason for bounds in (fp32, bf16) for bound in bounds.values())


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    conf = tmp_path / "conf"
    (conf / "model").mkdir(parents=True)
    (conf / "model" / "plain.yaml").write_text("_target_: tests.worker.plain.Net\n")
    return ["--config-dir", str(conf), *RUN, f"hydra.run.dir={tmp_path / 'run'}"]


def test_cuts_that_cannot_be_are_refused_before_anything_is_made(argv: list[str], tmp_path: Path) -> None:
    composer = Composer([*argv, "verify.cuts=[3]"])
    with pytest.raises(RequestError, match=r"^verify\.cuts=3: the 4 sequences of a rank"):
        job.prepare(composer.single(composer.compose()))
    assert not (tmp_path / "run").exists()


@pytest.mark.ranks
def test_a_run_that_is_sound_passes_and_leaves_its_table(argv: list[str], tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "launcher", *argv], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "run" / "verify.json").read_text())
    assert found["passed"] is True
    assert [cut["cut"]["data_parallel_size"] for cut in found["cuts"]] == [1, 1, 1, 1, 2, 2, 2]
    assert sum(line.rstrip().endswith(" pass") for line in done.stdout.splitlines()) == 7
    assert not (tmp_path / "run" / "verify").exists()
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "completed"


@pytest.mark.ranks
def test_a_mistake_fails_the_run_and_the_table_shows_where(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    composer = Composer(argv)
    prepared = job.prepare(composer.single(composer.compose()))
    with pytest.raises(RunError, match=r"^5 of 7 cuts give another update than the whole batch") as error:
        job.run(prepared, worker=[sys.executable, "-m", "tests.worker.divided_twice"])
    assert error.value.exit_code == 1
    found = json.loads((tmp_path / "run" / "verify.json").read_text())
    assert [cut["passed"] for cut in found["cuts"]] == [True, False, False, False, True, False, False]
    assert capsys.readouterr().out.count("FAIL") == 5
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"
