"""What a rank keeps of the weights and optimizer states, by the names of the parameters: what checkpoints are made of.

Wherever DeepSpeed has put a parameter, each of its elements has an owner: at stage 0 every rank, at stages 1 and 2 the
rank in whose flat partition it lies, at stage 3 the rank that keeps that part of it. So what is written by name and
position at one cut can be read at any other.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from torch import nn

WEIGHT = "weight"
"""The fp32 (master) weights. The other kinds of tensors are what the optimizer calls its states."""

COUNT = "step"
"""What optimizers call the number of updates behind a parameter."""

MOMENTUM = "momentum_buffer"


class Record(NamedTuple):
    """What there is of one parameter beside its weights."""

    kinds: frozenset[str] = frozenset()
    count: float | None = None


@dataclass(frozen=True)
class Slice:
    """Elements of one parameter, from ``start`` on in row-major order, of one kind. ``tensor`` is one-dimensional and
    live: training goes on with what is written to it."""

    name: str
    shape: tuple[int, ...]
    kind: str
    start: int
    tensor: torch.Tensor
    count: float | None

    @property
    def stop(self) -> int:
        return self.start + self.tensor.numel()


class _Place(NamedTuple):
    """Where elements [start, start + numel) of a parameter lie in a tensor of the optimizer."""

    name: str
    shape: tuple[int, ...]
    start: int
    offset: int
    numel: int


@dataclass(frozen=True)
class _Flat:
    """A tensor of the optimizer, and the parameters in it."""

    tensor: torch.Tensor
    places: list[_Place]
    momenta: list[_Place]
    """Where DeepSpeed's Muon keeps the momenta of whole parameters in a tensor of another size."""
    sub_group: int | None = None
    """At stage 3."""


def owned(engine: Any, records: Mapping[str, Record] | None = None) -> Iterator[Slice]:
    """The slices of this rank. Those offloaded to NVMe are in memory only until slices of other tensors are asked for.

    To fill a new engine, ``records`` tells by name what its optimizer is to have of each parameter; what is not there
    yet is made.
    """
    for flat in _flats(engine):
        if not flat.places:
            continue
        with _in_memory(engine.optimizer, flat.sub_group):
            state = engine.basic_optimizer.state[flat.tensor]
            if records is not None:
                _make(state, flat, records[flat.places[0].name], isinstance(engine.basic_optimizer, DeepSpeedCPUAdam))
            count = float(state[COUNT]) if COUNT in state else None
            tensors = {WEIGHT: flat.tensor.data} | {kind: state[kind] for kind in _kinds(state)}
            for kind, tensor in tensors.items():
                for place in flat.momenta if kind == MOMENTUM and flat.momenta else flat.places:
                    part = tensor.view(-1).narrow(0, place.offset, place.numel)
                    yield Slice(place.name, place.shape, kind, place.start, part, count)


def replicated(engine: Any) -> bool:
    """Every rank owns everything."""
    return engine.zero_optimization_stage() == 0 and not isinstance(engine.optimizer, BF16_Optimizer)


def shapes(engine: Any) -> dict[str, tuple[int, ...]]:
    """Of the parameters that are trained, by name, on all ranks."""
    return {name: tuple(getattr(parameter, "ds_shape", parameter.shape)) for parameter, name in _names(engine).items()}


def _names(engine: Any) -> dict[torch.Tensor, str]:
    """Those that are trained. Tied ones have one name, the first."""
    return {parameter: name for name, parameter in engine.module.named_parameters() if parameter.requires_grad}


def _kinds(state: Mapping[str, Any]) -> list[str]:
    return [kind for kind, value in state.items() if kind != COUNT and isinstance(value, torch.Tensor)]


def _make(state: dict[str, Any], flat: _Flat, record: Record, counts_in_integers: bool) -> None:
    """The states that an optimizer makes in its first step."""
    for kind in record.kinds - {WEIGHT} - state.keys():
        numel = sum(place.numel for place in flat.momenta) if kind == MOMENTUM and flat.momenta else None
        tensor = flat.tensor.data
        state[kind] = torch.zeros_like(tensor) if numel is None else tensor.new_zeros(numel)
    if record.count is not None:
        state[COUNT] = int(record.count) if counts_in_integers else torch.tensor(record.count)


