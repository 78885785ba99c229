"""The DeepSpeed JSON: what ``deepspeed.initialize`` is given, as a pure function of the configuration.

Every value that matters is written out, because DeepSpeed's own defaults are not this program's (it clips gradients at
1.0 unless told otherwise). Each key remembers what set it. What was measured about the combinations that are refused
here (DeepSpeed 0.19.8) is in docs/deepspeed_json.md.
"""

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from launcher import decode
from launcher.batch import Cut
from launcher.errors import RequestError
from launcher.schema import Config, Device, Dtype, OptimizerType, Zero

FIXED = "launcher"
"""The source of values that the training loop relies on; nobody can set them."""

DEFAULT = "default"
"""The source of values that no key of the configuration stands for; raw DeepSpeed keys replace them."""

OWNERS = {
    "train_batch_size": "batch.train_batch_size",
    "train_micro_batch_size_per_gpu": "batch.train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "batch.gradient_accumulation_steps",
    "activation_checkpointing": "activation.checkpointing",
    "autotuning": FIXED,
    "bf16": "precision.dtype",
    "bfloat16": "precision.dtype",
    "data_efficiency": "data",
    "data_types.param_dtype": "precision.dtype",
    "dataloader_drop_last": "accumulation.tail",
    "expert_parallel": "model",
    "fp16": "precision.dtype",
    "hybrid_engine": FIXED,
    "optimizer": "optimizer",
    "pipeline": "parallel.pipeline",
    "scheduler": "lr_schedule",
    "tensor_parallel": "parallel.tensor",
    "tensorboard": "logging.tensorboard",
    "torch_autocast": "precision.dtype",
    "wandb": "logging.wandb",
    "zero_optimization.cpu_offload": "offload.optimizer",
    "zero_optimization.cpu_offload_param": "offload.parameters",
    "zero_optimization.cpu_offload_use_pin_memory": "offload.pin_memory",
    "zero_optimization.legacy_stage1": "zero.stage",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "zero.stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.zenflow": FIXED,
}
"""Who decides over DeepSpeed's keys and whole sections, apart from the settings below."""

ZERO_STAGES = {
    "allgather_partitions": {1, 2},
    "allgather_bucket_size": {1, 2},
    "overlap_comm": {1, 2, 3},
    "reduce_scatter": {1, 2, 3},
    "reduce_bucket_size": {1, 2, 3},
    "contiguous_gradients": {1, 2, 3},
    "round_robin_gradients": {1, 2},
    "sub_group_size": {3},
    "stage3_max_live_parameters": {3},
    "stage3_max_reuse_distance": {3},
    "stage3_prefetch_bucket_size": {3},
    "stage3_param_persistence_threshold": {3},
    "stage3_gather_16bit_weights_on_model_save": {3},
}
"""The stages at which DeepSpeed reads a key of ``zero``."""

NEVER = 10**9
"""Steps between two of DeepSpeed's own reports; this program makes its own."""

OPTIMIZER_NVME_BUFFERS = 4
"""AdamW swaps the parameter, its gradient and two moments."""


@dataclass(frozen=True)
class DeepSpeedJSON:
    """``values``: nested plain values, ready for JSON. ``sources``: by dotted key, what set it: a key of the
    configuration, ``deepspeed`` (raw keys), ``launcher`` (fixed) or ``default`` (open to raw keys)."""

    values: dict[str, Any]
    sources: dict[str, str]


class Setting(NamedTuple):
    """A dotted DeepSpeed key, its value, what set it, and whether it means anything under this configuration."""

    key: str
    value: Any
    source: str
    written: bool = True


def build(config: Config, cut: Cut) -> DeepSpeedJSON:
    """The JSON of a configuration in which ``check`` found no fault; raises RequestError for faulty raw keys."""
    settings, faults = _merge(_settings(config), config.deepspeed)
    if faults:
        raise RequestError(*faults)
    triple = {
        "train_batch_size": cut.train_batch_size,
        "train_micro_batch_size_per_gpu": cut.micro_batch_size,
        "gradient_accumulation_steps": cut.gradient_accumulation_steps,
    }
    written = [Setting(key, value, OWNERS[key]) for key, value in triple.items()]
    written += [setting for setting in settings if setting.written]
    return DeepSpeedJSON(_nest(written), {setting.key: setting.source for setting in written})


