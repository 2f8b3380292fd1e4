"""The coordinator as a process: loop, signals, files, and the pipes to `launch`. Knows the service; decides nothing of the run.

    launch  <-- announce: {"address": "tcp://127.0.0.1:41233"}            one JSON line, once
    launch  --> deaths:   {"worker": ..., "description": ..., "by_signal": ...}    one JSON line for each worker that ended
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from coordinator.console import open_console
from coordinator.events import Finish
from coordinator.preparation import PreparedRun, prepare_run
from coordinator.saving import check_folder
from coordinator.service import CoordinatorService, ServiceOptions, Surroundings
from coordinator.steplog import StepLog
from coordinator.summary import format_summary, make_summary
from coordinator.timeline import KEPT_NBYTES
from coordinator.tracefile import write_trace
from pipecomp import __version__
from pipecomp.config import RunConfig, config_hash
from pipecomp.errors import AddressError, ConfigError
from pipecomp.runtime.compute import ComputeThread
from pipecomp.transport.base import Address

_LAST_PORT = 65535
Prediction = dict[str, Any]
"""What a plan says of a run, for its summary."""


class CoordinatorOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a coordinator is told by its own user."""

    config: RunConfig
    bind: str = "127.0.0.1:0"  # HOST:PORT of the control port; weights take the next port, or a free one with port 0
    advertise: str | None = None  # HOST that workers dial for weights, where it is not the one that is bound
    summary: str | None = None
    log: str | None = None
    trace: str | None = None
    plan: str | None = None  # of `pipecomp plan --json`, to be told beside the outcome
    quiet: bool = False
    num_worker_threads: int = 0


class LaunchPipes(NamedTuple):
    """File descriptors shared with `launch`."""

    announce: int
    deaths: int


def run_coordinator(options: CoordinatorOptions, pipes: LaunchPipes | None = None) -> int:
    """Run a coordinator to its end and return its exit code; the cause of a bad end goes to stderr in one line.

    Threads may still be at work when this returns (reading cannot be interrupted), so leave by `os._exit`.

    Raises:
        ConfigError, AddressError: it could not even start.
    """
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    _check_target(options.summary, "--summary")
    _check_target(options.trace, "--trace")
    prediction = read_prediction(options)
    try:
        import uvloop

        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    except ImportError:
        runner = asyncio.Runner()
    try:
        finish = runner.run(_run(options, prediction, pipes))
    finally:
        with contextlib.suppress(RuntimeError):
            runner.close()
    if finish.cause:
        sys.stderr.write(f"error: {finish.cause}\n")
    return finish.exit_code


async def _run(options: CoordinatorOptions, prediction: Prediction | None, pipes: LaunchPipes | None) -> Finish:
    from pipecomp.transport.zeromq import ZeromqTransport

    service_options = _service_options(options)
    transport = ZeromqTransport()
    console = open_console(quiet=options.quiet)
    with _open_log(options) as step_log:
        service = CoordinatorService(
            options.config,
            service_options,
            Surroundings(
                transport=transport,
                clock=time.monotonic,
                sleep=asyncio.sleep,
                prepare=partial(_prepare, cache_folder=cache_folder()),
                work=ComputeThread(),
                disk=ComputeThread(),
                console=console,
                step_log=step_log,
            ),
        )
        _listen_to_signals(service)
        if pipes is not None:
            _listen_to_launch(service, pipes.deaths)
        try:
            finish = await service.run(partial(_announce, pipes, console.say))
        finally:
            await transport.close()
            _tidy_log(options, step_log.path, service)
    if options.trace is not None:
        _write_trace(Path(options.trace), service, console.say)
    summary = make_summary(
        service.ledger,
        service.own_traffic(),
        wall_time_s=service.wall_time_s,
        stopped_early=finish.stopped_early,
        cause=finish.cause,
        prediction=prediction,
    )
    _conclude(options, summary, console.say)
    return finish


def _prepare(config: RunConfig, *, cache_folder: Path | None) -> PreparedRun:
    prepared = prepare_run(config, cache_folder)
    check_folder(prepared)
    return prepared


def _service_options(options: CoordinatorOptions) -> ServiceOptions:
    host, port = parse_host_port(options.bind, "--bind")
    if port == _LAST_PORT:
        raise AddressError(f"--bind {options.bind}: there is no next port for weights; choose one below {_LAST_PORT}")
    return ServiceOptions(
        run=secrets.token_hex(8),
        version=__version__,
        bind=Address(f"tcp://{host}:{port}"),
        weights_bind=Address(f"tcp://{host}:{port + 1 if port else 0}"),
        weights_advertise=options.advertise,
        num_worker_threads=options.num_worker_threads,
        kept_spans_nbytes=0 if options.trace is None else KEPT_NBYTES,
    )


