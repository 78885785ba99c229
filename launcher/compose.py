"""Composing a command line with Hydra's own parser and loader, without what Hydra does around it.

``@hydra.main`` composes twice, makes its directory before the program can refuse, and reports faults in several lines.
Here a command line is composed once, nothing is written, and every fault becomes a RequestError of one line. All use
of Hydra's internals (hydra-core 1.3) is in this file.
"""

import argparse
import dataclasses
import os
import re
import secrets
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import hydra.version
import omegaconf._utils
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository, IConfigRepository
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ResultDefault
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from launcher import __version__
from launcher.decode import encode
from launcher.errors import RequestError, RunError
from launcher.explain import explain
from launcher.nodes import keys, nearest_keys, show
from launcher.schema import Config, Data

PACKAGE = Path(__file__).resolve().parent

WHOLE_NODES = ("model", "data")
"""Nodes that an option brings whole, because a ``_target_`` in them has keys of its own."""


def shipped(folder: str) -> Path:
    """A folder that comes with this program: inside the package once installed, beside it in a checkout."""
    inside = PACKAGE / folder
    return inside if inside.is_dir() else PACKAGE.parent / folder


@dataclasses.dataclass(frozen=True)
class Composed:
    """One run as composed: resolved and plain, not yet decoded or checked."""

    node: dict[str, Any]
    """The configuration without Hydra's own part."""
    run_dir: Path
    overrides: tuple[str, ...]
    hydra: DictConfig | None = None
    """Hydra's own part, for points that a sweeper chose."""


class Composer:
    """One command line and what Hydra makes of it. Methods raise RequestError for what the user got wrong."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._parser = _parser()
        self._args = self._parser.parse_intermixed_args(list(argv))
        _refuse_together(self._args)
        _register()
        self._name: str = self._args.config_name or "config"
        self._overrides: list[str] = self._args.overrides
        self._loader = _Loader(_search_path(self._args))
        self._hydra = Hydra(task_name="okazaki", config_loader=self._loader)

    @property
    def only_shows(self) -> bool:
        """Whether the command line asks for help or information, and for no run."""
        args = self._args
        return bool(args.help or args.hydra_help or args.cfg or args.shell_completion or args.info)

    def show(self) -> None:
        """Print what ``--help``, ``--hydra-help``, ``--cfg``, ``--info`` or ``--shell-completion`` asks for."""
        args, hydra = self._args, self._hydra
        with self._one_line():
            if args.help:
                hydra.app_help(self._name, self._parser, args)
            elif args.hydra_help:
                hydra.hydra_help(self._name, self._parser, args)
            elif args.shell_completion:
                hydra.shell_completion(self._name, self._overrides)
            else:
                cfg = hydra.compose_config(self._name, self._overrides, RunMode.RUN)
                if args.info:
                    hydra.show_info(args.info, self._name, self._overrides)
                    return
                known = keys(OmegaConf.to_container(cfg))
                if args.package not in (None, "_global_", *known):
                    raise RequestError(f"--package={args.package}: no such node{nearest_keys(args.package, known)}")
                if args.package is not None and OmegaConf.select(cfg, args.package, default="") is None:
                    print("null")
                    return
                hydra.show_cfg(self._name, self._overrides, args.cfg, args.package, args.resolve)

    def compose(self) -> DictConfig:
        """The configuration of the command line, Hydra's part included; of a sweep, without the values it goes over."""
        with self._one_line():
            mode = RunMode.MULTIRUN if self._args.multirun else RunMode.RUN
            cfg = self._loader.load_configuration(self._name, self._overrides, mode, validate_sweep_overrides=False)
            if mode is RunMode.MULTIRUN or cfg.hydra.mode is None:
                cfg.hydra.mode = mode
            _refuse_sweeps(_parse(self._overrides), cfg.hydra.mode)
            return cfg

    def single(self, cfg: DictConfig) -> Composed:
        """The run of a command line that sweeps over nothing."""
        with self._one_line():
            HydraConfig.instance().set_config(cfg)
            return Composed(_job(cfg), _folder(cfg, "hydra.run.dir"), tuple(cfg.hydra.overrides.task))

    def points(self, cfg: DictConfig) -> list[tuple[str, ...]]:
        """The overrides of each point of a sweep, expanded as Hydra's basic sweeper does."""
        with self._one_line():
            params: Mapping[str, str] = cfg.hydra.sweeper.params or {}
            lines = [f"{key}={value}" for key, value in params.items()] + list(cfg.hydra.overrides.task)
            overrides = OverridesParser.create(config_loader=self._loader).parse_overrides(lines)
            (points,) = BasicSweeper.split_arguments(overrides, max_batch_size=None)
            return [tuple(point) for point in points]

    def point(self, cfg: DictConfig, overrides: Sequence[str], index: int) -> Composed:
        """Point ``index`` of the sweep ``cfg``."""
        return compose_point(self._loader, cfg, overrides, index)

    def run_sweeper(self, cfg: DictConfig) -> None:
        """Hand the sweep to the sweeper that ``cfg`` chooses; it calls back through the launcher plugin."""
        context = HydraContext(config_loader=self._loader, callbacks=Callbacks(cfg))
        with self._one_line():
            sweeper = Plugins.instance().instantiate_sweeper(
                config=cfg, hydra_context=context, task_function=lambda _: None
            )
        sweeper.sweep(arguments=list(cfg.hydra.overrides.task))

    def _one_line(self) -> AbstractContextManager[None]:
        return one_line(self._loader, self._name, self._overrides)


