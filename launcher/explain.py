"""Hydra's errors about a command line and its files, each told in one line: key, value, rule, remedy."""

import re
from collections.abc import Callable
from pathlib import Path

import yaml
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher.decode import encode
from launcher.errors import nearest
from launcher.nodes import keys, nearest_keys, show
from launcher.schema import Config

OPEN_NODES = ("model", "loss", "data", "deepspeed")
"""Nodes that can take keys of the user's own."""


def explain(error: Exception, overrides: list[str], config_name: str, loader: ConfigLoader) -> str:
    """One line about an error of Hydra, OmegaConf or YAML: key, value, rule, remedy."""
    text = str(error)
    if isinstance(error, OverrideParseException):
        return f"{error.override}: it cannot be read: {_joined(text)}"
    if isinstance(error, MissingConfigException):
        return _missing_option(error, config_name, loader)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{mark.name}, line {mark.line + 1}: {error.problem} {error.context or ''}".rstrip()
    if isinstance(error, UnicodeDecodeError):
        return f"a file of the configuration is not UTF-8 text: {text}"
    for pattern, tell in _TOLD.items():
        match = re.match(pattern, text)
        if match:
            return tell(match, overrides, config_name, loader)
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, OmegaConfBaseException):
        where = f"{cause.full_key}: " if cause.full_key else ""
        return where + _joined(text if cause is error else f"{text} {cause}")
    if isinstance(error, HydraException | ValueError | OSError):
        return _joined(text)
    return f"Hydra cannot compose this: {type(error).__name__}: {_joined(text)} (HYDRA_FULL_ERROR=1 shows where)"


def _joined(text: str) -> str:
    noise = re.compile(r"\s*(full_key|object_type|reference_type|See https|Set the environment)\b.*|\s*\^\s*|")
    return "; ".join(line.strip() for line in text.splitlines() if not noise.fullmatch(line))


def _missing_option(error: MissingConfigException, config_name: str, loader: ConfigLoader) -> str:
    path = error.missing_cfg_file or ""
    if path == config_name:
        folders = [source.path for source in loader.get_sources() if source.provider in ("main", "command-line")]
        return f"--config-name={path}: there is no such configuration in {', '.join(folders)}"
    if error.options is None:
        return f"{path}: there is no such configuration"
    group = next(str(parent) for parent in Path(path).parents if loader.get_group_options(str(parent)))
    option = path.removeprefix(f"{group}/")
    plus = "+" if group == "experiment" else ""
    hint = nearest(option, error.options) or f"; there are: {', '.join(error.options)}"
    return f"{plus}{group}={option}: there is no such option{hint}"


def _wrong_option_value(match: re.Match[str], overrides: list[str], _: str, loader: ConfigLoader) -> str:
    for override in OverridesParser.create().parse_overrides(overrides):
        options = loader.get_group_options(override.key_or_group) if override.key_or_group else []
        if options and not isinstance(override.value(), str | list | dict):
            value = show(override.value())
            near = [option for option in options if value in option]
            hint = f"nearest: {', '.join(near)}" if near else f"there are: {', '.join(options)}"
            return f"{override.input_line}: an option of a group is a word; {hint}"
    return match.string


def _unknown_key(match: re.Match[str], overrides: list[str], config_name: str, loader: ConfigLoader) -> str:
    key = match[1]
    line = _override(key, overrides)
    composed = _composed_keys([other for other in overrides if other != line], config_name, loader)
    known = [name for name in composed if not name.startswith("hydra") or key.startswith("hydra")]
    known += keys(encode(Config())) + loader.list_groups("")
    remedy = nearest_keys(key, list(dict.fromkeys(known)))
    if key.partition(".")[0] in OPEN_NODES:
        remedy += f"; +{line} adds it"
    return f"{line}: there is no such key{remedy}"


def _composed_keys(overrides: list[str], config_name: str, loader: ConfigLoader) -> list[str]:
    """The keys of a configuration, those that options bring included; none if something else is wrong in it too."""
    try:
        cfg = loader.load_configuration(config_name, overrides, RunMode.MULTIRUN)
    except (HydraException, OmegaConfBaseException, ValueError, OSError):
        return []
    return keys(OmegaConf.to_container(cfg))


def _unused_choice(match: re.Match[str], overrides: list[str], _: str, loader: ConfigLoader) -> str:
    file, group = match["file"], match["group"]
    if file is not None:
        groups = loader.list_groups("")
        return f"{file}: override /{group}: there is no such group to override{nearest(group, groups)}"
    line = _override(group, overrides)
    return f"{line}: it is not in the defaults list; +{line} adds it"


def _second_choice(match: re.Match[str], overrides: list[str], *_: object) -> str:
    group = match[1]
    added = _override(f"+{group}", overrides)
    if added in overrides:
        return f"{added}: {group} is chosen already; leave the plus out, or choose it once"
    return f"{group}: two files of the configuration choose it; write 'override /{group}: OPTION' in the later one"


def _override(key: str, overrides: list[str]) -> str:
    """The override of a key as the user wrote it; the key alone if a file holds it."""
    return next((line for line in overrides if line.partition("=")[0] == key), key)


def _not_a_node(match: re.Match[str], *_: object) -> str:
    return f"{match['override']}: it must be a node of keys"


def _still_missing(match: re.Match[str], *_: object) -> str:
    return f"{match['key']}: it must be given, and is still ???"


_TOLD: dict[str, Callable[[re.Match[str], list[str], str, ConfigLoader], str]] = {
    r"Config group override must be": _wrong_option_value,
    r"Could not override '([^']+)'\.\nTo append": _unknown_key,
    r"(?:In '(?P<file>[^']+)': )?Could not override '(?P<group>[^']+)'\. No match": _unused_choice,
    r"Multiple values for ([^ ]+)\.": _second_choice,
    r"([^ ]+) appears more than once": _second_choice,
    r"Error merging override (?P<override>.*)": _not_a_node,
    r".*Missing mandatory value: (?P<key>[^ \n]+)": _still_missing,
}
"""The errors that Hydra tells by their text alone, and who tells them in its place."""
