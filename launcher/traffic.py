"""When gradients are communicated, what one optimizer step sends, and what that costs in memory.

What DeepSpeed 0.19.8 does at each ZeRO stage, counted on gloo ranks, is in docs/accumulation.md.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from launcher.parameters import Sizes
from launcher.schema import Config, Device, Dtype, OptimizerType, Sync

BYTES = {Dtype.FP32: 4, Dtype.BF16: 2, Dtype.FP16: 2}

FIXED_BUCKET = 500_000_000
"""Elements; DeepSpeed's own where ``zero.reduce_bucket_size`` does not count."""


def sync(config: Config) -> Sync:
    """``accumulation.sync``, or what is better at the ZeRO stage.

    Stages 0 and 1 keep a rank's gradients whole in any case, so one reduction a window costs nothing. Stages 2 and 3
    are chosen to keep only a partition of them, which needs a reduction after every micro-batch.
    """
    if config.accumulation.sync is not None:
        return config.accumulation.sync
    once = config.zero.stage < 2 or _sums_narrowly_in_host_memory(config)
    return Sync.ONCE_PER_WINDOW if once else Sync.EVERY_MICRO_BATCH


def check(config: Config) -> list[str]:
    """Fault lines of ``accumulation.sync``."""
    if config.accumulation.sync is not Sync.EVERY_MICRO_BATCH:
        return []
    if _sums_narrowly_in_host_memory(config):
        dtype = config.precision.dtype.value
        return [
            f"accumulation.sync=every_micro_batch: at zero.stage=2 with offload.optimizer=cpu DeepSpeed sums the "
            f"micro-batches of a {dtype} run in {dtype}, whatever precision.grad_accum_dtype says; set it to null or "
            "once_per_window, or zero=stage3"
        ]
    if config.zero.stage >= 2:
        return []
    return [
        f"accumulation.sync=every_micro_batch: at zero.stage={config.zero.stage} a rank keeps its gradients whole, and "
        "reducing them more often would gain nothing; set it to null or once_per_window, or zero=stage2"
    ]


def _sums_narrowly_in_host_memory(config: Config) -> bool:
    """Between the micro-batches stage 2 moves gradients to host memory, as numbers of the model's type."""
    precision = config.precision
    offloaded = config.zero.stage == 2 and config.offload.optimizer is not Device.NONE
    return offloaded and precision.grad_accum_dtype is not precision.dtype


@dataclass(frozen=True)
class Collectives:
    """Of one kind, in one optimizer step. ``bytes``: the whole tensors, added up over the calls, without padding."""

    operation: str
    calls: int | None
    """None where it depends on how DeepSpeed prefetches."""
    bytes: int

    def sent(self, ranks: int) -> int:
        """What each rank sends in a ring (Patarasuk and Yuan 2009)."""
        passes = 2 if self.operation == "all_reduce" else 1
        return passes * self.bytes * (ranks - 1) // ranks


@dataclass(frozen=True)
class Traffic:
    """What one optimizer step communicates; norms, flags and losses, a few numbers each, are left out."""

    gradients: Collectives
    parameters: Collectives | None


def per_step(config: Config, sizes: Sizes, accumulation_steps: int) -> Traffic:
    """The traffic of a step with so many micro-batches a rank."""
    zero, precision = config.zero, config.precision
    times = accumulation_steps if sync(config) is Sync.EVERY_MICRO_BATCH else 1
    reduced = precision.communication_data_type or precision.grad_accum_dtype
    bucket = zero.reduce_bucket_size if _has_buckets(config) else FIXED_BUCKET
    gradients = Collectives(
        "reduce_scatter" if zero.stage == 3 else "all_reduce",
        times * _buckets(_in_order(config, sizes), bucket),
        times * sizes.total * BYTES[reduced],
    )
    width = BYTES[precision.dtype]
    if zero.stage == 0:
        return Traffic(gradients, None)
    if zero.stage < 3:
        return Traffic(gradients, Collectives("all_gather", sizes.num_groups, sizes.total * width))
    # Small parameters stay where they are used, and are gathered once, after the update. The others are gathered for
    # every micro-batch, and again for its backward pass if a rank may not keep them all.
    small = sum(p.numel for p in sizes.parameters if p.numel <= zero.stage3_param_persistence_threshold)
    passes = 1 if sizes.total <= min(zero.stage3_max_live_parameters, zero.stage3_max_reuse_distance) else 2
    gathered = small + (sizes.total - small) * accumulation_steps * passes
    return Traffic(gradients, Collectives("all_gather", None, gathered * width))


