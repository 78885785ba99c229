"""How long ``mode=plan`` takes, against a Hydra program that composes the same configuration and does nothing else.

    python benchmarks/planning.py
    python benchmarks/planning.py --repeats 50 zero=stage3        # overrides go to both

Both are whole processes, started by turns. The genome is cached, as it is after the first run. That planning leaves
torch and DeepSpeed alone is looked up at the end of a plan of its own.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from launcher import genome  # noqa: E402 - runs from a checkout without installation
from launcher.decode import encode  # noqa: E402
from launcher.schema import Config, Data  # noqa: E402

OVERRIDES = ("+experiment=dna_8k", "mode=plan")
LIMIT = 1.5
HEAVY = ("torch", "deepspeed")

EMPTY = """
import json, secrets
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

for entry in json.loads(Path(__file__).with_suffix(".json").read_text()):
    ConfigStore.instance().store(**entry)
OmegaConf.register_new_resolver("unique", lambda: secrets.token_hex(4), use_cache=True)
OmegaConf.register_new_resolver("genome", lambda name: name)
OmegaConf.register_new_resolver("zero_pad", lambda number: f"{number:04d}")


@hydra.main(version_base="1.3", config_path=CONF, config_name="config")
def main(cfg):
    pass


main()
"""
"""The program without content. It reads the defaults of the schema from a file, and imports nothing of the launcher."""

LOADED = """
import sys

from launcher.__main__ import main

code = main(sys.argv[1:])
print(*sys.modules, file=sys.stderr)
sys.exit(code)
"""


def write_empty_program(folder: Path) -> Path:
    defaults = encode(Config())
    base = {name: node for name, node in defaults.items() if name not in ("model", "data")}
    program = folder / "empty.py"
    program.write_text(EMPTY.replace("CONF", repr(str(REPOSITORY / "conf"))))
    program.with_suffix(".json").write_text(
        json.dumps(
            [{"name": "okazaki_defaults", "node": base}, {"group": "data", "name": "fasta", "node": encode(Data())}]
        )
    )
    return program


def seconds(command: Sequence[str], folder: Path) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def heavy_modules(overrides: Sequence[str], folder: Path) -> list[str]:
    """Those of HEAVY that are loaded in a process that has planned."""
    command = [sys.executable, "-c", LOADED, *overrides]
    done = subprocess.run(command, check=True, cwd=folder, capture_output=True, text=True)
    loaded = set(done.stderr.split())
    assert "launcher.plan" in loaded, "it has planned"
    return [name for name in HEAVY if name in loaded]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("overrides", nargs="*", help="more overrides, for both programs")
    options = parser.parse_args()
    overrides = [*OVERRIDES, *options.overrides]
    genome.load(Data(fasta=str(REPOSITORY / "genomes/ecoli_mg1655.fa.gz")))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        commands = {
            "empty @hydra.main program": [sys.executable, str(write_empty_program(folder)), *overrides],
            "python -m launcher": [sys.executable, "-m", "launcher", *overrides],
        }
        times: dict[str, list[float]] = {program: [] for program in commands}
        for repeat in range(options.repeats + 1):
            for program, command in commands.items():
                taken = seconds(command, folder)
                if repeat:  # the first warms the caches of the machine
                    times[program].append(taken)
        print(f"{' '.join(overrides)}: seconds of {options.repeats} runs by turns{'':7}median   fastest")
        for program, measured in times.items():
            print(f"  {program:<58}{statistics.median(measured):12.3f}{min(measured):10.3f}")
        empty, planned = times.values()
        # Pairs ran one after the other, so that a busy machine slowed both.
        ratio = statistics.median(ours / base for ours, base in zip(planned, empty, strict=True))
        print(f"  {f'ratio, median over pairs (limit {LIMIT})':<58}{ratio:12.2f}")
        loaded = heavy_modules(overrides, folder)
        print(f"  {' and '.join(HEAVY)} in sys.modules at the end of planning: {', '.join(loaded) or 'none'}")


if __name__ == "__main__":
    main()
