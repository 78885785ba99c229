"""List the configuration keys that the installed DeepSpeed knows, with the kind of each, from DeepSpeed itself.

    python scripts/list_deepspeed_keys.py           # rewrites launcher/deepspeed_keys.json
    python scripts/list_deepspeed_keys.py --check   # exit code 1 if that file is out of date

DeepSpeed reads its configuration in two ways, so two things are watched while it reads one. Sections that it parses by
hand are given as a dictionary that notes which names it is asked for, with their defaults. Sections that it hands to a
pydantic model give the model away, whose fields are then listed.
"""

import contextlib
import enum
import json
import logging
import os
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "launcher" / "deepspeed_keys.json"

KINDS = {bool: "bool", int: "int", float: "float", str: "str", Path: "str", list: "list", tuple: "list", dict: "object"}
"""Anything else is "any": a value of any kind, whose inside DeepSpeed does not name."""

KINDS_NOT_IN_THE_DEFAULT = {
    "activation_checkpointing.number_checkpoints": "int",
    "data_types.buffer_dtype": "str",
    "data_types.keep_in_fp32_modules": "list",
    "datastates_ckpt": "object",
    "flops_profiler.output_file": "str",
    "gradient_accumulation_steps": "int",
    "log_level": "str",
    "optimizer.params": "object",
    "scheduler.params": "object",
    "steps_per_print": "int",
    "train_batch_size": "int",
    "train_micro_batch_size_per_gpu": "int",
    "vocabulary_size": "int",
}
"""Keys whose default (null, "auto", false for a missing section) does not tell what they hold."""

NEEDED = {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"}}
"""What a section must hold before DeepSpeed reads the rest of it."""

PROBE = "okazaki_probe"


class Asked(dict[str, Any]):
    """A dictionary that notes the names it is asked for, in ``asked``, with the default that came with each."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.asked: dict[str, Any] = {}

    def __contains__(self, name: object) -> bool:
        self.asked.setdefault(str(name), None)
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        if default is not None or name not in self.asked:
            self.asked[name] = default
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self.asked.setdefault(name, None)
        return super().__getitem__(name)

    def keys(self) -> Any:
        return AskedKeys(self)

    def __copy__(self) -> "Asked":
        copy = Asked(self.items())
        copy.asked = self.asked
        return copy

    def __deepcopy__(self, memo: object) -> "Asked":
        return self.__copy__()


class AskedKeys(list[str]):
    def __init__(self, owner: Asked) -> None:
        super().__init__(dict.keys(owner))
        self.owner = owner

    def __contains__(self, name: object) -> bool:
        return name in self.owner


def main() -> int:
    text = json.dumps(document(), indent=1) + "\n"
    if "--check" in sys.argv[1:]:
        return 0 if FILE.read_text() == text else 1
    FILE.write_text(text)
    return 0


def document() -> dict[str, Any]:
    """What ``launcher/deepspeed_keys.json`` holds: the version of DeepSpeed and the kind of each dotted key."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    found = dict(keys(()))
    unused = KINDS_NOT_IN_THE_DEFAULT.keys() - found.keys()
    assert not unused, f"DeepSpeed does not ask for {sorted(unused)} any more"
    return {"version": deepspeed.__version__, "kinds": dict(sorted({**found, **KINDS_NOT_IN_THE_DEFAULT}.items()))}


def keys(path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """The dotted keys below the section at ``path``, and their kinds."""
    from deepspeed.runtime import config

    asked, _ = read(path)
    for name, default in asked.items():
        inner = (*path, name)
        if name == PROBE or (not path and name in config._REMOVED_TOP_LEVEL_CONFIG_KEYS):
            continue
        below, model = read(inner)
        if model is not None:
            yield from model_keys(model, ".".join(inner))
        elif below:
            yield from keys(inner)
        else:
            yield ".".join(inner), "any" if default == "auto" else kind(type(default))


def read(path: tuple[str, ...]) -> tuple[dict[str, Any], type | None]:
    """What DeepSpeed asks for in the section at ``path``, and the pydantic model to which it hands that section."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    section = Asked({PROBE: None, **NEEDED.get(".".join(path), {})} if path else {"train_batch_size": 1})
    whole = section
    for name in reversed(path):
        whole = Asked({name: whole, "train_batch_size": 1} if name == path[0] else {name: whole})
    models: list[type] = []
    plain_init = DeepSpeedConfigModel.__init__

    def noting_init(self: Any, strict: bool = False, **data: Any) -> None:
        if PROBE in data:
            models.append(type(self))
            del data[PROBE]
        plain_init(self, strict, **data)

    DeepSpeedConfigModel.__init__ = noting_init
    try:
        # A section in the place of a number, or an enabled feature without its settings, is refused in many ways;
        # what was asked before that is what counts.
        with contextlib.suppress(Exception):
            DeepSpeedConfig(whole)
    finally:
        DeepSpeedConfigModel.__init__ = plain_init
    return section.asked, models[0] if models else None


def model_keys(model: Any, prefix: str) -> Iterator[tuple[str, str]]:
    """The dotted keys of a pydantic model; deprecated fields are left out."""
    for name, field in model.model_fields.items():
        if (field.json_schema_extra or {}).get("deprecated"):
            continue
        key = f"{prefix}.{field.alias or name}"
        annotation = without_none(field.annotation)
        if hasattr(annotation, "model_fields"):
            yield from model_keys(annotation, key)
        else:
            yield key, kind(annotation)


def without_none(annotation: Any) -> Any:
    """``T`` of ``T | None``; other unions as they are."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(annotation) if member is not type(None)]
        return members[0] if len(members) == 1 else annotation
    return annotation


def kind(annotation: Any) -> str:
    """The kind of a value by its type, as ``launcher/deepspeed_keys.json`` names it."""
    origin = typing.get_origin(annotation) or annotation
    if origin is typing.Literal:
        return "str"
    if isinstance(origin, type) and issubclass(origin, enum.Enum):
        return "int" if issubclass(origin, int) else "str"
    if isinstance(origin, type):
        return next((word for base, word in KINDS.items() if issubclass(origin, base)), "any")
    return "any"


if __name__ == "__main__":
    sys.exit(main())