def check(config: Config) -> list[str]:
    """Fault lines of everything that goes into the JSON: the key, the value, the rule, the remedy. Reads no disk."""
    faults = _check_zero(config)
    faults += _check_offload(config)
    faults += _check_precision(config)
    faults += _check_optimizer(config)
    faults += _merge(_settings(config), config.deepspeed)[1]
    return faults


def _settings(config: Config) -> list[Setting]:
    """All that this program says to DeepSpeed but the batch, with what it would say under other configurations."""
    return [
        Setting("gradient_clipping", float(config.train.gradient_clipping or 0.0), "train.gradient_clipping"),
        *_reduction(config),
        *_precision(config),
        *_optimizer(config),
        *_zero(config),
        *_offload(config),
        *_activation(),
        Setting("steps_per_print", NEVER, DEFAULT),
        Setting("wall_clock_breakdown", False, DEFAULT),
        Setting("timers.throughput.enabled", False, DEFAULT),
    ]


def _reduction(config: Config) -> Iterator[Setting]:
    """One gradient, averaged over the ranks: what makes every cut of a global batch the same update."""
    precision = config.precision
    communication = precision.communication_data_type or precision.grad_accum_dtype
    yield Setting("managed_gradient_accumulation", True, FIXED)
    yield Setting("gradient_allreduce_op", "mean", FIXED)
    yield Setting("gradient_predivide_factor", 1.0, FIXED)
    yield Setting("prescale_gradients", False, FIXED)
    yield Setting("communication_data_type", communication.value, "precision.communication_data_type")
    yield Setting("data_types.grad_accum_dtype", precision.grad_accum_dtype.value, "precision.grad_accum_dtype")


def _precision(config: Config) -> Iterator[Setting]:
    precision = config.precision
    bf16, fp16 = precision.dtype is Dtype.BF16, precision.dtype is Dtype.FP16
    yield Setting("bf16.enabled", bf16, "precision.dtype")
    yield Setting("bf16.check_grad_overflow", True, FIXED, bf16)
    yield Setting("bf16.immediate_grad_update", False, FIXED, bf16)
    yield Setting("bf16.bf16_master_weights_and_grads", False, FIXED, bf16)
    yield Setting("bf16.bf16_optimizer_states", False, FIXED, bf16)
    yield Setting("fp16.enabled", fp16, "precision.dtype")
    yield Setting("fp16.auto_cast", False, FIXED, fp16)
    yield Setting("fp16.loss_scale", float(precision.loss_scale), "precision.loss_scale", fp16)
    yield Setting("fp16.initial_scale_power", precision.initial_scale_power, "precision.initial_scale_power", fp16)
    yield Setting("fp16.loss_scale_window", precision.loss_scale_window, "precision.loss_scale_window", fp16)
    yield Setting("fp16.hysteresis", precision.hysteresis, "precision.hysteresis", fp16)
    yield Setting("fp16.consecutive_hysteresis", False, FIXED, fp16)
    yield Setting("fp16.min_loss_scale", precision.min_loss_scale, "precision.min_loss_scale", fp16)
    yield Setting("fp16.fp16_master_weights_and_grads", False, FIXED, fp16)


def _optimizer(config: Config) -> Iterator[Setting]:
    """AdamW and SGD are DeepSpeed's to make; LAMB, LARS and Muon are made by the training loop and given to it."""
    optimizer = config.optimizer
    adamw, sgd = optimizer.type is OptimizerType.ADAMW, optimizer.type is OptimizerType.SGD
    named = adamw or sgd
    offloaded = config.offload.optimizer is not Device.NONE
    yield Setting("optimizer.type", "AdamW" if adamw else "SGD", "optimizer.type", named)
    yield Setting("optimizer.params.lr", float(optimizer.lr), "optimizer.lr", named)
    yield Setting("optimizer.params.weight_decay", float(optimizer.weight_decay), "optimizer.weight_decay", named)
    yield Setting("optimizer.params.betas", [float(beta) for beta in optimizer.betas], "optimizer.betas", adamw)
    yield Setting("optimizer.params.eps", float(optimizer.eps), "optimizer.eps", adamw)
    yield Setting("optimizer.params.momentum", float(optimizer.momentum), "optimizer.momentum", sgd)
    # torch's AdamW, unless its states live in host memory: then DeepSpeed's, which is made for that. DeepSpeed's own
    # for a GPU would have to be compiled there first.
    yield Setting("optimizer.params.torch_adam", not offloaded, "offload.optimizer", adamw)
    yield Setting("optimizer.params.fp32_optimizer_states", True, FIXED, adamw and offloaded)
    yield Setting("zero_allow_untested_optimizer", not adamw, "optimizer.type")
    yield Setting("zero_force_ds_cpu_optimizer", True, FIXED)


