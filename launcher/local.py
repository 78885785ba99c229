"""Runs the ranks of one run on this machine, and sees to it that all of them end together."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from launcher import devices, failures, guard, output
from launcher.errors import (
    OutOfMemoryError,
    RequestError,
    RunError,
    RunInterruptedError,
    RunPreemptedError,
    RunStoppedError,
)
from launcher.failures import Failure
from launcher.progress import Progress
from launcher.ranks import STORE_FD
from launcher.rundir import FAILURE, PREEMPTED, RunDir
from launcher.schema import Config, Mode

WORKER = (sys.executable, "-m", "launcher.worker")

POLL_S = 0.05

PARTED = "op.preamble.length <= op.nbytes"
"""What gloo says where two ranks are at different collectives."""


def run(
    config: Config,
    groups: Sequence[int],
    num_steps: int | None,
    run_dir: RunDir,
    worker: Sequence[str] | None = None,
    *,
    is_all: bool = True,
) -> None:
    """Do what is frozen in ``run_dir``: start groups of so many ranks, one group after another, show how they get on,
    and return when all are done; with ``is_all`` the run is completed then.

    Raises RunError naming the first rank that failed, OutOfMemoryError where smaller micro-batches may do (it is the
    caller's to try them, or to call ``fail``), RequestError where that rank found the request wrong, RunPreemptedError
    where a signal stopped the run after it was saved, and RunInterruptedError where it could not be.
    No process of the run is left then.
    """
    run_dir.write_status(state="running", step=run_dir.last_step(), num_steps=num_steps, reason=None)
    run_dir.write_status(activity="starting", pid=os.getpid(), host=socket.gethostname())
    try:
        with _signals() as caught, Progress(run_dir, config, num_steps) as progress:
            try:
                for num_ranks in groups:
                    _supervise(num_ranks, run_dir, worker or WORKER, progress, caught, config.mode is Mode.TRAIN)
            except OutOfMemoryError:
                if caught:  # ranks are not to go on in smaller micro-batches instead
                    raise _preempted(run_dir, "", caught) from None
                raise
            if caught and not is_all:  # it came too late for these ranks, and what comes after them is not wanted
                raise _preempted(run_dir, "", caught)
    except (RunPreemptedError, OutOfMemoryError):
        raise
    except BaseException as error:
        fail(run_dir, error)
        raise
    if is_all:
        run_dir.write_status(state="completed", activity=None)


def fail(run_dir: RunDir, error: BaseException) -> None:
    """Write that the run has failed, and why."""
    reason = str(error) or type(error).__name__
    try:
        run_dir.write_status(state="failed", step=run_dir.last_step(), activity=None, reason=reason)
    except OSError as fault:  # what it failed of is told all the same
        output.complain(f"{run_dir.status} cannot be written ({fault.strerror})")


@dataclass
class Rank:
    number: int
    process: "subprocess.Popen[bytes]"
    seen_alive: float
    """Seconds since the epoch, as in the failure files."""
    code: int | None = None
    seen_dead: float | None = None


def _supervise(
    num_ranks: int,
    run_dir: RunDir,
    worker: Sequence[str],
    progress: Progress,
    caught: list[signal.Signals],
    may_stop: bool,
) -> None:
    ranks: list[Rank] = []
    run_dir.forget_failures()
    with _Guard() as watch:
        try:
            for rank in _start(num_ranks, run_dir, worker):
                ranks.append(rank)
                watch.began(rank.process.pid)
            failed = _wait(ranks, progress, caught, may_stop)
        finally:
            guard.end({rank.process.pid for rank in ranks}, hurry=lambda: _is_second_interrupt(caught))
            for rank in ranks:
                rank.process.wait()
                watch.ended(rank.process.pid)
    progress.update()
    status = run_dir.read_status()
    if not failed and status["state"] == PREEMPTED:
        raise _preempted(run_dir, status["reason"], caught)
    if failed and caught and not _is_second_interrupt(caught) and all(rank.code == -signal.SIGTERM for rank in failed):
        # They were asked before they could listen.
        run_dir.write_status(state=PREEMPTED, reason=caught[0].name, activity=None)
        raise RunPreemptedError(f"stopped by {caught[0].name} before training had begun")
    if _is_second_interrupt(caught) or (caught and not may_stop):
        raise RunInterruptedError(caught[-1].name)
    if failed:
        found = _failures(ranks, failed, run_dir)
        first = min(found)
        if first.stopped_by is not None:
            raise _preempted(run_dir, first.stopped_by, caught)
        raise _error(found, ranks, run_dir)


def _preempted(run_dir: RunDir, stopped_by: str, caught: list[signal.Signals]) -> RunPreemptedError:
    reason = f"{caught[0].name} to the launcher" if caught else stopped_by  # which this process has passed on
    run_dir.write_status(state=PREEMPTED, reason=reason, step=run_dir.last_step(), activity=None)
    step = run_dir.read_status().get("checkpoint")
    return RunPreemptedError(f"stopped by {reason}" + ("" if step is None else f", saved at step {step}"))


def _start(num_ranks: int, run_dir: RunDir, worker: Sequence[str]) -> Iterator[Rank]:
    """The ranks, each in a session of its own, so that its children can be ended with it.

    Rank 0 inherits the listening socket of the rendezvous: it was bound to a free port before anybody knew the
    number, and so no two runs can meet on one.
    """
    with socket.create_server(("127.0.0.1", 0)) as store:
        for number in range(num_ranks):
            variables = _environment(number, num_ranks, store.getsockname()[1])
            fds: tuple[int, ...] = ()
            if number == 0:
                fds = (store.fileno(),)
                variables[STORE_FD] = str(store.fileno())
            with run_dir.log(number).open("ab") as log:
                process = subprocess.Popen(
                    [*worker, str(run_dir.path)],
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=fds,
                )
            yield Rank(number, process, seen_alive=time.time())


def _environment(number: int, num_ranks: int, port: int) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0))
    defaults = {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": str(max(1, cores // num_ranks)),
        "PYTHONUNBUFFERED": "1",
    }
    if devices.visible_gpus() == 0:
        defaults["DS_ACCELERATOR"] = "cpu"
    return {
        **defaults,
        **os.environ,
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _wait(ranks: list[Rank], progress: Progress, caught: list[signal.Signals], may_stop: bool) -> list[Rank]:
    """Wait until every rank is done, or one has failed, or a signal came; returns the ranks that failed.

    Ranks that ``may_stop`` are asked to by a first signal, and waited for until a second interrupt comes. Other signals
    come more than once without anybody's meaning it: from a queue that warns before it ends, or a shell that passes on.
    """
    asked = False
    while not caught or (may_stop and not _is_second_interrupt(caught)):
        if caught and not asked:
            asked = True
            for rank in ranks:
                rank.process.terminate()
        for rank in ranks:
            if rank.code is None:
                now = time.time()
                rank.code = rank.process.poll()
                if rank.code is None:
                    rank.seen_alive = now
                else:
                    rank.seen_dead = time.time()
        failed = [rank for rank in ranks if rank.code not in (None, 0)]
        if failed or all(rank.code == 0 for rank in ranks):
            return failed
        progress.update()
        time.sleep(POLL_S)
    return []


def _is_second_interrupt(caught: list[signal.Signals]) -> bool:
    return caught.count(signal.SIGINT) > 1


def _failures(ranks: list[Rank], failed: list[Rank], run_dir: RunDir) -> list[Failure]:
    """Why ranks failed; the smallest one is the first, and the others lost their peer and failed of that.

    A rank that raises notes when. One that died without a word did so after it was last seen alive, and before its
    peers noticed. Collectives abort where a peer is lost, but also where peers disagree: an abort is taken to come
    after what others note, unless all that they note is that they have lost a peer.
    """
    found: list[Failure] = []
    for rank in ranks:
        note = failures.noted(run_dir, rank.number)
        if note is not None:
            found.append(note)
        elif rank in failed:
            assert rank.code is not None
            assert rank.seen_dead is not None
            when = rank.seen_dead if -rank.code == signal.SIGABRT else rank.seen_alive
            reason = _end_of(rank.code, run_dir.log(rank.number))
            found.append(Failure(False, when, rank.number, FAILURE, reason))
    return found


def _error(found: list[Failure], ranks: list[Rank], run_dir: RunDir) -> RequestError | RunError:
    """What the run ends with: it names the rank that failed first."""
    all_lost_a_peer = all(failure.lost_a_peer for failure in found)
    left = [rank for rank in ranks if rank.code == 0]
    if left and all_lost_a_peer:
        log = run_dir.log(left[0].number)
        return RunError(f"rank {left[0].number} failed: it ended before the run did, with exit code 0 (log: {log})")
    silent = [rank for rank in ranks if rank.code is None and not run_dir.failure(rank.number).exists()]
    if silent and all_lost_a_peer:
        # All others wait, and this one does not even say so: it was stopped, or its machine does not answer.
        return RunError(f"rank {silent[0].number} failed: no sign of life (log: {run_dir.log(silent[0].number)})")
    return failures.error(min(found), run_dir)


def _end_of(code: int, log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    if code < 0:
        name = signal.Signals(-code).name
        # What C++ says before it aborts.
        said = next((line.partition("what():")[2].strip() for line in reversed(lines) if "what():" in line), "")
        if PARTED in said:
            said += (
                ": ranks communicate different things, as those do whose micro-batches use different parameters; set "
                "zero=stage1, or accumulation.sync=once_per_window"
            )
        why = {"SIGKILL": "often a sign of too little memory", "SIGABRT": said}.get(name)
        return f"killed by {name}" + (f", {why}" if why else "")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
    return f"exit code {code}: {last}"


class _Guard:
    """The process that ends the ranks if this one is gone before it could."""

    def __enter__(self) -> "_Guard":
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
            bufsize=1,
        )
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(BrokenPipeError):
            self._process.communicate()

    def began(self, group: int) -> None:
        self._tell(f"+{group}")

    def ended(self, group: int) -> None:
        self._tell(f"-{group}")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        # Without the guard a run goes on: it is needed only if this process is killed too.
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{line}\n")


@contextmanager
def interruptible() -> Iterator[None]:
    """Signals to stop raise RunInterruptedError while inside, except during ``run``, which ends its ranks first."""

    def interrupt(number: int, _: FrameType | None) -> None:
        raise RunInterruptedError(signal.Signals(number).name)

    with _handled_by(interrupt):
        yield


@contextmanager
def stoppable(run_dir: RunDir) -> Iterator[None]:
    """Signals to stop raise RunPreemptedError while inside, with the status of the run, except during ``run``: between
    two groups of ranks nothing has to be saved."""

    def stop(number: int, _: FrameType | None) -> None:
        raise RunPreemptedError(f"stopped by {signal.Signals(number).name} to the launcher")

    with _handled_by(stop):
        try:
            yield
        except RunPreemptedError as error:
            if run_dir.read_status().get("state") != PREEMPTED:
                reason = str(error).removeprefix("stopped by ")
                run_dir.write_status(state=PREEMPTED, reason=reason, step=run_dir.last_step(), activity=None)
            raise


@contextmanager
def _signals() -> Iterator[list[signal.Signals]]:
    """The signals to stop that came while inside, in order."""
    caught: list[signal.Signals] = []
    with _handled_by(lambda number, _: caught.append(signal.Signals(number))):
        yield caught


@contextmanager
def _handled_by(note: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """``note`` is called on the signals to stop while inside; one that was ignored before stays ignored. Where one has
    stopped what is inside, this process is about to end, and those that come again change nothing."""
    stops = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2]
    before = {number: signal.getsignal(number) for number in stops if signal.getsignal(number) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, note)
    stopped = False
    try:
        yield
    except RunStoppedError:
        stopped = True
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if stopped else handler)
