"""What a run learns from: the training and validation sequences, and the objective."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from launcher import genome
from launcher.errors import RequestError
from launcher.genome import markov
from launcher.schema import Call, ClusterType, Config, CustomData
from launcher.schema import Objective as ObjectiveType
from launcher.worker import models
from launcher.worker.objectives import Bases, Custom, Objective
from launcher.worker.stage import stage
from launcher.worker.windows import GenomeSource, Source, TorchSource


@dataclass(frozen=True)
class Task:
    train: Source
    validation: Source | None
    objective: Objective
    predicts_bases: bool
    """So that the loss has a meaning in bits per base."""
    read: genome.Genome | None

    def baselines(self) -> dict[str, float]:
        """Bits per base of Markov models of the training split on the validation split; slow on large genomes."""
        if self.read is None or self.read.validation is None or not self.predicts_bases:
            return {}
        return {
            f"markov_order{order}_bits_per_base": markov.markov_bits_per_base(
                self.read.train, self.read.validation, order
            )
            for order in (0, 1)
        }


def open_task(config: Config, planned: Mapping[str, Any]) -> Task:
    """The task of a run; ``planned`` is what ``plan.json`` says about its data.

    Raises RequestError for a ``_target_`` or argument that cannot be, as far as the launcher could not tell.
    """
    data = config.data
    if isinstance(data, CustomData):
        assert config.loss is not None, "checked before the run started"
        objective = Custom(models.call("loss", config.loss))
        validation = None if data.validation is None else _dataset("data.validation", data.validation)
        return Task(_dataset("data", data), validation, objective, predicts_bases=False, read=None)
    entries: list[str] = planned["cache"]
    if config.cluster.type is ClusterType.SLURM and config.cluster.stage_to is not None:
        entries = [str(stage(Path(entry), config.cluster.stage_to)) for entry in entries]
    read = genome.reopen(data, entries, planned["fingerprint"])
    return Task(
        train=GenomeSource(read.train, data, reverse_complement=data.reverse_complement),
        validation=GenomeSource(read.validation, data, reverse_complement=False) if read.validation else None,
        objective=Bases(data),
        predicts_bases=data.objective is ObjectiveType.CAUSAL,
        read=read,
    )


def _dataset(key: str, data: CustomData) -> TorchSource:
    made = models.call(key, Call(data.target, data.arguments))
    if not (hasattr(made, "__getitem__") and hasattr(made, "__len__")):
        raise RequestError(
            f"{key}._target_={data.target}: a dataset needs __len__ and __getitem__; this one has not both"
        )
    if len(made) == 0:
        raise RequestError(f"{key}._target_={data.target}: the dataset is empty")
    dataset: Dataset[object] = made
    return TorchSource(dataset)
