"""The whole fp32 weights and optimizer states of an engine, by the names of its parameters.

Collective over all ranks, wherever DeepSpeed keeps them: partitioned, in bf16 beside fp32 masters, on CPU or NVMe.
"""

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from launcher.worker.slices import masters_of

FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
"""What optimizers call the running mean of gradients."""

Tensors = dict[str, torch.Tensor]


def weights(engine: Any) -> Tensors:
    """The fp32 (master) weights, on the CPU."""
    if engine.zero_optimization():
        return _by_name(engine, safe_get_full_fp32_param)
    masters = masters_of(engine)
    return _by_name(engine, lambda parameter: masters.get(parameter, parameter))


def first_moments(engine: Any) -> Tensors | None:
    """The running mean of gradients of each parameter, on the CPU; None for an optimizer that keeps none, and for Muon,
    whose own DeepSpeed keeps where it cannot be found by name.

    After the first update it is the gradient as the optimizer got it, times the same factor for all parameters of a
    group.
    """
    if any(getattr(parameter, "use_muon", False) for parameter in engine.module.parameters()):
        return None
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        # DeepSpeed links parameters to their states when the first group of the first step is done, and the others have
        # none yet.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    states = engine.basic_optimizer.state
    kept = {key for state in states.values() for key in state}
    key = next((key for key in FIRST_MOMENTS if key in kept), None)
    if key is None:
        return None

    if engine.zero_optimization():
        return _by_name(engine, lambda parameter: safe_get_full_optimizer_state(parameter, key))
    masters = masters_of(engine)
    return _by_name(engine, lambda parameter: states[masters.get(parameter, parameter)][key])


def _by_name(engine: Any, value: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    return {
        name: value(parameter).detach().float().cpu().clone()
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad
    }
