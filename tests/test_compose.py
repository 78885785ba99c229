"""Composition: one configuration from files and the command line, and one line for whatever is wrong with them."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from launcher import __version__, compose, decode, slurm_options
from launcher.compose import Composed, Composer
from launcher.errors import RequestError
from tests.test_slurm_options import BEGINS, DEPENDENCIES, MEMORY, TIMES


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A user's own configuration folder."""
    folder = tmp_path / "mine"
    for group in ("experiment", "data", "model", "zero"):
        (folder / group).mkdir(parents=True)
    return folder


def single(*argv: str) -> Composed:
    composer = Composer(argv)
    return composer.single(composer.compose())


def node(*argv: str) -> dict[str, Any]:
    return single("+experiment=dna_8k", *argv).node


def compose_and_decode(*argv: str) -> None:
    composer = Composer(argv)
    cfg = composer.compose()
    if compose.is_sweep(cfg):
        for index, overrides in enumerate(composer.points(cfg)):
            composer.point(cfg, overrides, index)
    else:
        decode.decode(composer.single(cfg).node)


def refusal(*argv: str) -> str:
    """The one line of a command line that is refused; points of sweeps and decoding included."""
    with pytest.raises(RequestError) as raised:
        compose_and_decode(*argv)
    (line,) = raised.value.faults
    assert "\n" not in line
    return line


def test_the_command_line_wins_over_the_experiment_in_any_order() -> None:
    argv = ["zero=stage3", "batch.train_batch_size=32", "+experiment=dna_8k", "data=lambda", "precision=bf16"]
    for order in (argv, argv[::-1]):
        composed = single(*order).node
        assert composed["name"] == "dna_8k"
        assert composed["batch"]["train_batch_size"] == 32
        assert composed["data"]["fasta"].endswith("genomes/lambda_phage.fa.gz")
        assert composed["data"]["sequence_length"] == 8192
        assert composed["zero"]["stage"] == 3
        assert composed["precision"]["dtype"] == "bf16"


def test_options_may_stand_between_overrides(mine: Path) -> None:
    argv = ["+experiment=dna_8k", "--config-dir", str(mine), "zero=stage2", "seed=3"]
    composed = single(*argv).node
    assert (composed["zero"]["stage"], composed["seed"]) == (2, 3)


def test_null_unsets_and_hydras_plus_adds() -> None:
    composed = node("batch.train_batch_size=null", "+deepspeed.zero_optimization.foo=1", "+model.attention_dropout=0.1")
    assert composed["batch"]["train_batch_size"] is None
    assert composed["deepspeed"] == {"zero_optimization": {"foo": 1}}
    assert composed["model"]["attention_dropout"] == 0.1


def test_the_run_directory_has_the_name_the_time_and_something_unique(tmp_path: Path) -> None:
    first, second = (single("name=abc").run_dir for _ in range(2))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d-[0-9a-f]{8}", first.name)
    assert first.parent == tmp_path / "runs" / "abc"
    assert first != second


def test_the_run_directory_can_be_given(tmp_path: Path) -> None:
    assert single("hydra.run.dir=a/b").run_dir == tmp_path / "a" / "b"
    assert single("hydra.run.dir=/a/b").run_dir == Path("/a/b")
    assert single("hydra.run.dir='~/x'").run_dir == Path.home() / "x"


def test_composing_writes_nothing(tmp_path: Path) -> None:
    single("+experiment=dna_8k", "hydra.run.dir=here")
    composer = Composer(["-m", "+experiment=dna_8k", "seed=1,2", "hydra.sweep.dir=there"])
    cfg = composer.compose()
    for index, overrides in enumerate(composer.points(cfg)):
        composer.point(cfg, overrides, index)
    assert list(tmp_path.iterdir()) == []


def test_shipped_genomes_are_there() -> None:
    for option in ("ecoli", "lambda"):
        assert Path(node(f"data={option}")["data"]["fasta"]).is_file()