def _has_buckets(config: Config) -> bool:
    """DeepSpeed has no buckets of its own to reduce in without ZeRO, nor at stage 1 with bf16 sums in fp32, which is
    another optimizer of its own."""
    precision = config.precision
    apart = precision.dtype is Dtype.BF16 and precision.grad_accum_dtype is Dtype.FP32
    return config.zero.stage > (1 if apart else 0)


def _in_order(config: Config, sizes: Sizes) -> list[int]:
    """Elements of the parameters as they are reduced: as the backward pass comes upon them, or by group afterwards."""
    if sync(config) is Sync.EVERY_MICRO_BATCH:
        return [parameter.numel for parameter in reversed(sizes.parameters)]
    return [parameter.numel for parameter in sorted(sizes.parameters, key=lambda parameter: parameter.group)]


def _buckets(sizes: Iterable[int], bucket: int) -> int:
    """Calls that a reduction takes: parameters are put into a bucket until one more would not fit."""
    calls, filled = 0, 0
    for size in sizes:
        if calls == 0 or filled + size > bucket:
            calls, filled = calls + 1, 0
        filled += size
    return calls


def memory(config: Config, sizes: Sizes, ranks: int) -> dict[str, int | None]:
    """The most bytes that a rank holds besides the passes themselves, by kind, on the device or where it is offloaded.

    What depends on the run itself, the activations, is None.
    """
    stage, precision, total = config.zero.stage, config.precision, sizes.total
    width, summed = BYTES[precision.dtype], BYTES[precision.grad_accum_dtype]
    part = -(-total // ranks) if stage > 0 else total
    # Without ZeRO the weights of fp32 are their own masters; with it DeepSpeed keeps the partition a second time.
    masters = 0 if stage == 0 and precision.dtype is Dtype.FP32 else 4 * part
    return {
        "parameters": width * (part if stage == 3 else total),
        "master_weights": masters,
        "gradients": _gradients(config, total, part),
        "optimizer_states": 4 * part * _moments(config),
        "reduction_buckets": _buckets_held(config) * config.zero.reduce_bucket_size * (summed if stage < 3 else width),
        "offload_buffers": width * _numbers_to_offload(config, sizes, part),
        "activations": None,
    }


def _gradients(config: Config, total: int, part: int) -> int:
    """Bytes of the rank's own, of its partition of everyone's, and of the copy that an offloaded optimizer reads."""
    stage, precision = config.zero.stage, config.precision
    width, summed = BYTES[precision.dtype], BYTES[precision.grad_accum_dtype]
    offloaded = config.offload.optimizer is not Device.NONE
    own = summed * total if sync(config) is Sync.ONCE_PER_WINDOW else 0
    if stage == 3 or (stage == 2 and not offloaded):
        shared = summed * part
    else:  # with offloading stage 2 sums up in host memory, where it has to
        shared = width * part if stage == 2 and not own else 0
    return own + shared + (4 * part if offloaded else 0)


def _numbers_to_offload(config: Config, sizes: Sizes, part: int) -> int:
    """Stages 1 and 2 copy weights through a partition, and gradients through two buffers for the largest parameter."""
    if config.offload.optimizer is Device.NONE or config.zero.stage == 3:
        return 0
    return part + 2 * max(parameter.numel for parameter in sizes.parameters)


def _buckets_held(config: Config) -> int:
    """Buffers for ``zero.reduce_bucket_size`` elements: one to copy gradients together in, and at stages 1 and 2 with
    overlap_comm another one, that is filled while the first is sent."""
    if not _has_buckets(config):
        return 0
    zero = config.zero
    return int(zero.contiguous_gradients) + int(zero.overlap_comm and zero.stage < 3)


def _moments(config: Config) -> int:
    """Numbers that the optimizer keeps beside each weight; of Muon those of its larger part."""
    if config.optimizer.type in (OptimizerType.ADAMW, OptimizerType.LAMB):
        return 2
    return 1 if config.optimizer.momentum > 0 else 0
