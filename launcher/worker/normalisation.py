"""BatchNorm, whose statistics are those of one micro-batch on one rank, and what can stand in its place.

A sample that is normalised by its micro-batch makes the update a function of how the global batch is cut.
"""

import logging
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from launcher.errors import RequestError, RunError
from launcher.schema import BatchNorm

log = logging.getLogger(__name__)

MAX_GROUPS = 32
MIN_CHANNELS_PER_GROUP = 8


def replace_batch_norms(model: nn.Module, choice: BatchNorm) -> nn.Module:
    """``model`` with every BatchNorm replaced as ``train.batch_norm`` says; parameters and their names are kept.

    A BatchNorm that is meant to stay in evaluation mode cannot be told from others, and is replaced alike. One that a
    module computes itself (``F.batch_norm``) cannot be seen.

    Raises RequestError if there is any and the choice is ``error``, or for one that cannot be replaced.
    """
    found = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    if not found:
        return model
    if choice is BatchNorm.ERROR:
        raise RequestError(_refusal(list(found)))
    faults = [
        f"train.batch_norm={choice.value}: {name or 'the model'} is a {type(module).__name__}, {reason}"
        for name, module in found.items()
        if (reason := _obstacle(module))
    ]
    if faults:
        raise RequestError(*faults)
    if choice is BatchNorm.GROUP_NORM:
        return _replaced(model, {module: _group_norm(module) for module in found.values()})
    if dist.get_rank() == 0:
        log.warning(
            "train.batch_norm=sync: statistics are those of one micro-batch of all ranks, so the update still depends "
            "on its size (micro-batch x ranks), though no longer on how many ranks share it"
        )
    if get_accelerator().device_name() != "cpu":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return _replaced(model, {module: _synchronised(module) for module in found.values()})


def num_groups(num_channels: int) -> int:
    """Groups of a GroupNorm in the place of a BatchNorm.

    32, as Wu and He (2018) have it, or the next smaller number that divides the channels into groups of at least 8: in
    smaller groups the error grows (their table 3), and of one channel without space nothing but zero would be left.
    """
    divisors = [groups for groups in range(1, MAX_GROUPS + 1) if num_channels % groups == 0]
    return max(groups for groups in divisors if groups == 1 or num_channels // groups >= MIN_CHANNELS_PER_GROUP)


def _refusal(names: list[str]) -> str:
    shown = ", ".join(name or "itself" for name in names[:3]) + (", ..." if len(names) > 3 else "")
    layers = f"{len(names)} BatchNorm layer{'s' if len(names) > 1 else ''} ({shown})"
    return (
        f"train.batch_norm=error: the model has {layers}, which normalise by the statistics of a micro-batch on one "
        "rank, so that the update would depend on how the global batch is cut; set train.batch_norm=group_norm "
        "(GroupNorm instead, every cut is the same update) or sync (statistics over all ranks, of a micro-batch still)"
    )


def _obstacle(module: nn.Module) -> str | None:
    """Why this one cannot be replaced without changing what the model computes."""
    if isinstance(module, LazyModuleMixin):
        return "which has no channels before the first batch; give it its number of channels"
    if type(module).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
        return "whose forward() does more than BatchNorm; replace it in the model"
    return None


def _replaced(model: nn.Module, replacements: dict[nn.Module, nn.Module]) -> nn.Module:
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in replacements:
                parent._modules[name] = replacements[child]
    return replacements.get(model, model)


def _group_norm(old: Any) -> nn.Module:
    new = nn.GroupNorm(num_groups(old.num_features), old.num_features, old.eps, old.affine, device="meta")
    new.weight, new.bias = old.weight, old.bias
    return new.train(old.training)


def _synchronised(old: Any) -> nn.Module:
    new = SyncBatchNorm(old.num_features, old.eps, old.momentum, old.affine, old.track_running_stats, device="meta")
    new.weight, new.bias = old.weight, old.bias
    for name, buffer in old.named_buffers(recurse=False):
        new._buffers[name] = _in_fp32(buffer)
    return new.train(old.training)


class SyncBatchNorm(_BatchNorm):
    """``torch.nn.SyncBatchNorm`` where its input lies on a CPU, which torch's refuses.

    Over the same samples it computes what ``torch.nn.BatchNorm1d`` to ``3d`` do in one process, however unequally the
    ranks share them. Statistics are fp32, whatever the weights are cast to.
    """

    def forward(self, input: Tensor) -> Tensor:
        """From (N, C, ...) to the same shape and type."""
        values = input.float()
        mean, variance = self.running_mean, self.running_var
        if self.training or mean is None:
            count, mean, variance = _statistics(values)
            if self.training and self.track_running_stats:
                self._track(count, mean.detach(), variance.detach())
        scale = torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        result = (values - _by_channel(mean, values)) * _by_channel(scale, values)
        if self.bias is not None:
            result = result + _by_channel(self.bias, values)
        return result.to(input.dtype)

    @torch.no_grad()
    def _track(self, count: int, mean: Tensor, variance: Tensor) -> None:
        """Running averages as torch has them: of the unbiased variance, and cumulative for ``momentum=None``."""
        if count == 1:
            raise RunError(
                "train.batch_norm=sync: a BatchNorm sees one value a channel in a micro-batch of all ranks, which has "
                "no variance: raise batch.train_micro_batch_size_per_gpu, or set train.batch_norm=group_norm"
            )
        self.num_batches_tracked += 1
        factor = 1 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, factor)
        self.running_var.lerp_(variance * (count / (count - 1)), factor)

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        """DeepSpeed casts whole models; in bf16 a running average would come to rest some per cent from its goal."""
        super()._apply(fn, recurse)
        for name, buffer in self.named_buffers(recurse=False):
            self._buffers[name] = _in_fp32(buffer)
        return self


def _statistics(values: Tensor) -> tuple[int, Tensor, Tensor]:
    """Count, mean (C,) and biased variance (C,) of each channel of ``values`` (N, C, ...) over all ranks.

    One all-reduce, of the moments about zero in double precision: E[x^2] - E[x]^2 loses no digit of an fp32 variance
    unless the mean exceeds a deviation 10,000 times.
    """
    variance, mean = torch.var_mean(values, dim=[axis for axis in range(values.dim()) if axis != 1], correction=0)
    mean, variance = mean.double(), variance.double()
    own_count = mean.new_tensor([values.numel() // values.shape[1]])
    moments = torch.cat([own_count, own_count * mean, own_count * (variance + mean**2)])
    count, first, second = _SumOverRanks.apply(moments).split([1, len(mean), len(mean)])
    mean = first / count
    variance = (second / count - mean**2).clamp(min=0)
    return int(count), mean.float(), variance.float()


class _SumOverRanks(torch.autograd.Function):
    """An all-reduce through which gradients flow: what the losses of all ranks owe to a rank's part is summed too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        summed = values.clone()
        dist.all_reduce(summed)
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        summed = gradient.clone()
        dist.all_reduce(summed)
        return summed


def _by_channel(values: Tensor, like: Tensor) -> Tensor:
    """(C,) as (C, 1, ...), to meet (N, C, ...)."""
    return values.reshape(-1, *[1] * (like.dim() - 2))


def _in_fp32(buffer: Tensor) -> Tensor:
    return buffer.float() if buffer.is_floating_point() else buffer