@contextmanager
def one_line(loader: ConfigLoader, config_name: str, overrides: Sequence[str]) -> Iterator[None]:
    """Turn an error of Hydra, OmegaConf or YAML about the user's input into a RequestError of one line."""
    try:
        yield
    except (RequestError, RunError):
        raise
    except Exception as error:  # Hydra also asserts, and looks keys up, on what the user wrote
        raise RequestError(explain(error, list(overrides), config_name, loader)) from error


def is_sweep(cfg: DictConfig) -> bool:
    return bool(cfg.hydra.mode is RunMode.MULTIRUN)


def is_basic_sweep(cfg: DictConfig) -> bool:
    """Whether all points of a sweep are known before it starts."""
    return bool(cfg.hydra.sweeper._target_ == f"{BasicSweeper.__module__}.{BasicSweeper.__name__}")


def sweep_folder(cfg: DictConfig) -> Path:
    return _folder(cfg, "hydra.sweep.dir")


def compose_point(loader: ConfigLoader, cfg: DictConfig, overrides: Sequence[str], index: int) -> Composed:
    """Point ``index`` of the sweep ``cfg``; its run directory is inside the sweep's."""
    with one_line(loader, cfg.hydra.job.config_name, overrides):
        point = loader.load_sweep_config(cfg, list(overrides))
        with open_dict(point):
            point.hydra.job.id = str(index)
            point.hydra.job.num = index
        HydraConfig.instance().set_config(point)
        subdir = str(OmegaConf.select(point, "hydra.sweep.subdir"))
        own = OmegaConf.create({"hydra": point.hydra}, flags={"allow_objects": True})
        return Composed(_job(point), sweep_folder(cfg) / subdir, tuple(overrides), own)


def _register() -> None:
    """Tell Hydra the defaults of the schema, as plain nodes, and the resolvers of conf/.

    Plain, so that a wrong value is found by ``launcher.decode`` with all others and not by the first typed node.
    """
    defaults = encode(Config())
    store = ConfigStore.instance()
    base = {name: node for name, node in defaults.items() if name not in WHOLE_NODES}
    store.store(name="okazaki_defaults", node=base, provider="okazaki")
    store.store(group="data", name="fasta", node=encode(Data()), provider="okazaki")
    hydra.version.setbase("1.3")
    # Cached by the configuration that it stands in, and so the same for all points of a sweep.
    OmegaConf.register_new_resolver("unique", lambda: secrets.token_hex(4), use_cache=True, replace=True)
    OmegaConf.register_new_resolver("genome", lambda name: str(shipped("genomes") / name), replace=True)
    OmegaConf.register_new_resolver("zero_pad", lambda number: f"{number:04d}", replace=True)