def test_a_users_own_experiment_model_and_dataset(mine: Path) -> None:
    (mine / "experiment" / "long.yaml").write_text(
        "# @package _global_\n"
        "defaults:\n  - dna_8k\n  - override /model: net\n  - override /data: lambda\n  - _self_\n"
        "data:\n  sequence_length: 4096\n"
    )
    (mine / "model" / "net.yaml").write_text("_target_: nets.Net\nwidth: 8\n")
    (mine / "data" / "set.yaml").write_text("_target_: sets.Set\npath: ${oc.env:HOME}\n")
    composed = single("--config-dir", str(mine), "+experiment=long").node
    assert composed["model"] == {"_target_": "nets.Net", "width": 8}
    assert composed["data"]["sequence_length"] == 4096
    assert composed["data"]["fasta"].endswith("lambda_phage.fa.gz")
    assert composed["batch"]["train_batch_size"] == node()["batch"]["train_batch_size"]
    data = single("--config-dir", str(mine), "data=set").node["data"]
    assert data == {"_target_": "sets.Set", "path": str(Path.home())}


def test_a_folder_can_also_be_given_as_hydras_search_path(mine: Path) -> None:
    (mine / "model" / "net.yaml").write_text("_target_: nets.Net\n")
    composed = single(f"hydra.searchpath=[file://{mine}]", "model=net").node
    assert composed["model"] == {"_target_": "nets.Net"}


def test_a_users_own_primary_configuration_can_go_over_ours(mine: Path) -> None:
    (mine / "base.yaml").write_text("defaults:\n  - config\n  - _self_\nseed: 5\n")
    composed = single("--config-dir", str(mine), "--config-name", "base").node
    assert (composed["seed"], composed["zero"]["stage"]) == (5, 1)


def test_points_of_a_sweep_share_its_directory_and_have_their_own_in_it() -> None:
    composer = Composer(["-m", "+experiment=dna_8k", "batch.gradient_accumulation_steps=1,2", "zero=stage1,stage3"])
    cfg = composer.compose()
    assert compose.is_sweep(cfg)
    points = [composer.point(cfg, overrides, index) for index, overrides in enumerate(composer.points(cfg))]
    folder = compose.sweep_folder(cfg)
    assert re.fullmatch(r"sweep-\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d-[0-9a-f]{8}", folder.name)
    assert [point.run_dir for point in points] == [folder / f"{number:04d}" for number in range(4)]
    assert [(p.node["batch"]["gradient_accumulation_steps"], p.node["zero"]["stage"]) for p in points] == [
        (1, 1),
        (1, 3),
        (2, 1),
        (2, 3),
    ]
    assert points[1].overrides == ("+experiment=dna_8k", "batch.gradient_accumulation_steps=1", "zero=stage3")


@pytest.mark.parametrize(
    ("sweep", "values"),
    [
        ("seed=range(1,4)", ["seed=1", "seed=2", "seed=3"]),
        ("zero=glob(stage*,exclude=stage0)", ["zero=stage1", "zero=stage2", "zero=stage3"]),
        ("seed=choice(5,7)", ["seed=5", "seed=7"]),
    ],
)
def test_hydras_ways_to_write_a_sweep_all_work(sweep: str, values: list[str]) -> None:
    composer = Composer(["-m", sweep])
    assert composer.points(composer.compose()) == [(value,) for value in values]


def test_a_sweep_can_be_stated_in_a_file(mine: Path) -> None:
    (mine / "base.yaml").write_text(
        "defaults:\n  - config\n  - _self_\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      seed: 1,2\n"
    )
    composer = Composer(["--config-dir", str(mine), "--config-name", "base", "zero=stage2"])
    cfg = composer.compose()
    assert compose.is_sweep(cfg)
    assert composer.points(cfg) == [("seed=1", "zero=stage2"), ("seed=2", "zero=stage2")]


