"""From plain nodes (what YAML and Hydra give) to the typed values of ``launcher.schema`` and back.

Everything that is wrong is found in one pass and raised as one RequestError with a line for each fault.
"""

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from launcher import nodes
from launcher.errors import RequestError
from launcher.genome.bed import is_bed
from launcher.schema import Call, Config, CustomData, Data

T = TypeVar("T")

UNSET = "???"
"""OmegaConf's mark of a value that must be given."""

TARGET = "_target_"

SECRET = re.compile(
    r"(^|_)(api_?key|password|passwd|secret|secret_key|(access|auth|api|hf)_token)$|^token$", re.IGNORECASE
)


def decode(node: Mapping[str, Any]) -> Config:
    """The configuration that a composed node or a frozen ``config.yaml`` stands for.

    Integral floats and numeric strings become integers. Raises RequestError with every fault.
    """
    return section(Config, node, "")


def section(cls: type[T], node: Any, key: str) -> T:
    """The dataclass ``cls`` from the plain node found at ``key`` (dotted; empty at the top)."""
    value: T = _value(cls, node, key)
    return value


def encode(value: Any) -> Any:
    """The plain node (dicts, lists, numbers, strings) of a typed value; ``decode`` gives the value back."""
    if isinstance(value, Call):
        return {TARGET: value.target, **value.arguments}
    if isinstance(value, CustomData):
        node = {TARGET: value.target, **value.arguments}
        return node | {"validation": encode(value.validation), "num_workers": value.num_workers}
    if is_dataclass(value):
        return {field.name: encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    return value


def dump(config: Config) -> str:
    """The text of ``config.yaml``; ``load`` gives exactly this configuration back."""
    import yaml

    text: str = yaml.safe_dump(encode(config), sort_keys=False, allow_unicode=True)
    return text


def load(path: Path) -> Config:
    """The configuration frozen in a run directory."""
    import yaml

    return decode(yaml.safe_load(path.read_text(encoding="utf-8")))


def with_absolute_paths(config: Config, folder: Path) -> Config:
    """The same configuration with the input paths that were given relative to ``folder`` made absolute.

    ``~`` is expanded here; a path that starts with a variable is left for the node that opens it.
    """

    def absolute(path: str) -> str:
        return path if path.startswith("$") else str(folder / Path(path).expanduser())

    resume = config.checkpoint.resume
    if resume not in ("auto", "required", "never"):
        config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, resume=absolute(resume)))
    data = config.data
    if not isinstance(data, Data):
        return config
    validation = data.validation
    return dataclasses.replace(
        config,
        data=dataclasses.replace(
            data,
            fasta=absolute(data.fasta) if isinstance(data.fasta, str) else [absolute(path) for path in data.fasta],
            regions=None if data.regions is None else absolute(data.regions),
            validation=absolute(validation) if isinstance(validation, str) and is_bed(validation) else validation,
            cache_dir=None if data.cache_dir is None else absolute(data.cache_dir),
        ),
    )


def _value(annotation: Any, value: Any, key: str) -> Any:
    """``value`` as the type ``annotation``; the one place that knows what may stand for what."""
    origin = typing.get_origin(annotation)
    if value == UNSET and annotation is not Any:
        raise RequestError(f"{key}: it must be given, and is still {UNSET}")
    if origin in (types.UnionType, typing.Union):
        return _union(annotation, value, key)
    if annotation is Any:
        return _plain(value, key)
    if annotation is bool:
        return _bool(value, key)
    if annotation is int:
        return _int(value, key)
    if annotation is float:
        return _float(value, key)
    if annotation is str:
        return _str(value, key)
    if origin is list:
        return _list(annotation, value, key)
    if origin is tuple:
        return _tuple(annotation, value, key)
    if not isinstance(value, Mapping) and not (isinstance(annotation, type) and issubclass(annotation, Enum)):
        raise _wrong_kind(annotation, value, key)
    if origin is Mapping:
        return _mapping(annotation, value, key)
    if annotation is Call:
        return _call(value, key)
    if annotation is CustomData:
        return _custom_data(value, key)
    if is_dataclass(annotation):
        return _dataclass(annotation, value, key)
    return _enum(annotation, value, key)


