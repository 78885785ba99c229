"""The batch script of a Slurm job: text made of typed values, by a pure function.

What it does stands in ``slurm/submit.sbatch``, which is shell to be read; here only its ``@names@`` are filled in.
"""

import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from launcher import slurm_options
from launcher.schema import Cluster

LOG, LOG_OF_ARRAY = "logs/slurm_%j.log", "logs/slurm_%A_%a.log"
"""What Slurm and the script say, in the folder that the script is submitted from."""


def render(
    template: str,
    cluster: Cluster,
    *,
    name: str,
    python: str,
    folder: Path,
    run_dirs: Sequence[Path],
    ranks_per_node: int,
    signal_lead: int,
    array: str | None = None,
) -> str:
    """The script of one job, or with ``array`` of one for each of ``run_dirs``.

    ``python`` is the interpreter on the nodes, ``folder`` where it is started, and ``signal_lead`` is in seconds.
    Whatever the values hold, a shell reads each of them as one word; only ``cluster.setup`` is shell of the user's own.
    Raises ValueError for a value that cannot stand on an ``#SBATCH`` line.
    """
    directives = slurm_options.directives(
        cluster,
        job_name=name,
        ntasks_per_node=ranks_per_node,
        signal=f"USR2@{signal_lead}",
        output=LOG if array is None else LOG_OF_ARRAY,
        open_mode="append",
        **({} if array is None else {"array": array}),
    )
    pyxis = {"image": cluster.container_image, "mounts": cluster.container_mounts, "workdir": cluster.container_workdir}
    options = [f"--container-{key}={value}" for key, value in pyxis.items() if value is not None]
    values = {
        "directives": "\n".join(directives),
        "run_dirs": _words(map(str, run_dirs)),
        "folder": shlex.quote(str(folder)),
        "python": _words([*cluster.container, python]),
        "srun_options": _words(options),
        # In an image there is another Python than on the node itself.
        "first_node": f"srun --nodes=1 --ntasks=1 --relative=0 {_words(options)}" if options else "",
        "ranks_per_node": str(ranks_per_node),
        "environment": "\n".join(f"export {key}={shlex.quote(value)}" for key, value in cluster.environment.items()),
        "setup": "\n".join(cluster.setup),
    }

    def fill(place: re.Match[str]) -> str:
        value = values[place["name"]]
        return value and value + place["end"]

    return re.sub(r"@(?P<name>\w+)@(?P<end>\n?)", fill, template)


def _words(words: Iterable[str]) -> str:
    return " ".join(map(shlex.quote, words))
