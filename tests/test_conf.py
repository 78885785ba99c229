"""The shipped configuration files: all of them compose, and the command line wins over every experiment."""

import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from launcher import compose, decode, plan
from launcher.compose import Composer
from launcher.errors import RequestError
from launcher.schema import Call, Data

CONF = compose.shipped("conf")


def options(group: str) -> list[str]:
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


GROUPS = sorted(folder.name for folder in CONF.iterdir() if folder.is_dir() and folder.name != "experiment")
EXPERIMENTS = options("experiment")
CHOICES = [(group, option) for group in GROUPS for option in options(group)]


def composed(*argv: str) -> dict[str, Any]:
    composer = Composer(argv)
    return composer.single(composer.compose()).node


def leaves(node: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys and values of a node, its defaults list left out."""
    found: dict[str, Any] = {}
    for name, value in node.items():
        if isinstance(value, dict):
            found |= leaves(value, f"{prefix}{name}.")
        elif name != "defaults":
            found[f"{prefix}{name}"] = value
    return found


def file(group: str, option: str) -> dict[str, Any]:
    node = OmegaConf.to_container(OmegaConf.load(CONF / group / f"{option}.yaml"))
    assert isinstance(node, dict)
    return {str(name): value for name, value in node.items()}


def test_the_groups_are_those_of_the_contract() -> None:
    words = "model data zero offload precision optimizer lr_schedule batch_schedule activation parallel cluster logging"
    assert " ".join(GROUPS) == " ".join(sorted(words.split()))


def fits(group: str, option: str, experiment: str) -> bool:
    """Windows of a genome and datasets of one's own have no keys in common that an experiment could set."""
    return not ("data" in file("experiment", experiment) and group == "data" and "_target_" in file(group, option))


@pytest.mark.parametrize(
    ("group", "option", "experiment"),
    [(*choice, experiment) for choice in CHOICES for experiment in EXPERIMENTS if fits(*choice, experiment)],
)
def test_an_option_on_the_command_line_wins_over_an_experiment(group: str, option: str, experiment: str) -> None:
    node = composed(f"{group}={option}", f"+experiment={experiment}")
    config = decode.decode(node)
    assert config.name == experiment
    written = leaves(file(group, option))
    assert written, "an option that sets nothing cannot win"
    result = leaves(node[group])
    assert {key: result[key] for key in written} == {
        key: str(compose.shipped("genomes") / value.split(":")[1].rstrip("}")) if "${genome:" in str(value) else value
        for key, value in written.items()
    }


@pytest.mark.parametrize("experiment", EXPERIMENTS)
@pytest.mark.parametrize(
    ("option", "needed"),
    [
        ("constant", []),
        ("ramp", ["batch_schedule.initial_batch_size=2", "batch_schedule.over=20"]),
        ("milestones", ["batch_schedule.milestones=[[0,2],[20,${batch.train_batch_size}]]"]),
        ("noise_scale", ["batch_schedule.initial_batch_size=2"]),
    ],
)
def test_a_batch_schedule_with_what_it_needs_goes_with_every_experiment(
    option: str, needed: list[str], experiment: str
) -> None:
    config = decode.decode(composed("mode=plan", f"+experiment={experiment}", f"batch_schedule={option}", *needed))
    made = plan.make(replace(config, cluster=replace(config.cluster, ranks_per_node=1)))
    assert plan.summary(made)["batch_schedule"][-1]["train_batch_size"] == made.cut.train_batch_size
    if needed:
        incomplete = composed("mode=plan", f"+experiment={experiment}", f"batch_schedule={option}")
        with pytest.raises(RequestError, match=f"type={option} needs it"):
            plan.make(decode.decode(incomplete))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_sets_no_key_that_an_option_sets(experiment: str) -> None:
    of_options = {f"{group}.{key}" for group, option in CHOICES for key in leaves(file(group, option))}
    assert not of_options & set(leaves(file("experiment", experiment)))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_sets_the_global_batch_and_never_its_cut(experiment: str) -> None:
    keys = {key for key in leaves(file("experiment", experiment)) if key.startswith("batch.")}
    assert keys in ({"batch.train_batch_size"}, {"batch.train_batch_tokens"})


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_value_on_the_command_line_wins_over_an_experiment(experiment: str) -> None:
    written = leaves(file("experiment", experiment))
    changed = {key: "x" if isinstance(value, str) else 3 for key, value in written.items()}
    node = leaves(composed(*(f"{key}={value}" for key, value in changed.items()), f"+experiment={experiment}"))
    assert {key: node[key] for key in changed} == changed


# Models and data are exempt: each has arguments of its own, and a choice replaces the whole node. So is the cluster: a
# site states what it has, and the examples of sites are there to be copied.
@pytest.mark.parametrize("group", [group for group in GROUPS if group not in (*compose.WHOLE_NODES, "cluster")])
def test_options_of_a_group_set_the_same_keys_so_that_one_takes_the_place_of_another(group: str) -> None:
    keys = [set(leaves(file(group, option))) for option in options(group)]
    assert all(other == keys[0] for other in keys)


@pytest.mark.parametrize("group", [*GROUPS, "experiment"])
def test_options_are_words(group: str) -> None:
    for option in options(group):
        assert isinstance(OmegaConf.create(f"x: {option}").x, str), f"YAML reads {option} as something else"


def test_without_an_experiment_only_the_data_the_batch_and_the_length_have_to_be_given() -> None:
    config = decode.decode(composed("data.fasta=/g.fa"))
    assert config.data == Data(fasta="/g.fa")
    assert config.model.target == "launcher.worker.models.hugging_face"


def num_parameters(model: Call) -> int:
    """Of a Llama without grouped queries: embedding and head; attention, gated MLP and norms of a layer.

    Of an LFM2 of convolutions: one tied embedding; in each layer a projection to three gates, a depthwise convolution,
    a projection back, the MLP and the norms.
    """
    arguments = model.arguments
    hidden, inner, layers = (arguments[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    if arguments["model_type"] == "lfm2":
        convolution = (3 + 1) * hidden * hidden + arguments["conv_L_cache"] * hidden
        layer = convolution + 3 * hidden * inner + 2 * hidden
        return arguments["vocab_size"] * hidden + layers * layer + hidden
    layer = 4 * hidden * hidden + 3 * hidden * inner + 2 * hidden
    return 2 * arguments["vocab_size"] * hidden + layers * layer + hidden


@pytest.mark.parametrize("option", [option for option in options("model") if "model_type" in file("model", option)])
def test_a_model_has_the_size_that_its_file_states(option: str) -> None:
    config = decode.decode(composed(f"model={option}", "data.fasta=/g.fa"))
    assert f" {num_parameters(config.model):,} parameters." in (CONF / "model" / f"{option}.yaml").read_text()
    assert config.model.arguments["hidden_size"] % config.model.arguments["num_attention_heads"] == 0


@pytest.mark.parametrize(
    ("option", "millions"),
    [("1m", 1), ("10m", 10), ("50m", 50), ("150m", 150), ("500m", 500), ("1b", 1000), ("3b", 3000), ("7b", 7000)],
)
def test_a_model_has_the_size_of_its_name(option: str, millions: int) -> None:
    config = decode.decode(composed(f"model=llama_{option}", "data.fasta=/g.fa"))
    assert num_parameters(config.model) == pytest.approx(millions * 1e6, rel=0.03)


def test_every_file_says_what_it_is() -> None:
    silent = [
        str(path.relative_to(CONF))
        for path in Path(CONF).rglob("*.yaml")
        if len(path.read_text().splitlines()) > 3 and not path.read_text().startswith("#")
    ]
    assert silent == []


def documented() -> list[str]:
    """The commands that the pages show, but those with what only a user has."""
    root = Path(__file__).parents[1]
    pages = [root / "README.md", root / "conf" / "config.yaml", *sorted((root / "docs").glob("*.md"))]
    lines = [line.strip() for page in pages for line in page.read_text(encoding="utf-8").splitlines()]
    shown = [line.partition("#")[0].split("   ")[0].strip() for line in lines if line.startswith("python -m launcher ")]
    return [line for line in dict.fromkeys(shown) if not any(word in line for word in ("my_conf", "genomes/", "help"))]


def test_the_pages_show_commands() -> None:
    assert len(documented()) > 8


@pytest.mark.parametrize("command", documented())
def test_a_command_that_a_page_shows_can_be_run(command: str, tmp_path: Path) -> None:
    words = [word for word in shlex.split(command) if not word.startswith("mode=")]
    planned = [] if "--cfg" in words else ["mode=plan"]
    done = subprocess.run(
        [sys.executable, *words[1:], *planned], cwd=tmp_path, check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
