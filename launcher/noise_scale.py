"""The simple gradient noise scale (McCandlish et al. 2018, "An Empirical Model of Large-Batch Training").

Estimated from what accumulation has in any case: the gradient after the first micro-batch of a window, on each rank,
and the accumulated one. One norm a step, and no more for longer windows.
"""

from dataclasses import dataclass

from launcher.batch import Cut
from launcher.schema import BatchScheduleType, Config, OptimizerType, Sync
from launcher.traffic import sync


def unavailable(config: Config) -> str | None:
    """Why a run cannot measure its noise scale, or None if it can wherever a window has two micro-batches or more."""
    if not config.train.noise_scale:
        return "train.noise_scale=false"
    if config.zero.stage >= 2 and sync(config) is Sync.EVERY_MICRO_BATCH:
        return (
            f"at zero.stage={config.zero.stage} no rank keeps the gradient of its own micro-batch; "
            "set accumulation.sync=once_per_window"
        )
    if config.optimizer.type is OptimizerType.MUON:
        return "DeepSpeed tells no norm of the gradients under optimizer=muon"
    return None


def check(config: Config, cut: Cut) -> list[str]:
    """Fault lines of a batch schedule that goes by a noise scale which the run cannot measure."""
    schedule = config.batch_schedule
    if schedule.type is not BatchScheduleType.NOISE_SCALE:
        return []
    if (reason := unavailable(config)) is not None:
        return [f"batch_schedule.type=noise_scale: the noise scale cannot be measured: {reason}"]
    assert schedule.initial_batch_size is not None, "checked with the schedule"
    if cut.accumulation_steps(schedule.initial_batch_size) < 2:
        smallest = 2 * cut.micro_batch_size * cut.data_parallel_size
        return [
            f"batch_schedule.initial_batch_size={schedule.initial_batch_size}: the noise scale is measured between the "
            f"micro-batches of a window, and it has only one; set at least {smallest}, or a smaller micro-batch"
        ]
    return []


@dataclass(frozen=True)
class Estimate:
    """One step's unbiased estimates: ``signal`` of |G|^2, the squared norm of the true gradient, and ``noise`` of
    tr(S), the summed variances of the gradient of a single sequence."""

    signal: float
    noise: float


def estimate(small: float, small_weight: float, large: float, weight: float, num_sequences: int) -> Estimate:
    """From the gradients of small parts of a global batch and of the whole of it.

    Sums of gradients over targets of weight w have an expected squared norm of w^2 |G|^2 + w tr(S'), where S' is the
    covariance of a single target's. So of ``small``, the mean over the parts of |sum|^2 / w, the expectation is
    small_weight |G|^2 + tr(S'), with the mean weight of the parts, and likewise for ``large`` and ``weight``, however
    unequal the parts. This is appendix A.1 of the paper for batches that are counted in targets; tr(S) follows for
    sequences of their mean weight.
    """
    signal = (large - small) / (weight - small_weight)
    return Estimate(signal, (small - small_weight * signal) * num_sequences / weight)


@dataclass
class Average:
    """The exponential moving averages of both estimates, whose ratio is the noise scale: averaged apart, because the
    ratio of noisy numbers is biased (appendix A.1)."""

    decay: float
    signal: float = 0.0
    noise: float = 0.0

    def add(self, one: Estimate) -> None:
        self.signal += (1 - self.decay) * (one.signal - self.signal)
        self.noise += (1 - self.decay) * (one.noise - self.noise)

    @property
    def sequences(self) -> float | None:
        """The noise scale; None until there is one. Both averages start at 0, which their ratio does not show."""
        return self.noise / self.signal if self.signal > 0 and self.noise > 0 else None
