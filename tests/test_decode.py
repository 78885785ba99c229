"""Plain nodes to typed values: what may stand for what, and that every fault is told at once."""

import dataclasses
import random
import string
from pathlib import Path

import pytest

from launcher import decode, nodes, schema
from launcher.errors import RequestError
from launcher.schema import Call, Config, CustomData, Data


def node(**changes: object) -> dict[str, object]:
    """A node that decodes, with some of its top-level nodes merged with ``changes``."""
    base: dict[str, object] = {"model": {"_target_": "nets.Net"}, "data": {"fasta": "/g.fa"}}
    for name, change in changes.items():
        base[name] = {**base.get(name, {}), **change} if isinstance(change, dict) else change  # type: ignore[dict-item]
    return base


def faults(**changes: object) -> list[str]:
    with pytest.raises(RequestError) as raised:
        decode.decode(node(**changes))
    return raised.value.faults


def test_keys_that_are_left_out_have_the_defaults_of_the_schema() -> None:
    config = decode.decode(node())
    assert config == Config(model=Call("nets.Net"), data=Data(fasta="/g.fa"))


@pytest.mark.parametrize(("given", "value"), [(8, 8), ("8", 8), (5e8, 500_000_000), ("5e8", 500_000_000), (8.0, 8)])
def test_integral_numbers_and_numeric_strings_become_integers(given: object, value: int) -> None:
    bucket = decode.decode(node(zero={"reduce_bucket_size": given})).zero.reduce_bucket_size
    assert bucket == value
    assert type(bucket) is int


