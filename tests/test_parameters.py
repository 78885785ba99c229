"""The size of a model, told without torch, must be that of the model."""

from pathlib import Path

import pytest
import torch
import yaml

from launcher import parameters
from launcher.schema import Call

SHIPPED = sorted((Path(__file__).parents[1] / "conf" / "model").glob("l*.yaml"))


def call(node: dict[str, object]) -> Call:
    return Call(str(node.pop("_target_")), node)


def built(model: Call) -> parameters.Sizes:
    """Of the model as transformers makes it, without its memory."""
    from launcher.worker import models

    with torch.device("meta"):
        return models.sizes(models.call("model", model))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_sizes_of_a_shipped_model_are_those_of_its_parameters(path: Path) -> None:
    model = call(yaml.safe_load(path.read_text()))
    assert parameters.sizes(model) == built(model)


LLAMA = {
    "_target_": parameters.HUGGING_FACE,
    "model_type": "llama",
    "vocab_size": 17,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}

LFM2 = {
    "_target_": parameters.HUGGING_FACE,
    "model_type": "lfm2",
    "vocab_size": 17,
    "hidden_size": 32,
    "intermediate_size": 48,
    "block_auto_adjust_ff_dim": False,
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "conv_L_cache": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.mark.parametrize(
    "node",
    [
        LLAMA | {"num_key_value_heads": 2},
        LLAMA | {"head_dim": 16},
        LLAMA | {"tie_word_embeddings": True},
        LFM2,
    ],
    ids=["grouped keys", "wide heads", "tied head", "convolutions and attention"],
)
def test_arguments_that_change_the_sizes_are_followed(node: dict[str, object]) -> None:
    assert parameters.sizes(call(dict(node))) == built(call(dict(node)))


@pytest.mark.parametrize(
    "node",
    [
        {"_target_": "tests.worker.plain.Net"},
        {"_target_": parameters.HUGGING_FACE, "model_type": "modernbert"},
        LLAMA | {"attention_bias": True},
        {name: value for name, value in LLAMA.items() if name != "intermediate_size"},
        LFM2 | {"conv_bias": True},
        LFM2 | {"tie_word_embeddings": False},
    ],
    ids=["own", "other", "biases", "a default", "biases of convolutions", "untied"],
)
def test_what_only_the_job_can_know_is_not_guessed(node: dict[str, object]) -> None:
    assert parameters.sizes(call(dict(node))) is None
