"""How large the parameters of a model are, told from its configuration alone: a login node has no torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from launcher.schema import Call

HUGGING_FACE = "launcher.worker.models.hugging_face"


class Parameter(NamedTuple):
    numel: int
    group: int
    """Parameter group of the optimizer."""


@dataclass(frozen=True)
class Sizes:
    """The parameters that are trained, in the order of the model."""

    parameters: tuple[Parameter, ...]

    @property
    def total(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def num_groups(self) -> int:
        return len({parameter.group for parameter in self.parameters})


def sizes(model: Call) -> Sizes | None:
    """Of a Llama or an LFM2; None for what only the job can know."""
    if model.target != HUGGING_FACE:
        return None
    arguments = dict(model.arguments)
    tell = {"llama": _llama, "lfm2": _lfm2}.get(arguments.pop("model_type", None))
    try:
        found = tuple(tell(arguments)) if tell else ()
    except KeyError:  # the library's default decides
        return None
    return Sizes(found) if found else None


def _matrices(*numels: int) -> Iterator[Parameter]:
    return (Parameter(numel, 0) for numel in numels)


def _others(*numels: int) -> Iterator[Parameter]:
    """Norms and embeddings, which do not decay."""
    return (Parameter(numel, 1) for numel in numels)


def _llama(arguments: Mapping[str, Any]) -> Iterator[Parameter]:
    """Touvron et al. 2023, as transformers has it: no biases, and a head of its own unless the embedding is tied."""
    hidden, inner, heads = (arguments[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads"))
    width = arguments.get("head_dim") or hidden // heads
    keys = (arguments.get("num_key_value_heads") or heads) * width
    if arguments.get("attention_bias") or arguments.get("mlp_bias"):
        return
    yield from _others(arguments["vocab_size"] * hidden)
    for _ in range(arguments["num_hidden_layers"]):
        yield from _matrices(heads * width * hidden, keys * hidden, keys * hidden, hidden * heads * width)
        yield from _matrices(hidden * inner, hidden * inner, hidden * inner)
        yield from _others(hidden, hidden)
    yield from _others(hidden)
    if not arguments.get("tie_word_embeddings", False):
        yield from _matrices(arguments["vocab_size"] * hidden)


def _lfm2(arguments: Mapping[str, Any]) -> Iterator[Parameter]:
    """Liquid AI 2025, as transformers has it: gated short convolutions and layers of attention, with a tied head."""
    hidden, inner = arguments["hidden_size"], arguments["intermediate_size"]
    if arguments["block_auto_adjust_ff_dim"] or arguments.get("conv_bias") or not _is_tied(arguments):
        return
    yield from _others(arguments["vocab_size"] * hidden)
    for kind in arguments["layer_types"]:
        if kind == "conv":
            yield from _matrices(hidden * arguments["conv_L_cache"], 3 * hidden * hidden, hidden * hidden)
        else:
            width = hidden // arguments["num_attention_heads"]
            keys = arguments["num_key_value_heads"] * width
            yield from _matrices(hidden * hidden, keys * hidden, keys * hidden, hidden * hidden)
            yield from _others(width, width)
        yield from _matrices(hidden * inner, hidden * inner, hidden * inner)
        yield from _others(hidden, hidden)
    yield from _others(hidden)


def _is_tied(arguments: Mapping[str, Any]) -> bool:
    return bool(arguments.get("tie_word_embeddings", True) and arguments.get("tie_embedding", True))
