"""The Hydra launcher of this program: any sweeper of Hydra can run its points through it."""

from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class OkazakiLauncherConf:
    _target_: str = "hydra_plugins.okazaki.launcher.OkazakiLauncher"


ConfigStore.instance().store(group="hydra/launcher", name="okazaki", node=OkazakiLauncherConf, provider="okazaki")


class OkazakiLauncher(Launcher):
    """Runs the points that a sweeper chooses; the value of a point is its last ``eval_loss``."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._loader = hydra_context.config_loader
        self._config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from launcher import sweep

        return sweep.launch(self._loader, self._config, job_overrides, initial_job_idx)