def _zero(config: Config) -> Iterator[Setting]:
    zero = config.zero
    yield Setting("zero_optimization.stage", zero.stage, "zero.stage")
    for name, stages in ZERO_STAGES.items():
        value, source = getattr(zero, name), f"zero.{name}"
        if name == "sub_group_size" and config.offload.optimizer is Device.NVME:
            # One parameter a group: DeepSpeed reads the gradient of a later one back into the wrong place.
            value, source = 1, "offload.optimizer"
        yield Setting(f"zero_optimization.{name}", value, source, zero.stage in stages)
    yield Setting("zero_optimization.compute_grad_norm", True, FIXED, zero.stage in (1, 2))


def _offload(config: Config) -> Iterator[Setting]:
    offload = config.offload
    optimizer, parameters = offload.optimizer is not Device.NONE, offload.parameters is not Device.NONE
    optimizer_nvme, parameters_nvme = offload.optimizer is Device.NVME, offload.parameters is Device.NVME
    section = "zero_optimization.offload_optimizer"
    yield Setting(f"{section}.device", offload.optimizer.value, "offload.optimizer", optimizer)
    yield Setting(f"{section}.pin_memory", offload.pin_memory, "offload.pin_memory", optimizer)
    yield Setting(f"{section}.nvme_path", offload.nvme_path, "offload.nvme_path", optimizer_nvme)
    yield Setting(f"{section}.buffer_count", OPTIMIZER_NVME_BUFFERS, DEFAULT, optimizer_nvme)
    yield Setting(f"{section}.pipeline_read", False, DEFAULT, optimizer_nvme)
    yield Setting(f"{section}.pipeline_write", False, DEFAULT, optimizer_nvme)
    section = "zero_optimization.offload_param"
    yield Setting(f"{section}.device", offload.parameters.value, "offload.parameters", parameters)
    yield Setting(f"{section}.pin_memory", offload.pin_memory, "offload.pin_memory", parameters)
    yield Setting(f"{section}.nvme_path", offload.nvme_path, "offload.nvme_path", parameters_nvme)
    yield Setting(f"{section}.buffer_count", offload.buffer_count, "offload.buffer_count", parameters_nvme)
    yield Setting(f"{section}.buffer_size", 100_000_000, DEFAULT, parameters_nvme)
    yield Setting(f"{section}.max_in_cpu", 1_000_000_000, DEFAULT, parameters_nvme)
    nvme = optimizer_nvme or parameters_nvme
    yield Setting("aio.block_size", 1_048_576, DEFAULT, nvme)
    yield Setting("aio.queue_depth", 8, DEFAULT, nvme)
    yield Setting("aio.intra_op_parallelism", 1, DEFAULT, nvme)
    yield Setting("aio.single_submit", False, DEFAULT, nvme)
    yield Setting("aio.overlap_events", True, DEFAULT, nvme)
    yield Setting("aio.use_gds", False, DEFAULT, nvme)


def _activation() -> Iterator[Setting]:
    """The model does its own checkpointing; this section is for models that call ``deepspeed.checkpointing``."""
    for name in (
        "partition_activations",
        "cpu_checkpointing",
        "contiguous_memory_optimization",
        "synchronize_checkpoint_boundary",
        "profile",
    ):
        yield Setting(f"activation_checkpointing.{name}", False, "activation.checkpointing")