def test_hydra_s_resolver_works_in_keys_and_directories(tmp_path: Path) -> None:
    composed = single("name=${hydra:runtime.choices.zero}", "hydra.run.dir=out/${hydra:runtime.choices.model}")
    assert composed.node["name"] == "stage1"
    assert composed.run_dir == tmp_path / "out" / "llama_1m"


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        # keys
        (
            "batch.train_bach_size=8",
            "batch.train_bach_size=8: there is no such key; nearest: batch.train_batch_size, batch.train_batch_tokens, "
            "batch.reference_batch_size",
        ),
        ("bacth.seed=8", "bacth.seed=8: there is no such key; nearest: seed"),
        ("max_steps=8", "max_steps=8: there is no such key; nearest: train.max_steps"),
        ("data=ecoli +batch.max_steps=8", "batch.max_steps: there is no such key; nearest: train.max_steps"),
        (
            "model.hiden_size=8",
            "model.hiden_size=8: there is no such key; nearest: model.hidden_size; +model.hiden_size=8 adds it",
        ),
        ("deepspeed.foo=1", "deepspeed.foo=1: there is no such key; +deepspeed.foo=1 adds it"),
        (
            "hydra.runn.dir=x",
            "hydra.runn.dir=x: there is no such key; nearest: hydra.run.dir, hydra.sweep.dir",
        ),
        ("~batch.nothing", "Could not delete from config. 'batch.nothing' does not exist."),
        ("train=[1]", "train=[1]: it must be a node of keys"),
        ("deepspeed=[]", "deepspeed=[]: it must be a node of keys"),
        ("name=???", "name: it must be given, and is still ???"),
        # groups
        ("zero=stage9", "zero=stage9: there is no such option; nearest: stage3, stage2, stage1"),
        ("optimizer=lion", "optimizer=lion: there is no such option; there are: adamw, lamb, lars, muon, sgd"),
        ("zero=3", "zero=3: an option of a group is a word; nearest: stage3"),
        ("logging=null", "logging=null: an option of a group is a word; there are: none, tensorboard, wandb"),
        ("zeroo=stage3", "zeroo=stage3: there is no such key; nearest: zero"),
        ("data=ecoli +zeroo=stage3", "zeroo: there is no such key; nearest: zero"),
        ("+zero=stage3", "+zero=stage3: zero is chosen already; leave the plus out, or choose it once"),
        (
            "+experiment=dna_8k +experiment=dna_8k",
            "+experiment=dna_8k: experiment is chosen already; leave the plus out, or choose it once",
        ),
        ("+experiment=dna8k", "+experiment=dna8k: there is no such option; nearest: dna_8k"),
        (
            "experiment=dna_8k",
            "experiment=dna_8k: it is not in the defaults list; +experiment=dna_8k adds it",
        ),
        ("+experimnt=dna_8k data=ecoli", "experimnt: there is no such key; nearest: +experiment"),
        # grammar and interpolation
        ("seed=[1", "seed=[1: it cannot be read: no viable alternative at input '[1'"),
        (
            "seed",
            "seed: it cannot be read: Error parsing override 'seed'; missing EQUAL at '<EOF>'",
        ),
        ("seed=${nope}", "seed: Interpolation key 'nope' not found"),
        ("seed=${nope:1}", "seed: Unsupported interpolation type nope"),
        ("seed=${seed}", "seed: Recursive interpolation detected"),
        (
            "seed=1,2",
            "seed=1,2: several values for one run; -m sweeps over them, seed=[...] makes a list, quotes make text",
        ),
        # Hydra's own
        ("hydra.run.dir=", "hydra.run.dir=: it must be the path of a directory"),
        ("hydra.searchpath=[/nope]", "hydra.searchpath: there is no file:///nope"),
        ("hydra.searchpath=3", "hydra.searchpath must be a list of strings. Got: 3"),
        ("--config-dir /nope", "--config-dir=/nope: there is no folder /nope"),
        ("--config-path /nope", "--config-path=/nope: there is no folder /nope"),
        ("hydra/launcher=nope", "hydra/launcher=nope: there is no such option; there are: basic, okazaki"),
        ("-m hydra.run.dir=a,b", "hydra.run.dir=a,b: a sweep cannot go over Hydra's own keys"),
        ("-m zero=stage1,stage9", "zero=stage9: there is no such option; nearest: stage3, stage2, stage1"),
        ("-m seed=interval(1,2)", "BasicSweeper does not support sweep type : INTERVAL_SWEEP"),
        ("--nope", "unrecognized arguments: --nope; python -m launcher --hydra-help lists the options"),
        ("--cfg job -m", "only one of --run, --multirun, --cfg, --info and --shell-completion can be given"),
        ("--resolve", "--resolve: it goes with --cfg or --help"),
        (
            "--experimental-rerun x",
            "--experimental-rerun: not here; config.yaml of a run directory holds the whole run",
        ),
    ],
)
def test_what_hydra_refuses_is_told_in_one_line(argv: str, line: str) -> None:
    assert refusal(*argv.split()) == line