def _parser() -> argparse.ArgumentParser:
    parser = get_args_parser()
    parser.prog = "python -m launcher"

    def refuse(message: str) -> NoReturn:
        raise RequestError(f"{message}; python -m launcher --hydra-help lists the options")

    parser.error = refuse  # type: ignore[method-assign]
    for action in parser._actions:
        if isinstance(action, argparse._VersionAction):
            action.version = f"okazaki {__version__} (Hydra {hydra.__version__})"
    return parser


def _refuse_together(args: argparse.Namespace) -> None:
    if args.experimental_rerun is not None:
        raise RequestError("--experimental-rerun: not here; config.yaml of a run directory holds the whole run")
    if args.resolve and not (args.cfg or args.help):
        raise RequestError("--resolve: it goes with --cfg or --help")
    commands = [args.run, args.multirun, args.cfg, args.info, args.shell_completion]
    if sum(bool(command) for command in commands) > 1:
        raise RequestError("only one of --run, --multirun, --cfg, --info and --shell-completion can be given")


def _search_path(args: argparse.Namespace) -> ConfigSearchPath:
    main = str(shipped("conf"))
    if args.config_path is not None:
        main = args.config_path if "://" in args.config_path else os.path.abspath(args.config_path)
        if "://" not in main and not os.path.isdir(main):
            raise RequestError(f"--config-path={args.config_path}: there is no folder {main}")
    search_path = create_config_search_path(main)
    if args.config_dir is not None:
        folder = os.path.abspath(args.config_dir)
        if not os.path.isdir(folder):
            raise RequestError(f"--config-dir={args.config_dir}: there is no folder {folder}")
        # Before the schema, after conf/: as Hydra has it.
        search_path.prepend("command-line", f"file://{folder}", anchor=SearchPathQuery(provider="schema"))
    return search_path


def _parse(overrides: list[str]) -> list[Override]:
    return OverridesParser.create().parse_overrides(overrides)


def _refuse_sweeps(overrides: list[Override], mode: RunMode) -> None:
    sweeps = [override for override in overrides if override.is_sweep_override()]
    if mode is RunMode.RUN:
        faults = [
            f"{sweep.input_line}: several values for one run; -m sweeps over them, "
            f"{sweep.get_key_element()}=[...] makes a list, quotes make text"
            for sweep in sweeps
        ]
    else:
        faults = [
            f"{sweep.input_line}: a sweep cannot go over Hydra's own keys"
            for sweep in sweeps
            if sweep.is_hydra_override()
        ]
    if faults:
        raise RequestError(*faults)


def _job(cfg: DictConfig) -> dict[str, Any]:
    """The part of a composed configuration that is not Hydra's, resolved to plain values; ``???`` stays."""
    if "experiment" in cfg:
        raise RequestError("experiment: the file of an experiment must begin with the line '# @package _global_'")
    node: dict[str, Any] = {}
    for name in cfg:
        if name == "hydra":
            continue
        if OmegaConf.is_missing(cfg, name):
            node[str(name)] = "???"
        elif OmegaConf.is_config(cfg[name]):
            node[str(name)] = OmegaConf.to_container(cfg[name], resolve=True)
        else:
            node[str(name)] = cfg[name]
    return node


def _folder(cfg: DictConfig, key: str) -> Path:
    folder = OmegaConf.select(cfg, key)
    if not isinstance(folder, str) or not folder:
        raise RequestError(f"{key}={show(folder)}: it must be the path of a directory")
    return Path.cwd() / Path(folder).expanduser()


NOT_A_NUMBER = re.compile(r"[-+]?(0[0-9_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)\Z")
"""What YAML 1.1 reads as a number to the base of 8 or 60: 010 as 8, and 1:30:00, which is a time, as 5400."""


