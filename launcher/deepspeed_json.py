"""The DeepSpeed JSON: what ``deepspeed.initialize`` is given, as a pure function of the configuration.

Every value that matters is written out, because DeepSpeed's own defaults are not this program's (it clips gradients at
1.0 unless told otherwise). Each key remembers what set it. Combinations that DeepSpeed mistreats are refused by
``launcher.deepspeed_refusals``, raw keys are merged by ``launcher.deepspeed_raw``.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from launcher import deepspeed_refusals
from launcher.batch import Cut
from launcher.deepspeed_raw import DEFAULT, FIXED, OWNERS, Setting, merge
from launcher.errors import RequestError
from launcher.schema import Config, Device, Dtype, OptimizerType

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
    "memory_efficient_linear": {3},
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


def build(config: Config, cut: Cut) -> DeepSpeedJSON:
    """The JSON of a configuration in which ``check`` found no fault; raises RequestError for faulty raw keys."""
    settings, faults = merge(_settings(config), config.deepspeed)
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
    return deepspeed_refusals.check(config) + merge(_settings(config), config.deepspeed)[1]


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


def _nest(settings: Iterable[Setting]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for setting in settings:
        *sections, name = setting.key.split(".")
        node = values
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = setting.value
    return values