def test_a_primary_configuration_that_is_not_there_is_told_with_where_was_looked() -> None:
    assert refusal("--config-name", "nope") == (
        f"--config-name=nope: there is no such configuration in {compose.shipped('conf')}"
    )


EXPERIMENT = "# @package _global_\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            EXPERIMENT + "batch:\n  train_bach_size: 3\ndata:\n  fasta: x\n",
            "experiment/x sets data.fasta, which data=ecoli, data=lambda sets too, so that data=OPTION on the command "
            "line would not win over the experiment: write 'override /data: OPTION' in the experiment, or leave the "
            "key out of one of the two",
        ),
        (
            EXPERIMENT + "zero:\n  stage: 3\n",
            "experiment/x sets zero.stage, which zero=stage0, zero=stage1, zero=stage2, zero=stage3 sets too, so that "
            "zero=OPTION on the command line would not win over the experiment: write 'override /zero: OPTION' in the "
            "experiment, or leave the key out of one of the two",
        ),
        (
            EXPERIMENT + "defaults:\n  - override /zeroo: stage3\n",
            "experiment/x: override /zeroo: there is no such group to override; nearest: zero",
        ),
        (
            EXPERIMENT + "defaults:\n  - override /zero: stage9\n",
            "zero=stage9: there is no such option; nearest: stage3, stage2, stage1",
        ),
        (
            EXPERIMENT + "defaults:\n  - /zero: stage3\n",
            "zero: two files of the configuration choose it; write 'override /zero: OPTION' in the later one",
        ),
        (EXPERIMENT + "defaults:\n  - nothere\n", "experiment/nothere: there is no such configuration"),
        (EXPERIMENT + "defaults: 3\n", "Invalid defaults list in 'experiment/x', defaults must be a list (got int)"),
        (
            EXPERIMENT + "defaults:\n  - override /data: ecoli\nbatch:\n  train_bach_size: 3\n",
            "batch.train_bach_size: there is no such key; nearest: batch.train_batch_size, batch.train_batch_tokens, "
            "batch.reference_batch_size",
        ),
        (
            "batch:\n  train_batch_size: 3\n",
            "experiment: the file of an experiment must begin with the line '# @package _global_'",
        ),
        ("- 1\n", "experiment: the file of an experiment must begin with the line '# @package _global_'"),
        ("", "experiment: the file of an experiment must begin with the line '# @package _global_'"),
    ],
)
def test_a_users_experiment_that_is_wrong_is_told_in_one_line(mine: Path, text: str, line: str) -> None:
    (mine / "experiment" / "x.yaml").write_text(text)
    assert refusal("--config-dir", str(mine), "+experiment=x") == line


def test_yaml_that_cannot_be_read_is_told_with_file_and_line(mine: Path) -> None:
    file = mine / "experiment" / "x.yaml"
    file.write_text(EXPERIMENT + "batch:\n  a: [1\nb: 2\n")
    assert refusal("--config-dir", str(mine), "+experiment=x") == (
        f"{file}, line 4: expected ',' or ']', but got ':' while parsing a flow sequence"
    )


def test_a_users_option_must_not_set_what_the_experiment_sets(mine: Path) -> None:
    (mine / "data" / "own.yaml").write_text("defaults:\n  - fasta\n  - _self_\nsequence_length: 512\n")
    argv = ("--config-dir", str(mine), "+experiment=dna_8k")
    assert refusal(*argv, "data=own") == (
        "experiment/dna_8k sets data.sequence_length, which data=own sets too, so that data=OPTION on the command line "
        "would not win over the experiment: write 'override /data: OPTION' in the experiment, or leave the key out of "
        "one of the two"
    )
    assert single(*argv).node["data"]["sequence_length"] == 8192