def parse_host_port(text: str, flag: str) -> tuple[str, int]:
    """Raises AddressError that says how to write it."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > _LAST_PORT:
        raise AddressError(f"{flag} {text}: write HOST:PORT, for example 0.0.0.0:7700 (port 0 takes a free one)")
    return host, int(port)


# ---------------------------------------------------------------- signals and launch


def _listen_to_signals(service: CoordinatorService) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, service.request_stop)


def _announce(pipes: LaunchPipes | None, say: Callable[[str], None], address: Address) -> None:
    if pipes is None:
        say(f"listening at {address.removeprefix('tcp://')}; start workers with: pipecomp worker --coordinator HOST:PORT")
        return
    os.write(pipes.announce, json.dumps({"address": address}).encode() + b"\n")
    os.close(pipes.announce)


def _listen_to_launch(service: CoordinatorService, deaths: int) -> None:
    """`launch` writes whole lines shorter than PIPE_BUF, so they arrive whole; they may arrive several at once."""
    loop = asyncio.get_running_loop()
    os.set_blocking(deaths, False)
    pending = bytearray()

    def read() -> None:
        chunk = os.read(deaths, 65536)
        if not chunk:
            loop.remove_reader(deaths)
        pending.extend(chunk)
        while b"\n" in pending:
            line, _, rest = pending.partition(b"\n")
            pending[:] = rest
            death = json.loads(line)
            service.process_died(death["worker"], death["description"], by_signal=death["by_signal"])

    loop.add_reader(deaths, read)


# ---------------------------------------------------------------- files


def _conclude(options: CoordinatorOptions, summary: dict[str, Any], say: Callable[[str], None]) -> None:
    if summary["steps"]:
        say("\n" + format_summary(summary))
    if options.summary is not None:
        try:
            Path(options.summary).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write --summary {options.summary}: {error.strerror or error}") from error


def _write_trace(path: Path, service: CoordinatorService, say: Callable[[str], None]) -> None:
    trace, timeline = service.trace(), service.timeline

    def about() -> dict[str, Any]:
        return {"pipecomp": __version__, "clock_error_ms": trace.clock_errors_ms, "dropped_spans": timeline.num_dropped}

    try:
        write_trace(path, trace.events(timeline.kept), about)
    except OSError as error:
        raise ConfigError(f"cannot write --trace {path}: {error.strerror or error}") from error
    say(f"trace written to {path}; open it at https://ui.perfetto.dev or in chrome://tracing")


def read_prediction(options: CoordinatorOptions) -> Prediction | None:
    """What `--plan FILE` says of this run; None where there is none.

    Raises:
        ConfigError: the file is no plan, or one of another configuration.
    """
    if options.plan is None:
        return None
    again = "make it again with: pipecomp plan RUN.toml --json > FILE, with the same --set as here"
    try:
        tree = json.loads(Path(options.plan).read_text(encoding="utf-8"))
        planned_hash, prediction = tree["config_hash"], dict(tree["prediction"])
    except OSError as error:
        raise ConfigError(f"cannot read --plan {options.plan}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--plan {options.plan} is no plan: {again}") from error
    if planned_hash != config_hash(options.config):
        raise ConfigError(f"--plan {options.plan} was made for another configuration: {again}")
    return prediction


def _open_log(options: CoordinatorOptions) -> StepLog:
    """Without --log it is kept beside the model's folder until it can move into it."""
    if options.log is not None:
        return StepLog(Path(options.log))
    folder = Path(options.config.train.output_dir).expanduser().resolve()
    return StepLog(folder.with_name(f"{folder.name}.steps.jsonl"))


def _tidy_log(options: CoordinatorOptions, path: Path, service: CoordinatorService) -> None:
    """Nobody asked for it: leave it only where steps would be lost with it."""
    if options.log is None and (service.ledger.model_folder or not service.ledger.num_steps):
        path.unlink(missing_ok=True)


def _check_target(path: str | None, flag: str) -> None:
    """Find out before hours of training, not after."""
    if path is None:
        return
    target = Path(path).resolve()
    if target.is_dir():
        raise ConfigError(f"{flag} {path}: this is a folder; name a file in it")
    if not target.parent.is_dir():
        raise ConfigError(f"{flag} {path}: there is no folder {target.parent}")
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise ConfigError(f"{flag} {path}: no right to write there")


def cache_folder() -> Path | None:
    """Where tokenized data is kept between runs; None where there is no home."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    except RuntimeError:
        return None
    return Path(base) / "pipecomp" / "datasets"
