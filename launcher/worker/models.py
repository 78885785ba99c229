"""Building the model: Hugging Face architectures from their configuration, or any ``torch.nn.Module``.

Whatever the ZeRO stage, the weights that a seed gives are the same.
"""

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import deepspeed
import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from launcher.errors import RequestError, nearest
from launcher.parameters import Parameter, Sizes
from launcher.schema import BatchNorm, Call
from launcher.steps import mix
from launcher.worker.normalisation import replace_batch_norms


def hugging_face(model_type: str, task: str = "causal_lm", **config: Any) -> nn.Module:
    """A Hugging Face architecture with random weights.

    ``model_type`` is the library's own name (``llama``, ``modernbert``, ...); ``task`` is ``causal_lm`` or
    ``masked_lm``; ``config`` holds arguments of the architecture's configuration class. Attention is torch's
    scaled-dot-product attention where the architecture has any, unless ``attn_implementation`` says otherwise.

    Raises RequestError for a type, task or argument that the library does not know.
    """
    return _architecture(model_type, task, **config)()


def _architecture(model_type: str, task: str = "causal_lm", **config: Any) -> Callable[[], nn.Module]:
    """What makes the model; by then everything it needs is imported."""
    from transformers.models.auto import configuration_auto, modeling_auto

    mappings = {
        "causal_lm": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        "masked_lm": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING,
    }
    if task not in mappings:
        raise RequestError(f"model.task={task}: it must be one of {', '.join(mappings)}")
    if model_type not in configuration_auto.CONFIG_MAPPING:
        known = list(configuration_auto.CONFIG_MAPPING)
        raise RequestError(
            f"model.model_type={model_type}: transformers has no such architecture{nearest(model_type, known)}"
        )
    config_class = configuration_auto.CONFIG_MAPPING[model_type]
    names = set(config_class().to_dict())
    attention = config.pop("attn_implementation", None)
    if unknown := sorted(set(config) - names):
        raise RequestError(
            *(f"model.{key}: {config_class.__name__} has no such argument{nearest(key, names)}" for key in unknown)
        )
    model_config = config_class(**config)
    if type(model_config) not in mappings[task]:
        raise RequestError(f"model.model_type={model_type}: transformers has no {task} model of it")
    model_class = mappings[task][type(model_config)]
    if attention is None and model_class._supports_sdpa:
        attention = "sdpa"
    return functools.partial(model_class._from_config, model_config, attn_implementation=attention)


def locate(key: str, target: str) -> Any:
    """The object with a dotted name; RequestError naming ``key`` where it cannot be imported."""
    module_name, _, name = target.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise RequestError(f"{key}={target}: it cannot be imported: {error}") from error


def call(key: str, request: Call) -> Any:
    """What ``request`` makes; a wrong argument is a RequestError naming ``key``."""
    made_by = locate(f"{key}._target_", request.target)
    with _reported(key, request):
        return made_by(**request.arguments)


@contextmanager
def _reported(key: str, request: Call) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, OSError, ArithmeticError, ImportError, StrictDataclassError) as error:
        raise RequestError(f"{key}._target_={request.target}: {' '.join(str(error).split())}") from error


def build(
    request: Call, seed: int, deepspeed_values: Mapping[str, Any], batch_norm: BatchNorm = BatchNorm.ERROR
) -> nn.Module:
    """The model of a run, its weights drawn from ``seed``; at ZeRO stage 3 partitioned over the ranks.

    A model with the Hugging Face method ``_init_weights(module)`` is built partitioned, a module at a time, so that
    it never lies whole on one rank; each module is then initialised from (seed, its name) while it is gathered. Any
    other module initialises itself as it is built, which cannot be repeated on slices: it is built whole, and
    DeepSpeed partitions it afterwards.
    """
    made_by = locate("model._target_", request.target)
    stage = deepspeed_values["zero_optimization"]["stage"]
    partitioned = stage == 3
    if made_by is hugging_face:
        # Imported out here: DeepSpeed replaces torch's constructors while it partitions, and imports break on that.
        with _reported("model", request):
            make = functools.partial(_undrawn, _architecture(**request.arguments))
    else:
        partitioned = partitioned and hasattr(made_by, "_init_weights")
        make = functools.partial(made_by, **request.arguments)
    context = deepspeed.zero.Init(config_dict_or_path=dict(deepspeed_values)) if partitioned else nullcontext()
    torch.manual_seed(seed)
    with context, _reported("model", request):
        model = _partitioned(make, request) if partitioned else make()
    if not isinstance(model, nn.Module):
        raise RequestError(f"model._target_={request.target}: it makes a {type(model).__name__}, not a torch.nn.Module")
    if partitioned:
        _keep_derived_buffers_exact(model)
    else:
        _check_forms(request, model)
    if hasattr(model, "_init_weights"):
        _initialise(model, model, "", seed, set())
    # After the draw, which is then the same for every choice, and before the model is partitioned or wrapped.
    model = replace_batch_norms(model, batch_norm)
    if stage == 3 and not partitioned:
        _cast(model, deepspeed_values)
        # Here and not in deepspeed.initialize, which would keep parameters on NVMe in bf16 where the CPU knows no fp16.
        deepspeed.zero.Init(module=model, config_dict_or_path=dict(deepspeed_values))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RequestError(f"model._target_={request.target}: it has no parameter to train")
    return model