class _Repository(ConfigRepository):
    """Hydra's files, with numbers read in them as on the command line, where only 5400 is 5400."""

    def load_config(self, config_path: str) -> ConfigResult | None:
        # Hydra's sources call OmegaConf.load, which knows no loader but its own, and looks that up at every call.
        original = omegaconf._utils.get_yaml_loader
        omegaconf._utils.get_yaml_loader = lambda: _with_times_as_text(original())
        try:
            return super().load_config(config_path)
        finally:
            omegaconf._utils.get_yaml_loader = original


def _with_times_as_text(loader: Any) -> Any:
    """OmegaConf's own class of YAML loader, made anew at each call, with a rule before those for numbers."""
    for first in "-+0123456789":
        rules = loader.yaml_implicit_resolvers.get(first, [])
        loader.yaml_implicit_resolvers[first] = [("tag:yaml.org,2002:str", NOT_A_NUMBER), *rules]
    return loader


class _Loader(ConfigLoaderImpl):
    """Hydra's loader, with two checks of its own between finding the files of a configuration and merging them."""

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self.repository = _Repository(config_search_path)

    def _compose_config_from_defaults_list(self, defaults: list[ResultDefault], repo: IConfigRepository) -> DictConfig:
        for source in repo.get_sources():
            if not source.available():
                raise RequestError(f"hydra.searchpath: there is no {source.scheme()}://{source.path}")
        faults = _broken_precedence(defaults, repo)
        if faults:
            raise RequestError(*faults)
        return super()._compose_config_from_defaults_list(defaults, repo)

    def _process_config_searchpath(self, *args: Any, **kwargs: Any) -> None:
        # A folder that is not there is an error above, and no warning of several lines.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            super()._process_config_searchpath(*args, **kwargs)


def _broken_precedence(defaults: list[ResultDefault], repo: IConfigRepository) -> list[str]:
    """Fault lines for keys that an experiment and an option of a group both set.

    Experiments are merged after the options of groups, so such a key would keep the experiment's value also where the
    command line chooses the option. A user's experiment is held against every option; a shipped one, which a test
    holds against every shipped option, against the user's options that are in use.
    """
    if all(_is_shipped(source.full_path()) for source in repo.get_sources()):
        return []
    chosen = [default.config_path for default in defaults if default.config_path is not None]
    faults = []
    for experiment in dict.fromkeys(path for path in chosen if path.startswith("experiment/")):
        own = _load(experiment, repo)
        for key in _own_keys(own):
            group = key.partition(".")[0]
            options = [
                option
                for option in repo.get_group_options(group)
                if not _is_shipped(own.path) or f"{group}/{option}" in chosen
                if any(_overlap(key, f"{group}.{inner}") for inner in _own_keys(_load(f"{group}/{option}", repo)))
            ]
            if options:
                faults.append(
                    f"{experiment} sets {key}, which {', '.join(f'{group}={option}' for option in options)} sets too, "
                    f"so that {group}=OPTION on the command line would not win over the experiment: write "
                    f"'override /{group}: OPTION' in the experiment, or leave the key out of one of the two"
                )
    return faults


def _load(path: str, repo: IConfigRepository) -> ConfigResult:
    loaded = repo.load_config(path)
    assert loaded is not None, "it is in the repository's own list"
    return loaded


def _own_keys(loaded: ConfigResult) -> list[str]:
    """The dotted keys of the values that a file sets itself; none for the defaults of the schema."""
    if loaded.is_schema_source:
        return []
    node = OmegaConf.to_container(loaded.config)
    found = keys(node) if isinstance(node, dict) else []
    return [key for key in found if key != "defaults" and not any(other.startswith(f"{key}.") for other in found)]


def _overlap(first: str, second: str) -> bool:
    return f"{first}.".startswith(f"{second}.") or f"{second}.".startswith(f"{first}.")


def _is_shipped(source: str) -> bool:
    scheme, _, path = source.rpartition("://")
    return scheme != "file" or Path(path) == shipped("conf")