def _check_zero(config: Config) -> list[str]:
    zero, faults = config.zero, []
    if zero.stage not in (0, 1, 2, 3):
        faults.append(f"zero.stage={zero.stage}: it must be 0, 1, 2 or 3")
    if zero.round_robin_gradients:
        faults.append(
            "zero.round_robin_gradients=true: DeepSpeed then loses track of which slice belongs to which parameter; "
            "set it to false"
        )
    if not zero.allgather_partitions:
        faults.append("zero.allgather_partitions=false: DeepSpeed ignores it and gathers all the same; set it to true")
    if zero.overlap_comm and not zero.contiguous_gradients:
        faults.append(
            "zero.overlap_comm=true: gradients that are not contiguous may be overwritten while they are reduced; "
            "set zero.contiguous_gradients=true or zero.overlap_comm=false"
        )
    size = zero.allgather_bucket_size
    if size < 2 or size % 2:
        nearest = sorted({max(2, size - 1), max(2, size + 1)}) if size % 2 else [2]
        faults.append(
            f"zero.allgather_bucket_size={size}: it must be even and at least 2; "
            f"nearest: {', '.join(map(str, nearest))}"
        )
    least = {"reduce_bucket_size": 1, "sub_group_size": 1}
    least |= {name: 0 for name in ZERO_STAGES if name.startswith("stage3_")}
    faults += _at_least({f"zero.{name}": (getattr(zero, name), bound) for name, bound in least.items()})
    return faults


def _check_offload(config: Config) -> list[str]:
    offload, stage, faults = config.offload, config.zero.stage, []
    optimizer, parameters = offload.optimizer, offload.parameters
    if optimizer is not Device.NONE and stage == 0:
        stages = "zero=stage3" if optimizer is Device.NVME else "zero=stage1 (or stage2, stage3)"
        faults.append(
            f"offload.optimizer={optimizer.value}: nothing is offloaded at zero.stage=0; set {stages} or offload=none"
        )
    elif optimizer is Device.NVME and stage < 3:
        faults.append(
            f"offload.optimizer=nvme: at zero.stage={stage} DeepSpeed keeps the states in host memory without a word; "
            "set zero=stage3 or offload.optimizer=cpu"
        )
    if parameters is not Device.NONE and stage < 3:
        faults.append(
            f"offload.parameters={parameters.value}: at zero.stage={stage} parameters are not partitioned and cannot "
            "be offloaded; set zero=stage3 or offload.parameters=none"
        )
    if optimizer is not Device.NONE and config.optimizer.type is not OptimizerType.ADAMW:
        faults.append(
            f"offload.optimizer={optimizer.value}: DeepSpeed's offloading is made for its own AdamW, and not tested "
            f"with optimizer.type={config.optimizer.type.value}; set optimizer=adamw or offload.optimizer=none"
        )
    if optimizer is Device.NVME and config.zero.sub_group_size not in (1, Zero().sub_group_size):
        faults.append(
            f"zero.sub_group_size={config.zero.sub_group_size}: with offload.optimizer=nvme DeepSpeed misreads the "
            "gradients of groups of several parameters, so 1 is written; leave it out or set it to 1"
        )
    if Device.NVME in (optimizer, parameters):
        if offload.nvme_path is None:
            faults.append("offload.nvme_path=null: offloading to nvme needs it; set it to a folder on a local disk")
        elif not offload.nvme_path.startswith(("/", "$")):
            faults.append(f"offload.nvme_path={offload.nvme_path}: it must be an absolute path, the same on every node")
    return faults + _at_least({"offload.buffer_count": (offload.buffer_count, 1)})