def _partitioned(make: Callable[[], nn.Module], request: Call) -> nn.Module:
    """Here parameters are sent while they are made, before ``_check_forms`` could see them."""
    try:
        return make()
    except RuntimeError as error:
        if "as Byte" not in str(error):
            raise
        raise RequestError(
            f"model._target_={request.target}: DeepSpeed cannot take a parameter without a dimension, nor at stage 3 "
            "one that does not lie in one piece; give it the shape (1,), or make it contiguous"
        ) from error


def _check_forms(request: Call, model: nn.Module) -> None:
    """DeepSpeed sends parameters as rows of bytes, which torch cannot make of those without a dimension, nor of those
    that do not lie in one piece; the latter are copied."""
    scalars = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise RequestError(
            f"model._target_={request.target}: DeepSpeed cannot take a parameter without a dimension "
            f"({', '.join(scalars)}); give it the shape (1,)"
        )
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()


def _undrawn(make: Callable[[], nn.Module]) -> nn.Module:
    """A Hugging Face model, tied but its weights not drawn: the library would index what are slices at ZeRO stage 3."""
    from transformers import PreTrainedModel

    draw = PreTrainedModel.initialize_weights
    PreTrainedModel.initialize_weights = lambda self: None
    try:
        return make()
    finally:
        PreTrainedModel.initialize_weights = draw


def checkpoint_activations(model: nn.Module) -> None:
    """Recompute the activations of each layer in the backward pass, with the same dropout masks.

    Raises RequestError for a model that does not offer it the Hugging Face way.
    """
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise RequestError(
            f"activation.checkpointing=full: {type(model).__name__} has no method gradient_checkpointing_enable; "
            "add it, or set none"
        )
    # The reentrant kind would lose the gradients of the first layer's inputs.
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _keep_derived_buffers_exact(model: nn.Module) -> None:
    """zero.Init makes every floating-point tensor in the compute type; ``_init_weights`` derives these again."""
    for module in model.modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers[name]
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.float()


def _cast(model: nn.Module, deepspeed_values: Mapping[str, Any]) -> None:
    """As DeepSpeed casts the weights of a model that it finds whole."""
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if deepspeed_values[name]["enabled"]:
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(dtype)


@torch.no_grad()
def _initialise(model: nn.Module, owner: nn.Module, name: str, seed: int, drawn: set[nn.Parameter]) -> None:
    """Children first, as Hugging Face does; ``owner`` is the innermost enclosing model with ``_init_weights``.

    A module is gathered with its direct children, since some architectures scale a child's weight in its parent.
    """
    for child_name, child in model.named_children():
        child_owner = child if hasattr(child, "_init_weights") else owner
        _initialise(child, child_owner, f"{name}.{child_name}", seed, drawn)
    near = [parameter for module in (model, *model.children()) for parameter in module.parameters(recurse=False)]
    with deepspeed.zero.GatheredParameters(list(dict.fromkeys(near)), modifier_rank=0):
        # The name and not the place of a module: the draw of one does not move those of the others.
        torch.manual_seed(int(mix(*np.array([seed, *name.encode()], dtype=np.uint64))) >> 1)
        # A tied weight stays what its first module made it, as in the library, which ties after drawing.
        tied = {parameter: parameter.clone() for parameter in model.parameters(recurse=False) if parameter in drawn}
        owner._init_weights(model)
        for parameter, value in tied.items():
            parameter.copy_(value)
    drawn.update(model.parameters(recurse=False))


def num_dimensions(parameter: nn.Parameter) -> int:
    # At stage 3 a parameter is a flat slice; DeepSpeed keeps its shape.
    return len(getattr(parameter, "ds_shape", parameter.shape))


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """The parameters to train but norms, biases and embeddings.

    A tied embedding counts as an embedding under every name.
    """
    embeddings = {
        parameter
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for parameter in module.parameters(recurse=False)
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [parameter for parameter in trained if num_dimensions(parameter) > 1 and parameter not in embeddings]


def sizes(model: nn.Module) -> Sizes:
    groups = enumerate(parameter_groups(model, weight_decay=0.0))
    group_of = {parameter: number for number, group in groups for parameter in group["params"]}
    trained = [parameter for parameter in model.parameters() if parameter in group_of]
    return Sizes(tuple(Parameter(getattr(p, "ds_numel", p.numel()), group_of[p]) for p in trained))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups: matrices, which decay, and norms, biases and embeddings, which do not.

    Parameters that do not require a gradient are in neither.
    """
    decayed = matrices(model)
    chosen = set(decayed)
    rest = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter not in chosen]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
