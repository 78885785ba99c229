"""The plan against numbers worked out by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from launcher import plan
from launcher.batch import Cut
from launcher.errors import RequestError
from launcher.schema import (
    Accumulation,
    Batch,
    BatchSchedule,
    BatchScheduleType,
    Call,
    Cluster,
    ClusterType,
    Config,
    Count,
    CustomData,
    Data,
    Device,
    LrSchedule,
    Mode,
    Offload,
    Optimizer,
    Scaling,
    Tail,
    Train,
    Zero,
)

GENOMES = Path(__file__).parents[1] / "genomes"
LLAMA = Call("launcher.worker.models.hugging_face", {"model_type": "llama"})
# Phage lambda has 48,502 bases: 49 windows of 1,000, the last of 502.
LAMBDA = Config(
    mode=Mode.PLAN,
    model=LLAMA,
    data=Data(fasta=str(GENOMES / "lambda_phage.fa.gz"), sequence_length=1000),
    batch=Batch(12, train_micro_batch_size_per_gpu=3),
    train=Train(epochs=2),
    cluster=Cluster(ranks_per_node=2),
    lr_schedule=LrSchedule(warmup_steps=4),
)


def test_the_cut_the_steps_and_the_rates_of_phage_lambda() -> None:
    made = plan.make(LAMBDA)
    facts = plan.summary(made)
    assert made.cut == Cut(12, 3, 2, 2)
    assert facts["batch"]["bases_per_micro_batch"] == 3_000
    assert facts["batch"]["sequences_per_window"] == 6
    assert facts["batch"]["bases_per_window"] == 6_000
    assert facts["batch"]["bases_per_step"] == 12_000
    assert facts["data"]["train_sequences"] == 49
    assert facts["run"] == {"num_steps": 8, "epochs": 96 / 49, "sequences": 96, "tail": "carry"}
    assert facts["learning_rate"]["first"] == pytest.approx(1e-3 / 4)
    assert facts["learning_rate"]["last"] == pytest.approx(1e-4)
    flushed = replace(LAMBDA, accumulation=replace(LAMBDA.accumulation, tail=Tail.FLUSH))
    assert plan.summary(plan.make(flushed))["run"] == {
        "num_steps": 10,
        "epochs": 2.0,
        "sequences": 98,
        "tail": "flush",
    }


def test_the_files_are_json_and_hold_the_batch_triple() -> None:
    files = plan.files(plan.make(LAMBDA))
    triple = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [json.loads(files["deepspeed.json"])[key] for key in triple] == [12, 3, 2]
    assert json.loads(files["plan.json"])["batch"]["data_parallel_size"] == 2


def test_every_fault_is_told_at_once() -> None:
    config = replace(
        LAMBDA,
        data=replace(LAMBDA.data, fasta="/nowhere.fa"),
        batch=Batch(13, train_micro_batch_size_per_gpu=3),
        train=Train(max_steps=3),
        seed=-1,
    )
    with pytest.raises(RequestError) as refused:
        plan.make(config)
    keys = [line.split("=")[0].split(" ")[0] for line in refused.value.faults]
    assert keys == ["seed", "batch.train_batch_size", "data.fasta", "lr_schedule.warmup_steps"]


def test_variables_in_an_nvme_path_are_expanded_for_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    offloaded = replace(LAMBDA, zero=Zero(3), offload=Offload(optimizer=Device.NVME, nvme_path="$SCRATCH"))
    made = plan.make(offloaded)
    assert made.deepspeed.values["zero_optimization"]["offload_optimizer"]["nvme_path"] == str(tmp_path)
    assert made.config.offload.nvme_path == str(tmp_path)
    assert plan.make(replace(offloaded, cluster=SLURM)).config.offload.nvme_path == "$SCRATCH", (
        "a variable of the nodes"
    )


def test_a_dataset_of_ones_own_leaves_its_length_to_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    data = CustomData("json.JSONDecoder")
    config = replace(LAMBDA, data=data, loss=Call("json.JSONDecoder"))
    made = plan.make(config)
    assert made.num_steps is None
    plan.render(made, "runs/x")
    assert "(checked in the job) optimizer steps" in capsys.readouterr().out
    assert plan.make(replace(config, train=Train(max_steps=7))).num_steps == 7


def test_what_is_printed_holds_the_cut_the_horizon_and_who_set_each_key(capsys: pytest.CaptureFixture[str]) -> None:
    plan.render(plan.make(LAMBDA), "runs/lambda/x")
    printed = capsys.readouterr().out
    for text in ("micro-batch", "3,000", "12,000", "8 optimizer steps", "runs/lambda/x", "gradient_clipping"):
        assert text in printed
    (line,) = [line for line in printed.splitlines() if "gradient_clipping" in line]
    assert line.split() == ["gradient_clipping", "1.0", "train.gradient_clipping"]


@pytest.mark.parametrize("limit", [{"max_steps": -1}, {"max_tokens": 0}, {"max_steps": 5, "epochs": -3}])
@pytest.mark.parametrize(("size", "others"), [(12, []), (13, ["batch.train_batch_size"])])
def test_a_limit_that_cannot_be_is_told_once_beside_the_other_faults(
    limit: dict[str, int], size: int, others: list[str]
) -> None:
    config = replace(LAMBDA, train=Train(**limit), batch=replace(LAMBDA.batch, train_batch_size=size))
    with pytest.raises(RequestError) as refused:
        plan.make(config)
    assert [line.split("=")[0] for line in refused.value.faults] == [f"train.{list(limit)[-1]}", *others]


RAMP = BatchSchedule(BatchScheduleType.RAMP, initial_batch_size=3, over=6)
RAMPED = replace(LAMBDA, batch=Batch(12), batch_schedule=RAMP, cluster=Cluster(ranks_per_node=1))


def test_a_ramp_over_phage_lambda() -> None:
    """98 sequences: 3 steps of 3 and 3 of 6 are 27, 5 of 12 are 60 more, and 11 are left over."""
    facts = plan.summary(plan.make(RAMPED))
    assert facts["batch_schedule"] == [
        {"from_step": 0, "train_batch_size": 3, "gradient_accumulation_steps": 3},
        {"from_step": 3, "train_batch_size": 6, "gradient_accumulation_steps": 6},
        {"from_step": 6, "train_batch_size": 12, "gradient_accumulation_steps": 12},
    ]
    assert facts["run"] == {"num_steps": 11, "epochs": 87 / 49, "sequences": 87, "tail": "carry"}
    assert facts["batch"]["gradient_accumulation_steps"] == 12
    assert facts["warnings"] == []


def test_a_constant_batch_is_a_schedule_of_one() -> None:
    assert plan.summary(plan.make(LAMBDA))["batch_schedule"] == [
        {"from_step": 0, "train_batch_size": 12, "gradient_accumulation_steps": 2}
    ]


def test_what_scales_the_learning_rate_is_in_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """A peak of 1e-3 x 12 / 1; the first of two warm-up steps, of 3 sequences, takes half of half of it."""
    config = replace(
        RAMPED,
        batch=Batch(12, lr_scaling=Scaling.LINEAR, reference_batch_size=1),
        batch_schedule=replace(RAMP, lr_scaling=Scaling.SQRT),
        lr_schedule=LrSchedule(warmup_tokens=6_000),
    )
    made = plan.make(config)
    facts = plan.summary(made)
    rate = facts["learning_rate"]
    assert rate["peak"] == pytest.approx(0.012)
    assert rate["optimizer_lr"] == 1e-3
    assert rate["warmup_steps"] == 2
    assert rate["first"] == pytest.approx(0.012 / 2 / 2)
    assert rate["last"] == pytest.approx(0.0012)
    assert rate["counted_in"] == "steps"
    (warning,) = facts["warnings"]
    assert warning.startswith("batch.lr_scaling=linear: a global batch of 12 is more than 8 times")
    plan.render(made, "runs/x")
    printed = capsys.readouterr().out
    assert warning in printed
    assert "the peak is optimizer.lr=0.001 for 1 sequence, scaled to 12 (linear)" in printed
    assert "2 warm-up steps" in printed
    rows = [line.split() for line in printed.splitlines()]
    assert all(row in rows for row in (["1", "3", "3,000", "3"], ["4", "6", "6,000", "6"], ["7", "12", "12,000", "12"]))
    assert json.loads(plan.files(made)["plan.json"])["warnings"] == [warning]


def test_a_run_that_ends_on_the_way_up_is_warned_of() -> None:
    config = replace(RAMPED, train=Train(max_steps=5))
    assert plan.summary(plan.make(config))["warnings"] == [
        "batch_schedule.type=ramp: the run ends after 5 optimizer steps, at a global batch of 6; 12 would come with "
        "step 7"
    ]
    assert plan.summary(plan.make(replace(config, train=Train(max_steps=7))))["warnings"] == []


GROWING = replace(
    RAMPED, batch_schedule=BatchSchedule(BatchScheduleType.NOISE_SCALE, initial_batch_size=3), train=Train(epochs=1)
)


def test_where_the_noise_scale_decides_the_plan_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    made = plan.make(GROWING)
    facts = plan.summary(made)
    assert facts["batch_schedule"] == [
        {"from_step": 0, "train_batch_size": 3, "gradient_accumulation_steps": 3},
        {"from_step": None, "train_batch_size": 6, "gradient_accumulation_steps": 6},
        {"from_step": None, "train_batch_size": 12, "gradient_accumulation_steps": 12},
    ]
    assert facts["run"]["num_steps"] == 16
    assert facts["learning_rate"]["counted_in"] == "sequences"
    plan.render(made, "runs/x")
    printed = capsys.readouterr().out
    assert "at most 16 optimizer steps" in printed
    assert "(as the run goes)" in printed
    in_steps = plan.summary(plan.make(replace(GROWING, train=Train(max_steps=9))))
    assert in_steps["learning_rate"]["counted_in"] == "steps"
    with pytest.raises(RequestError, match=r"train\.noise_scale=false: batch_schedule\.type=noise_scale goes by it"):
        plan.make(replace(GROWING, train=Train(epochs=1, noise_scale=False)))


def test_a_schedule_over_a_dataset_of_ones_own_is_planned_as_far_as_it_goes() -> None:
    own = replace(RAMPED, data=CustomData("json.JSONDecoder"), loss=Call("json.JSONDecoder"))
    facts = plan.summary(plan.make(own))
    assert [level["from_step"] for level in facts["batch_schedule"]] == [0, 3, 6]
    assert facts["learning_rate"]["first"] is None
    known = plan.summary(plan.make(replace(own, train=Train(max_steps=9))))
    assert known["learning_rate"]["first"] == pytest.approx(1e-3 / 4)
    assert known["learning_rate"]["last"] == pytest.approx(1e-4)
    by_bases = replace(
        own,
        data=CustomData("json.JSONDecoder", {"sequence_length": 100}),
        batch_schedule=replace(RAMP, by=Count.TOKENS, over=6_000),
        train=Train(max_steps=20),
    )
    starts = [level["from_step"] for level in plan.summary(plan.make(by_bases))["batch_schedule"]]
    assert starts == [0, 10, 15], "30 sequences are 10 steps of 3, 30 more are 5 of 6"
    flushed = replace(by_bases, accumulation=Accumulation(tail=Tail.FLUSH))
    starts = [level["from_step"] for level in plan.summary(plan.make(flushed))["batch_schedule"]]
    assert starts == [0, None, None], "where an epoch ends is not known"


def test_faults_of_batches_and_rates_are_told_at_once() -> None:
    config = replace(
        RAMPED,
        batch=Batch(12, train_micro_batch_size_per_gpu=2, lr_scaling=Scaling.SQRT),
        batch_schedule=replace(RAMP, patience=3),
        lr_schedule=LrSchedule(warmup_steps=3, warmup_tokens=-1),
        optimizer=Optimizer(),
    )
    with pytest.raises(RequestError) as refused:
        plan.make(config)
    assert [line.split(":")[0] for line in refused.value.faults] == [
        "batch_schedule.patience=3",
        "lr_schedule.warmup_tokens=-1",
        "lr_schedule.warmup_tokens=-1 and lr_schedule.warmup_steps=3 are both set",
        "batch.reference_batch_size=null",
        "batch_schedule.initial_batch_size=3 cannot be cut into micro-batches of 2 over 1 rank",
    ]
    broken = replace(RAMPED, batch=Batch(13, train_micro_batch_size_per_gpu=2), batch_schedule=replace(RAMP, over=0))
    with pytest.raises(RequestError) as refused:
        plan.make(broken)
    assert [line.split("=")[0] for line in refused.value.faults] == ["batch_schedule.over", "batch.train_batch_size"]


def test_ranks_that_cannot_share_the_batch_are_left_out_where_that_is_allowed() -> None:
    three = replace(LAMBDA, batch=Batch(10), cluster=Cluster(ranks_per_node=3))
    with pytest.raises(RequestError) as refused:
        plan.make(three)
    assert refused.value.faults == [
        "batch.train_batch_size=10 cannot be cut into equal parts over 3 ranks: it must be a multiple of 3; "
        "nearest: 9, 12"
    ]
    made = plan.make(replace(three, cluster=Cluster(ranks_per_node=3, allow_fewer_ranks=True)))
    assert made.cut == Cut(10, 1, 5, 2)
    assert plan.summary(made)["warnings"] == [
        "cluster.allow_fewer_ranks=true: the global batch of 10 cannot be cut over 3 ranks; 2 of them are used"
    ]
    whole = plan.make(replace(LAMBDA, cluster=Cluster(ranks_per_node=2, allow_fewer_ranks=True)))
    assert (whole.num_ranks, plan.summary(whole)["warnings"]) == (2, [])


SLURM = Cluster(type=ClusterType.SLURM, nodes=2, gpus_per_node="a100:2")


def test_a_job_has_a_rank_for_each_gpu_of_each_node() -> None:
    assert plan.make(replace(LAMBDA, cluster=SLURM)).cut == Cut(12, 3, 1, 4)


@pytest.mark.parametrize(
    ("cluster", "batch", "line"),
    [
        (
            {"nodes": "3-4"},
            Batch(16),
            "cluster.nodes=3-4: with 3 of them batch.train_batch_size=16 cannot be cut into equal parts over 6 ranks: "
            "it must be a multiple of 6; nearest: 12, 18; or set cluster.allow_fewer_ranks=true",
        ),
        (
            {"nodes": "1-2"},
            Batch(None, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=2),
            "cluster.nodes=1-2: the global batch must not depend on it; set batch.train_batch_size",
        ),
    ],
)
def test_every_number_of_nodes_that_may_be_granted_has_to_share_the_same_batch(
    cluster: dict[str, str], batch: Batch, line: str
) -> None:
    with pytest.raises(RequestError) as refused:
        plan.make(replace(LAMBDA, cluster=replace(SLURM, **cluster), batch=batch))
    assert refused.value.faults == [line]