def _check_precision(config: Config) -> list[str]:
    precision, stage, faults = config.precision, config.zero.stage, []
    dtype, sums, communication = precision.dtype, precision.grad_accum_dtype, precision.communication_data_type
    if sums not in (dtype, Dtype.FP32):
        faults.append(
            f"precision.grad_accum_dtype={sums.value}: DeepSpeed sums the gradients of {dtype.value} in it at some "
            f"ZeRO stages only; set it to {' or '.join(sorted({dtype.value, 'fp32'}))}"
        )
    elif dtype is Dtype.FP16 and stage == 0:
        faults.append(
            "precision.dtype=fp16: at zero.stage=0 DeepSpeed divides the gradients by a loss scale that it never "
            "multiplied the loss by; set zero=stage1 (or higher), or precision=bf16"
        )
    elif sums is not dtype and stage == 0:
        faults.append(
            f"precision.grad_accum_dtype={sums.value}: at zero.stage=0 DeepSpeed sums the gradients of {dtype.value} "
            f"in {dtype.value} only; set zero=stage1 (or higher), or precision.grad_accum_dtype={dtype.value}"
        )
    if communication is Dtype.FP16 and dtype is not Dtype.FP16:
        faults.append(
            f"precision.communication_data_type=fp16: the gradients of a {dtype.value} run are not scaled to the range "
            "of fp16 and may overflow; set it to null, fp32 or bf16"
        )
    if not (math.isfinite(precision.loss_scale) and precision.loss_scale >= 0):
        faults.append(f"precision.loss_scale={precision.loss_scale}: it must be at least 0; 0 makes it dynamic")
    if not 0 <= precision.initial_scale_power <= 31:
        faults.append(f"precision.initial_scale_power={precision.initial_scale_power}: it must lie in [0, 31]")
    keys = ("loss_scale_window", "hysteresis", "min_loss_scale")
    return faults + _at_least({f"precision.{key}": (getattr(precision, key), 1) for key in keys})


def _check_optimizer(config: Config) -> list[str]:
    optimizer, faults = config.optimizer, []
    for key, value in (("lr", optimizer.lr), ("eps", optimizer.eps)):
        if not (math.isfinite(value) and value > 0):
            faults.append(f"optimizer.{key}={value}: it must be above 0")
    if not (math.isfinite(optimizer.weight_decay) and optimizer.weight_decay >= 0):
        faults.append(f"optimizer.weight_decay={optimizer.weight_decay}: it must be at least 0")
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        faults.append(f"optimizer.betas={decode.show(list(optimizer.betas))}: both must lie in [0, 1)")
    if not 0 <= optimizer.momentum < 1:
        faults.append(f"optimizer.momentum={optimizer.momentum}: it must lie in [0, 1)")
    if not (math.isfinite(optimizer.trust_coefficient) and optimizer.trust_coefficient > 0):
        faults.append(f"optimizer.trust_coefficient={optimizer.trust_coefficient}: it must be above 0")
    if optimizer.type is OptimizerType.MUON:
        faults += _check_muon(config)
    return faults


def _check_muon(config: Config) -> list[str]:
    zero, precision, faults = config.zero, config.precision, []
    if zero.stage == 0:
        faults.append(
            "optimizer.type=muon: at zero.stage=0 DeepSpeed's Muon moves the weights in a step without finite "
            "gradients too; set zero=stage1 (or higher)"
        )
    if zero.stage == 3 and zero.reduce_scatter:
        faults.append(
            "zero.reduce_scatter=true: DeepSpeed's Muon does without it at zero.stage=3; set it to false, or "
            "zero=stage1"
        )
    if precision.dtype is Dtype.FP16:
        faults.append(
            "precision.dtype=fp16: DeepSpeed's Muon adds gradients to its momentum that still carry the loss scale, "
            "which changes; set precision=bf16 or fp32"
        )
    elif precision.dtype is Dtype.BF16 and zero.stage == 2:
        faults.append(
            "precision.dtype=bf16: at zero.stage=2 DeepSpeed keeps the momentum of Muon in bf16; set zero=stage1 (or "
            "stage3), or precision=fp32"
        )
    elif precision.grad_accum_dtype is Dtype.BF16:
        faults.append(
            "precision.grad_accum_dtype=bf16: DeepSpeed would keep the momentum of Muon in it too; set it to fp32"
        )
    if zero.stage == 3 and precision.communication_data_type not in (None, Dtype.FP32):
        faults.append(
            f"precision.communication_data_type={precision.communication_data_type.value}: at zero.stage=3 DeepSpeed "
            "rounds the momentum of Muon to it in every step; set it to null"
        )
    if config.train.gradient_clipping:
        faults.append(
            f"train.gradient_clipping={config.train.gradient_clipping}: DeepSpeed clips what Muon has made of the "
            "gradient, whose norm depends on the shapes of the layers alone; set it to null"
        )
    return faults


