"""``mode=verify`` on the ranks: the same global batches in several cuts, and whole in one process of plain torch."""

import gc
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from launcher import deepspeed_json, rundir, traffic
from launcher.batch import Cut
from launcher.errors import RunError
from launcher.genome import alphabet
from launcher.ranks import Rank
from launcher.rundir import RunDir
from launcher.schema import Config, Dtype, OptimizerType
from launcher.steps import Int64s, Steps, UInt64s
from launcher.worker import models, optimizers, states, step
from launcher.worker.data import Task
from launcher.worker.engine import Engine
from launcher.worker.objectives import Batch
from launcher.worker.states import Tensors
from launcher.worker.windows import GenomeSource, Share, Shares, Source

DTYPES = {Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16}

MAX_ATTEMPTS = 32
"""Of an update in fp16, whose loss scale has to come down first."""

SHORTEST = 8
"""Bases that are left of the shortest sequence."""


@dataclass
class Trace:
    """What a few optimizer steps did. ``moments``: the first moments after the first update."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float | None] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    moments: Tensors | None = None
    rounded_moments: dict[int, Tensors | None] = field(default_factory=dict)
    """Of one process with gradients in the precision of the run, by the size of its micro-batches."""
    before: Tensors = field(default_factory=dict)
    after: Tensors = field(default_factory=dict)
    passes: int = 1
    """In how many pieces a global batch was read, where it was to be read whole."""


class Uneven:
    """A genome whose sequences are cut to lengths of their own: only unequal parts show mistakes in weighing."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def fetch(self, indices: Int64s, keys: UInt64s) -> Batch:
        batch = self._source.fetch(indices, keys)
        codes = batch["codes"].numpy()
        length = codes.shape[1]
        for row, key in enumerate(keys):
            # Evenly spread logarithms, so that very short ones are not rare.
            kept = round(SHORTEST * (length / SHORTEST) ** np.random.Generator(np.random.Philox(int(key))).random())
            codes[row, kept:] = alphabet.PAD
            if "targets" in batch:
                batch["inputs"][row, kept:] = alphabet.PAD
                batch["targets"][row, kept:] = False
        return batch