@pytest.mark.parametrize(
    ("where", "line"),
    [
        (
            {"zero": {"reduce_bucket_size": 15099494.4}},
            "zero.reduce_bucket_size=15099494.4: it must be an integer; nearest: 15099494, 15099495",
        ),
        ({"batch": {"train_batch_size": 8.5}}, "batch.train_batch_size=8.5: it must be an integer or null"),
        ({"batch": {"train_batch_size": "many"}}, "batch.train_batch_size=many: it must be an integer or null"),
        ({"train": {"max_steps": 10**19}}, "train.max_steps=10000000000000000000: it must fit into 64 bits"),
        ({"batch": {"train_batch_size": True}}, "batch.train_batch_size=true: it must be an integer or null"),
        ({"seed": None}, "seed=null: it must be an integer"),
        ({"optimizer": {"lr": "fast"}}, "optimizer.lr=fast: it must be a number"),
        ({"optimizer": {"lr": float("nan")}}, "optimizer.lr=nan: it must be a number"),
        ({"optimizer": {"betas": [0.9]}}, "optimizer.betas=[0.9]: it must be a list of 2 numbers"),
        ({"optimizer": {"betas": [0.9, "x"]}}, "optimizer.betas[1]=x: it must be a number"),
        ({"logging": {"wandb": 1}}, "logging.wandb=1: it must be true or false"),
        ({"logging": {"tags": "a"}}, "logging.tags=a: it must be a list of text"),
        ({"logging": {"project": 1e3}}, "logging.project=1000.0: it must be text"),
        ({"data": {"fasta": 1.5}}, "data.fasta=1.5: it must be text or a list of text"),
        ({"data": {"validation": True}}, "data.validation=true: it must be a number, text, a list of text or null"),
        ({"zero": 3}, "zero=3: it must be a node of keys"),
        ({"batch": None}, "batch=null: it must be a node of keys"),
        ({"loss": 3}, "loss=3: it must be a node with _target_ or null"),
        ({"mode": "trian"}, "mode=trian: it must be one of train, plan, verify; nearest: train"),
        ({"precision": {"dtype": "half"}}, "precision.dtype=half: it must be one of fp32, bf16, fp16"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_key_with_the_rule(where: dict[str, object], line: str) -> None:
    assert faults(**where) == [line]


@pytest.mark.parametrize(
    ("where", "line"),
    [
        ({"bacth": {}}, "bacth: there is no such key; nearest: batch"),
        ({"experimnt": "x"}, "experimnt: there is no such key; nearest: +experiment"),
        ({"batch": {"max_steps": 3}}, "batch.max_steps: there is no such key; nearest: train.max_steps"),
        ({"zero": {"stgae": 3}}, "zero.stgae: there is no such key; nearest: zero.stage"),
        (
            {"parallel": {"xyz": 3}},
            "parallel.xyz: there is no such key; nearest: parallel.pipeline, parallel.sequence, parallel.tensor",
        ),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(where: dict[str, object], line: str) -> None:
    assert faults(**where) == [line]


def test_all_faults_are_told_at_once() -> None:
    found = faults(
        seed="x",
        batch={"train_batch_size": 1.5, "nope": 1},
        data={"fasta": "???", "sequence_length": "long"},
        model={"_target_": "???"},
        optimizer={"betas": ["a", "b"]},
    )
    assert [line.partition(":")[0].partition("=")[0] for line in found] == [
        "seed",
        "model._target_",
        "data.fasta",
        "data.sequence_length",
        "batch.train_batch_size",
        "batch.nope",
        "optimizer.betas[0]",
        "optimizer.betas[1]",
    ]


def test_a_value_still_to_be_given_is_named() -> None:
    assert faults(data={"fasta": "???"}) == ["data.fasta: it must be given, and is still ???"]
    assert faults(model={"width": "???"}) == ["model.width: it must be given, and is still ???"]
    assert faults(model=None) == ["model=null: it must be a node with _target_"]


def test_a_fraction_contigs_and_a_bed_file_can_all_be_validation() -> None:
    given = {0.1: 0.1, 1: 1.0, "chr1": "chr1"}
    for value, expected in given.items():
        assert decode.decode(node(data={"validation": value})).data.validation == expected  # type: ignore[union-attr]
    assert decode.decode(node(data={"validation": ["chr1", 2]})).data.validation == ["chr1", "2"]  # type: ignore[union-attr]


def test_a_target_and_its_arguments_are_kept_as_they_are() -> None:
    arguments = {"width": 64, "layers": [1, 2.5, None], "inner": {"a": "b", "on": True}}
    config = decode.decode(node(model=arguments, loss={"_target_": "nets.loss", "alpha": 2}))
    assert config.model == Call("nets.Net", arguments)
    assert config.loss == Call("nets.loss", {"alpha": 2})


def test_a_target_in_data_makes_it_a_dataset_of_the_users_own() -> None:
    data = {
        "_target_": "sets.Set",
        "path": "x",
        "num_workers": "2",
        "validation": {"_target_": "sets.Set", "path": "y"},
    }
    config = decode.decode({"model": {"_target_": "nets.Net"}, "data": data})
    assert config.data == CustomData("sets.Set", {"path": "x"}, CustomData("sets.Set", {"path": "y"}), 2)


def test_faults_of_a_users_own_dataset_are_told_together() -> None:
    data = {"_target_": 3, "num_workers": "x", "validation": 0.1, "width": "???", "_args_": []}
    with pytest.raises(RequestError) as raised:
        decode.decode({"model": {"_target_": "nets.Net"}, "data": data})
    assert raised.value.faults == [
        "data._target_: it must be given: the dotted name of something callable",
        "data._args_: only _target_ and keyword arguments can stand here",
        "data.width: it must be given, and is still ???",
        "data.validation=0.1: it must be a node with _target_ or null",
        "data.num_workers=x: it must be an integer",
    ]


def test_raw_deepspeed_keys_must_be_what_json_can_hold() -> None:
    assert faults(deepspeed={1: 2, "a": {"b": object, "c": float("inf")}}) == [
        "deepspeed.1: a name must be text; put 1 in quotes",
        f"deepspeed.a.b={object}: a type cannot be kept in JSON; put it in quotes",
        "deepspeed.a.c=inf: it must be a finite number",
    ]


@pytest.mark.parametrize("name", ["api_key", "apikey", "wandb_api_key", "password", "token", "hf_token", "secret"])
def test_a_secret_is_refused_and_never_printed(name: str) -> None:
    (line,) = faults(model={name: "hunter2"})
    assert line == (
        f"model.{name}: it looks like a secret, and would be written to config.yaml; "
        "leave it out and put it in the environment"
    )


def test_token_ids_and_empty_secrets_are_no_secrets() -> None:
    arguments = {"pad_token_id": 3, "bos_token": "<s>", "num_tokens": 4, "token": None, "password": ""}
    assert decode.decode(node(model=arguments)).model.arguments == arguments


def test_a_secret_of_the_environment_is_found_under_any_name() -> None:
    environment = {"WANDB_API_KEY": "0123456789abcdef", "SHORT_KEY": "1", "HOME": "/home/someone"}
    tree = {"name": "/home/someone", "logging": {"tags": ["a", "x0123456789abcdefx"]}, "seed": 1}
    assert nodes.secrets(tree, environment) == [
        "logging.tags[1]: it holds the value of the environment variable WANDB_API_KEY, and would be written to "
        "config.yaml; leave it out: ranks see the environment"
    ]


def test_an_open_node_of_text_takes_whole_numbers_too_and_null_leaves_a_name_out() -> None:
    cluster = {"environment": {"A": "x", "B": 8, "C": None}}
    assert decode.decode(node(cluster=cluster)).cluster.environment == {"A": "x", "B": "8"}
    assert faults(cluster={"environment": {"A": 0.5, "B": [1]}}) == [
        "cluster.environment.A=0.5: it must be text",
        "cluster.environment.B=[1]: it must be text",
    ]


def test_a_frozen_configuration_is_read_back_exactly(tmp_path: Path) -> None:
    rng = random.Random(0)
    words = [
        "1e-3",
        "null",
        "0x1f",
        "on",
        "1:30",
        "2024-01-01",
        "a: b",
        "#x",
        "${name}",
        "ÄÖ",
        "",
        " x ",
        "'",
        '"',
        "~",
    ]
    for _ in range(30):
        text = rng.choice(words) + rng.choice(string.ascii_letters)
        config = decode.decode(
            node(
                name=rng.choice(words) or "x",
                model={"text": rng.choice(words), "deep": {"list": [text, rng.random(), None, True, 10**12]}},
                loss=rng.choice([None, {"_target_": "a.b", "x": rng.choice(words)}]),
                data=rng.choice([{"fasta": ["/a", text]}, {"validation": rng.choice([0.1, text, ["chr1"]])}]),
                optimizer={"lr": rng.random() * 1e-5, "betas": [rng.random(), rng.random()], "eps": 1e-30},
                precision={"dtype": "bf16", "communication_data_type": rng.choice([None, "fp32"])},
                logging={"tags": [text]},
                cluster={
                    "time": rng.choice([90, text]),
                    "setup": [text],
                    "environment": {"A": text},
                    "extra": {"b": text},
                },
                deepspeed={"a": {"b": [1, {"c": text}]}},
            )
        )
        path = tmp_path / "config.yaml"
        path.write_text(decode.dump(config), encoding="utf-8")
        assert decode.load(path) == config


def test_a_users_own_dataset_is_read_back_exactly(tmp_path: Path) -> None:
    data = CustomData("a.B", {"x": 1}, CustomData("a.C", {}, None, 3), 2)
    config = dataclasses.replace(Config(model=Call("nets.Net")), data=data)
    (tmp_path / "config.yaml").write_text(decode.dump(config), encoding="utf-8")
    assert decode.load(tmp_path / "config.yaml") == config


def test_relative_input_paths_become_absolute_and_variables_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    data = Data(
        fasta=["a.fa", "~/b.fa", "/c.fa", "$SCRATCH/d.fa", "sub/*.fa.gz"],
        regions="r.bed",
        validation="v.bed",
        cache_dir="$TMPDIR/cache",
    )
    config = decode.with_absolute_paths(Config(data=data), Path("/here"))
    assert config.data == dataclasses.replace(
        data,
        fasta=["/here/a.fa", "/home/someone/b.fa", "/c.fa", "$SCRATCH/d.fa", "/here/sub/*.fa.gz"],
        regions="/here/r.bed",
        validation="/here/v.bed",
    )
    assert decode.with_absolute_paths(config, Path("/elsewhere")) == config


def test_the_name_of_a_contig_is_no_path() -> None:
    config = decode.with_absolute_paths(Config(data=Data(fasta="a.fa", validation="chr1")), Path("/here"))
    assert config.data == Data(fasta="/here/a.fa", validation="chr1")


def test_every_key_of_the_schema_has_a_default_that_decodes() -> None:
    defaults = decode.encode(Config())
    defaults["model"]["_target_"] = "a.b"
    defaults["data"]["fasta"] = "/x"
    assert decode.decode(defaults) == Config(model=Call("a.b"), data=Data(fasta="/x"))
    assert set(defaults) == {field.name for field in dataclasses.fields(schema.Config)}