def test_an_experiment_may_set_what_no_option_sets(mine: Path) -> None:
    (mine / "experiment" / "x.yaml").write_text(
        EXPERIMENT + "defaults:\n  - override /zero: stage3\nzero:\n  overlap_comm: true\nmodel:\n  dropout: 0.1\n"
    )
    composed = single("--config-dir", str(mine), "+experiment=x", "zero=stage2").node
    assert composed["zero"]["stage"] == 2
    assert composed["zero"]["overlap_comm"] is True
    assert composed["model"]["dropout"] == 0.1


def test_files_and_the_command_line_read_the_same_text_alike(mine: Path) -> None:
    times = ["1:30", "12:00", "1:30:00", "190:20:30.5", "-1:30", "0030", "010130", "1-12:30", "2030-01-20"]
    texts = ["2030-01-20T12:34:00", "now+1hour", "a100:4", "2-4", "8G"]
    numbers = {"0": 0, "-1": -1, "90": 90, "1_000": 1000, "1e-3": 0.001, "0.5": 0.5, "true": True, "null": None}
    values = {text: text for text in times + texts} | numbers
    named = {f"key{index}": text for index, text in enumerate(values)}
    expected = dict(zip(named, values.values(), strict=True)) | {"all": list(values.values())}
    lines = "".join(f"  {name}: {text}\n" for name, text in named.items()) + f"  all: [{', '.join(values)}]\n"
    (mine / "cluster").mkdir()
    (mine / "cluster" / "site.yaml").write_text(f"type: slurm\nextra:\n{lines}")
    for argv in (
        ["--config-dir", str(mine), "cluster=site"],
        [f"hydra.searchpath=[file://{mine}]", "cluster=site"],
        [
            *(f"+cluster.extra.{name}={text}" for name, text in named.items()),
            f"+cluster.extra.all=[{','.join(values)}]",
        ],
    ):
        extra = node(*argv)["cluster"]["extra"]
        assert extra == expected
        assert [type(value) for value in extra.values()] == [type(value) for value in expected.values()]


def test_every_form_of_slurm_s_survives_files_and_the_command_line(mine: Path) -> None:
    forms = {str(form) for form in (*TIMES, *MEMORY, *BEGINS, *DEPENDENCIES)}
    named = {f"key{index}": form for index, form in enumerate(sorted(forms))}
    (mine / "cluster").mkdir()
    lines = "".join(f"  {name}: {form}\n" for name, form in named.items())
    (mine / "cluster" / "site.yaml").write_text(f"type: slurm\nextra:\n{lines}")
    for argv in (
        ["--config-dir", str(mine), "cluster=site"],
        [f"+cluster.extra.{name}=" + (f"'{form}'" if "," in form else form) for name, form in named.items()],
    ):
        extra = node(*argv)["cluster"]["extra"]
        assert {name: str(value) for name, value in extra.items()} == named


def test_the_site_of_the_page_on_slurm_composes_and_has_no_fault(mine: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "slurm.md").read_text()
    example = re.search(r"\n((?:    .*\n)+)", page.partition("## Options")[2])
    assert example is not None
    (mine / "cluster").mkdir()
    (mine / "cluster" / "site.yaml").write_text(textwrap.dedent(example[1]))
    cluster = decode.decode(node("--config-dir", str(mine), "cluster=site")).cluster
    assert slurm_options.check(cluster) == []
    assert slurm_options.directives(cluster) == [
        "#SBATCH --account=my_lab",
        "#SBATCH --partition=gpu",
        "#SBATCH --nodes=1",
        "#SBATCH --cpus-per-task=12",
        "#SBATCH --gpus-per-node=a100:4",
        "#SBATCH --mem=200G",
        "#SBATCH --time=1-12:00:00",
        "#SBATCH --requeue",
        "#SBATCH --export=ALL",
        "#SBATCH --gpu-bind=none",
        "#SBATCH --contiguous",
        "#SBATCH --ear=off",
    ]


