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
    Dtype,
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
        "activations": None,
    }
