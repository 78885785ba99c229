"""Raw DeepSpeed keys of the user's, merged over what this program says: unknown names and conflicts are refused."""

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from launcher import decode, nodes
from launcher.errors import RequestError

FIXED = "launcher"
"""The source of values that the training loop relies on; nobody can set them."""

DEFAULT = "default"
"""The source of values that no key of the configuration stands for; raw DeepSpeed keys replace them."""

OWNERS = {
    "train_batch_size": "batch.train_batch_size",
    "train_micro_batch_size_per_gpu": "batch.train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "batch.gradient_accumulation_steps",
    "activation_checkpointing": "activation.checkpointing",
    "autotuning": FIXED,
    "bf16": "precision.dtype",
    "bfloat16": "precision.dtype",
    "data_efficiency": "data",
    "data_types.param_dtype": "precision.dtype",
    "dataloader_drop_last": "accumulation.tail",
    "expert_parallel": "model",
    "fp16": "precision.dtype",
    "hybrid_engine": FIXED,
    "optimizer": "optimizer",
    "pipeline": "parallel.pipeline",
    "scheduler": "lr_schedule",
    "tensor_parallel": "parallel.tensor",
    "tensorboard": "logging.tensorboard",
    "torch_autocast": "precision.dtype",
    "wandb": "logging.wandb",
    "zero_optimization.cpu_offload": "offload.optimizer",
    "zero_optimization.cpu_offload_param": "offload.parameters",
    "zero_optimization.cpu_offload_use_pin_memory": "offload.pin_memory",
    "zero_optimization.legacy_stage1": "zero.stage",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "zero.stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.zenflow": FIXED,
}
"""Who decides over DeepSpeed's keys and whole sections, apart from the settings below."""


class Setting(NamedTuple):
    """A dotted DeepSpeed key, its value, what set it, and whether it means anything under this configuration."""

    key: str
    value: Any
    source: str
    written: bool = True


def merge(settings: list[Setting], raw: Mapping[str, Any]) -> tuple[list[Setting], list[str]]:
    """``settings`` with the raw keys added and the defaults among them replaced, and the faults of the raw keys."""
    if not raw:
        return settings, []
    version, kinds = _known_keys()
    owners = {setting.key: setting.source for setting in settings if setting.source != DEFAULT} | OWNERS
    merged = {setting.key: setting for setting in settings}
    faults: list[str] = []
    for key, value in _leaves(raw, kinds):
        try:
            merged[key] = Setting(key, _raw_value(key, value, kinds, owners, version), "deepspeed")
        except RequestError as error:
            faults += error.faults
    return list(merged.values()), faults


def _raw_value(key: str, value: Any, kinds: Mapping[str, str], owners: Mapping[str, str], version: str) -> Any:
    """The value of a raw key as the kind that DeepSpeed expects; raises RequestError."""
    name = f"deepspeed.{key}"
    given = f"{name}={nodes.show(value)}"
    parents = [key, *_parents(key)]
    owner = next((owners[part] for part in parents if part in owners), None)
    if owner == FIXED:
        raise RequestError(f"{given}: this program's training loop decides it; leave it out")
    if owner is not None:
        raise RequestError(f"{given}: {owner} decides it; leave it out and set {owner}")
    if any(known.startswith(f"{key}.") for known in kinds):
        raise RequestError(f"{given}: it is a section of DeepSpeed's; set keys inside it")
    if key not in kinds:
        nearest = [f"deepspeed.{other}" for other in _nearest(key, kinds)]
        remedy = f"nearest: {', '.join(nearest)}" if nearest else "leave it out"
        raise RequestError(f"{given}: DeepSpeed {version} knows no such key; {remedy}")
    if _has_auto(value):
        raise RequestError(f"{given}: DeepSpeed itself knows no auto; give the value, or leave the key out")
    annotations = {"bool": bool, "int": int, "float": float, "str": str, "list": list[Any], "object": Mapping[str, Any]}
    return decode.section(annotations.get(kinds[key], Any), value, name)


def _leaves(node: Mapping[str, Any], kinds: Mapping[str, str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted raw keys and their values. Nulls are left out: they unset a key."""
    for name, value in node.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and kinds.get(key) not in ("object", "any"):
            yield from _leaves(value, kinds, f"{key}.")
        elif value is not None:
            yield key, value


def _parents(key: str) -> list[str]:
    """The sections that a dotted key lies in, the innermost first."""
    parts = key.split(".")
    return [".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1)]


def _nearest(key: str, kinds: Mapping[str, str]) -> list[str]:
    """Known keys that an unknown one may stand for: the same name in another section, or one spelt like it."""
    names = key.split(".")
    same_name = [known for known in kinds if known.rpartition(".")[2] == names[-1]]
    similar: list[str] = []
    for depth, name in enumerate(names):
        above = "".join(f"{part}." for part in names[:depth])
        siblings = {known[len(above) :].split(".")[0] for known in kinds if known.startswith(above)}
        if name not in siblings:
            similar = [above + other for other in difflib.get_close_matches(name, siblings, cutoff=0.75)]
            break
    return list(dict.fromkeys((same_name if len(same_name) <= 3 else []) + similar))


def _has_auto(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_auto, value.values()))
    if isinstance(value, list):
        return any(map(_has_auto, value))
    return isinstance(value, str) and value.lower() == "auto"


def _known_keys() -> tuple[str, dict[str, str]]:
    """The version of DeepSpeed whose keys are known, and the kind of each dotted key."""

    known = json.loads(Path(__file__).with_name("deepspeed_keys.json").read_text(encoding="utf-8"))
    return known["version"], known["kinds"]
