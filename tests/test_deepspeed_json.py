"""The DeepSpeed JSON against JSON written by hand, against DeepSpeed's own parser and against real engines."""

import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from launcher import deepspeed_json
from launcher.batch import Cut
from launcher.errors import RequestError
from launcher.ranks import Rank
from launcher.schema import Config, Device, Dtype, Offload, Optimizer, OptimizerType, Precision, Train, Zero
from tests.ranks import on_ranks

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).parent / "golden" / "deepspeed"
FP32, BF16, FP16 = Dtype.FP32, Dtype.BF16, Dtype.FP16
BASE = Config()

RAW_KEYS = {
    "steps_per_print": "50",
    "wall_clock_breakdown": True,
    "memory_breakdown": None,
    "timers": {"throughput": {"enabled": True, "synchronized": False}},
    "zero_optimization": {"use_multi_rank_bucket_allreduce": False},
    "flops_profiler": {"enabled": True, "profile_step": 3.0},
    "checkpoint": {"tag_validation": "Fail"},
    "comms_logger": {"prof_ops": ["all_reduce"]},
    "vocabulary_size": "1.6e1",
}

CASES: dict[str, tuple[Config, Cut]] = {
    "default": (BASE, Cut(16, 1, 8, 2)),
    "stage0": (replace(BASE, zero=Zero(stage=0)), Cut(8, 8, 1, 1)),
    "stage2": (
        replace(
            BASE,
            zero=Zero(stage=2, overlap_comm=True, reduce_bucket_size=200_000_000, allgather_bucket_size=200_000_000),
        ),
        Cut(64, 2, 8, 4),
    ),
    "stage3": (
        replace(
            BASE,
            zero=Zero(
                stage=3,
                sub_group_size=1_000_000,
                stage3_prefetch_bucket_size=0,
                stage3_param_persistence_threshold=500,
            ),
        ),
        Cut(32, 4, 2, 4),
    ),
    "offload_cpu": (
        replace(BASE, zero=Zero(stage=2), offload=Offload(optimizer=Device.CPU, pin_memory=True)),
        Cut(16, 1, 16, 1),
    ),
    "offload_cpu_parameters": (
        replace(
            BASE,
            zero=Zero(stage=3),
            offload=Offload(optimizer=Device.CPU, parameters=Device.CPU),
            precision=Precision(dtype=BF16, communication_data_type=BF16),
        ),
        Cut(16, 2, 4, 2),
    ),
    "offload_nvme": (
        replace(
            BASE,
            zero=Zero(stage=3),
            offload=Offload(optimizer=Device.NVME, parameters=Device.NVME, nvme_path="/local/nvme", buffer_count=6),
        ),
        Cut(16, 1, 4, 4),
    ),
    "bf16": (
        replace(BASE, precision=Precision(dtype=BF16)),
        Cut(16, 4, 4, 1),
    ),
    "bf16_stage0": (
        replace(BASE, zero=Zero(stage=0), precision=Precision(dtype=BF16, grad_accum_dtype=BF16)),
        Cut(4, 1, 4, 1),
    ),
    "fp16": (
        replace(
            BASE,
            zero=Zero(stage=2),
            precision=Precision(
                dtype=FP16, initial_scale_power=12, loss_scale_window=500, hysteresis=4, min_loss_scale=2
            ),
        ),
        Cut(24, 3, 2, 4),
    ),
    "no_clipping": (replace(BASE, train=Train(gradient_clipping=None)), Cut(3, 1, 3, 1)),
    "sgd": (
        replace(
            BASE,
            optimizer=Optimizer(OptimizerType.SGD, lr=0.05, weight_decay=0.0, momentum=0.8),
            train=Train(gradient_clipping=0.5),
        ),
        Cut(8, 1, 4, 2),
    ),
    "lamb": (replace(BASE, zero=Zero(stage=3), optimizer=Optimizer(OptimizerType.LAMB)), Cut(32, 4, 2, 4)),
    "lars": (replace(BASE, optimizer=Optimizer(OptimizerType.LARS, lr=5.0, momentum=0.8)), Cut(8, 1, 4, 2)),
    "muon": (
        replace(
            BASE,
            zero=Zero(stage=3, reduce_scatter=False),
            optimizer=Optimizer(OptimizerType.MUON),
            train=Train(gradient_clipping=None),
        ),
        Cut(16, 2, 4, 2),
    ),
    "raw_keys": (replace(BASE, deepspeed=RAW_KEYS), Cut(8, 1, 4, 2)),
}


def exact(values: Any) -> str:
    """Text in which 1, 1.0 and true differ."""
    return json.dumps(values, sort_keys=True, indent=2, allow_nan=False)


def dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def golden(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{name}.json").read_text())


# What is written out


def test_each_golden_file_has_a_case():
    assert sorted(CASES) == sorted(path.stem for path in GOLDEN.glob("*.json"))
    assert len(CASES) >= 10


@pytest.mark.parametrize("name", CASES)
def test_the_json_is_the_one_written_by_hand(name):
    config, cut = CASES[name]
    assert deepspeed_json.check(config) == []
    assert exact(deepspeed_json.build(config, cut).values) == exact(golden(name))


@pytest.mark.parametrize("name", CASES)
def test_every_key_names_what_set_it(name):
    config, cut = CASES[name]
    built = deepspeed_json.build(config, cut)
    assert sorted(built.sources) == sorted(key for key, _ in dotted(built.values))
    for source in set(built.sources.values()) - {"launcher", "default", "deepspeed"}:
        node: Any = config
        for part in source.split("."):
            node = getattr(node, part)  # a source is a key of the configuration


def test_sources_are_the_keys_that_a_user_would_change():
    config, cut = CASES["raw_keys"]
    sources = deepspeed_json.build(config, cut).sources
    assert sources["zero_optimization.stage"] == "zero.stage"
    assert sources["gradient_clipping"] == "train.gradient_clipping"
    assert sources["train_batch_size"] == "batch.train_batch_size"
    assert sources["optimizer.params.betas"] == "optimizer.betas"
    assert sources["steps_per_print"] == "deepspeed"
    assert sources["flops_profiler.profile_step"] == "deepspeed"
    assert sources["gradient_allreduce_op"] == "launcher"


def test_one_parameter_a_group_is_written_for_states_on_nvme():
    config, cut = CASES["offload_nvme"]
    built = deepspeed_json.build(config, cut)
    assert built.values["zero_optimization"]["sub_group_size"] == 1
    assert built.sources["zero_optimization.sub_group_size"] == "offload.optimizer"


# What is refused

SUPPORTED = {
    (FP32, FP32): {0, 1, 2, 3},
    (BF16, FP32): {1, 2, 3},
    (BF16, BF16): {0, 1, 2, 3},
    (FP16, FP32): {1, 2, 3},
    (FP16, FP16): {1, 2, 3},
}
"""Compute type and accumulation type -> ZeRO stages: the table of docs/deepspeed_json.md."""


def cell(dtype: Dtype, sums: Dtype, stage: int, **offload: Any) -> Config:
    return replace(
        BASE,
        zero=Zero(stage=stage, reduce_bucket_size=1000, allgather_bucket_size=1000),
        precision=Precision(dtype=dtype, grad_accum_dtype=sums, initial_scale_power=8),
        offload=Offload(**offload),
    )


@pytest.mark.parametrize("sums", Dtype)
@pytest.mark.parametrize("dtype", Dtype)
def test_precisions_are_accepted_at_the_stages_of_the_support_table_only(dtype, sums):
    accepted = {stage for stage in range(4) if not deepspeed_json.check(cell(dtype, sums, stage))}
    assert accepted == SUPPORTED.get((dtype, sums), set())


@pytest.mark.parametrize("parameters", Device)
@pytest.mark.parametrize("optimizer", Device)
def test_offloading_is_accepted_at_the_stages_that_do_it_only(optimizer, parameters):
    accepted = {
        stage
        for stage in range(4)
        if not deepspeed_json.check(
            cell(FP32, FP32, stage, optimizer=optimizer, parameters=parameters, nvme_path="/local/nvme")
        )
    }
    by_optimizer = {Device.NONE: {0, 1, 2, 3}, Device.CPU: {1, 2, 3}, Device.NVME: {3}}[optimizer]
    by_parameters = {0, 1, 2, 3} if parameters is Device.NONE else {3}
    assert accepted == by_optimizer & by_parameters


MUON = {"optimizer": Optimizer(OptimizerType.MUON), "train": Train(gradient_clipping=None)}
"""What Muon is accepted with."""


def refuse(**nodes: Any) -> list[str]:
    return deepspeed_json.check(replace(BASE, **nodes))


@pytest.mark.parametrize(
    ("nodes", "line"),
    [
        ({"zero": Zero(stage=4)}, "zero.stage=4: it must be 0, 1, 2 or 3"),
        (
            {"zero": Zero(stage=0), "precision": Precision(dtype=BF16)},
            "precision.grad_accum_dtype=fp32: at zero.stage=0 DeepSpeed sums the gradients of bf16 in bf16 only; set "
            "zero=stage1 (or higher), or precision.grad_accum_dtype=bf16",
        ),
        (
            {"zero": Zero(stage=0), "precision": Precision(dtype=FP16)},
            "precision.dtype=fp16: at zero.stage=0 DeepSpeed divides the gradients by a loss scale that it never "
            "multiplied the loss by; set zero=stage1 (or higher), or precision=bf16",
        ),
        (
            {"precision": Precision(dtype=FP16, grad_accum_dtype=BF16)},
            "precision.grad_accum_dtype=bf16: DeepSpeed sums the gradients of fp16 in it at some ZeRO stages only; set "
            "it to fp16 or fp32",
        ),
        (
            {"precision": Precision(communication_data_type=FP16)},
            "precision.communication_data_type=fp16: the gradients of a fp32 run are not scaled to the range of fp16 "
            "and may overflow; set it to null, fp32 or bf16",
        ),
        (
            {"zero": Zero(stage=0), "offload": Offload(optimizer=Device.CPU)},
            "offload.optimizer=cpu: nothing is offloaded at zero.stage=0; set zero=stage1 (or stage2, stage3) or "
            "offload=none",
        ),
        (
            {"zero": Zero(stage=2), "offload": Offload(optimizer=Device.NVME, nvme_path="/n")},
            "offload.optimizer=nvme: at zero.stage=2 DeepSpeed keeps the states in host memory without a word; set "
            "zero=stage3 or offload.optimizer=cpu",
        ),
        (
            {"zero": Zero(stage=2), "offload": Offload(parameters=Device.CPU)},
            "offload.parameters=cpu: at zero.stage=2 parameters are not partitioned and cannot be offloaded; set "
            "zero=stage3 or offload.parameters=none",
        ),
        (
            {"zero": Zero(stage=3), "offload": Offload(optimizer=Device.NVME)},
            "offload.nvme_path=null: offloading to nvme needs it; set it to a folder on a local disk",
        ),
        (
            {"zero": Zero(stage=3), "offload": Offload(parameters=Device.NVME, nvme_path="scratch/nvme")},
            "offload.nvme_path=scratch/nvme: it must be an absolute path, the same on every node",
        ),
        (
            {
                "zero": Zero(stage=3, sub_group_size=1000),
                "offload": Offload(optimizer=Device.NVME, nvme_path="$TMPDIR"),
            },
            "zero.sub_group_size=1000: with offload.optimizer=nvme DeepSpeed misreads the gradients of groups of "
            "several parameters, so 1 is written; leave it out or set it to 1",
        ),
        (
            {"optimizer": Optimizer(OptimizerType.SGD), "offload": Offload(optimizer=Device.CPU)},
            "offload.optimizer=cpu: DeepSpeed's offloading is made for its own AdamW, and not tested with "
            "optimizer.type=sgd; set optimizer=adamw or offload.optimizer=none",
        ),
        (
            {"optimizer": Optimizer(OptimizerType.LAMB), "offload": Offload(optimizer=Device.CPU)},
            "offload.optimizer=cpu: DeepSpeed's offloading is made for its own AdamW, and not tested with "
            "optimizer.type=lamb; set optimizer=adamw or offload.optimizer=none",
        ),
        (
            {**MUON, "zero": Zero(stage=0)},
            "optimizer.type=muon: at zero.stage=0 DeepSpeed's Muon moves the weights in a step without finite "
            "gradients too; set zero=stage1 (or higher)",
        ),
        (
            {**MUON, "zero": Zero(stage=3)},
            "zero.reduce_scatter=true: DeepSpeed's Muon does without it at zero.stage=3; set it to false, or "
            "zero=stage1",
        ),
        (
            {**MUON, "precision": Precision(dtype=FP16)},
            "precision.dtype=fp16: DeepSpeed's Muon adds gradients to its momentum that still carry the loss scale, "
            "which changes; set precision=bf16 or fp32",
        ),
        (
            {**MUON, "zero": Zero(stage=2), "precision": Precision(dtype=BF16)},
            "precision.dtype=bf16: at zero.stage=2 DeepSpeed keeps the momentum of Muon in bf16; set zero=stage1 (or "
            "stage3), or precision=fp32",
        ),
        (
            {**MUON, "precision": Precision(dtype=BF16, grad_accum_dtype=BF16)},
            "precision.grad_accum_dtype=bf16: DeepSpeed would keep the momentum of Muon in it too; set it to fp32",
        ),
        (
            {
                **MUON,
                "zero": Zero(stage=3, reduce_scatter=False),
                "precision": Precision(communication_data_type=BF16),
            },
            "precision.communication_data_type=bf16: at zero.stage=3 DeepSpeed rounds the momentum of Muon to it in "
            "every step; set it to null",
        ),
        (
            {**MUON, "train": Train(gradient_clipping=2.0)},
            "train.gradient_clipping=2.0: DeepSpeed clips what Muon has made of the gradient, whose norm depends on "
            "the shapes of the layers alone; set it to null",
        ),
        (
            {"zero": Zero(round_robin_gradients=True)},
            "zero.round_robin_gradients=true: DeepSpeed then loses track of which slice belongs to which parameter; "
            "set it to false",
        ),
        (
            {"zero": Zero(allgather_partitions=False)},
            "zero.allgather_partitions=false: DeepSpeed ignores it and gathers all the same; set it to true",
        ),
        (
            {"zero": Zero(overlap_comm=True, contiguous_gradients=False)},
            "zero.overlap_comm=true: gradients that are not contiguous may be overwritten while they are reduced; set "
            "zero.contiguous_gradients=true or zero.overlap_comm=false",
        ),
        (
            {"zero": Zero(allgather_bucket_size=7)},
            "zero.allgather_bucket_size=7: it must be even and at least 2; nearest: 6, 8",
        ),
        (
            {"zero": Zero(allgather_bucket_size=0)},
            "zero.allgather_bucket_size=0: it must be even and at least 2; nearest: 2",
        ),
        ({"zero": Zero(reduce_bucket_size=0)}, "zero.reduce_bucket_size=0: it must be at least 1"),
        (
            {"zero": Zero(stage3_max_live_parameters=-1)},
            "zero.stage3_max_live_parameters=-1: it must be at least 0",
        ),
        ({"offload": Offload(buffer_count=0)}, "offload.buffer_count=0: it must be at least 1"),
        (
            {"precision": Precision(loss_scale=-1.0)},
            "precision.loss_scale=-1.0: it must be at least 0; 0 makes it dynamic",
        ),
        (
            {"precision": Precision(initial_scale_power=32)},
            "precision.initial_scale_power=32: it must lie in [0, 31]",
        ),
        ({"precision": Precision(min_loss_scale=0)}, "precision.min_loss_scale=0: it must be at least 1"),
        ({"optimizer": Optimizer(lr=0.0)}, "optimizer.lr=0.0: it must be above 0"),
        ({"optimizer": Optimizer(eps=0.0)}, "optimizer.eps=0.0: it must be above 0"),
        ({"optimizer": Optimizer(betas=(0.9, 1.0))}, "optimizer.betas=[0.9,1.0]: both must lie in [0, 1)"),
        ({"optimizer": Optimizer(weight_decay=-0.1)}, "optimizer.weight_decay=-0.1: it must be at least 0"),
        ({"optimizer": Optimizer(momentum=1.0)}, "optimizer.momentum=1.0: it must lie in [0, 1)"),
        ({"optimizer": Optimizer(trust_coefficient=0.0)}, "optimizer.trust_coefficient=0.0: it must be above 0"),
    ],
)  # fmt: skip
def test_what_deepspeed_rejects_or_mistreats_is_refused_with_the_remedy(nodes, line):
    assert refuse(**nodes) == [line]


def test_all_faults_come_at_once():
    lines = refuse(
        zero=Zero(stage=1, reduce_bucket_size=0),
        offload=Offload(optimizer=Device.NVME),
        precision=Precision(hysteresis=0),
        optimizer=Optimizer(lr=-1.0),
        deepspeed={"fp16": {"enabled": True}, "nebula": {"enabled": True}},
    )
    keys = [line.partition("=")[0] for line in lines]
    assert keys == [
        "zero.reduce_bucket_size",
        "offload.optimizer",
        "offload.nvme_path",
        "precision.hysteresis",
        "optimizer.lr",
        "deepspeed.fp16.enabled",
        "deepspeed.nebula.enabled",
    ]


# Raw keys


def raw(**keys: Any) -> list[str]:
    return refuse(deepspeed=keys)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (
            {"train_batch_size": 64},
            "deepspeed.train_batch_size=64: batch.train_batch_size decides it; leave it out and set "
            "batch.train_batch_size",
        ),
        (
            {"gradient_accumulation_steps": "8"},
            "deepspeed.gradient_accumulation_steps=8: batch.gradient_accumulation_steps decides it; leave it out and "
            "set batch.gradient_accumulation_steps",
        ),
        (
            {"zero_optimization": {"stage": 3}},
            "deepspeed.zero_optimization.stage=3: zero.stage decides it; leave it out and set zero.stage",
        ),
        (
            {"zero_optimization": {"stage3_max_live_parameters": 1}},
            "deepspeed.zero_optimization.stage3_max_live_parameters=1: zero.stage3_max_live_parameters decides it; "
            "leave it out and set zero.stage3_max_live_parameters",
        ),
        (
            {"fp16": {"loss_scale": 0}},
            "deepspeed.fp16.loss_scale=0: precision.loss_scale decides it; leave it out and set precision.loss_scale",
        ),
        (
            {"bf16": {"bf16_optimizer_states": True}},
            "deepspeed.bf16.bf16_optimizer_states=true: this program's training loop decides it; leave it out",
        ),
        (
            {"optimizer": {"params": {"foreach": True}}},
            "deepspeed.optimizer.params={foreach:true}: optimizer decides it; leave it out and set optimizer",
        ),
        (
            {"scheduler": {"type": "WarmupLR"}},
            "deepspeed.scheduler.type=WarmupLR: lr_schedule decides it; leave it out and set lr_schedule",
        ),
        (
            {"zero_optimization": {"reduce_bucket_sise": 1}},
            "deepspeed.zero_optimization.reduce_bucket_sise=1: DeepSpeed 0.19.8 knows no such key; nearest: "
            "deepspeed.zero_optimization.reduce_bucket_size",
        ),
        (
            {"use_multi_rank_bucket_allreduce": True},
            "deepspeed.use_multi_rank_bucket_allreduce=true: DeepSpeed 0.19.8 knows no such key; nearest: "
            "deepspeed.zero_optimization.use_multi_rank_bucket_allreduce",
        ),
        (
            {"nebula": {}},
            "deepspeed.nebula={}: DeepSpeed 0.19.8 knows no such key; leave it out",
        ),
        (
            {"checkpoint": {"tag_validation": "auto"}},
            "deepspeed.checkpoint.tag_validation=auto: DeepSpeed itself knows no auto; give the value, or leave the "
            "key out",
        ),
        (
            {"comms_logger": {"prof_ops": ["auto"]}},
            "deepspeed.comms_logger.prof_ops=[auto]: DeepSpeed itself knows no auto; give the value, or leave the key "
            "out",
        ),
        (
            {"zero_optimization": {"stage3_module_granularity_threshold": 15099494.4}},
            "deepspeed.zero_optimization.stage3_module_granularity_threshold=15099494.4: it must be an integer; "
            "nearest: 15099494, 15099495",
        ),
        (
            {"steps_per_print": [10]},
            "deepspeed.steps_per_print=[10]: it must be an integer",
        ),
        (
            {"flops_profiler": True},
            "deepspeed.flops_profiler=true: it is a section of DeepSpeed's; set keys inside it",
        ),
        (
            {"wall_clock_breakdown": "often"},
            "deepspeed.wall_clock_breakdown=often: it must be true or false",
        ),
        (
            {"comms_logger": {"prof_ops": [{1, 2}]}},
            "deepspeed.comms_logger.prof_ops[0]={1, 2}: a set cannot be kept in JSON; put it in quotes",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"ratio": math.inf}}},
            "deepspeed.zero_optimization.offload_optimizer.ratio=inf: it must be a number",
        ),
    ],
)  # fmt: skip
def test_raw_keys_that_cannot_be_are_refused(keys, line):
    assert raw(**keys) == [line]


