"""A whole cluster as local processes: one coordinator, all workers. Knows processes and pipes; nothing of training.

    launch ── imports torch and transformers once, then forks; it computes nothing and holds no sockets
      ├── coordinator   tells its address through a pipe, hears through another which worker process ended
      ├── worker-0 ...  each one in a process group of its own, so that Ctrl-C reaches launch alone

Nothing outlives launch: a thread of each child waits for the end of a pipe whose other end launch holds, and on Linux the
kernel kills the workers besides (not the coordinator, which says first why it ends). Memory is copied by the fork, so
arguments need no encoding.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import math
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import NamedTuple, NoReturn

from pipecomp.config import RunConfig
from pipecomp.errors import ConfigError, PipecompError, WorkerFailed
from pipecomp.folders import check_store_folder

_APPS = ("coordinator.process", "workers.service")
COORDINATOR = "coordinator"
_REHEARSED_COLUMNS = 64
LEAVE_S = 2.0
"""How long workers get to leave after the coordinator has ended; one that hangs must not keep the others' end waiting."""
WRITE_S = 3600.0
"""The same after a run that ended well and whose messages are kept: what is in memory has to be written. A signal ends it."""
ALONE_S = 4.0
"""How long a coordinator may take to end after its last worker has; it hangs, or somebody stopped it, if it takes longer."""
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


class _Child(NamedTuple):
    name: str
    process_id: int


class LaunchFiles(NamedTuple):
    """Files of a run, each left out where it is None."""

    summary: str | None = None
    log: str | None = None
    trace: str | None = None
    plan: str | None = None  # read, to be told beside the outcome; the others are written


def launch_run(
    config: RunConfig,
    files: LaunchFiles = LaunchFiles(),  # noqa: B008 - a frozen value
    *,
    quiet: bool = False,
    store_folder: str | None = None,
    source: str = "the run file",
) -> int:
    """Run everything to its end and return the exit code. `source`: what errors call the run file."""
    if store_folder is not None and not config.messages.is_on_disk:
        raise ConfigError(
            f"--store-folder {store_folder} needs messages.store = 'disk' or 'tiered'; with {config.messages.store!r} nothing "
            "is kept in a folder"
        )
    check_store_folder(store_folder)
    from pipecomp.runtime.rehearsal import check_plugins

    check_plugins(config, source)  # a typing mistake need not wait for transformers
    preload(config)
    return Launch(config, files, quiet=quiet, store_folder=store_folder).run()