def _at_least(values: Mapping[str, tuple[int, int]]) -> list[str]:
    """Fault lines of the keys whose value is below its bound."""
    return [f"{key}={value}: it must be at least {bound}" for key, (value, bound) in values.items() if value < bound]


def _merge(settings: list[Setting], raw: Mapping[str, Any]) -> tuple[list[Setting], list[str]]:
    """``settings`` with the raw keys added and the defaults among them replaced, and the faults of the raw keys."""
    if not raw:
        return settings, []
    version, kinds = _known_keys()
    owners = {setting.key: setting.source for setting in settings if setting.source != DEFAULT} | OWNERS
    merged = {setting.key: setting for setting in settings}
    faults: list[str] = []
    for key, value in _leaves(raw, kinds):
        try:
            merged[key] = Setting(key, _raw_value(key, value, kinds, owners, version), "deepspeed")
        except RequestError as error:
            faults += error.faults
    return list(merged.values()), faults


def _raw_value(key: str, value: Any, kinds: Mapping[str, str], owners: Mapping[str, str], version: str) -> Any:
    """The value of a raw key as the kind that DeepSpeed expects; raises RequestError."""
    name = f"deepspeed.{key}"
    given = f"{name}={decode.show(value)}"
    parents = [key, *_parents(key)]
    owner = next((owners[part] for part in parents if part in owners), None)
    if owner == FIXED:
        raise RequestError(f"{given}: this program's training loop decides it; leave it out")
    if owner is not None:
        raise RequestError(f"{given}: {owner} decides it; leave it out and set {owner}")
    if any(known.startswith(f"{key}.") for known in kinds):
        raise RequestError(f"{given}: it is a section of DeepSpeed's; set keys inside it")
    if key not in kinds:
        nearest = [f"deepspeed.{other}" for other in _nearest(key, kinds)]
        remedy = f"nearest: {', '.join(nearest)}" if nearest else "leave it out"
        raise RequestError(f"{given}: DeepSpeed {version} knows no such key; {remedy}")
    if _has_auto(value):
        raise RequestError(f"{given}: DeepSpeed itself knows no auto; give the value, or leave the key out")
    annotations = {"bool": bool, "int": int, "float": float, "str": str, "list": list[Any], "object": Mapping[str, Any]}
    return decode.section(annotations.get(kinds[key], Any), value, name)


def _leaves(node: Mapping[str, Any], kinds: Mapping[str, str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted raw keys and their values. Nulls are left out: they unset a key."""
    for name, value in node.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and kinds.get(key) not in ("object", "any"):
            yield from _leaves(value, kinds, f"{key}.")
        elif value is not None:
            yield key, value


def _parents(key: str) -> list[str]:
    """The sections that a dotted key lies in, the innermost first."""
    parts = key.split(".")
    return [".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1)]


def _nearest(key: str, kinds: Mapping[str, str]) -> list[str]:
    """Known keys that an unknown one may stand for: the same name in another section, or one spelt like it."""
    names = key.split(".")
    same_name = [known for known in kinds if known.rpartition(".")[2] == names[-1]]
    similar: list[str] = []
    for depth, name in enumerate(names):
        above = "".join(f"{part}." for part in names[:depth])
        siblings = {known[len(above) :].split(".")[0] for known in kinds if known.startswith(above)}
        if name not in siblings:
            similar = [above + other for other in difflib.get_close_matches(name, siblings, cutoff=0.75)]
            break
    return list(dict.fromkeys((same_name if len(same_name) <= 3 else []) + similar))


def _has_auto(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_auto, value.values()))
    if isinstance(value, list):
        return any(map(_has_auto, value))
    return isinstance(value, str) and value.lower() == "auto"


def _known_keys() -> tuple[str, dict[str, str]]:
    """The version of DeepSpeed whose keys are known, and the kind of each dotted key."""
    import json
    from pathlib import Path

    known = json.loads(Path(__file__).with_name("deepspeed_keys.json").read_text(encoding="utf-8"))
    return known["version"], known["kinds"]


def _nest(settings: Iterable[Setting]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for setting in settings:
        *sections, name = setting.key.split(".")
        node = values
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = setting.value
    return values
