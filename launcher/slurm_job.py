"""What a Slurm job does on its first node before and after its ranks, called by ``slurm/submit.sbatch``.

python -m launcher.slurm_job begin RUN_DIR      # prints a free port and the number of ranks; nothing if the run is done
python -m launcher.slurm_job end RUN_DIR CODE   # of srun; prints what is next, and exits with the code of the run
python -m launcher.slurm_job follow RUN_DIR JOB # note the job that goes on where this one cannot be queued again
"""

import contextlib
import dataclasses
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher import decode, failures, job, placement, plan, ranks, resume, slurm_options
from launcher.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_PREEMPTED,
    OutOfMemoryError,
    RequestError,
    RunError,
    RunPreemptedError,
)
from launcher.micro_batch import Trial
from launcher.plan import Plan
from launcher.rundir import MEMORY, PREEMPTED, RunDir
from launcher.schema import Config, MicroBatch, Mode

AGAIN, REQUEUE = "again", "requeue"
"""What ``end`` prints: begin once more in this job, or put it back into the queue."""

JOB = "OKAZAKI_JOB"
"""Where the script says which job, or which task of an array, it is: 12 or 12_0."""

PORTS, STRIDE = range(20000, 32000), 1009
"""Below those that Linux gives to outgoing connections; and how far from one that was taken the next one is sought."""

MAX_PORTS = 5
"""So often another port is sought: while rank 0 loads torch, before it listens, somebody else may take the one that was
free."""

SUBMITTER_S = 60.0
"""How long the launcher may still hold the run directory whose job begins already."""


def main(argv: Sequence[str]) -> int:
    verb, path, *rest = argv
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what is said on the way is for the log of the job
            answer = VERBS[verb](Path(path), *rest)
    except (RequestError, RunError) as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code
    except OSError as error:  # a full disk, as a rule
        print(f"the run in {path} cannot go on: {error}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    print(answer)
    return EXIT_PREEMPTED if answer == REQUEUE else EXIT_DONE


def begin(path: Path) -> str:
    """Freeze the attempt for the nodes that the job has got; returns a free port and the number of ranks to start.

    Empty for a run that has nothing left to do. Raises RequestError where the job is not what was planned.
    """
    if not RunDir(path).config.exists():
        raise RequestError(
            f"{path} is not on {socket.gethostname()}: the run directory must be on a file system that all nodes "
            "share; give another hydra.run.dir"
        )
    run_dir = _locked(path)
    try:
        status, config = run_dir.read_status(), decode.load(run_dir.config)
        begun = status.get("begun", True)
        if begun:
            config = resume.again(config)
        if (restarts := _restarts()) > config.cluster.max_requeues:
            raise RunError(f"the job was started again {restarts} times (cluster.max_requeues)")
        origin = resume.origin(config, path)
        if origin is not None and resume.is_done(config, origin):
            run_dir.write_status(state="completed", reason=None, activity=None)
            print(f"this run is done: {origin.folder} is its last step", file=sys.stderr)
            return ""
        attempt = run_dir.begin_attempt() if begun else status["attempt"]
        run_dir.forget_failures()
        num_ranks = _freeze(run_dir, config, status)
        run_dir.seal(os.environ[ranks.ATTEMPT]).touch()
        step = run_dir.last_step()
        run_dir.write_status(state="running", activity="starting", reason=None, step=step, began_at_step=step)
        run_dir.write_status(
            begun=True, attempt=attempt, job=os.environ[JOB], restarts=restarts, host=socket.gethostname()
        )
        return f"{_free_port(status.get('ports_taken', 0))} {num_ranks}"
    except (RequestError, RunError) as error:
        _fail(run_dir, error)
        raise
    finally:
        run_dir.release()


def _freeze(run_dir: RunDir, config: Config, status: Mapping[str, Any]) -> int:
    """Write what the ranks go by; returns how many of them there are to be."""
    made = _planned(config)
    run_dir.write_status(micro_batch_size=None)
    facts = {}
    if config.batch.train_micro_batch_size_per_gpu is MicroBatch.AUTO and config.mode is Mode.TRAIN:
        try:
            made = job.fitted(made, _replay(status.get("trials", [])))
        except _TrialNeeded as needed:
            facts["micro_batch_sizes"] = list(needed.sizes)
    job.freeze(_asked_for(made, config), run_dir, **facts)
    return job.groups(made)[int(status.get("groups_done", 0))] if config.mode is Mode.VERIFY else made.num_ranks


class _TrialNeeded(Exception):  # noqa: N818 - it is no error
    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes


def _replay(made: Sequence[Mapping[str, Any]]) -> Trial:
    """The trials of micro-batches that ranks of this run have made already, up to one that is not among them: on fewer
    nodes the sizes are others."""
    known: dict[tuple[int, ...], int | None] = {tuple(trial["sizes"]): trial["fits"] for trial in made}

    def trial(sizes: Sequence[int]) -> int | None:
        if tuple(sizes) not in known:
            raise _TrialNeeded(sizes)
        return known[tuple(sizes)]

    return trial


def follow(path: Path, job: str) -> str:
    """From now on that job is at work on the run."""
    RunDir(path).write_status(job=job)
    return f"job {job} follows this one"


def end(path: Path, srun: str) -> str:
    """Close the attempt whose ranks have ended, ``srun`` with that code; returns what the job is to do next, empty for
    nothing.

    Raises what the run ends with: RunError, RequestError, or RunPreemptedError where it is saved and not to be queued
    again by itself.
    """
    code, run_dir = int(srun), RunDir(path)
    status, config = run_dir.read_status(), decode.load(run_dir.config)
    noted = filter(None, (failures.noted(run_dir, rank) for rank in range(_num_ranks(run_dir))))
    first = min(noted, default=None)
    if first is not None and first.stopped_by is not None:
        run_dir.write_status(state=PREEMPTED, reason=first.stopped_by, activity=None)
        return _after_preemption(run_dir, config)
    tried = plan.read(run_dir).get("micro_batch_sizes")
    if tried is not None and status["state"] != PREEMPTED and (first.kind == MEMORY if first else code == 0):
        # Anything else that ends the ranks tells nothing about their memory.
        trial = {"sizes": tried, "fits": status["micro_batch_size"]}
        run_dir.write_status(begun=False, trials=[*status.get("trials", []), trial])
        return AGAIN
    ports = status.get("ports_taken", 0)
    if first is not None and failures.PORT_TAKEN.search(first.reason) and ports < MAX_PORTS:
        run_dir.write_status(ports_taken=ports + 1)
        print(f"{first.reason}; another port is tried", file=sys.stderr)
        return AGAIN
    try:
        if first is not None:
            raise failures.error(first, run_dir)
        if status["state"] == PREEMPTED:
            return _after_preemption(run_dir, config)
        if code in (128 + signal.SIGUSR2, 128 + signal.SIGTERM):
            run_dir.write_status(state=PREEMPTED, reason="a signal before training had begun", activity=None)
            return _after_preemption(run_dir, config)
        if code != 0:
            raise RunError(f"the ranks ended with exit code {code}: {_words_of_srun(run_dir)}")
    except OutOfMemoryError as error:
        made = job.finer(_planned(config), status.get("micro_batch_size"))
        if made is None:
            _fail(run_dir, error)
            raise
        job.freeze(_asked_for(made, config), run_dir)
        print(f"{error}; the run goes on with micro-batches of {made.cut.micro_batch_size}", file=sys.stderr)
        return AGAIN
    except RunPreemptedError:
        raise
    except (RequestError, RunError) as error:
        _fail(run_dir, error)
        raise
    if config.mode is Mode.VERIFY:
        groups_done = status.get("groups_done", 0) + 1
        if groups_done < len(job.groups(_planned(config))):
            run_dir.write_status(begun=False, groups_done=groups_done)
            return AGAIN
        job.judge(config, run_dir)
    else:
        job.learn(_planned(config), run_dir)
    run_dir.write_status(state="completed", activity=None)
    return ""


def _locked(path: Path) -> RunDir:
    deadline = time.monotonic() + SUBMITTER_S
    while True:
        try:
            return RunDir.create(path, may_continue=True)
        except RequestError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _planned(config: Config) -> Plan:
    """The plan for the nodes that Slurm has granted."""
    nodes, tasks = int(os.environ["SLURM_JOB_NUM_NODES"]), int(os.environ["SLURM_NTASKS"])
    least, most = slurm_options.node_range(config.cluster.nodes)
    if not least <= nodes <= most:
        raise RequestError(f"cluster.nodes={config.cluster.nodes}: the job has {nodes} nodes; submit it anew")
    granted = dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, nodes=nodes))
    if tasks != placement.num_ranks(granted):
        raise RequestError(
            f"the run was planned for {placement.num_ranks(granted)} ranks, but the job has {tasks} tasks"
        )
    return plan.make(granted)