def _flats(engine: Any) -> Iterator[_Flat]:
    names = _names(engine)
    stage = engine.zero_optimization_stage()
    if stage == 3:
        yield from _of_stage_3(engine.optimizer, names)
    elif stage or isinstance(engine.optimizer, BF16_Optimizer):
        yield from _of_flat_groups(engine.optimizer, names)
    else:
        masters = masters_of(engine)
        for parameter, name in names.items():
            place = _Place(name, tuple(parameter.shape), 0, 0, parameter.numel())
            yield _Flat(masters.get(parameter, parameter), [place], [])


def masters_of(engine: Any) -> dict[torch.Tensor, torch.Tensor]:
    """The fp32 master of each bf16 or fp16 parameter, without ZeRO."""
    optimizer = engine.optimizer
    if not isinstance(optimizer, FP16_UnfusedOptimizer):
        return {}
    return dict(zip(chain(*optimizer.fp16_groups), chain(*optimizer.fp32_groups), strict=True))


def _of_stage_3(optimizer: Any, names: Mapping[torch.Tensor, str]) -> Iterator[_Flat]:
    for number, (tensor, parameters) in enumerate(
        zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True)
    ):
        places = []
        for parameter in parameters:
            _, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start = dist.get_rank() * size
            numel = max(0, min(size, parameter.ds_numel - start))  # the rest is padding
            if numel:
                places.append(_Place(names[parameter], tuple(parameter.ds_shape), start, offset, numel))
        yield _Flat(tensor, places, [], number)


def _of_flat_groups(optimizer: Any, names: Mapping[torch.Tensor, str]) -> Iterator[_Flat]:
    bf16 = isinstance(optimizer, BF16_Optimizer)
    flats = optimizer.fp32_groups_flat_partition if bf16 else optimizer.single_partition_of_fp32_groups
    for number, tensor in enumerate(flats):
        places, momenta, offset = [], [], 0
        for parameter in optimizer.bf16_groups[number] if bf16 else optimizer.bit16_groups[number]:
            mapping = parameter._hp_mapping
            if mapping is None:
                continue  # no part of it is here
            fragment, name, shape = mapping.get_hp_fragment_address(), names[parameter], tuple(parameter.shape)
            start = mapping.lp_fragment_address.start
            places.append(_Place(name, shape, start, fragment.start, fragment.numel))
            if getattr(parameter, "use_muon", False):
                momenta.append(_Place(name, shape, 0, offset, parameter.numel()))
                offset += parameter.numel()
        yield _Flat(tensor, places, momenta)


@contextmanager
def _in_memory(optimizer: Any, sub_group: int | None) -> Iterator[None]:
    """Where DeepSpeed has swapped a sub-group out to NVMe, it comes in here and goes out again, as it is by then."""
    swapped = sub_group is not None and optimizer._swappable_optimizer_subgroup(sub_group)
    if swapped:
        optimizer._optimizer_states_and_gradient_swap_in(sub_group)
    yield
    if swapped:
        optimizer._optimizer_states_and_gradient_swap_out(sub_group)


@torch.no_grad()
def publish(engine: Any) -> None:
    """Let the model compute with the weights that were written to slices; collective."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        for number in range(len(optimizer.fp32_partitioned_groups_flat)):
            with _in_memory(optimizer, number):
                optimizer._reassign_or_swap_out_partitioned_parameters(number)
        if optimizer.persistent_parameters:  # these are whole on every rank
            optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
    elif hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
    for parameter, master in masters_of(engine).items():
        parameter.copy_(master)


@torch.no_grad()
def rest(module: nn.Module) -> dict[str, torch.Tensor]:
    """What belongs to a model and is not trained: frozen parameters and persistent buffers, by name, on the CPU.

    Collective at stage 3. Every rank has the same, except where a model changes its buffers by itself: there it is
    rank 0's that count.
    """
    found = {}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            with _gathered(parameter):
                found[name] = parameter.detach().cpu().clone()
    return found | {name: buffer.detach().cpu().clone() for name, buffer in _buffers(module)}


@torch.no_grad()
def restore_rest(module: nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    """Write ``rest`` back; collective at stage 3."""
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            with _gathered(parameter, modifier_rank=0):
                if parameter.numel():  # on the other ranks of stage 3 it is what rank 0 writes
                    parameter.copy_(saved[name])
    for name, buffer in _buffers(module):
        buffer.copy_(saved[name])


def _gathered(parameter: nn.Parameter, **options: Any) -> Any:
    return deepspeed.zero.GatheredParameters([parameter], **options)


def _buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Those that the model says belong to its state."""
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
