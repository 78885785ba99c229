"""What a rank holds between passes, by kind, counted by hand for a model of 1,000 parameters in one layer.

The traffic is counted on real ranks: tests/worker/test_traffic.py.
"""

from dataclasses import replace

import pytest

from launcher import traffic
from launcher.parameters import Parameter, Sizes
from launcher.schema import (
    Accumulation,
    Config,
    Device,
    Dtype,
    Offload,
    Optimizer,
    OptimizerType,
    Precision,
    Sync,
)

SIZES = Sizes((Parameter(1000, 0),))
FP32, BF16 = Config(), Config(precision=Precision(dtype=Dtype.BF16))
BUCKET = 700


def at(stage: int, config: Config = FP32, **zero: object) -> Config:
    return replace(config, zero=replace(config.zero, stage=stage, reduce_bucket_size=BUCKET, **zero))


def once(config: Config) -> Config:
    return replace(config, accumulation=Accumulation(sync=Sync.ONCE_PER_WINDOW))


@pytest.mark.parametrize(
    ("config", "parameters", "masters", "gradients", "states", "buckets"),
    [
        # On four ranks; 4 bytes a number in fp32 and 2 in bf16. AdamW keeps two moments of each weight.
        (at(0), 4000, 0, 4000, 8000, 0),
        (at(1), 4000, 1000, 4000, 2000, 4 * BUCKET),
        (at(2), 4000, 1000, 1000, 2000, 4 * BUCKET),
        (once(at(2)), 4000, 1000, 5000, 2000, 4 * BUCKET),
        (at(3), 1000, 1000, 1000, 2000, 4 * BUCKET),
        (once(at(3)), 1000, 1000, 5000, 2000, 4 * BUCKET),
        # bf16 passes, fp32 sums; at stage 1 an optimizer without buckets.
        (at(1, BF16), 2000, 1000, 4000, 2000, 0),
        (at(2, BF16), 2000, 1000, 1000, 2000, 4 * BUCKET),
        (at(3, BF16), 500, 1000, 1000, 2000, 2 * BUCKET),
        # One bucket is filled while the other is sent.
        (at(1, overlap_comm=True), 4000, 1000, 4000, 2000, 2 * 4 * BUCKET),
        (at(2, overlap_comm=True), 4000, 1000, 1000, 2000, 2 * 4 * BUCKET),
        (at(3, overlap_comm=True), 1000, 1000, 1000, 2000, 4 * BUCKET),
        (at(2, contiguous_gradients=False), 4000, 1000, 1000, 2000, 0),
        (at(3, contiguous_gradients=False), 1000, 1000, 1000, 2000, 0),
        (at(1, Config(optimizer=Optimizer(OptimizerType.SGD, momentum=0.0))), 4000, 1000, 4000, 0, 4 * BUCKET),
        (at(1, Config(optimizer=Optimizer(OptimizerType.LARS))), 4000, 1000, 4000, 1000, 4 * BUCKET),
    ],
)
def test_what_a_rank_holds_by_kind(
    config: Config, parameters: int, masters: int, gradients: int, states: int, buckets: int
) -> None:
    assert traffic.memory(config, SIZES, 4) == {
        "parameters": parameters,
        "master_weights": masters,
        "gradients": gradients,
        "optimizer_states": states,
        "reduction_buckets": buckets,
        "offload_buffers": 0,
        "activations": None,
    }


def test_an_offloaded_optimizer_of_stage_2_sums_16_bit_gradients_once_a_window() -> None:
    """In host memory DeepSpeed keeps the sum of the micro-batches in the type of the model."""
    offloaded = replace(at(2, BF16), offload=Offload(Device.CPU))
    assert traffic.sync(offloaded) is Sync.ONCE_PER_WINDOW
    assert traffic.sync(replace(offloaded, zero=replace(offloaded.zero, stage=3))) is Sync.EVERY_MICRO_BATCH
    (fault,) = traffic.check(replace(offloaded, accumulation=Accumulation(sync=Sync.EVERY_MICRO_BATCH)))
    assert fault.startswith("accumulation.sync=every_micro_batch: at zero.stage=2 with offload.optimizer=cpu")
    narrow = replace(offloaded, precision=Precision(dtype=Dtype.BF16, grad_accum_dtype=Dtype.BF16))
    assert traffic.sync(narrow) is Sync.EVERY_MICRO_BATCH


@pytest.mark.parametrize(
    ("config", "gradients", "buffers"),
    [
        # The optimizer reads 1,000 bytes a rank. Stage 2 sums up 1,000 more in host memory, unless a rank keeps all.
        (at(1), 5000, 1000 + 2 * 4000),
        (at(2), 2000, 1000 + 2 * 4000),
        (once(at(2)), 5000, 1000 + 2 * 4000),
        (at(3), 2000, 0),
        (once(at(3)), 6000, 0),
        (at(2, BF16), 5000, 500 + 2 * 2000),
        (at(3, BF16), 2000, 0),
    ],
)
def test_what_an_offloaded_optimizer_adds(config: Config, gradients: int, buffers: int) -> None:
    found = traffic.memory(replace(config, offload=Offload(Device.CPU)), SIZES, 4)
    assert (found["gradients"], found["offload_buffers"]) == (gradients, buffers)
