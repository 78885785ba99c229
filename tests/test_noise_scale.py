"""The estimators of the gradient noise scale against gradients whose mean and variances are known."""

from dataclasses import replace

import numpy as np
import pytest

from launcher.noise_scale import Average, Estimate, estimate, unavailable
from launcher.schema import Accumulation, Config, Optimizer, OptimizerType, Sync, Train, Zero

DIMENSIONS, DRAWS = 30, 20_000
MEAN = np.linspace(-0.5, 1.0, DIMENSIONS)
DEVIATIONS = np.linspace(0.1, 3.0, DIMENSIONS)
"""Of the gradient of a single target."""

SIGNAL, NOISE = float((MEAN**2).sum()), float((DEVIATIONS**2).sum())

EQUAL = [[4.0, 4.0, 4.0, 4.0]]
CUTS = {
    "one rank, equal parts": EQUAL,
    "two ranks, equal parts": EQUAL * 2,
    "one rank, unequal parts": [[12.0, 8000.0, 400.0, 8.0]],
    "two ranks, unequal parts": [[12.0, 400.0], [800.0, 8000.0]],
    "a large part first": [[300.0, 12.0, 100.0, 8.0]],
    "a small part first": [[1.0, 500.0], [2.0, 500.0], [3.0, 500.0]],
    "fractions of targets": [[0.1, 2.3, 0.7], [1.9, 0.2, 5.0]],
    "a first part without a target": [[0.0, 9.0], [5.0, 7.0], [2.0, 0.0]],
}
"""Weights, by rank and micro-batch."""


def sums(weight: float, generator: np.random.Generator) -> np.ndarray:
    """Sums of gradients over targets of a weight, (draws, dimensions)."""
    noise = generator.standard_normal((DRAWS, DIMENSIONS))
    return weight * MEAN + np.sqrt(weight) * DEVIATIONS * noise


@pytest.mark.parametrize("cut", CUTS)
def test_both_estimates_are_unbiased_however_unequal_the_parts(cut: str) -> None:
    generator = np.random.default_rng(1)
    weights, num_sequences = CUTS[cut], 7
    total = sum(map(sum, weights))
    small, first_weights, whole = [], [], np.zeros((DRAWS, DIMENSIONS))
    for of_rank in weights:
        parts = [sums(weight, generator) for weight in of_rank]
        whole += sum(parts)
        if of_rank[0] > 0:
            first_weights.append(of_rank[0])
            small.append((parts[0] ** 2).sum(1) / of_rank[0])
    large = (whole**2).sum(1) / total
    found = estimate(np.mean(small, 0), float(np.mean(first_weights)), large, total, num_sequences)  # type: ignore[arg-type]
    # Of a sequence of mean weight; the gradient is that of the mean over its targets.
    for values, truth in ((found.signal, SIGNAL), (found.noise, NOISE * num_sequences / total)):
        error = np.std(values) / np.sqrt(DRAWS)
        assert error < 0.05 * truth, "the check sees little otherwise"
        assert abs(np.mean(values) - truth) < 4 * error


def test_equal_parts_give_the_estimators_of_the_paper() -> None:
    """McCandlish et al. 2018, appendix A.1, for gradients of 3 and of 12 sequences."""
    small, large = 7.5, 4.25  # |G_small|^2 and |G_big|^2
    found = estimate(small * 3, 3.0, large * 12, 12.0, 12)
    assert found.signal == pytest.approx((12 * large - 3 * small) / (12 - 3), rel=1e-12)
    assert found.noise == pytest.approx((small - large) / (1 / 3 - 1 / 12), rel=1e-12)


def test_the_noise_of_a_sequence_falls_with_its_targets() -> None:
    """12 targets as 12, 6 or 3 sequences: a sequence of 2 targets has half the variance, so half as many do."""
    scales = [
        estimate(22.5, 3.0, 51.0, 12.0, num).noise / estimate(22.5, 3.0, 51.0, 12.0, num).signal for num in (12, 6, 3)
    ]
    assert scales == pytest.approx([scales[0], scales[0] / 2, scales[0] / 4], rel=1e-12)


def test_the_noise_scale_is_the_ratio_of_both_averages() -> None:
    """0.1 of each new estimate, 0.9 of what was; that averages begin at 0 does not show in the ratio."""
    average = Average(0.9)
    average.add(Estimate(2.0, 10.0))
    assert average.sequences == pytest.approx(5.0, rel=1e-12)
    average.add(Estimate(1.0, 20.0))
    assert average.signal == pytest.approx(0.9 * 0.2 + 0.1, rel=1e-12)
    assert average.noise == pytest.approx(0.9 * 1.0 + 2.0, rel=1e-12)
    assert average.sequences == pytest.approx(2.9 / 0.28, rel=1e-12), "the mean of 5 and 20 would be another number"
    for _ in range(500):
        average.add(Estimate(0.5, 4.0))
    assert average.sequences == pytest.approx(8.0, rel=1e-9)


def test_there_is_no_noise_scale_until_both_averages_are_positive() -> None:
    average = Average(0.5)
    assert average.sequences is None
    average.add(Estimate(-1.0, 10.0))
    assert average.sequences is None
    average.add(Estimate(3.0, -30.0))
    assert (average.signal, average.noise) == (1.25, -12.5)
    assert average.sequences is None
    average.add(Estimate(1.25, 32.5))
    assert average.sequences == 10.0 / 1.25


ONCE = Accumulation(sync=Sync.ONCE_PER_WINDOW)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_noise_scale_needs_the_gradient_of_a_ranks_own_micro_batch(stage: int) -> None:
    config = Config(zero=Zero(stage=stage))
    assert unavailable(replace(config, accumulation=ONCE)) is None
    told = unavailable(config)
    assert told is None if stage < 2 else f"zero.stage={stage}" in told and "sync=once_per_window" in told
    assert "noise_scale=false" in unavailable(replace(config, accumulation=ONCE, train=Train(noise_scale=False)))
    muon = replace(config, accumulation=ONCE, optimizer=Optimizer(OptimizerType.MUON))
    assert "muon" in unavailable(muon)
