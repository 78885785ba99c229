"""What updates the parameters: DeepSpeed's own optimizers, and LAMB, LARS and Muon, which are given to it.

LAMB and LARS scale the step of a layer (a parameter tensor) by norms of that whole layer. ZeRO hands an optimizer flat
partitions, in which a rank holds slices of some layers and padding. So these two learn which elements belong to which
layer, and add up squared norms over the ranks, those of all layers in one collective.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from launcher.schema import Optimizer, OptimizerType
from launcher.worker import models


def arguments(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The arguments of ``deepspeed.initialize`` that say what updates the parameters of ``model``: parameter groups for
    an optimizer that the DeepSpeed JSON names, else the optimizer itself.
    """
    match optimizer.type:
        case OptimizerType.LAMB:
            groups = _layers_and_vectors(model, optimizer.weight_decay)
            return {"optimizer": LAMB(groups, optimizer.lr, optimizer.betas, optimizer.eps)}
        case OptimizerType.LARS:
            groups = _layers_and_vectors(model, optimizer.weight_decay)
            return {"optimizer": LARS(groups, optimizer.lr, optimizer.momentum, optimizer.trust_coefficient)}
        case OptimizerType.MUON:
            return {"optimizer": _muon(model, optimizer)}
        case _:
            return {"model_parameters": models.parameter_groups(model, optimizer.weight_decay)}


class Slice(NamedTuple):
    """Where a layer, counted within its parameter group, lies in a tensor of the optimizer; by default it fills it."""

    layer: int
    start: int = 0
    numel: int | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.numel is None else tensor.narrow(0, self.start, self.numel)