@pytest.mark.parametrize(("given", "meant"), [(5e8, 500_000_000), ("5e8", 500_000_000), ("8", 8), (3, 3)])
def test_raw_integers_may_be_written_as_integral_floats_or_text(given, meant):
    config = replace(BASE, deepspeed={"zero_optimization": {"stage3_module_granularity_threshold": given}})
    assert deepspeed_json.check(config) == []
    value = deepspeed_json.build(config, Cut(1, 1, 1, 1)).values["zero_optimization"][
        "stage3_module_granularity_threshold"
    ]
    assert exact(value) == exact(meant)


def test_null_unsets_a_raw_key():
    config = replace(BASE, deepspeed={"steps_per_print": None, "vocabulary_size": None})
    plain = deepspeed_json.build(BASE, Cut(1, 1, 1, 1))
    assert deepspeed_json.build(config, Cut(1, 1, 1, 1)) == plain


def test_building_from_faulty_raw_keys_raises_all_of_them():
    config = replace(BASE, deepspeed={"steps_per_print": 1.5, "nebula": {"enabled": True}})
    with pytest.raises(RequestError) as error:
        deepspeed_json.build(config, Cut(1, 1, 1, 1))
    assert error.value.faults == deepspeed_json.check(config)
    assert len(error.value.faults) == 2


