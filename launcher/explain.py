"""Hydra's errors about a command line and its files, each told in one line: key, value, rule, remedy."""

import re
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher.decode import encode, keys, nearest_keys, show
from launcher.errors import nearest
from launcher.schema import Config

USER_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, OSError)
"""What Hydra, OmegaConf and YAML raise about a command line and its files."""

OPEN_NODES = ("model", "loss", "data", "deepspeed")
"""Nodes that can take keys of the user's own."""


def explain(error: Exception, overrides: list[str], config_name: str, loader: ConfigLoader) -> str:
    """One line about an error of Hydra, OmegaConf or YAML: key, value, rule, remedy."""
    text = str(error)
    if isinstance(error, OverrideParseException):
        return f"{error.override}: it cannot be read: {_one_line_of(text)}"
    if isinstance(error, MissingConfigException):
        return _explain_missing(error, config_name, loader)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{mark.name}, line {mark.line + 1}: {_one_line_of(f'{error.problem} {error.context or str()}')}"
    if "Config group override must be" in text:
        return _explain_option_value(overrides, loader) or _one_line_of(text)
    unknown = re.match(r"Could not override '(?P<key>[^']+)'\.\nTo append", text)
    if unknown:
        return _explain_unknown_key(unknown["key"], overrides, config_name, loader)
    group = re.match(r"(In '(?P<file>[^']+)': )?Could not override '(?P<group>[^']+)'\. No match", text)
    if group:
        return _explain_unknown_group(group["group"], group["file"], overrides, loader)
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, OmegaConfBaseException):
        where = f"{cause.full_key}: " if cause.full_key else ""
        return where + _one_line_of(f"{text} {cause}" if cause is not error else text)
    return _one_line_of(text)


def _one_line_of(text: str) -> str:
    noise = re.compile(r"\s*(full_key|object_type|reference_type|See https|Set the environment)\b.*|\s*\^\s*|")
    return "; ".join(line.strip() for line in text.splitlines() if not noise.fullmatch(line))


def _explain_missing(error: MissingConfigException, config_name: str, loader: ConfigLoader) -> str:
    path = error.missing_cfg_file or ""
    if path == config_name or error.options is None:
        known = loader.get_group_options("")
        what = f"--config-name={path}" if path == config_name else path
        return f"{what}: there is no such configuration{nearest(path, known)}"
    group = next(str(parent) for parent in Path(path).parents if loader.get_group_options(str(parent)))
    option = path.removeprefix(f"{group}/")
    plus = "+" if group == "experiment" else ""
    where = re.match(r"In '([^']+)': ", str(error))
    file = f"{where[1]}: " if where and where[1] != config_name else ""
    hint = nearest(option, error.options) or f"; there are: {', '.join(error.options)}"
    return f"{file}{plus}{group}={option}: there is no such option{hint}"


def _explain_option_value(overrides: list[str], loader: ConfigLoader) -> str | None:
    for override in OverridesParser.create().parse_overrides(overrides):
        options = loader.get_group_options(override.key_or_group)
        if options and not isinstance(override.value(), str | list | dict):
            value = show(override.value())
            near = [option for option in options if value in option]
            hint = f"nearest: {', '.join(near)}" if near else f"there are: {', '.join(options)}"
            return f"{override.input_line}: an option of a group is a word; {hint}"
    return None


def _explain_unknown_key(key: str, overrides: list[str], config_name: str, loader: ConfigLoader) -> str:
    line = next(line for line in overrides if line.partition("=")[0] == key)
    others = [other for other in overrides if other.partition("=")[0] != key]
    known = keys(encode(Config())) + loader.list_groups("")
    try:
        cfg = loader.load_configuration(config_name, others, RunMode.MULTIRUN, validate_sweep_overrides=False)
        known = keys({name: node for name, node in _unresolved(cfg).items() if name != "hydra"}) + known
    except USER_ERRORS:
        # Another override is wrong too, and will be told next; the names of the schema are known all the same.
        pass
    remedy = nearest_keys(key, list(dict.fromkeys(known)))
    if key.partition(".")[0] in OPEN_NODES:
        remedy += f"; +{line} adds it"
    return f"{line}: there is no such key{remedy}"


def _unresolved(cfg: DictConfig) -> dict[str, Any]:
    node = OmegaConf.to_container(cfg)
    assert isinstance(node, dict)
    return {str(name): item for name, item in node.items()}


def _explain_unknown_group(group: str, file: str | None, overrides: list[str], loader: ConfigLoader) -> str:
    groups = loader.list_groups("")
    if file is not None:
        return f"{file}: override /{group}: there is no such group to override{nearest(group, groups)}"
    line = next(line for line in overrides if line.partition("=")[0] == group)
    return f"{line}: it is not in the defaults list; +{line} adds it"
