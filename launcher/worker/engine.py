"""The DeepSpeed engine of a run, and the places where DeepSpeed has to be helped to be exact.

What was measured about each (DeepSpeed 0.19.8) is in docs/exactness.md.
"""

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from torch import nn

from launcher.errors import RequestError
from launcher.schema import Optimizer, OptimizerType, Sync
from launcher.worker import optimizers


def check_precision(values: Mapping[str, Any]) -> None:
    """Raises RequestError if the device of this rank cannot compute in the precision of the DeepSpeed JSON."""
    accelerator = get_accelerator()
    able = {"fp16": accelerator.is_fp16_supported(), "bf16": accelerator.is_bf16_supported()}
    for dtype, supported in able.items():
        if values[dtype]["enabled"] and not supported:
            others = [name for name, holds in able.items() if holds] + ["fp32"]
            raise RequestError(
                f"precision.dtype={dtype}: this machine's {accelerator.device_name()} cannot compute in it; "
                f"set {' or '.join(f'precision={name}' for name in others)}"
            )


@dataclass(frozen=True)
class Update:
    """One update: the norm of the accumulated gradient before and after clipping, and whether it was applied."""

    grad_norm: float | None
    grad_norm_clipped: float | None
    applied: bool


class Engine:
    """A DeepSpeed engine whose windows this program begins and ends: each may have its own number of micro-batches."""

    def __init__(self, model: nn.Module, values: Mapping[str, Any], optimizer: Optimizer, sync: Sync) -> None:
        self.deepspeed, *_ = deepspeed.initialize(
            model=model, config=dict(values), **optimizers.arguments(model, optimizer)
        )
        if isinstance(self.deepspeed.basic_optimizer, optimizers.LayerWise) and self.deepspeed.zero_optimization():
            self.deepspeed.basic_optimizer.find_slices(self.deepspeed.optimizer)
        _forget_initialisation_step(self.deepspeed.optimizer)
        # DeepSpeed measures what Muon has made of the gradients, which is not their norm.
        self._measures_gradients = optimizer.type is not OptimizerType.MUON
        self._clipping = float(values["gradient_clipping"])
        self._coalesces = sync is Sync.ONCE_PER_WINDOW and self._stage >= 2
        # Below stage 2 gradients are reduced after the passes of a window, so that a rank may fail in one of them
        # without leaving the others waiting; unless they are to be reduced during the last of them.
        self._reduces_at_end = self._stage < 2 and not getattr(self.deepspeed.optimizer, "overlap_comm", False)
        self._window = ExitStack()
        self._micro_batches_left = 0
        self._order: list[int] = []
        self._names = [name for name, parameter in self.deepspeed.module.named_parameters() if parameter.requires_grad]
        if sync is Sync.EVERY_MICRO_BATCH:
            self._watch_order()
        if self._coalesces and values["data_types"]["grad_accum_dtype"] == "fp32":
            _sum_gradients_in_fp32(self.deepspeed)
        self._data_parallel_size = self.deepspeed.dp_world_size
        # Only plain torch training in fp32 leaves the gradients on the parameters, where DeepSpeed looks at neither
        # their norm nor whether they are finite.
        self._plain = not (
            self.deepspeed.zero_optimization() or self.deepspeed.bfloat16_enabled() or self.deepspeed.fp16_enabled()
        )

    @property
    def module(self) -> nn.Module:
        return self.deepspeed

    @property
    def _stage(self) -> int:
        return int(self.deepspeed.zero_optimization_stage())

    @property
    def device(self) -> torch.device:
        return torch.device(self.deepspeed.device)

    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = learning_rate

    def set_accumulation_steps(self, number: int) -> None:
        """Those of a window from now on. DeepSpeed's gradient buffers in host memory go by it."""
        batch_size = self.deepspeed.train_batch_size()
        self.deepspeed.set_train_micro_batch_size(batch_size // (number * self._data_parallel_size))
        self.deepspeed.set_train_batch_size(batch_size)
        if hasattr(self.deepspeed.optimizer, "gradient_accumulation_steps"):
            self.deepspeed.optimizer.gradient_accumulation_steps = number

    def begin_window(self, num_micro_batches: int) -> None:
        """The next ``num_micro_batches`` backward passes are one optimizer step."""
        if self._stage < 2:
            # Gradients live until the window ends: made by the first backward pass, they would lie among its
            # activations and keep the heap of a CPU rank from using that space again.
            for parameter in self.deepspeed.module.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        self._micro_batches_left = num_micro_batches
        self._order.clear()
        if self._coalesces:
            self._window.enter_context(self.deepspeed.coalesce_grad_reduction())
        self._set_boundary()

    def backward(self, loss_sum: torch.Tensor, weight: float) -> None:
        """Accumulate the gradient of ``loss_sum / weight``, where ``weight`` is that of the whole global batch.

        DeepSpeed averages gradients over the data-parallel ranks, so the sum over them is restored here; it is told
        not to divide by the accumulation steps. A sum that is not finite makes all gradients so, even where its own
        are finite (a target whose logit is -inf): no rank can apply them then.
        """
        loss = loss_sum * (self._data_parallel_size / weight)
        self.deepspeed.backward(loss * (1.0 + 0.0 * loss.detach()), scale_wrt_gas=False)
        if isinstance(self.deepspeed.optimizer, BF16_Optimizer):
            # They are in its sums by now. DeepSpeed clears them only before a backward pass that it sees coming, which
            # it does not where the model wraps its logits in a class of its own.
            self.deepspeed.optimizer.clear_lp_grads()
        self._micro_batches_left -= 1
        self._set_boundary()

    def own_gradient_norm(self) -> torch.Tensor:
        """The norm of the gradient that this rank has summed up so far in the window, before any reduction.

        Only where it is still there: below stage 2, or where gradients are communicated once a window.
        """
        optimizer = self.deepspeed.optimizer
        if isinstance(optimizer, BF16_Optimizer):
            gradients = optimizer.fp32_groups_gradients_flat
        else:
            kept = "grad_accum" if getattr(optimizer, "use_grad_accum_attribute", False) else "grad"
            found = [getattr(parameter, kept, None) for parameter in self.deepspeed.module.parameters()]
            gradients = [gradient for gradient in found if gradient is not None]
        scale = float(optimizer.loss_scale) if self.deepspeed.fp16_enabled() else 1.0
        return torch.nn.utils.get_total_norm(gradients).double() / (scale * self._data_parallel_size)

    def order(self) -> list[str]:
        """The names of the parameters in the order in which they had gradients in the window so far.

        Where gradients are reduced after every backward pass it has to be the same on all ranks, because DeepSpeed
        reduces what comes at the same place on each. Elsewhere it does not matter, and is empty.
        """
        return [self._names[number] for number in self._order]

    def _watch_order(self) -> None:
        trained = [parameter for parameter in self.deepspeed.module.parameters() if parameter.requires_grad]
        for number, parameter in enumerate(trained):
            parameter.register_post_accumulate_grad_hook(lambda _, number=number: self._order.append(number))

    def _complete_gradients(self) -> None:
        """Give zeros to the parameters that had no gradient in a window which is reduced at its end: another rank may
        have used them, and all must send the same."""
        for parameter in self.deepspeed.module.parameters():
            kept = parameter.grad is not None or getattr(parameter, "grad_accum", None) is not None
            if parameter.requires_grad and not kept:
                # At stage 3 a parameter that is not in use has no elements, and takes no gradient of its full shape.
                data, shape = parameter.data, getattr(parameter, "ds_shape", parameter.shape)
                parameter.data = data.new_empty(shape)
                parameter.grad = torch.zeros(shape, dtype=parameter.grad_dtype, device=data.device)
                parameter.data = data

    def _set_boundary(self) -> None:
        """Tell DeepSpeed, which counts for itself otherwise, whether to reduce with the next backward pass."""
        last = self._micro_batches_left <= 1 and not self._reduces_at_end
        self.deepspeed.set_gradient_accumulation_boundary(last)

    @property
    def can_abandon(self) -> bool:
        """Nothing is communicated before the window ends: a rank may fail in it without leaving the others waiting."""
        return self._reduces_at_end or (self._coalesces and self._stage == 2)

    def abandon_window(self) -> None:
        """Throw away what the window has summed up so far, on all ranks together, as if it had not begun."""
        self._forget_gradients()
        self._window.close()  # there is nothing left to reduce
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        optimizer = self.deepspeed.optimizer
        for parameter in self.deepspeed.module.parameters():
            parameter.grad = None
            if getattr(parameter, "grad_accum", None) is not None:
                parameter.grad_accum = None
        if isinstance(optimizer, BF16_Optimizer):
            optimizer.clear_hp_grads()
        elif self._stage in (1, 2):
            # In place: other parts of DeepSpeed hold the same dictionaries.
            for kept in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
                for group in kept:
                    kept[group] = None
            optimizer.zero_grad()
            optimizer._release_ipg_buffers()
            optimizer.micro_step_id = -1
            optimizer.ready_for_gradients = False
            if optimizer.cpu_offload:
                optimizer.reset_cpu_buffers()
                optimizer._offload_accumulated_param_ids = set()
            for bucket in optimizer.ipg_buckets.values():
                bucket.clear()
            for number in range(len(optimizer.params_already_reduced)):
                optimizer.params_already_reduced[number] = False
        hooks = getattr(optimizer, "_backward_hook_state", None)
        if hooks is not None:  # of a backward pass that did not come to its end
            hooks.reset_for_new_step()
            hooks.backward_active_depth = 0
            hooks.remaining_grad_acc_hooks = 0

    def end_window(self) -> Update:
        """Clip the accumulated gradient once, apply and clear it; on all ranks, or on none if it is not finite."""
        if self._coalesces:
            self._complete_gradients()
        self._window.close()  # gradients that were summed here are reduced now
        self.deepspeed.set_gradient_accumulation_boundary(True)
        if self._reduces_at_end:
            self.deepspeed.allreduce_gradients()
        norm = None
        if self._plain:
            gradients = [p.grad for p in self.deepspeed.module.parameters() if p.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(gradients))
            if not math.isfinite(norm):
                # On all ranks, whose gradients are the same by now. DeepSpeed would apply them.
                self.deepspeed.zero_grad()
                return Update(None, None, applied=False)
        self.deepspeed.step()
        if not self._plain:
            reported = self.deepspeed.get_global_grad_norm()
            norm = None if reported is None else float(reported)
        applied = bool(self.deepspeed.was_step_applied()) and (norm is None or math.isfinite(norm))
        if norm is None or not math.isfinite(norm) or not self._measures_gradients:
            return Update(None, None, applied)
        clipped = norm * min(1.0, self._clipping / (norm + 1e-6)) if self._clipping > 0 else norm
        return Update(norm, clipped, applied)


def _sum_gradients_in_fp32(engine: Any) -> None:
    """Let autograd add up the gradients of bf16 and fp16 weights in fp32, and DeepSpeed reduce them so."""
    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            parameter.grad_dtype = torch.float32
    if hasattr(engine.optimizer, "_gradient_reduction_buffer_dtype"):
        # Stage 2 would round the sums to copy them into its buckets.
        engine.optimizer._gradient_reduction_buffer_dtype = lambda: torch.float32


@torch.no_grad()
def _forget_initialisation_step(optimizer: Any) -> None:
    """Undo the step with zero gradients by which DeepSpeed allocates the state in bf16 and fp16 at stage 0.

    That step decays the weights and counts as AdamW's first, which changes every later bias correction.
    """
    if not isinstance(optimizer, FP16_UnfusedOptimizer):
        return
    optimizer.optimizer.state.clear()
    for masters, weights in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
        for master, weight in zip(masters, weights, strict=True):
            master.copy_(weight)