# The list of known keys


def known_keys() -> dict[str, str]:
    return json.loads((ROOT / "launcher" / "deepspeed_keys.json").read_text())["kinds"]


def is_known(key: str, kinds: Mapping[str, str]) -> bool:
    parts = key.split(".")
    above = [".".join(parts[:length]) for length in range(1, len(parts))]
    return key in kinds or any(kinds.get(section) == "object" for section in above)


def test_the_known_keys_are_those_of_the_installed_deepspeed():
    script = ROOT / "scripts" / "list_deepspeed_keys.py"
    subprocess.run([sys.executable, str(script), "--check"], check=True, timeout=120)


def test_the_known_keys_include_those_of_every_depth_and_mark_integers():
    kinds = known_keys()
    assert kinds["zero_optimization.reduce_bucket_size"] == "int"
    assert kinds["zero_optimization.offload_param.buffer_size"] == "int"
    assert kinds["zero_optimization.offload_optimizer.ratio"] == "float"
    assert kinds["checkpoint.parallel_write.pipeline_stage"] == "bool"
    assert kinds["steps_per_print"] == "int"
    assert not any(key.startswith(("nebula", "elasticity", "compression_training")) for key in kinds)


def test_the_check_of_the_known_keys_fails_when_one_is_missing(tmp_path):
    spec = importlib.util.spec_from_file_location("list_keys", ROOT / "scripts" / "list_deepspeed_keys.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    stale = json.loads(script.FILE.read_text())
    del stale["kinds"]["gradient_clipping"]
    assert script.document() != stale


# Whatever is accepted

# Each value is good by itself; what goes together is for check() to tell.
counts = st.integers(1, 10**9)
zeros = st.builds(
    Zero,
    stage=st.integers(0, 3),
    allgather_bucket_size=counts.map(lambda half: 2 * half),
    overlap_comm=st.booleans(),
    reduce_scatter=st.booleans(),
    reduce_bucket_size=counts,
    sub_group_size=st.sampled_from([1, 1000, Zero().sub_group_size]),
    stage3_max_live_parameters=counts | st.just(0),
    stage3_prefetch_bucket_size=counts | st.just(0),
)
offloads = st.builds(
    Offload,
    optimizer=st.sampled_from(Device),
    parameters=st.sampled_from(Device),
    nvme_path=st.sampled_from(["/local/nvme", "$TMPDIR/nvme"]),
    pin_memory=st.booleans(),
    buffer_count=st.integers(1, 9),
)
precisions = st.builds(
    Precision,
    dtype=st.sampled_from(Dtype),
    grad_accum_dtype=st.sampled_from(Dtype),
    communication_data_type=st.none() | st.sampled_from(Dtype),
    loss_scale=st.sampled_from([0.0, 128.0]),
    initial_scale_power=st.integers(0, 31),
)
optimizers = st.builds(
    Optimizer,
    type=st.sampled_from(OptimizerType),
    lr=st.floats(1e-9, 1),
    weight_decay=st.floats(0, 1),
    betas=st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)),
    eps=st.floats(1e-12, 1e-3),
)
raw_keys = st.fixed_dictionaries(
    {},
    optional={
        "steps_per_print": counts | counts.map(float) | counts.map(str),
        "comms_logger": st.fixed_dictionaries({"prof_ops": st.lists(st.sampled_from(["all_reduce", "broadcast"]))}),
        "zero_optimization": st.fixed_dictionaries({}, optional={"memory_efficient_linear": st.booleans()}),
        "aio": st.fixed_dictionaries({"block_size": counts | st.none()}),
    },
)
configs = st.builds(
    Config,
    zero=zeros,
    offload=st.just(Offload()) | offloads,
    precision=st.just(Precision()) | precisions,
    optimizer=st.just(Optimizer()) | optimizers,
    train=st.builds(Train, gradient_clipping=st.none() | st.floats(1e-3, 10)),
    deepspeed=raw_keys,
)
cuts = st.builds(
    lambda micro, steps, ranks: Cut(micro * steps * ranks, micro, steps, ranks),
    st.integers(1, 64),
    st.integers(1, 64),
    st.integers(1, 64),
)