def _dataclass(cls: Any, node: Mapping[str, Any], key: str) -> Any:
    prefix = f"{key}." if key else ""
    faults: list[str] = []
    values: dict[str, Any] = {}
    annotations = typing.get_type_hints(cls)
    for field in fields(cls):
        if field.name in node:
            value = node[field.name]
        elif field.default is not MISSING:
            value = encode(field.default)
        else:
            assert field.default_factory is not MISSING
            value = encode(field.default_factory())
        try:
            values[field.name] = _value(annotations[field.name], value, prefix + field.name)
        except RequestError as error:
            faults += error.faults
    for name in node:
        if name not in annotations:
            known = [*nodes.keys(encode(Config())), "+experiment"]
            faults.append(f"{prefix}{name}: there is no such key{nodes.nearest_keys(f'{prefix}{name}', known)}")
    if faults:
        raise RequestError(*faults)
    return cls(**values)


def _call(node: Mapping[str, Any], key: str) -> Call:
    target, arguments = _target_and_arguments(node, key)
    return Call(target, arguments)


def _custom_data(node: Mapping[str, Any], key: str) -> CustomData:
    faults: list[str] = []
    rest = dict(node)
    validation, num_workers = rest.pop("validation", None), rest.pop("num_workers", 0)
    parts: list[Any] = []
    for decoder in (
        lambda: _target_and_arguments(rest, key),
        lambda: _value(CustomData | None, validation, f"{key}.validation"),
        lambda: _value(int, num_workers, f"{key}.num_workers"),
    ):
        try:
            parts.append(decoder())
        except RequestError as error:
            faults += error.faults
    if faults:
        raise RequestError(*faults)
    (target, arguments), decoded_validation, decoded_workers = parts
    return CustomData(target, arguments, decoded_validation, decoded_workers)


def _target_and_arguments(node: Mapping[str, Any], key: str) -> tuple[str, dict[str, Any]]:
    faults: list[str] = []
    if not isinstance(node.get(TARGET), str) or node[TARGET] == UNSET:
        faults.append(f"{key}.{TARGET}: it must be given: the dotted name of something callable")
    faults += [
        f"{key}.{name}: only {TARGET} and keyword arguments can stand here"
        for name in node
        if isinstance(name, str) and name != TARGET and name.startswith("_") and name.endswith("_")
    ]
    arguments: dict[str, Any] = {}
    try:
        arguments = _plain({name: value for name, value in node.items() if name != TARGET}, key)
    except RequestError as error:
        faults += error.faults
    if faults:
        raise RequestError(*faults)
    return node[TARGET], arguments


def _union(annotation: Any, value: Any, key: str) -> Any:
    members = typing.get_args(annotation)
    if value is None and type(None) in members:
        return None
    members = tuple(member for member in members if member is not type(None))
    if Data in members and isinstance(value, Mapping):
        return _value(CustomData if TARGET in value else Data, value, key)
    natural = [member for member in members if isinstance(value, _natural(member)) and not isinstance(value, bool)]
    if natural:
        return _value(natural[0], value, key)
    for member in members:
        try:
            return _value(member, value, key)
        except RequestError:
            continue
    raise _wrong_kind(annotation, value, key)


def _natural(annotation: Any) -> tuple[type, ...]:
    """The kinds of plain values that stand for ``annotation`` before any other member of a union."""
    if annotation is int:
        return (int,)
    if annotation is float:
        return (int, float)
    if annotation is str:
        return (str,)
    if typing.get_origin(annotation) is list:
        return (list,)
    return (Mapping,) if is_dataclass(annotation) else ()


def _bool(value: Any, key: str) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise _wrong_kind(bool, value, key)
    return value


def _int(value: Any, key: str) -> int:
    number = _whole(value, key)
    if not -(2**63) <= number < 2**63:
        raise RequestError(f"{key}={nodes.show(value)}: it must fit into 64 bits")
    return number