def run(
    config: Config,
    planned: Mapping[str, Any],
    rank: Rank,
    run_dir: RunDir,
    task: Task,
    tell: Callable[[str | None], None],
) -> None:
    """Try the planned cuts that take as many ranks as there are; a single rank sees the whole batch first.

    Leaves ``verify/<ranks>.json`` in the run directory: the rows of ``verify.json``, not yet judged.
    """
    source = Uneven(task.train) if isinstance(task.train, GenomeSource) else task.train
    folder = run_dir.path / "verify"
    if rank.world_size == 1:
        tell("computing the whole batch in one process")
        folder.mkdir(exist_ok=True)
        whole_size = planned[0]["train_batch_size"]
        reference = whole(config, whole_size, task, source)
        if config.precision.dtype is not Dtype.FP32:
            for size in {values["micro_batch_size"] for values in planned}:
                pieces = Cut(whole_size, size, whole_size // size, 1)
                reference.rounded_moments[size] = rounded_moments(config, pieces, task, source)
        torch.save(asdict(reference), folder / "whole.pt")
    reference = Trace(**torch.load(folder / "whole.pt"))
    rows = []
    for values in planned:
        cut = Cut(**values)
        largest = cut.train_batch_size // reference.passes
        if cut.data_parallel_size != rank.world_size or cut.micro_batch_size > largest:
            continue
        steps = f"{cut.gradient_accumulation_steps} accumulation steps"
        tell(f"micro-batches of {cut.micro_batch_size} x {steps} x {cut.data_parallel_size} ranks")
        trace = in_pieces(config, cut, rank, task, source)
        rows.append(
            {
                "cut": values,
                "loss": trace.losses,
                "grad_norm": trace.grad_norms,
                "errors": errors(trace, reference, cut),
            }
        )
    if rank.is_first:
        text = json.dumps({"passes": reference.passes, "rows": rows})
        rundir.write_text(folder / f"{rank.world_size}.json", text)


def in_pieces(config: Config, cut: Cut, rank: Rank, task: Task, source: Source) -> Trace:
    """The steps as a run does them, with one cut; collective over its ranks."""
    values = deepspeed_json.build(config, cut).values
    model = models.build(config.model, config.seed, values, config.train.batch_norm)
    turn_off_dropout(model)
    engine = Engine(model, values, config.optimizer, traffic.sync(config))
    trace = Trace(before=states.weights(engine.deepspeed))
    shares = Shares(source, task.objective, _steps(config, cut, len(source)), cut, rank.rank)
    for number in range(config.verify.steps):
        for _ in range(MAX_ATTEMPTS):
            outcome = step.train_step(engine, task.objective, shares[number], config.verify.learning_rate)
            if outcome.update.applied or config.precision.dtype is not Dtype.FP16:
                break
        if outcome.loss is None or not outcome.update.applied:
            raise RunError(f"step {number + 1}: no update could be applied: loss or gradients are not finite")
        trace.losses.append(outcome.loss)
        trace.grad_norms.append(outcome.update.grad_norm)
        trace.learning_rates.append(engine.deepspeed.optimizer.param_groups[0]["lr"])
        if number == 0:
            trace.moments = states.first_moments(engine.deepspeed)
    trace.after = states.weights(engine.deepspeed)
    engine.deepspeed.destroy()
    del engine, model
    _release_memory()
    return trace


def whole(config: Config, size: int, task: Task, source: Source) -> Trace:
    """The same steps in one process of plain torch, without DeepSpeed, that sees each global batch at once.

    In as few passes as the memory of the accelerator allows. A run in bf16 or fp16 is held against fp32 from the same
    rounded weights: what it would be without rounding.
    """
    for passes in (passes for passes in range(1, size + 1) if size % passes == 0):
        try:
            return _whole(config, Cut(size, size // passes, passes, 1), task, source)
        except torch.OutOfMemoryError:
            if passes == size:
                raise
        _release_memory()
    raise AssertionError("a batch divides by its own size")


def _whole(config: Config, cut: Cut, task: Task, source: Source) -> Trace:
    model = _plain_model(config)
    device = next(model.parameters()).device
    optimizer = _optimizer(model, config)
    trace = Trace(before=_values(model), passes=cut.gradient_accumulation_steps)
    shares = Shares(source, task.objective, _steps(config, cut, len(source)), cut, rank=0)
    for number in range(config.verify.steps):
        optimizer.zero_grad()
        loss = _accumulate(model, task, shares[number], device)
        norm = _clip(model, config)
        optimizer.step()
        trace.losses.append(loss)
        trace.grad_norms.append(norm)
        trace.learning_rates.append(config.verify.learning_rate)
        if number == 0:
            trace.moments = _moments(model, optimizer)
    trace.after = _values(model)
    return trace


def rounded_moments(config: Config, cut: Cut, task: Task, source: Source) -> Tensors | None:
    """The first moments after one update of one process of plain torch, whose gradients are computed in the precision
    of the run and in micro-batches of its size, and then summed in fp32.

    From this a run may differ by what its sums and reductions lose, and not by what the passes themselves round.
    """
    model = _plain_model(config)
    device = next(model.parameters()).device
    optimizer = _optimizer(model, config)
    low = _plain_model(config)
    for parameter in low.parameters():
        parameter.data = parameter.data.to(DTYPES[config.precision.dtype])
        parameter.grad_dtype = torch.float32
    shares = Shares(source, task.objective, _steps(config, cut, len(source)), cut, rank=0)
    _accumulate(low, task, shares[0], device)
    for parameter, rounded in zip(model.parameters(), low.parameters(), strict=True):
        parameter.grad = rounded.grad
    _clip(model, config)
    optimizer.step()
    return _moments(model, optimizer)


def _plain_model(config: Config) -> nn.Module:
    """In fp32; the weights rounded once, as those of a run in bf16 and fp16 are at its start."""
    model = models.build(config.model, config.seed, {"zero_optimization": {"stage": 0}}, config.train.batch_norm)
    if config.precision.dtype is not Dtype.FP32:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(DTYPES[config.precision.dtype]).float()
    turn_off_dropout(model)
    return model.to(get_accelerator().current_device_name()).train()


def _accumulate(model: nn.Module, task: Task, share: Share, device: torch.device) -> float:
    """Add up the gradients of a global batch; returns its loss."""
    loss = 0.0
    for micro_batch in share.micro_batches:
        batch = step.to_device(device, micro_batch.batch)
        part = task.objective.loss(model, batch) / share.weight.weight
        part.backward()
        loss += part.item()
    return loss


def _clip(model: nn.Module, config: Config) -> float:
    """The norm of the gradients before they are clipped."""
    return nn.utils.clip_grad_norm_(model.parameters(), config.train.gradient_clipping or math.inf).item()


def _optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    chosen = replace(config.optimizer, lr=config.verify.learning_rate)
    arguments = optimizers.arguments(model, chosen)
    if "optimizer" in arguments:
        optimizer: torch.optim.Optimizer = arguments["optimizer"]
        return optimizer
    groups = arguments["model_parameters"]
    if chosen.type is OptimizerType.SGD:
        return torch.optim.SGD(groups, lr=chosen.lr, momentum=chosen.momentum)
    return torch.optim.AdamW(groups, lr=chosen.lr, betas=chosen.betas, eps=chosen.eps)


def errors(trace: Trace, reference: Trace, cut: Cut) -> dict[str, float | None]:
    """The relative errors of ``launcher.verify.QUANTITIES``."""
    changed, wanted = _difference(trace.after, trace.before), _difference(reference.after, reference.before)
    moments = reference.rounded_moments.get(cut.micro_batch_size, reference.moments)
    return {
        "loss": _largest(trace.losses, reference.losses),
        "grad_norm": _largest(trace.grad_norms, reference.grad_norms),
        "gradient": _relative(trace.moments, moments) if trace.moments and moments else None,
        "parameters": _relative(trace.after, reference.after),
        "update": _relative(changed, wanted),
        "learning_rate": _largest(trace.learning_rates, reference.learning_rates),
    }


def turn_off_dropout(model: nn.Module) -> None:
    """Dropout modules, and the rates that modules keep under a name with ``dropout`` in it, as Hugging Face's do."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _steps(config: Config, cut: Cut, num_sequences: int) -> Steps:
    """Constant batches, as many as are tried."""
    return Steps(num_sequences, cut.train_batch_size, config.accumulation.tail, config.verify.steps, config.seed)


def _largest(ours: Sequence[float | None], reference: Sequence[float | None]) -> float | None:
    pairs = [(a, b) for a, b in zip(ours, reference, strict=True) if a is not None and b is not None]
    return max((abs(a - b) / abs(b) for a, b in pairs), default=None)


def _relative(ours: Tensors, reference: Tensors) -> float:
    """|a - b| / |b| over all tensors as one vector, in double precision."""
    return _norm(_difference(ours, reference).values()) / _norm(reference.values())


def _difference(ours: Tensors, theirs: Tensors) -> Tensors:
    assert ours.keys() == theirs.keys()
    return {name: ours[name].double() - theirs[name].double() for name in ours}


def _norm(tensors: Any) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def _values(model: nn.Module) -> Tensors:
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters() if p.requires_grad}


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors | None:
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = {name: _moment(optimizer.state[parameter]) for name, parameter in named.items()}
    moments = {name: moment.cpu().clone() for name, moment in found.items() if moment is not None}
    return moments if len(moments) == len(named) else None


def _moment(state: Mapping[str, Any]) -> torch.Tensor | None:
    moments: Iterator[torch.Tensor] = (state[key] for key in states.FIRST_MOMENTS if state.get(key) is not None)
    return next(moments, None)


def _release_memory() -> None:
    gc.collect()
    get_accelerator().empty_cache()