def preload(config: RunConfig) -> None:
    """Import once what every child needs; forked children share its memory."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's BLAS would start its threads here, before the forks
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from pipecomp.runtime.preloading import import_all, modules_of

    import_all(*_APPS, *modules_of(config.model))
    from pipecomp.runtime.rehearsal import rehearse_codecs

    rehearse_codecs(config, _REHEARSED_COLUMNS)  # kernels are compiled, or loaded, once for all; no thread is started


class Launch:
    """One coordinator and its workers."""

    def __init__(self, config: RunConfig, files: LaunchFiles, *, quiet: bool, store_folder: str | None) -> None:
        self._config = config
        self._files = files
        self._quiet = quiet
        self._store_folder = store_folder
        self._num_workers = config.cluster.num_stages * config.cluster.num_replicas
        self._coordinator: _Child | None = None
        self._workers: dict[int, str] = {}
        self._lifeline = os.pipe()  # nobody writes; its end of file is launch's death
        self._announce = os.pipe()
        self._deaths = os.pipe()
        self._wake = os.pipe()
        self._open_ends = {*self._lifeline, *self._announce, *self._deaths, *self._wake}
        self._signals: list[int] = []
        self._num_signals = 0
        self._alone_since = math.inf

    def run(self) -> int:
        """Fork, watch, forward signals, reap. Returns the coordinator's exit code."""
        try:
            with self._signals_caught():
                self._coordinator = _Child(COORDINATOR, self._fork(COORDINATOR, self._run_coordinator))
                self._close(self._announce[1], self._deaths[0])
                return self._watch()
        finally:
            self._end_workers(0.0)
            if self._coordinator is not None:
                _kill(self._coordinator.process_id)
                os.waitpid(self._coordinator.process_id, 0)
            self._close(*self._open_ends)

    # ------------------------------------------------------------ children

    def _run_coordinator(self) -> int:
        from coordinator.process import CoordinatorOptions, LaunchPipes, run_coordinator

        os.close(self._announce[0])
        os.close(self._deaths[1])
        options = CoordinatorOptions(
            config=self._config,
            **self._files._asdict(),
            quiet=self._quiet,
            num_worker_threads=max(1, _num_cores() // self._num_workers),
        )
        return run_coordinator(options, LaunchPipes(announce=self._announce[1], deaths=self._deaths[0]))

    def _run_worker(self, name: str, coordinator: str) -> int:
        from workers.service import WorkerOptions, run_worker

        os.close(self._announce[0])
        os.close(self._deaths[1])
        threads = max(1, _num_cores() // self._num_workers)
        return run_worker(
            WorkerOptions(
                coordinator=coordinator,
                name=name,
                bind="127.0.0.1:0",
                num_threads=threads,
                store_folder=self._store_folder,
                is_launched=True,
            )
        )

    def _fork(self, name: str, body: Callable[[], int]) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        process_id = os.fork()
        if process_id == 0:
            self._become_child(name, parent, body)
        with contextlib.suppress(OSError):  # the child does it too; whoever is first
            os.setpgid(process_id, process_id)
        return process_id

    def _become_child(self, name: str, parent: int, body: Callable[[], int]) -> NoReturn:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)
            for end in (self._lifeline[1], *self._wake):
                os.close(end)
            _set_process_name(name)
            _die_with(parent, self._lifeline[0], name)
            code = body()
        except PipecompError as error:
            sys.stderr.write(f"error: {error}\n")
        except BaseException:  # noqa: BLE001 - the last frame of a process
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    # ------------------------------------------------------------ watching

    def _watch(self) -> int:
        assert self._coordinator is not None
        announced = bytearray()
        sources = [self._wake[0], self._announce[0]]
        while True:
            ready, _, _ = select.select(sources, [], [], 0.5)
            if self._wake[0] in ready:
                os.read(self._wake[0], 4096)
            if self._announce[0] in ready:
                chunk = os.read(self._announce[0], 4096)
                announced += chunk
                if b"\n" in announced:
                    self._start_workers(json.loads(announced)["address"])
                if b"\n" in announced or not chunk:
                    sources.remove(self._announce[0])
            self._forward_signals()
            status = self._reap()
            if status is not None:
                return self._conclude(status)
            if time.monotonic() - self._alone_since > ALONE_S:
                raise WorkerFailed(
                    f"all workers have ended and the coordinator has not {ALONE_S:g} s later: it hangs or was stopped; "
                    "it was ended, nothing more was saved"
                )

    def _start_workers(self, address: str) -> None:
        coordinator = address.removeprefix("tcp://")
        for index in range(self._num_workers):
            name = f"worker-{index}"
            self._workers[self._fork(name, functools.partial(self._run_worker, name, coordinator))] = name

    def _reap(self) -> int | None:
        """Tell the coordinator of workers that ended; the coordinator's own wait status once it has."""
        assert self._coordinator is not None
        while True:
            try:
                process_id, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return 1
            if process_id == 0:
                return None
            if process_id == self._coordinator.process_id:
                self._coordinator = None
                return status
            worker = self._workers.pop(process_id, None)
            if worker is not None:
                self._report_death(worker, status)
                self._alone_since = math.inf if self._workers else time.monotonic()

    def _report_death(self, worker: str, status: int) -> None:
        death = {"worker": worker, "description": describe_status(status), "by_signal": os.WIFSIGNALED(status)}
        with contextlib.suppress(OSError):  # the coordinator is gone too
            os.write(self._deaths[1], json.dumps(death).encode() + b"\n")

    def _conclude(self, status: int) -> int:
        if os.WIFSIGNALED(status):
            self._end_workers(0.0)
            if sys.stdout.isatty():
                sys.stdout.write("\x1b[?25h")  # its progress bar had hidden the cursor
            if self._num_signals and os.WTERMSIG(status) in (signal.SIGINT, signal.SIGTERM):
                return 130
            raise WorkerFailed(f"the coordinator was {describe_status(status)}; its workers were ended, nothing was saved")
        code = os.waitstatus_to_exitcode(status)
        self._end_workers(WRITE_S if code == 0 and self._store_folder is not None else LEAVE_S)
        return code

    def _end_workers(self, patience_s: float) -> None:
        """Let workers leave by themselves for a while, then kill; reap all."""
        deadline, num_signals = time.monotonic() + patience_s, len(self._signals)
        while self._workers and time.monotonic() < deadline and len(self._signals) == num_signals:
            self._reap_workers(os.WNOHANG)
            if self._workers and select.select([self._wake[0]], [], [], 0.05)[0]:
                os.read(self._wake[0], 4096)
        for process_id in self._workers:
            _kill(process_id)
        self._reap_workers(0)

    def _reap_workers(self, flags: int) -> None:
        for process_id in list(self._workers):
            with contextlib.suppress(ChildProcessError):
                found, _ = os.waitpid(process_id, flags)
                if found == 0:
                    continue
            del self._workers[process_id]

    # ------------------------------------------------------------ signals

    @contextlib.contextmanager
    def _signals_caught(self) -> Iterator[None]:
        """Signals are noted and wake the loop; afterwards they mean again what they meant."""
        for end in self._wake:
            os.set_blocking(end, False)
        handlers: dict[int, Callable[[int, object], None]] = {
            signal.SIGINT: lambda number, _frame: self._signals.append(number),
            signal.SIGTERM: lambda number, _frame: self._signals.append(number),
            signal.SIGCHLD: lambda _number, _frame: None,
        }
        wake_before = signal.set_wakeup_fd(self._wake[1], warn_on_full_buffer=False)
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wake_before)

    def _forward_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            self._num_signals += 1
            if self._coordinator is None:
                continue
            forwarded = signal.SIGKILL if self._num_signals > 2 else number
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._coordinator.process_id, forwarded)


    def _close(self, *ends: int) -> None:
        for end in ends:
            os.close(end)
        self._open_ends -= {*ends}


def describe_status(status: int) -> str:
    """`killed by signal 9 (SIGKILL)` or `exit code 3`, from a wait status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(ValueError):
            return f"killed by signal {number} ({signal.Signals(number).name})"
        return f"killed by signal {number}"
    return f"exit code {os.waitstatus_to_exitcode(status)}"


def _die_with(parent: int, lifeline: int, name: str) -> None:
    """End this process as soon as launch ends, however that happens."""
    if name != COORDINATOR and sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)

    def watch() -> None:
        with contextlib.suppress(OSError):
            os.read(lifeline, 1)
        if name == COORDINATOR:
            with contextlib.suppress(OSError, ValueError):
                os.write(2, b"error: launch was killed; the run ends here, nothing was saved\n")
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="lifeline").start()


def _set_process_name(name: str) -> None:
    """What `ps` and `top` show, so that a person can tell the processes apart. Linux only, 15 letters."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15])


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _kill(process_id: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process_id, signal.SIGKILL)