class LayerWise(torch.optim.Optimizer):
    """An optimizer that multiplies the step of each layer by a trust ratio, which depends on norms of the whole layer.

    A parameter group has ``weight_decays``, one a layer, and is either ``adapted`` or has trust ratios of 1. Norms and
    biases are not adapted and do not decay. The papers do not mention it, but it is what was run for them: the authors'
    LAMB for BERT leaves LayerNorm and biases out of both by name, and so does MLPerf's LARS for ResNet with batch norms
    and biases. For LAMB what remains is Adam, for LARS it is momentum SGD.
    """

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
        super().__init__(groups, defaults)
        self._whole_layers = [list(group["params"]) for group in groups]
        self._slices: dict[torch.Tensor, list[Slice]] | None = None

    def find_slices(self, zero: Any) -> None:
        """Learn which elements of the partitions of DeepSpeed's ZeRO optimizer belong to which layer.

        The others are padding. It must stay out of the norms: at stage 3 nothing has ever been written to it.
        """
        self._slices = {}
        for group, layers in zip(self.param_groups, self._whole_layers, strict=True):
            for number, parameter in enumerate(layers):
                if hasattr(parameter, "ds_id"):
                    sub_group, start, size = zero.grad_position[zero.get_param_id(parameter)]
                    partition = zero.fp32_partitioned_groups_flat[sub_group]
                    numel = max(0, min(size, parameter.ds_numel - dist.get_rank() * size))
                elif parameter._hp_mapping is not None:
                    (partition,) = group["params"]
                    address = parameter._hp_mapping.get_hp_fragment_address()
                    start, numel = address.start, address.numel
                else:
                    continue  # no part of it is here
                self._slices.setdefault(partition, []).append(Slice(number, start, numel))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Where DeepSpeed partitions, a collective: every rank then has a gradient of every partition, or none has."""
        for group in self.param_groups:
            tensors = [(n, tensor) for n, tensor in enumerate(group["params"]) if tensor.grad is not None]
            if not tensors:
                continue
            directions = [self._direction(group, tensor) for _, tensor in tensors]
            if group["adapted"]:
                self._adapt(group, tensors, directions)
            for (_, tensor), direction in zip(tensors, directions, strict=True):
                self._move(group, tensor, direction)

    def _adapt(
        self, group: dict[str, Any], tensors: list[tuple[int, torch.Tensor]], directions: list[torch.Tensor]
    ) -> None:
        """Decay the layers and multiply their directions by their trust ratios, in place."""
        parts: list[tuple[int, torch.Tensor]] = []
        norms: list[torch.Tensor] = []
        for (number, tensor), direction in zip(tensors, directions, strict=True):
            slices = [Slice(number)] if self._slices is None else self._slices.get(tensor, [])
            for one in slices:
                weight, part = one.of(tensor), one.of(direction)
                norms += [weight.norm(), self._decay(part, weight, group["weight_decays"][one.layer])]
                parts.append((one.layer, part))
        decays = torch.tensor(group["weight_decays"], dtype=torch.float64, device=tensors[0][1].device)
        # In fp64 squares neither overflow nor vanish, and their sum hardly depends on how layers are cut.
        squares = decays.new_zeros(len(decays), 2)
        if parts:
            squares[[layer for layer, _ in parts]] = torch.stack(norms).double().square().view(-1, 2)
        if self._slices is not None:
            dist.all_reduce(squares)
        ratios = self._trust_ratios(group, *squares.sqrt().unbind(1), decays)
        for layer, part in parts:
            part.mul_(ratios[layer])

    def _direction(self, group: dict[str, Any], tensor: torch.Tensor) -> torch.Tensor:
        """What would be subtracted from a tensor, times the learning rate, without decay, trust ratio and momentum."""
        raise NotImplementedError

    def _decay(self, direction: torch.Tensor, weight: torch.Tensor, weight_decay: float) -> torch.Tensor:
        """Add the decay to a part of a direction. The norm of that part which the trust ratio compares with that of the
        weights: taken before or after."""
        raise NotImplementedError

    def _trust_ratios(
        self, group: dict[str, Any], weights: torch.Tensor, others: torch.Tensor, decays: torch.Tensor
    ) -> torch.Tensor:
        """By layer, from the norms of whole layers."""
        raise NotImplementedError

    def _move(self, group: dict[str, Any], tensor: torch.Tensor, direction: torch.Tensor) -> None:
        raise NotImplementedError


class LAMB(LayerWise):
    """You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", algorithm 2, with
    phi(z) = z:

        r = m_hat / (sqrt(v_hat) + eps),   x <- x - lr * |x| / |r + decay * x| * (r + decay * x)

    m_hat and v_hat are Adam's bias-corrected moments. Where a norm is 0 the trust ratio is 1.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})

    def _direction(self, group: dict[str, Any], tensor: torch.Tensor) -> torch.Tensor:
        state, (beta1, beta2) = self.state[tensor], group["betas"]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(tensor)
            state["exp_avg_sq"] = torch.zeros_like(tensor)
        state["step"] += 1
        step = state["step"].item()
        state["exp_avg"].lerp_(tensor.grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(tensor.grad, tensor.grad, value=1 - beta2)
        root = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_()
        return (state["exp_avg"] / (1 - beta1**step)).div_(root.add_(group["eps"]))

    def _decay(self, direction: torch.Tensor, weight: torch.Tensor, weight_decay: float) -> torch.Tensor:
        return direction.add_(weight, alpha=weight_decay).norm()

    def _trust_ratios(
        self, group: dict[str, Any], weights: torch.Tensor, others: torch.Tensor, decays: torch.Tensor
    ) -> torch.Tensor:
        return torch.where((weights > 0) & (others > 0), weights / others, 1.0)

    def _move(self, group: dict[str, Any], tensor: torch.Tensor, direction: torch.Tensor) -> None:
        tensor.sub_(direction, alpha=group["lr"])


class LARS(LayerWise):
    """You et al. 2017, "Large Batch Training of Convolutional Networks", equation 6 and algorithm 1:

        v <- momentum * v + trust_coefficient * |w| / (|g| + decay * |w|) * (g + decay * w),   w <- w - lr * v

    Where |w| or the denominator is 0 the trust ratio is 1. The learning rate is applied as in torch's SGD, after the
    momentum; the paper has it before. While it is constant there is no difference.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, momentum: float, trust_coefficient: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "trust_coefficient": trust_coefficient})

    def _direction(self, group: dict[str, Any], tensor: torch.Tensor) -> torch.Tensor:
        return tensor.grad.clone()

    def _decay(self, direction: torch.Tensor, weight: torch.Tensor, weight_decay: float) -> torch.Tensor:
        norm = direction.norm()
        direction.add_(weight, alpha=weight_decay)
        return norm

    def _trust_ratios(
        self, group: dict[str, Any], weights: torch.Tensor, others: torch.Tensor, decays: torch.Tensor
    ) -> torch.Tensor:
        denominators = others + decays * weights
        ratios = group["trust_coefficient"] * weights / denominators
        return torch.where((weights > 0) & (denominators > 0), ratios, 1.0)

    def _move(self, group: dict[str, Any], tensor: torch.Tensor, direction: torch.Tensor) -> None:
        state = self.state[tensor]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(tensor)
        velocity = state["momentum_buffer"].mul_(group["momentum"]).add_(direction)
        tensor.sub_(velocity, alpha=group["lr"])


def _layers_and_vectors(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The groups of LAMB and LARS: matrices and embeddings in one, whose norms need one collective; and the rest."""
    decays = {
        parameter: group["weight_decay"]
        for group in models.parameter_groups(model, weight_decay)
        for parameter in group["params"]
    }
    layers = [parameter for parameter in decays if models.num_dimensions(parameter) > 1]
    vectors = [parameter for parameter in decays if models.num_dimensions(parameter) <= 1]
    groups = [
        {"params": chosen, "weight_decays": [decays[parameter] for parameter in chosen], "adapted": adapted}
        for chosen, adapted in ((layers, True), (vectors, False))
    ]
    return [group for group in groups if group["params"]]


def _muon(model: nn.Module, optimizer: Optimizer) -> torch.optim.Optimizer:
    """DeepSpeed's Muon (Jordan et al. 2024) for hidden matrices, and torch's AdamW for the rest.

    Given as an object, because where the JSON names it DeepSpeed goes by parameter names alone: a head that is not
    called ``lm_head`` and the kernels of convolutions would get Muon too.
    """
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    output = getattr(model, "get_output_embeddings", lambda: None)()
    heads = set() if output is None else set(output.parameters())
    hidden = {p for p in models.matrices(model) if models.num_dimensions(p) == 2 and p not in heads}
    groups: list[dict[str, Any]] = []
    for group in models.parameter_groups(model, optimizer.weight_decay):
        with_muon = [parameter for parameter in group["params"] if parameter in hidden]
        with_adamw = [parameter for parameter in group["params"] if parameter not in hidden]
        groups += [
            group | {"params": with_muon, "use_muon": True, "lr": optimizer.lr, "momentum": optimizer.momentum},
            group
            | {
                "params": with_adamw,
                "use_muon": False,
                "lr": optimizer.lr,
                "betas": optimizer.betas,
                "eps": optimizer.eps,
            },
        ]
    for group in groups:
        for parameter in group["params"]:
            parameter.use_muon = group["use_muon"]  # where DeepSpeed looks
    return MuonWithAuxAdam([group for group in groups if group["params"]], adam_optimizer=torch.optim.AdamW)
