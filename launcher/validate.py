"""What can be wrong with one configuration by itself, without reading data or solving anything."""

import math
import re
from dataclasses import fields
from typing import Any

from launcher import slurm_options, targets
from launcher.genome import alphabet
from launcher.schema import BatchScheduleType, ClusterType, Config, CustomData, Data, Objective

MAX_SEED = 2**63 - 1


def check(config: Config) -> list[str]:
    """All fault lines: the key, the value, the rule, the remedy."""
    faults = []
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", config.name):
        faults.append(
            f"name={config.name}: it names a folder; use at most 64 letters, digits, '.', '_' and '-', "
            "a letter or digit first"
        )
    if not 0 <= config.seed <= MAX_SEED:
        faults.append(f"seed={config.seed}: it must lie in [0, {MAX_SEED}]")
    faults += targets.check("model._target_", config.model.target)
    if config.loss is not None:
        faults += targets.check("loss._target_", config.loss.target)
    if isinstance(config.data, CustomData):
        faults += _check_custom_data(config)
    elif config.loss is not None:
        faults.append(
            f"loss._target_={config.loss.target}: windows of a genome have their own loss (data.objective); "
            "set loss=null, or put your own dataset in place with data._target_"
        )
    else:
        faults += _check_task(config.data, config)
    faults += _check_train(config)
    for name in (field.name for field in fields(config.parallel)):
        if (degree := getattr(config.parallel, name)) != 1:
            faults.append(f"parallel.{name}={degree}: only data parallelism is available; set it to 1")
    if config.cluster.type is ClusterType.SLURM:
        faults += slurm_options.check(config.cluster)
    elif config.cluster.nodes != 1:
        faults.append(f"cluster.nodes={config.cluster.nodes}: cluster=local runs on this machine; set it to 1")
    if config.batch_schedule.type is BatchScheduleType.NOISE_SCALE and not config.train.noise_scale:
        faults.append("train.noise_scale=false: batch_schedule.type=noise_scale goes by it; set it to true")
    return faults


def _check_custom_data(config: Config) -> list[str]:
    assert isinstance(config.data, CustomData)
    faults = targets.check("data._target_", config.data.target)
    if config.data.validation is not None:
        faults += targets.check("data.validation._target_", config.data.validation.target)
    if config.loss is None:
        faults.append(
            "loss=null: your own dataset needs a loss; set loss._target_ to a callable that makes one, whose result "
            "called with (logits, batch) returns (sum, weight)"
        )
    if config.data.num_workers < 0:
        faults.append(f"data.num_workers={config.data.num_workers}: it must be at least 0")
    return faults


def _check_task(data: Data, config: Config) -> list[str]:
    """A Hugging Face model has to predict what the objective asks for, and to know all bases."""
    if config.model.target != "launcher.worker.models.hugging_face":
        return []
    faults = []
    task = config.model.arguments.get("task", "causal_lm")
    wanted = "masked_lm" if data.objective is Objective.MASKED else "causal_lm"
    if task != wanted:
        faults.append(f"data.objective={data.objective.value}: the model's task is {task}; set model.task={wanted}")
    known, needed = config.model.arguments.get("vocab_size"), len(alphabet.VOCABULARY)
    if isinstance(known, int) and known < needed:
        faults.append(f"model.vocab_size={known}: bases have {needed} token ids; set at least {needed}")
    return faults


def _check_train(config: Config) -> list[str]:
    train = config.train
    faults = []
    at_least_one: dict[str, Any] = {
        "train.max_steps": train.max_steps,
        "train.max_tokens": train.max_tokens,
        "train.epochs": train.epochs,
        "train.eval_every": train.eval_every,
        "train.eval_batches": train.eval_batches,
        "train.log_every": train.log_every,
        "train.max_consecutive_skips": train.max_consecutive_skips,
        "checkpoint.every": config.checkpoint.every,
        "checkpoint.keep": config.checkpoint.keep,
        "checkpoint.keep_every": config.checkpoint.keep_every,
        "cluster.ranks_per_node": config.cluster.ranks_per_node,
    }
    faults += [
        f"{key}={value}: it must be at least 1"
        for key, value in at_least_one.items()
        if value is not None and value < 1
    ]
    if not config.checkpoint.resume:
        faults.append("checkpoint.resume=: give auto, required, never, or the path of a checkpoint")
    clipping = train.gradient_clipping
    if clipping is not None and not (math.isfinite(clipping) and clipping > 0):
        faults.append(f"train.gradient_clipping={clipping}: it must be above 0; null turns clipping off")
    if train.step_timeout is not None and not (math.isfinite(train.step_timeout) and train.step_timeout > 0):
        faults.append(f"train.step_timeout={train.step_timeout}: it must be above 0; null turns it off")
    if not 0 <= train.noise_scale_decay < 1:
        faults.append(f"train.noise_scale_decay={train.noise_scale_decay}: it must lie in [0, 1)")
    return faults
