"""``mode=verify`` on the ranks: the same global batches in several cuts, and whole in one process of plain torch."""

import gc
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from torch import nn

from launcher import deepspeed_json, rundir, steps, traffic
from launcher.batch import Cut
from launcher.batch_schedule import Levels
from launcher.errors import RequestError, RunError
from launcher.genome import alphabet
from launcher.ranks import Rank
from launcher.rundir import RunDir
from launcher.schema import Config, Dtype, OptimizerType, Train
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

DRAWS = 8
"""Passes over one micro-batch, to see whether the model draws random numbers."""

SHORTEST = 8
"""Bases that are left of the shortest sequence."""


@dataclass
class Trace:
    """What a few optimizer steps did. ``moments``: the first moments after the first update."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float | None] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    moments: Tensors | None = None
    before: Tensors = field(default_factory=dict)
    after: Tensors = field(default_factory=dict)
    micro_batch_size: int = 0
    """Sequences that were read at once."""


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
        torch.save([asdict(one) for one in references(config, planned, task, source)], folder / "whole.pt")
    found = {one.micro_batch_size: one for one in (Trace(**values) for values in torch.load(folder / "whole.pt"))}
    largest = max(found)
    rows = []
    for values in planned:
        cut = Cut(**values)
        if cut.data_parallel_size != rank.world_size or cut.micro_batch_size > largest:
            continue
        accumulation = f"{cut.gradient_accumulation_steps} accumulation steps"
        tell(f"micro-batches of {cut.micro_batch_size} x {accumulation} x {cut.data_parallel_size} ranks")
        trace = in_pieces(config, cut, rank, task, source)
        rows.append(
            {
                "cut": values,
                "loss": trace.losses,
                "grad_norm": trace.grad_norms,
                "errors": errors(trace, found.get(cut.micro_batch_size, found[largest])),
            }
        )
    if rank.is_first:
        text = json.dumps({"passes": planned[0]["train_batch_size"] // largest, "rows": rows})
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
        if outcome.weight.weight == 0:
            raise RequestError(_without_target(number))
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


def references(config: Config, planned: Sequence[Mapping[str, Any]], task: Task, source: Source) -> list[Trace]:
    """What the cuts are held against: the same steps in one process of plain torch, without DeepSpeed.

    In fp32 it sees each global batch at once, or in as few passes as the memory of the accelerator allows. In bf16 and
    fp16 the size of a pass changes what the pass itself rounds. There a cut is held against the same passes, one
    process for each size of micro-batch, whose gradients are summed in fp32: what may differ is what a run loses in
    its sums and reductions.

    Raises RequestError for a model or data that no two cuts can agree on.
    """
    batch_size = planned[0]["train_batch_size"]
    size = min(values["micro_batch_size"] for values in planned)
    _refuse_randomness(config, Cut(batch_size, size, batch_size // size, 1), task, source)
    if config.precision.dtype is not Dtype.FP32:
        sizes = sorted({values["micro_batch_size"] for values in planned})
        found = [_by_one_process(config, Cut(batch_size, size, batch_size // size, 1), task, source) for size in sizes]
    else:
        found = [_whole(config, batch_size, task, source)]
    for trace in found:
        if not _norm(_difference(trace.after, trace.before).values()):
            raise RequestError(
                f"verify.learning_rate={config.verify.learning_rate:g}: the steps do not move the weights, so that "
                "nothing can be told from them; raise it, or take a model whose gradients are not 0"
            )
    return found


def _whole(config: Config, batch_size: int, task: Task, source: Source) -> Trace:
    for passes in (passes for passes in range(1, batch_size + 1) if batch_size % passes == 0):
        try:
            return _by_one_process(config, Cut(batch_size, batch_size // passes, passes, 1), task, source)
        except torch.OutOfMemoryError:
            if passes == batch_size:
                raise
        _release_memory()
    raise AssertionError("a batch divides by its own size")


def _by_one_process(config: Config, cut: Cut, task: Task, source: Source) -> Trace:
    """Master weights in fp32, which passes in bf16 or fp16 see rounded, as in mixed-precision training (Micikevicius et
    al. 2018)."""
    masters = _plain_model(config)
    model = masters if config.precision.dtype is Dtype.FP32 else _plain_model(config)
    optimizer = _optimizer(masters, config)
    trace = Trace(before=_values(masters), micro_batch_size=cut.micro_batch_size)
    shares = Shares(source, task.objective, _steps(config, cut, len(source)), cut, rank=0)
    for number in range(config.verify.steps):
        if model is not masters:
            _round(masters, model, DTYPES[config.precision.dtype])
        model.zero_grad()
        with _linear_layers(config):
            loss = _accumulate(model, task, shares[number], number)
        for master, parameter in zip(masters.parameters(), model.parameters(), strict=True):
            if master.requires_grad:
                # What no pass has used has a gradient of 0, as in a run: DeepSpeed's partitions know no other.
                master.grad = torch.zeros_like(master) if parameter.grad is None else parameter.grad
        norm = _clip(masters, config)
        optimizer.step()
        trace.losses.append(loss)
        trace.grad_norms.append(norm)
        trace.learning_rates.append(config.verify.learning_rate)
        if number == 0:
            trace.moments = _moments(masters, optimizer)
    trace.after = _values(masters)
    return trace


@torch.no_grad()
def _round(masters: nn.Module, model: nn.Module, dtype: torch.dtype) -> None:
    """The weights that passes are computed with; their gradients are summed in fp32."""
    for master, parameter in zip(masters.parameters(), model.parameters(), strict=True):
        parameter.data = master.to(dtype)
        parameter.grad_dtype = torch.float32


@contextmanager
def _linear_layers(config: Config) -> Iterator[None]:
    """Those that DeepSpeed puts in at stage 3, which add a bias to a product that is rounded already."""
    if config.zero.stage < 3 or not config.zero.memory_efficient_linear:
        yield
        return
    linear = F.linear
    F.linear = zero3_linear_wrap
    try:
        yield
    finally:
        F.linear = linear


@torch.no_grad()
def _refuse_randomness(config: Config, cut: Cut, task: Task, source: Source) -> None:
    model = _plain_model(config)
    device = next(model.parameters()).device
    first = Shares(source, task.objective, _steps(config, cut, len(source)), cut, rank=0)[0].micro_batches[0]
    found = set()
    for seed in range(DRAWS):
        torch.manual_seed(seed)
        loss = task.objective.loss(model, step.to_device(device, first.batch)).item()
        found.add(f"{loss:.4g}")
    if len(found) > 1:
        raise RequestError(
            f"model: it draws random numbers while it trains (losses of one micro-batch: {', '.join(sorted(found))}), "
            "so that no two cuts can give the same update; switch that off for mode=verify (dropout modules are off)"
        )


def _plain_model(config: Config) -> nn.Module:
    """In fp32; the weights rounded once, as those of a run in bf16 and fp16 are at its start."""
    model = models.build(config.model, config.seed, {"zero_optimization": {"stage": 0}}, config.train.batch_norm)
    if config.precision.dtype is not Dtype.FP32:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(DTYPES[config.precision.dtype]).float()
    turn_off_dropout(model)
    return model.to(get_accelerator().current_device_name()).train()


def _accumulate(model: nn.Module, task: Task, share: Share, number: int) -> float:
    """Add up the gradients of the global batch of a step; returns its loss."""
    if share.weight.weight == 0:
        raise RequestError(_without_target(number))
    loss, device = 0.0, next(model.parameters()).device
    for micro_batch in share.micro_batches:
        if micro_batch.is_empty:
            continue
        part = task.objective.loss(model, step.to_device(device, micro_batch.batch)) / share.weight.weight
        part.backward()
        loss += part.item()
    return loss


def _without_target(number: int) -> str:
    return (
        f"step {number + 1}: its global batch has no target; set a larger batch.train_batch_size, or, for a genome, a "
        "smaller data.max_n_fraction"
    )


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


def errors(trace: Trace, reference: Trace) -> dict[str, float | None]:
    """The relative errors of ``launcher.verify.QUANTITIES``."""
    changed, wanted = _difference(trace.after, trace.before), _difference(reference.after, reference.before)
    return {
        "loss": _largest(trace.losses, reference.losses),
        "grad_norm": _largest(trace.grad_norms, reference.grad_norms),
        "gradient": _relative(trace.moments, reference.moments) if trace.moments and reference.moments else None,
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
    """Constant batches, as many as are tried. Raises RequestError where the data do not fill one."""
    levels = Levels((cut.train_batch_size,))
    limits = Train(max_steps=config.verify.steps)
    return steps.of(limits, config.accumulation.tail, levels, num_sequences, None, config.seed)


def _largest(ours: Sequence[float | None], reference: Sequence[float | None]) -> float | None:
    pairs = [(a, b) for a, b in zip(ours, reference, strict=True) if a is not None and b is not None]
    return max((abs(a - b) / abs(b) if b else abs(a) for a, b in pairs), default=None)


def _relative(ours: Tensors, reference: Tensors) -> float:
    """|a - b| / |b| over all tensors as one vector, in double precision; |a| where b is 0."""
    return _norm(_difference(ours, reference).values()) / (_norm(reference.values()) or 1.0)


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
