"""The training loop of one rank, and what it tells the world."""

import json
import logging
import math
import resource
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from launcher import costs, decode, noise_scale, resume, traffic
from launcher.batch import Cut
from launcher.course import Course
from launcher.errors import OutOfMemoryError, RequestError, RunError
from launcher.noise_scale import Estimate
from launcher.ranks import Rank
from launcher.rundir import RunDir
from launcher.schema import Checkpointing, Config, Tail
from launcher.steps import Steps
from launcher.worker import checkpoint, distributed, models, step, stop
from launcher.worker.checkpoint import Saver
from launcher.worker.data import Task
from launcher.worker.engine import Engine
from launcher.worker.metrics import Guarded, MetricsFile, TensorBoard, WandB, now
from launcher.worker.watchdog import Watchdog
from launcher.worker.windows import Share, Shares, read_ahead

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
"""Least time between two writes of status.json while training goes on."""


class Trainer:
    """One rank of one run."""

    def __init__(
        self,
        config: Config,
        cut: Cut,
        values: dict[str, Any],
        rank: Rank,
        run_dir: RunDir,
        task: Task,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.config, self.cut, self.rank, self.run_dir, self.task = config, cut, rank, run_dir, task
        self.watchdog = watchdog or Watchdog(None, log.error)
        self.course = Course(config, cut, len(task.train))
        model = models.build(config.model, config.seed, values, config.train.batch_norm)
        if config.activation.checkpointing is Checkpointing.FULL:
            models.checkpoint_activations(model)
        self.engine = Engine(model, values, config.optimizer, traffic.sync(config))
        if rank.is_first:
            _complete_plan(run_dir, config, cut, model)
        self.measures_noise = noise_scale.unavailable(config) is None
        self.tokens_seen = 0
        self.num_updates = self.skips_in_a_row = 0
        self.evaluation: dict[str, Any] = {}
        """The last one, and at which step it was."""
        self.done = self.saved = 0
        """Steps that are done, and that are in a checkpoint."""
        self.stopped_by: str | None = None
        """A signal, and the rank that it came to; the same on all ranks."""
        self.others_write = False
        files = {path.name: path.read_text(encoding="utf-8") for path in (run_dir.config, run_dir.plan)}
        keep = config.checkpoint
        self.saver = Saver(self.engine, run_dir.checkpoints, files, keep.keep, keep.keep_every)
        self.origin: str | None = None
        """The checkpoint that the run goes on from, and why not from a newer one."""
        self._resume()
        self.attempt = run_dir.read_status().get("attempt", 1)
        self.trackers = _start_trackers(config, values, run_dir) if rank.is_first else []
        if rank.is_first and self.origin:
            facts = {"kind": "resume", "attempt": self.attempt, "step": self.done, "origin": self.origin}
            self.trackers[0].log({**facts, "time": now()})
        self.last_heartbeat = 0.0
        self.longest_step_s = 0.0

    def train(self) -> dict[str, Any] | None:
        """All optimizer steps that are left, the evaluations between and after them, and the checkpoints.

        Returns the summary; or None where a signal has stopped the run, which is saved then.
        """
        # What the attempt before was stopped in.
        goes_on = self.done == 0 or self._after_step()
        for number, share, data_time_s in self._timed_shares() if goes_on else ():
            self._step(number, share, data_time_s)
            self.done = number + 1
            if not self._after_step():
                goes_on = False
                break
        summary = {"num_steps": self.course.steps.num_steps, **self.evaluation} if goes_on else {}
        summary.pop("step", None)
        if self.rank.is_first and goes_on:
            summary |= self.task.baselines()
        for tracker in self.trackers:
            tracker.finish(summary)
        return summary if goes_on else None

    def _after_step(self) -> bool:
        """The evaluation and the checkpoint, if they are due. Returns False where the run has to stop, and is saved."""
        done, last = self.done, self.done >= self.course.steps.num_steps
        self.watchdog.beat(f"what follows step {done}")
        due = last or _is_due(done, self.config.train.eval_every)
        if self.task.validation and due and self.evaluation.get("step") != done and self.stopped_by is None:
            self._evaluate()
            if self.stopped_by is None:
                self._is_to_stop()
        stops = self.stopped_by is not None and not self._is_complete
        if self.saved != done and (last or stops or _is_due(done, self.config.checkpoint.every)):
            self._save(wait=last or stops)
        elif self.saver.pending and not self.others_write:
            self._finish_save()
        self._heartbeat()
        return not stops

    @property
    def _is_complete(self) -> bool:
        """All steps are done, and what they have come to is evaluated."""
        evaluated = not self.task.validation or self.evaluation.get("step") == self.done
        return self.done >= self.course.steps.num_steps and evaluated

    def _timed_shares(self) -> Iterator[tuple[int, Share, float]]:
        """This rank's share of every step, and the seconds that training waited for it."""
        number = self.done
        while number < self.course.steps.num_steps:
            steps = self.course.steps
            source = Shares(self.task.train, self.task.objective, steps, self.cut, self.rank.rank)
            shares = iter(read_ahead(source, range(number, steps.num_steps), self.config.data.num_workers))
            cut = self.cut
            # What was read ahead holds until the course of the run changes, or its cut.
            while number < steps.num_steps and steps is self.course.steps and cut is self.cut:
                start = time.perf_counter()
                share = next(shares)
                yield number, share, time.perf_counter() - start
                number += 1

    def _step(self, number: int, share: Share, data_time_s: float) -> None:
        self.watchdog.beat(f"step {number + 1}")
        start = time.perf_counter()
        steps, learning_rate = self.course.steps, self.course.learning_rate(number)
        share, outcome = self._train_step(number, share, learning_rate)
        step_time_s = time.perf_counter() - start + data_time_s
        self.longest_step_s = max(self.longest_step_s, step_time_s)
        peak_memory, stops, writes = distributed.max_over_ranks(
            [_peak_memory_bytes(self.engine.device), stop.wanted() is not None, self.saver.busy], self.engine.device
        )
        self.others_write = writes > 0
        if stops:
            self.stopped_by = distributed.agreed_signal()
        self.tokens_seen += outcome.weight.tokens
        self.course.record(number, outcome.update.applied, self._agreed(outcome.noise))
        self._log(
            {
                "kind": "train",
                "attempt": self.attempt,
                "step": number + 1,
                "loss": outcome.loss,
                "bits_per_base": self._bits(outcome.loss),
                "lr": learning_rate,
                "grad_norm": outcome.update.grad_norm,
                "grad_norm_clipped": outcome.update.grad_norm_clipped,
                "tokens": outcome.weight.tokens,
                "padded_tokens": outcome.weight.padded_tokens,
                "tokens_seen": self.tokens_seen,
                "sequences_seen": steps.sequences_before(number + 1),
                "gradient_accumulation_steps": len(share.micro_batches),
                "train_batch_size": share.num_sequences,
                "micro_batch_size": self.cut.micro_batch_size,
                "tokens_per_s": outcome.weight.tokens / step_time_s,
                "step_time_s": step_time_s,
                "data_time_s": data_time_s,
                "peak_memory_bytes": int(peak_memory),
                "mfu": None,
                "skipped": not outcome.update.applied,
                "noise_scale": self.course.noise_scale if outcome.noise is not None else None,
                "time": now(),
            }
        )
        self.num_updates += outcome.update.applied
        self.skips_in_a_row = 0 if outcome.update.applied else self.skips_in_a_row + 1
        limit = self.config.train.max_consecutive_skips
        learned_nothing = self.num_updates == 0 and number + 1 == self.course.steps.num_steps
        if self.skips_in_a_row >= limit or learned_nothing:
            reason = "loss or gradients are not finite" if outcome.weight.weight else "the global batch has no target"
            whole_run = "none in the whole run" if learned_nothing else f"train.max_consecutive_skips={limit}"
            raise RunError(
                f"step {number + 1}: no update could be applied, {reason} ({self.skips_in_a_row} in a row; {whole_run})"
            )

    def _train_step(self, number: int, share: Share, learning_rate: float) -> tuple[Share, step.Outcome]:
        """One update. Where a rank is out of memory, the same global batch again in smaller pieces on all ranks."""
        while True:
            try:
                return share, step.train_step(
                    self.engine, self.task.objective, share, learning_rate, self.measures_noise
                )
            except OutOfMemoryError as error:
                finer = self.cut.finer()
                if finer is None:
                    raise
                reason = " ".join(str(error).split())[:200]
            self._cut_finer(finer, f"step {number + 1}: {reason}")
            share = Shares(self.task.train, self.task.objective, self.course.steps, finer, self.rank.rank)[number]

    def _cut_finer(self, finer: Cut, reason: str) -> None:
        distributed.empty_cache(self.engine.device)
        self.cut = finer
        self.engine.set_accumulation_steps(finer.gradient_accumulation_steps)
        how = f"micro-batches of {finer.micro_batch_size} x {finer.gradient_accumulation_steps} accumulation steps"
        log.warning("%s; the run goes on with %s", reason, how)
        if self.rank.is_first:
            self.run_dir.write_status(micro_batch_size=finer.micro_batch_size, activity=f"out of memory: {how}")

    def _agreed(self, noise: Estimate | None) -> Estimate | None:
        """Rank 0's, where it decides over the batches to come: a last digit that differs must not part the ranks."""
        if noise is None or not self.course.grows:
            return noise
        values = [noise.signal, noise.noise] if self.rank.is_first else [0.0, 0.0]
        return Estimate(*distributed.sum_over_ranks(values, self.engine.device))

    def _is_to_stop(self) -> bool:
        """Between the batches of an evaluation; collective."""
        self.watchdog.beat(f"the evaluation after step {self.done}")
        (stops,) = distributed.max_over_ranks([stop.wanted() is not None], self.engine.device)
        if stops:
            self.stopped_by = distributed.agreed_signal()
        return bool(stops)

    def _evaluate(self) -> None:
        assert self.task.validation is not None
        start = time.perf_counter()
        size, limit = len(self.task.validation), self.config.train.eval_batches
        batches = -(-size // self.cut.train_batch_size)
        batches = batches if limit is None else min(batches, limit)
        steps = Steps(size, self.cut.train_batch_size, Tail.FLUSH, batches, self.config.seed)
        shares = Shares(self.task.validation, self.task.objective, steps, self.cut, self.rank.rank)
        read = read_ahead(shares, range(batches), self.config.data.num_workers)
        found = step.evaluate(self.engine, self.task.objective, read, self._is_to_stop)
        if found is None:
            return
        loss, weight = found
        values = {"eval_loss": loss, "eval_bits_per_base": self._bits(loss)}
        self._log(
            {
                "kind": "eval",
                "attempt": self.attempt,
                "step": self.done,
                **values,
                "tokens": weight.tokens,
                "padded_tokens": weight.padded_tokens,
                "step_time_s": time.perf_counter() - start,
                "time": now(),
            }
        )
        self.evaluation = {"step": self.done, **values}

    def _save(self, wait: bool) -> None:
        """Begin a checkpoint of the steps that are done, and with ``wait`` finish it."""
        self.watchdog.beat(f"saving step {self.done}")
        self._tell(f"saving step {self.done}")
        if self.saver.pending:
            self._finish_save()
        state = {
            "tokens_seen": self.tokens_seen,
            "sequences_seen": self.course.steps.sequences_before(self.done),
            "num_updates": self.num_updates,
            "skips_in_a_row": self.skips_in_a_row,
            "evaluation": self.evaluation,
            "course": self.course.state(),
            "is_last": self._is_complete,
        }
        self.saver.begin(self.done, state)
        self.saved = self.done
        if wait or not self.config.checkpoint.asynchronous:
            fault = self._finish_save()
            if fault is not None and wait:
                raise RunError(f"step {self.done} could not be saved: {fault}")
        self._tell(None)

    def _finish_save(self) -> str | None:
        """Returns why there is no checkpoint, if so; a run goes on without one that is not its last."""
        saved = self.saver.finish()
        if self.rank.is_first:
            values = {"kind": "checkpoint", "attempt": self.attempt, **asdict(saved), "time": now()}
            self.trackers[0].log(values)
            if saved.fault is None:
                lead_s = self.longest_step_s + saved.total_s
                self.run_dir.write_status(checkpoint=saved.step, signal_lead_s=round(lead_s, 3))
        return saved.fault

    def _resume(self) -> None:
        """Go on from the newest whole checkpoint, where the configuration says so."""
        wish = self.config.checkpoint.resume
        if wish == resume.NEVER:
            return
        found, notes = checkpoint.find(self.run_dir.checkpoints)
        if wish not in (resume.AUTO, resume.REQUIRED) and found is None and not notes:
            # A path is where a run begins; once it has checkpoints of its own it goes on from those.
            found = checkpoint.read(Path(wish))
        if found is None:
            if notes or wish == resume.REQUIRED:
                raise RequestError(f"{resume.WISH}={wish}: {resume.none_in(self.run_dir.checkpoints, notes)}")
            return
        self.origin = "; ".join([f"going on from {found.path}, after step {found.step}", *notes])
        checkpoint.load(self.engine, found)
        state = found.state
        self.course.restore(state["course"])
        self.done = found.step
        self.tokens_seen = state["tokens_seen"]
        self.num_updates, self.skips_in_a_row = state["num_updates"], state["skips_in_a_row"]
        self.evaluation = state["evaluation"]
        # One that was stopped in its last evaluation is saved again when it has been made up for.
        self.saved = found.step if state["is_last"] or self.done < self.course.steps.num_steps else 0

    def _bits(self, loss: float | None) -> float | None:
        return loss / math.log(2) if loss is not None and self.task.predicts_bases else None

    def _log(self, values: dict[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.log(values)

    def _tell(self, activity: str | None) -> None:
        if self.rank.is_first:
            self.run_dir.write_status(activity=activity)

    def _heartbeat(self) -> None:
        is_due = time.monotonic() - self.last_heartbeat > HEARTBEAT_S
        ends = self.done == self.course.steps.num_steps or self.stopped_by is not None
        if self.rank.is_first and (is_due or ends):
            self.last_heartbeat = time.monotonic()
            self.run_dir.write_status(step=self.done, num_steps=self.course.steps.num_steps, activity=None)


def _complete_plan(run_dir: RunDir, config: Config, cut: Cut, model: nn.Module) -> None:
    """Write what depends on the size of the model into ``plan.json``, where the launcher could not tell it."""
    planned = json.loads(run_dir.plan.read_text())
    if planned["num_parameters"] is None:
        planned |= costs.facts(config, cut, models.sizes(model))
        run_dir.write_files({run_dir.plan.name: json.dumps(planned, indent=2) + "\n"})


def _start_trackers(config: Config, values: dict[str, Any], run_dir: RunDir) -> list[Any]:
    """The metrics file first: what it cannot write ends the run; the others may fail without it."""
    trackers: list[Any] = [MetricsFile(run_dir.metrics)]
    if config.logging.tensorboard:
        trackers.append(Guarded("TensorBoard", lambda: TensorBoard(run_dir.tracker / "tensorboard")))
    if config.logging.wandb:
        attached = {"config": decode.encode(config), "deepspeed": values, "plan": json.loads(run_dir.plan.read_text())}
        trackers.append(Guarded("Weights & Biases", lambda: WandB(config, run_dir, attached)))
    return trackers


def _is_due(done: int, every: int | None) -> bool:
    return every is not None and done % every == 0


def _peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this rank has held: of the accelerator, or resident on a CPU."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB
    return torch.get_device_module(device).max_memory_allocated(device)
