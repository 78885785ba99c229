"""How long a login shell is busy with a sweep of many points on Slurm, ours against hydra-submitit-launcher's.

    python benchmarks/slurm_sweep.py --points 64 --submitit FOLDER

Starts a Slurm cluster of four nodes on this machine (``slurm/cluster.sh``, as root). Every point trains a small model
for one step; two fail on purpose. ``FOLDER`` holds hydra-submitit-launcher and what it needs (pip install --target);
its points return at once and train nothing, in its favour. Without it only ours is measured.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]

NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self, number):
        super().__init__()
        if number in (13, 42):
            raise ValueError(f"point {number} fails on purpose")
        self.embed = torch.nn.Embedding(17, 17)

    def forward(self, tokens):
        return self.embed(tokens)
"""

OURS = (
    "-m +experiment=dna_8k data=lambda data.sequence_length=128 --config-dir conf model=net "
    "batch.train_batch_size=8 train.max_steps=1 train.eval_batches=1 lr_schedule.warmup_steps=0 logging=none "
    "cluster=slurm hydra.sweep.dir=sweep"
)

APP = """
import hydra

@hydra.main(config_path=None, config_name="config", version_base="1.3")
def main(cfg):
    if cfg.number in (13, 42):
        raise ValueError(f"point {cfg.number} fails on purpose")
    return cfg.number

from hydra.core.config_store import ConfigStore
ConfigStore.instance().store(name="config", node={"number": 0})
main()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=64)
    parser.add_argument("--submitit", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        cluster, folder = Path(name, "cluster"), Path(name, "lab")
        _cluster("start", cluster)
        try:
            os.environ["SLURM_CONF"] = str(cluster / "etc" / "slurm.conf")
            _ours(folder, options.points)
            if options.submitit is not None:
                _submitit(folder, options.points, options.submitit)
        finally:
            _cluster("stop", cluster)


def _cluster(action: str, folder: Path) -> None:
    knobs = {"NODES": "4", "CPUS": "1", "MEM": "8000", "GPUS": "0", "PORT": "18800"}
    command = [str(REPOSITORY / "slurm" / "cluster.sh"), action, str(folder)]
    subprocess.run(command, env={**os.environ, **knobs}, check=True, stdout=subprocess.DEVNULL)


def _ours(folder: Path, points: int) -> None:
    (folder / "conf" / "model").mkdir(parents=True)
    (folder / "conf" / "model" / "net.yaml").write_text("_target_: nets.Net\nnumber: 0\n")
    (folder / "nets.py").write_text(NET)
    command = [sys.executable, "-m", "launcher", *OURS.split(), f"model.number=range({points})"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
        "TORCHDYNAMO_DISABLE": "1",
    }
    start = time.perf_counter()
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    print(f"ours: the shell is free after {time.perf_counter() - start:.1f} s", flush=True)
    ledger = [json.loads(line) for line in (folder / "sweep" / "sweep.jsonl").read_text().splitlines()]
    last = {line["point"]: line for line in ledger}
    arrays = {line["job"].partition("_")[0] for line in last.values()}
    print(f"  {len(last)} points in the ledger, as {len(arrays)} array", flush=True)
    while _queue():
        time.sleep(15)
    states = [json.loads((Path(line["run_dir"]) / "status.json").read_text()) for line in last.values()]
    counts = collections.Counter(status["state"] for status in states)
    print(f"  all have ended after {time.perf_counter() - start:.0f} s: {dict(counts)}")
    for status in states:
        if status["state"] != "completed":
            print(f"    {status['reason']}")


def _submitit(folder: Path, points: int, packages: Path) -> None:
    (folder / "app.py").write_text(APP)
    words = ["-m", "hydra/launcher=submitit_slurm", f"number=range({points})", "hydra.launcher.timeout_min=30"]
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "app.py", *words], cwd=folder, env=environment, check=False, capture_output=True, text=True
    )
    print(f"hydra-submitit-launcher: the shell is free after {time.perf_counter() - start:.1f} s")
    print(f"  exit code {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1]}")


def _queue() -> str:
    return subprocess.run(["squeue", "--noheader"], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