def _whole(value: Any, key: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d+\s*", value):
        return int(value)
    number = _number(value)
    if number is None:
        raise _wrong_kind(int, value, key)
    if not number.is_integer():
        raise _wrong_kind(int, value, key, f"; nearest: {math.floor(number)}, {math.ceil(number)}")
    return int(number)


def _float(value: Any, key: str) -> float:
    number = _number(value)
    if number is None:
        raise _wrong_kind(float, value, key)
    return number


def _number(value: Any) -> float | None:
    """A finite number, from text too, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _str(value: Any, key: str) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise _wrong_kind(str, value, key)
    return value


def _mapping(annotation: Any, node: Mapping[str, Any], key: str) -> dict[str, Any]:
    """An open node. Where its values have a type, null leaves a name out."""
    plain: dict[str, Any] = _plain(node, key)
    _, item = typing.get_args(annotation)
    if item is Any:
        return plain
    given = {name: value for name, value in plain.items() if value is not None}
    items = _items([item] * len(given), list(given.values()), [f"{key}.{name}" for name in given])
    return dict(zip(given, items, strict=True))


def _list(annotation: Any, value: Any, key: str) -> list[Any]:
    if not isinstance(value, list):
        raise _wrong_kind(annotation, value, key)
    (item,) = typing.get_args(annotation)
    return _items([item] * len(value), value, _indexed(key, value))


def _tuple(annotation: Any, value: Any, key: str) -> tuple[Any, ...]:
    items = typing.get_args(annotation)
    if not isinstance(value, list) or len(value) != len(items):
        raise _wrong_kind(annotation, value, key)
    return tuple(_items(items, value, _indexed(key, value)))


def _indexed(key: str, values: list[Any]) -> list[str]:
    return [f"{key}[{index}]" for index in range(len(values))]


def _items(annotations: Collection[Any], values: list[Any], keys: list[str]) -> list[Any]:
    items: list[Any] = []
    faults: list[str] = []
    for annotation, value, key in zip(annotations, values, keys, strict=True):
        try:
            items.append(_value(annotation, value, key))
        except RequestError as error:
            faults += error.faults
    if faults:
        raise RequestError(*faults)
    return items


def _enum(cls: type[Enum], value: Any, key: str) -> Enum:
    words = [member.value for member in cls]
    if value in words:
        return cls(value)
    near = difflib.get_close_matches(str(value), words)
    raise _wrong_kind(cls, value, key, f"; nearest: {', '.join(near)}" if near else "")


def _plain(value: Any, key: str) -> Any:
    """A value of an open node (keyword arguments, raw DeepSpeed keys): anything that JSON can hold, no secrets."""
    if isinstance(value, Mapping):
        faults: list[str] = []
        node: dict[str, Any] = {}
        for name, item in value.items():
            inner = f"{key}.{name}"
            if not isinstance(name, str):
                faults.append(f"{inner}: a name must be text; put {name!r} in quotes")
            elif SECRET.search(name) and isinstance(item, str) and item:
                faults.append(
                    f"{inner}: it looks like a secret, and would be written to config.yaml; "
                    "leave it out and put it in the environment"
                )
            else:
                try:
                    node[name] = _plain(item, inner)
                except RequestError as error:
                    faults += error.faults
        if faults:
            raise RequestError(*faults)
        return node
    if isinstance(value, list):
        return _items([Any] * len(value), value, _indexed(key, value))
    if value == UNSET:
        raise RequestError(f"{key}: it must be given, and is still {UNSET}")
    if value is not None and not isinstance(value, bool | int | float | str):
        raise RequestError(f"{key}={value}: a {type(value).__name__} cannot be kept in JSON; put it in quotes")
    if isinstance(value, float) and not math.isfinite(value):
        raise RequestError(f"{key}={value}: it must be a finite number")
    return value


def _wrong_kind(annotation: Any, value: Any, key: str, remedy: str = "") -> RequestError:
    return RequestError(f"{key}={nodes.show(value)}: it must be {_words(annotation)}{remedy}")


def _words(annotation: Any) -> str:
    """What a value of this type is, in words: "an integer or null"."""
    plain = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    if annotation in plain:
        return plain[annotation]
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        *first, last = [_words(member) for member in inner]
        return f"{', '.join(first)} or {last}"
    if origin is list:
        return "a list of text" if inner == (str,) else "a list"
    if origin is tuple:
        return f"a list of {len(inner)} numbers"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return f"one of {', '.join(member.value for member in annotation)}"
    if annotation in (Call, CustomData):
        return f"a node with {TARGET}"
    return "a node of keys"