@settings(max_examples=300, deadline=None)
@given(configs, cuts)
def test_whatever_is_accepted_gives_plain_exact_json_of_known_keys(config, cut):
    assume(not deepspeed_json.check(config))
    built = deepspeed_json.build(config, cut)
    text = exact(built.values)
    assert json.loads(text) == built.values
    assert '"auto"' not in text
    values = built.values
    ranks, rest = divmod(
        values["train_batch_size"], values["train_micro_batch_size_per_gpu"] * values["gradient_accumulation_steps"]
    )
    assert (ranks, rest) == (cut.data_parallel_size, 0)
    assert values["gradient_clipping"] == (config.train.gradient_clipping or 0.0)
    kinds = known_keys()
    assert [key for key, _ in dotted(values) if not is_known(key, kinds)] == []
    assert "scheduler" not in values
    assert not (values["bf16"]["enabled"] and values["fp16"]["enabled"])


# What DeepSpeed makes of it


@pytest.mark.parametrize("name", CASES)
def test_deepspeed_reads_the_file_unchanged(name, monkeypatch):
    import deepspeed.comm
    import torch
    from deepspeed.runtime.config import DeepSpeedConfig

    cut, values = CASES[name][1], golden(name)
    monkeypatch.setattr(deepspeed.comm, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(deepspeed.comm, "get_world_size", lambda group=None: cut.data_parallel_size)
    read = DeepSpeedConfig(str(GOLDEN / f"{name}.json"))
    assert read._param_dict == values  # hjson, with which DeepSpeed reads, makes 1 of 1.0
    assert read.world_size == cut.data_parallel_size
    # By the names of our keys, what DeepSpeed will use.
    used: dict[str, Any] = {
        key: getattr(read, key)
        for key in (
            *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
            *("gradient_clipping", "managed_gradient_accumulation", "gradient_allreduce_op"),
            *("gradient_predivide_factor", "prescale_gradients"),
            *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
            *("steps_per_print", "wall_clock_breakdown"),
        )
    }
    dtypes = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    used["communication_data_type"] = dtypes[read.communication_data_type]
    used["data_types"] = {"grad_accum_dtype": read.grad_accum_dtype}
    used["optimizer"] = {"type": read.optimizer_name, "params": read.optimizer_params}
    used["zero_optimization"] = read.zero_config.model_dump(mode="json", by_alias=True)
    used["bf16"] = read.bfloat16_config.model_dump()
    used["fp16"] = read.float16_config.model_dump()
    used["activation_checkpointing"] = vars(read.activation_checkpointing_config)
    used["aio"] = read.aio_config
    used["timers"] = {"throughput": read.timers_config.model_dump()}
    found = dict(dotted(used))
    raw_sections = ("flops_profiler.", "checkpoint.", "comms_logger.", "vocabulary_size")
    for key, value in dotted(values):
        if key == "optimizer.type":
            assert found[key].lower() == value.lower()
        elif not key.startswith(raw_sections):
            assert found[key] == value, key


# What an engine makes of it

WIDTH = 64
MICRO_BATCHES = 13
SMALL = {FP32: 2.0**-9, BF16: 2.0**-9, FP16: 2.0**-12}
"""Half of the spacing of bf16 (fp16) numbers at 1: added to 1, it is lost there."""


def run_window(config: Config, small: float) -> dict[str, Any]:
    """One optimizer step of a real engine, from micro-batches whose gradients are 1 and then, 12 times, ``small``.

    Every element of both weights has that gradient, so its sum is 1 + 12 x small and its norm sqrt(128) times that.
    """
    import deepspeed
    import torch
    from torch import nn

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, 1, bias=False), nn.Linear(WIDTH, 1, bias=False)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.first(inputs).sum() + self.second(inputs).sum()

    values = deepspeed_json.build(config, Cut(MICRO_BATCHES, 1, MICRO_BATCHES, 1)).values
    model = Sum()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=values)
    dtype = next(engine.module.parameters()).dtype
    for number in range(MICRO_BATCHES):
        loss = engine(torch.full((1, WIDTH), 1.0 if number == 0 else small, dtype=dtype))
        engine.backward(loss.float() * 1.0, scale_wrt_gas=False)
        engine.step()
    norm = engine.get_global_grad_norm()
    states = engine.basic_optimizer.state.values()
    beta = engine.basic_optimizer.param_groups[0].get("betas", (0.0,))[0]
    moments = [state["exp_avg"].abs().max().item() / (1 - beta) for state in states if "exp_avg" in state]
    facts = {
        "dtype": str(dtype),
        "accumulation": str(engine.get_data_types()[1]),
        "communication": str(engine.communication_data_type),
        "stage": int(engine.zero_optimization_stage()),
        "clipping": engine.gradient_clipping(),
        "optimizer": type(engine.basic_optimizer).__name__,
        "norm": None if norm is None else float(norm),
        "gradient": max(moments, default=None),
        "batch": (
            engine.train_batch_size(),
            engine.train_micro_batch_size_per_gpu(),
            engine.gradient_accumulation_steps(),
        ),
    }
    engine.destroy()
    return facts