def _asked_for(made: Plan, config: Config) -> Plan:
    """What is frozen of a plan for the nodes that were granted: with those that were asked for, and the folders as they
    were given, as other nodes may come next."""
    frozen = dataclasses.replace(made.config, cluster=config.cluster, offload=config.offload)
    return dataclasses.replace(made, config=frozen)


def _after_preemption(run_dir: RunDir, config: Config) -> str:
    status = run_dir.read_status()
    saved = f"stopped by {status['reason']}, saved at step {status.get('checkpoint', 0)}"
    requeues = status.get("requeues", 0)
    if not config.cluster.requeue:
        raise RunPreemptedError(f"{saved}; cluster.requeue=false: submit it again to go on")
    if requeues >= config.cluster.max_requeues:
        raise RunPreemptedError(f"{saved}; it was queued again {requeues} times (cluster.max_requeues)")
    if requeues and run_dir.last_step() == status["began_at_step"]:
        raise RunPreemptedError(f"{saved}; it made no progress since it was queued again, and is not another time")
    run_dir.write_status(requeues=requeues + 1)
    return REQUEUE


def _fail(run_dir: RunDir, error: Exception) -> None:
    run_dir.write_status(state="failed", step=run_dir.last_step(), activity=None, reason=str(error))


def _num_ranks(run_dir: RunDir) -> int:
    number: int = plan.read(run_dir)["batch"]["data_parallel_size"]
    return number


def _words_of_srun(run_dir: RunDir) -> str:
    """The first complaint of the step: the others follow from it."""
    log = run_dir.logs / "srun.log"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    complaints = [line for line in lines if re.match(r"(srun|slurmstepd)\S*: error: ", line)]
    return complaints[0] if complaints else f"srun says nothing (log: {log})"


def _free_port(taken: int) -> int:
    """On this node, where rank 0 will be. Each job begins to look at a place of its own, and at another one each time
    that its port was ``taken`` by somebody."""
    number = int(os.environ["SLURM_JOB_ID"]) + taken * STRIDE  # the id of a task of an array is its own too
    for offset in range(len(PORTS)):
        port = PORTS[(number + offset) % len(PORTS)]
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise RunError(f"no port from {PORTS[0]} to {PORTS[-1]} is free on {socket.gethostname()}")


def _restarts() -> int:
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


VERBS: dict[str, Callable[..., str]] = {"begin": begin, "end": end, "follow": follow}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
