"""How a run goes on from where it stands: its steps and learning rates, after skipped steps and grown batches."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from launcher import noise_scale, plan
from launcher.batch import Cut
from launcher.noise_scale import Estimate
from launcher.schema import BatchScheduleType, Config
from launcher.steps import Steps


class Course:
    """What the steps so far change about those to come; the same on every rank.

    A skipped step counts neither as one of ``train.max_steps`` nor for the learning rate: the run goes on with the next
    global batch until so many updates are made, or ``max_tokens`` or ``epochs`` end it.
    """

    def __init__(self, config: Config, cut: Cut, num_sequences: int) -> None:
        """Raises RequestError where the run is too short for its learning-rate schedule."""
        self.steps = plan.steps_of(config, cut, num_sequences)
        self._rates = plan.rates_of(config, cut, self.steps)
        self._schedule = config.batch_schedule
        self._sizes = plan.levels_of(config, cut).sizes
        self._noise = noise_scale.Average(config.train.noise_scale_decay)
        self.skipped_steps = self._skipped_sequences = 0
        self._steps_above = 0

    def state(self) -> dict[str, Any]:
        """Plain values from which ``restore`` makes the same course in a new process."""
        return {
            "skipped_steps": self.skipped_steps,
            "skipped_sequences": self._skipped_sequences,
            "noise": {"signal": self._noise.signal, "noise": self._noise.noise, "steps_above": self._steps_above},
            "grown": [[segment.first_step, segment.batch_size] for segment in self.steps.later] if self.grows else [],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where another course of the same run was; its limits may be others by now."""
        self.skipped_steps, self._skipped_sequences = state["skipped_steps"], state["skipped_sequences"]
        noise = state["noise"]
        self._noise.signal, self._noise.noise = noise["signal"], noise["noise"]
        self._steps_above = noise["steps_above"]
        steps, limits = self.steps, self.steps.limits
        assert limits is not None, "plan.steps_of sets them"
        if limits.max_steps is not None:
            steps = steps.limited(replace(limits, max_steps=limits.max_steps + self.skipped_steps))
        for first_step, batch_size in state["grown"]:
            steps = steps.grown(first_step, batch_size)
        self._go_on_with(steps)

    @property
    def noise_scale(self) -> float | None:
        """In sequences."""
        return self._noise.sequences

    @property
    def grows(self) -> bool:
        """The noise scale decides over the batches to come."""
        return self._schedule.type is BatchScheduleType.NOISE_SCALE

    def learning_rate(self, step: int) -> float:
        """Of the step after those that were recorded."""
        return self._rates.of(step, self.skipped_steps, self._skipped_sequences)

    def record(self, step: int, applied: bool, noise: Estimate | None) -> None:
        """Take note of step ``step`` (from 0): whether it made an update, and what it tells about the noise scale."""
        if not applied:
            self._skip(step)
        if noise is not None:
            self._noise.add(noise)
            if self.grows:
                self._grow(step + 1)

    def _skip(self, step: int) -> None:
        self.skipped_steps += 1
        self._skipped_sequences += self.steps.sequences_before(step + 1) - self.steps.sequences_before(step)
        limits = self.steps.limits
        assert limits is not None, "plan.steps_of sets them"
        if limits.max_steps is not None:
            self._go_on_with(self.steps.limited(replace(limits, max_steps=limits.max_steps + 1)))

    def _grow(self, done: int) -> None:
        """Once the noise scale has exceeded the batch for ``patience`` steps in a row."""
        size = self.steps.batch_size(done - 1)
        larger = [other for other in self._sizes if other > size]
        above = self.noise_scale is not None and self.noise_scale > self._schedule.threshold * size
        self._steps_above = self._steps_above + 1 if above else 0
        if larger and self._steps_above >= self._schedule.patience:
            self._steps_above = 0
            grown = self.steps.grown(done, larger[0])
            if grown.num_steps > done:  # else the run ends with this step, and has reached its last learning rate
                self._go_on_with(grown)

    def _go_on_with(self, steps: Steps) -> None:
        self.steps = steps
        self._rates = replace(self._rates, steps=steps)