def test_a_sweep_stated_in_a_file_goes_over_times(mine: Path) -> None:
    (mine / "base.yaml").write_text(
        "defaults:\n  - config\n  - _self_\n"
        "hydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      cluster.time: 1:30:00\n"
    )
    composer = Composer(["--config-dir", str(mine), "--config-name", "base"])
    cfg = composer.compose()
    (point,) = composer.points(cfg)
    assert composer.point(cfg, point, 0).node["cluster"]["time"] == "1:30:00"


def test_only_files_that_are_composed_are_read_like_that() -> None:
    node("cluster=slurm", "cluster.time=1:30:00")
    assert OmegaConf.create("time: 1:30:00").time == 5400


def test_times_are_shown_and_frozen_as_they_were_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ["+experiment=dna_8k", "cluster=slurm", "cluster.time=1:30:00", "cluster.begin=010130"]
    shown_text = shown(capsys, "--cfg", "job", "-p", "cluster", *argv)
    assert "\ntime: '1:30:00'\n" in shown_text
    config = decode.decode(single(*argv).node)
    (tmp_path / "config.yaml").write_text(decode.dump(config))
    frozen = decode.load(tmp_path / "config.yaml")
    assert frozen == config
    assert (frozen.cluster.time, frozen.cluster.begin) == ("1:30:00", "010130")


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    composer = Composer(argv)
    assert composer.only_shows
    composer.show()
    return capsys.readouterr().out


def test_help_is_of_this_program(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--help")
    assert "Okazaki" in text
    assert "python -m launcher +experiment=dna_8k mode=plan" in text
    assert "\nzero: stage0, stage1, stage2, stage3\n" in text
    assert "\n  train_batch_size: null\n" in text
    assert "Powered by Hydra" not in text


def test_hydras_help_and_completion_work(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--shell-completion" in shown(capsys, "--hydra-help")
    monkeypatch.setenv("COMP_LINE", "okazaki zero=st")
    assert shown(capsys, "-sc", "query=bash") == "zero=stage0 zero=stage1 zero=stage2 zero=stage3\n"


def test_the_configuration_can_be_shown_whole_or_in_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert "\n  stage: 3\n" in shown(capsys, "--cfg", "job", "zero=stage3")
    assert "fasta: ${genome:" in shown(capsys, "--cfg", "job", "data=ecoli")
    assert shown(capsys, "--cfg", "job", "--package", "activation") == "# @package activation\ncheckpointing: none\n"
    assert shown(capsys, "--cfg", "job", "--resolve", "-p", "data.fasta", "data=ecoli").endswith("mg1655.fa.gz\n")
    assert shown(capsys, "--cfg", "job", "--package", "batch.train_batch_size") == "null\n"
    assert "okazaki" in shown(capsys, "--cfg", "hydra", "--package", "hydra.launcher")
    with pytest.raises(RequestError) as raised:
        shown(capsys, "--cfg", "job", "--package", "bacth")
    assert str(raised.value) == "--package=bacth: no such node; nearest: batch"


def test_the_version_is_ours(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        Composer(["--version"])
    assert raised.value.code == 0
    assert capsys.readouterr().out.startswith(f"okazaki {__version__} (Hydra 1.3.")


def test_a_fault_in_what_is_to_be_shown_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--help"], ["--cfg", "job"], ["--info", "config"]):
        with pytest.raises(RequestError) as raised:
            shown(capsys, *argv, "zero=stage9")
        assert str(raised.value) == "zero=stage9: there is no such option; nearest: stage3, stage2, stage1"
        assert capsys.readouterr().out == ""


def test_hydras_information_is_shown() -> None:
    # In a process of its own: Hydra sets up logging for it.
    command = [sys.executable, "-c", "from launcher.compose import Composer; Composer(['--info', 'all']).show()"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "OkazakiLauncher" in text
    assert "Defaults List" in text
