"""What DeepSpeed would reject on every rank, or silently do otherwise, refused before anything starts, with the remedy.

What was measured about each combination (DeepSpeed 0.19.8) is in docs/deepspeed_json.md.
"""

import math
from collections.abc import Mapping
from dataclasses import fields

from launcher import nodes
from launcher.schema import Config, Device, Dtype, OptimizerType, Zero


def check(config: Config) -> list[str]:
    """Fault lines: the key, the value, the rule, the remedy. Reads no disk."""
    return _check_zero(config) + _check_offload(config) + _check_precision(config) + _check_optimizer(config)


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
    least |= {field.name: 0 for field in fields(Zero) if field.name.startswith("stage3_")}
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
        faults.append(f"optimizer.betas={nodes.show(list(optimizer.betas))}: both must lie in [0, 1)")
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