def run_windows(rank: Rank, windows: list[tuple[Config, float]]) -> list[dict[str, Any]]:
    """What each window gave; an error of DeepSpeed's as ``error``."""
    from deepspeed.accelerator import get_accelerator

    # Many CPUs calculate fp16 slowly, and DeepSpeed calls that not supported; slow is fast enough here.
    type(get_accelerator()).is_fp16_supported = lambda self: True
    results = []
    for config, small in windows:
        try:
            results.append(run_window(config, small))
        except NotImplementedError as error:
            results.append({"error": str(error)})
    return results


def summed(dtype: Dtype, small: float) -> float:
    """1 + 12 x small, every addition rounded to ``dtype``."""
    import torch

    total = torch.tensor(1.0, dtype={FP32: torch.float32, BF16: torch.bfloat16, FP16: torch.float16}[dtype])
    for _ in range(MICRO_BATCHES - 1):
        total += small
    return float(total)


def unclipped(config: Config) -> Config:
    return replace(config, train=Train(gradient_clipping=None))


@pytest.mark.ranks
def test_engines_do_what_the_json_says_in_every_supported_precision():
    cells = [(dtype, sums, stage) for (dtype, sums), stages in SUPPORTED.items() for stage in sorted(stages)]
    windows = [(cell(*one), SMALL[FP16 if FP16 in one else BF16]) for one in cells]
    free_windows = [(unclipped(config), small) for config, small in windows]
    (results,) = on_ranks(1, run_windows, windows + free_windows)
    clipped, free = results[: len(cells)], results[len(cells) :]
    torch_names = {FP32: "torch.float32", BF16: "torch.bfloat16", FP16: "torch.float16"}
    for (dtype, sums, stage), (_, small), with_clipping, without in zip(cells, windows, clipped, free, strict=True):
        total, root = summed(sums, small), math.sqrt(2 * WIDTH)
        assert (total == 1.0) == (sums is not FP32), "the sum tells the types apart"
        for facts, clipping in ((with_clipping, 1.0), (without, 0.0)):
            assert facts["dtype"] == torch_names[dtype]
            assert facts["accumulation"] == torch_names[sums]
            assert facts["communication"] == torch_names[sums]
            assert facts["stage"] == stage
            assert facts["clipping"] == clipping
            assert facts["optimizer"] == "AdamW"
            assert facts["batch"] == (MICRO_BATCHES, 1, MICRO_BATCHES)
            if (dtype, stage) == (FP32, 0):
                assert facts["norm"] is None
            else:
                assert facts["norm"] == pytest.approx(total * root, rel=1e-6), (dtype, sums, stage)
        assert without["gradient"] == pytest.approx(total, rel=1e-6), (dtype, sums, stage)
        assert with_clipping["gradient"] == pytest.approx(1 / root, rel=1e-5), (dtype, sums, stage)


