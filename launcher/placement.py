"""Where the ranks of a run are, as its configuration tells: how many, on which machine, and what that needs."""

import importlib.util
import os
import sys
import tempfile

from launcher import devices, ranks, slurm_options
from launcher.errors import RequestError
from launcher.schema import Cluster, ClusterType, Config, Device, Mode


def check(config: Config) -> list[str]:
    """The faults: what the ranks need and will not find, as far as this machine can tell."""
    return _check_packages(config) + _check_nvme(config)


def num_ranks(config: Config) -> int:
    """Ranks of a run: on all nodes that Slurm is asked for, or here.

    Raises RequestError where there are fewer GPUs here than ranks.
    """
    if config.cluster.type is ClusterType.SLURM:
        try:
            _, nodes = slurm_options.node_range(config.cluster.nodes)
            return nodes * ranks_per_node(config.cluster)
        except ValueError:
            return 0  # validate says what is wrong
    wanted, gpus = config.cluster.ranks_per_node, devices.visible_gpus()
    if wanted is None:
        return max(1, gpus)
    if gpus and wanted > gpus:
        raise RequestError(f"cluster.ranks_per_node={wanted}: only {gpus} GPUs are visible here; set at most {gpus}")
    return wanted


def ranks_per_node(cluster: Cluster) -> int:
    """Tasks of a Slurm job on each node: ``ranks_per_node``, or one for each GPU that is asked for, or one."""
    return cluster.ranks_per_node or slurm_options.num_gpus(cluster) or 1


def is_elsewhere(config: Config) -> bool:
    """The ranks will run on nodes that this machine knows nothing of."""
    return config.cluster.type is ClusterType.SLURM and ranks.ATTEMPT not in os.environ


def _check_packages(config: Config) -> list[str]:
    """What the ranks import has to be installed where they run; a plan can be made without."""
    cluster = config.cluster
    others = cluster.python or cluster.setup or cluster.container or cluster.container_image
    is_unknown = config.mode is Mode.PLAN or (is_elsewhere(config) and others)
    needed = [] if is_unknown else ["torch", "deepspeed", "transformers"]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if not missing:
        return []
    remedy = "; or set cluster.python, setup or container to what the nodes have" if is_elsewhere(config) else ""
    return [
        f"training needs {', '.join(missing)}, not installed for {sys.executable}: pip install 'okazaki[train]'{remedy}"
    ]


def _check_nvme(config: Config) -> list[str]:
    """The folder for offloading is on this machine, as its ranks are; its form is checked with the DeepSpeed JSON."""
    path = config.offload.nvme_path
    if Device.NVME not in (config.offload.optimizer, config.offload.parameters) or not path or is_elsewhere(config):
        return []
    folder = os.path.expandvars(path)
    if not os.path.isabs(folder):
        told = not path.startswith("$")
        return [] if told else [f"offload.nvme_path={path}: it stands for {folder}; it must be an absolute path"]
    if not os.path.isdir(folder):
        return [f"offload.nvme_path={path}: there is no such folder; make it, or name one on a local disk"]
    try:
        tempfile.TemporaryFile(dir=folder).close()  # root may write anywhere, as far as access rights tell
    except OSError as error:
        fault = f"it cannot be written ({error.strerror}); name another folder on a local disk"
        return [f"offload.nvme_path={path}: {fault}"]
    return []
