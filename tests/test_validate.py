"""Faults that one configuration shows by itself, each with its line."""

from dataclasses import replace

import pytest

from launcher import validate
from launcher.schema import Call, Checkpoint, Cluster, Config, CustomData, Data, Objective, Parallel, Train

LLAMA = Call("launcher.worker.models.hugging_face", {"model_type": "llama"})
GOOD = Config(model=LLAMA, data=Data(fasta="x.fa"))


def test_a_good_configuration_has_no_fault() -> None:
    assert validate.check(GOOD) == []


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (
            replace(GOOD, name="a/b"),
            "name=a/b: it names a folder; use at most 64 letters, digits, '.', '_' and '-', a letter or digit first",
        ),
        (replace(GOOD, seed=-1), "seed=-1: it must lie in [0, 9223372036854775807]"),
        (
            replace(GOOD, train=Train(gradient_clipping=0.0)),
            "train.gradient_clipping=0.0: it must be above 0; null turns clipping off",
        ),
        (
            replace(GOOD, train=Train(noise_scale_decay=1.0)),
            "train.noise_scale_decay=1.0: it must lie in [0, 1)",
        ),
        (replace(GOOD, train=Train(eval_every=0)), "train.eval_every=0: it must be at least 1"),
        (replace(GOOD, train=Train(max_steps=0)), "train.max_steps=0: it must be at least 1"),
        (replace(GOOD, train=Train(max_tokens=-1)), "train.max_tokens=-1: it must be at least 1"),
        (replace(GOOD, train=Train(epochs=0)), "train.epochs=0: it must be at least 1"),
        (replace(GOOD, checkpoint=Checkpoint(every=-2)), "checkpoint.every=-2: it must be at least 1"),
        (replace(GOOD, cluster=Cluster(ranks_per_node=0)), "cluster.ranks_per_node=0: it must be at least 1"),
        (
            replace(GOOD, cluster=Cluster(nodes=2)),
            "cluster.nodes=2: cluster=local runs on this machine; set it to 1",
        ),
        (
            replace(GOOD, parallel=Parallel(sequence=2)),
            "parallel.sequence=2: only data parallelism is available; set it to 1",
        ),
        (
            replace(GOOD, data=Data(fasta="x.fa", objective=Objective.MASKED)),
            "data.objective=masked: the model's task is causal_lm; set model.task=masked_lm",
        ),
        (
            replace(GOOD, model=Call(LLAMA.target, {"model_type": "llama", "vocab_size": 16})),
            "model.vocab_size=16: bases have 17 token ids; set at least 17",
        ),
        (
            replace(GOOD, data=CustomData("json.JSONDecoder")),
            "loss=null: your own dataset needs a loss; set loss._target_ to a callable that makes one, whose result "
            "called with (logits, batch) returns (sum, weight)",
        ),
        (
            replace(GOOD, loss=Call("json.JSONDecoder")),
            "loss._target_=json.JSONDecoder: windows of a genome have their own loss (data.objective); set loss=null, "
            "or put your own dataset in place with data._target_",
        ),
    ],
)
def test_a_fault_is_one_line_with_its_remedy(config: Config, line: str) -> None:
    assert validate.check(config) == [line]


def test_all_faults_are_told_at_once() -> None:
    config = replace(GOOD, seed=-1, name="", train=Train(log_every=0), model=Call("no_such.Model"))
    assert [line.split("=")[0] for line in validate.check(config)] == [
        "name",
        "seed",
        "model._target_",
        "train.log_every",
    ]