@pytest.mark.ranks
def test_the_reasons_for_refusing_precisions_still_hold():
    """Where DeepSpeed mends one of these, the refusal can go."""
    windows = [
        (unclipped(cell(BF16, FP32, 0)), SMALL[BF16]),
        (unclipped(cell(FP16, FP16, 0)), SMALL[FP16]),
        (unclipped(cell(FP32, BF16, 2)), SMALL[BF16]),
        (unclipped(cell(BF16, FP16, 2)), SMALL[BF16]),
    ]
    (results,) = on_ranks(1, run_windows, windows)
    mixed, unscaled, too_exact, too_coarse = results
    assert "unsupported mix" in mixed["error"]
    assert unscaled["gradient"] == pytest.approx(1 / 2**8, rel=1e-6)
    assert too_exact["gradient"] == pytest.approx(summed(FP32, SMALL[BF16]), rel=1e-6), "in fp32, not in bf16"
    assert too_coarse["gradient"] == pytest.approx(summed(BF16, SMALL[BF16]), rel=1e-6), "in bf16, not in fp16"


@pytest.mark.ranks
def test_engines_take_sgd_at_every_stage():
    sgd = Optimizer(OptimizerType.SGD, lr=0.1, momentum=0.9)
    windows = [(replace(cell(FP32, FP32, stage), optimizer=sgd), SMALL[BF16]) for stage in range(4)]
    (results,) = on_ranks(1, run_windows, windows)
    assert [facts["optimizer"] for facts in results] == ["SGD"] * 4
    assert [facts["stage"] for facts in results] == [0, 1, 2, 3]


def offloaded_update(rank: Rank, config: Config) -> dict[str, Any]:
    """Relative error of two AdamW steps against plain torch, and the files that are left below nvme_path."""
    import deepspeed
    import torch
    from torch import nn

    from launcher.worker import build

    # Uneven widths: the second weight starts at no multiple of what NVMe access is aligned to.
    widths = (901, 1203)

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(*widths, bias=False), nn.Linear(*reversed(widths), bias=False))

    values = deepspeed_json.build(config, Cut(4, 2, 2, 1)).values
    build.build(build.needed(values), print)
    trained = model()
    if config.zero.stage == 3:
        # Partitioned by the engine itself, parameters on NVMe are kept in bf16 where the CPU knows no fp16.
        deepspeed.zero.Init(module=trained, config_dict_or_path=values)
    engine, *_ = deepspeed.initialize(model=trained, model_parameters=list(trained.parameters()), config=values)
    plain = model()
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    inputs = torch.randn(2, 4, widths[0], generator=torch.Generator().manual_seed(1))
    for batch in inputs:
        for part in batch.split(2):
            engine.backward(engine(part).square().sum() / 4, scale_wrt_gas=False)
            engine.step()
        adamw.zero_grad()
        (plain(batch).square().sum() / 4).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        adamw.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        weights = [parameter.detach().clone().flatten() for parameter in engine.module.parameters()]
    ours = torch.cat(weights)
    theirs = torch.cat([parameter.detach().flatten() for parameter in plain.parameters()])
    path = config.offload.nvme_path
    files = list(Path(path).rglob("*.swp")) if path else []
    facts = {
        "error": float((ours - theirs).norm() / theirs.norm()),
        "files": len(files),
        "optimizer": type(engine.basic_optimizer).__name__,
    }
    engine.destroy()
    return facts


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_in_host_memory_are_updated_by_deepspeeds_adam(stage):
    config = replace(BASE, zero=Zero(stage=stage), offload=Offload(optimizer=Device.CPU))
    assert deepspeed_json.check(config) == []
    (facts,) = on_ranks(1, offloaded_update, config)
    assert facts["optimizer"] == "DeepSpeedCPUAdam"
    assert facts["error"] < 1e-5


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("parameters", [Device.NONE, Device.CPU, Device.NVME])
def test_states_on_nvme_are_updated_exactly_and_are_there(tmp_path, parameters):
    offload = Offload(optimizer=Device.NVME, parameters=parameters, nvme_path=str(tmp_path))
    config = replace(BASE, zero=Zero(stage=3), offload=offload)
    assert deepspeed_json.check(config) == []
    (facts,) = on_ranks(1, offloaded_update, config)
    assert facts["optimizer"] == "DeepSpeedCPUAdam"
    assert facts["error"] < 1e-5
    assert facts["files"] > 0


@pytest.mark.slow
@pytest.mark.ranks
def test_states_for_nvme_below_stage_3_still_stay_in_memory(tmp_path):
    """Where DeepSpeed mends this, the refusal can go."""
    offload = Offload(optimizer=Device.NVME, nvme_path=str(tmp_path))
    (facts,) = on_ranks(1, offloaded_update, replace(BASE, zero=Zero(stage=2), offload=offload))
    assert facts["files"] == 0
