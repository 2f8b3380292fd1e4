"""The worker's only awaits: sockets, tasks and the effects its state machine asks for. Knows every layer; decides nothing.

    control socket --receive--> events --> state.handle --> effects --> tasks, control socket
    compute thread, codec threads, data links: behind the pipeline of the assignment
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pipecomp import __version__
from pipecomp.errors import (
    AddressError,
    CoordinatorLost,
    PeerLost,
    PipecompError,
    StoreError,
    TransportError,
)
from pipecomp.folders import check_store_folder
from pipecomp.protocol import messages as m
from pipecomp.protocol import spans, wire
from pipecomp.protocol.session import PeerSilent, SendHeartbeat, Session, loading_timeout_s
from pipecomp.runtime.memory import keep_freed_memory, peak_memory_nbytes
from pipecomp.runtime.preloading import import_all
from pipecomp.runtime.stores import StoreHome
from pipecomp.transport.base import Address, Connection, Transport
from workers import events as e
from workers.addresses import check_advertised, source_address, with_scheme
from workers.job import AssignedWork
from workers.state import Phase, WorkerState
from workers.survey import describe_survey, num_cores

logger = logging.getLogger(__name__)

_DIAL_S = 60.0
_DIAL_ONCE_S = 5.0
_TICK_S = 0.1
_LAST_WORDS_S = 1.0
_REPORTS = (m.Committed, m.Aborted, m.Evaluated, m.WeightsSent, m.Failed, m.Goodbye)
"""What the worker says when a piece of work is over; the coordinator then has its spans already."""
_EVERY_INTERFACE = ("0.0.0.0", "[::]", "*")  # noqa: S104 - compared, never bound


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is told by its own user."""

    coordinator: str  # HOST:PORT
    name: str = ""  # default: host name and process id
    bind: str = "0.0.0.0:0"
    advertise: str | None = None  # HOST or HOST:PORT that neighbours dial; default: the address that reaches the coordinator
    model_folder: str | None = None
    config_hash: str = ""  # of the one configuration that it wants to train; empty: any
    num_threads: int = 0
    device: str = "cpu"
    store_folder: str | None = None  # messages are kept here and found again; default: a temporary folder
    message_memory_nbytes: int | None = None  # budgets of this worker; None: as the run file says
    message_disk_nbytes: int | None = None
    is_launched: bool = False  # its coordinator writes to the same terminal


class WorkerService:
    """Runs one worker to its end."""

    def __init__(
        self,
        options: WorkerOptions,
        *,
        control: Transport,
        work: AssignedWork,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """`say` is told, in words, how far the worker is."""
        self.options = options
        self._say = say or (lambda _: None)
        self._dialling: asyncio.Task[Connection] | None = None
        self.state = WorkerState(options.name)
        self._control = control
        self._work = work
        self._clock = clock
        self._sleep = sleep
        self._events: asyncio.Queue[e.Event] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._step_task: asyncio.Task[None] | None = None
        self._connection: Connection | None = None
        self._session: Session | None = None
        self._round_trips: list[m.RoundTrip] = []
        self._is_under_way = False  # all workers are ready
        self._has_told = False  # the coordinator, why this worker failed
        self._finish: e.Finish | None = None

    async def run(self) -> e.Finish:
        """Join, work, leave; how it ended.

        Raises:
            StoreError: a store could not be closed after a run that ended well. After one that failed that is no news.
        """
        try:
            finish = await self._serve()
        except BaseException:
            await self._close()
            raise
        try:
            await self._close()
        except StoreError as error:
            if finish.exit_code == 0:
                raise
            return msgspec.structs.replace(finish, reason=f"{finish.reason}; and at its end: {error}")
        return finish

    async def _serve(self) -> e.Finish:
        self._say(f"{self.options.name}: joining the coordinator at {self.options.coordinator}")
        self._dialling = asyncio.create_task(self._dial())
        await asyncio.wait([self._dialling])
        if self._dialling.cancelled() and self._finish is not None:
            return self._finish
        self._connection = self._dialling.result()
        self._session = Session(interval_s=1.0, timeout_s=30.0, now=self._clock())
        data_address = await self._work.listen()
        await self._send(self._join(data_address))
        self._spawn(self._receive(), "receive")
        self._spawn(self._keep_alive(), "heartbeats")
        while self._finish is None:
            await self._handle(await self._events.get())
        return self._finish

    @property
    def is_told(self) -> bool:
        """Whether the coordinator knows why this worker ended, and says it."""
        return self.state.phase is Phase.STOPPED or self._has_told

    def leave(self, reason: str) -> None:
        """Called by a signal."""
        if self._connection is None and self._dialling is not None and self._dialling.cancel():
            self._finish = e.Finish(exit_code=130, reason=reason)
            return
        self._events.put_nowait(e.LeaveRequested(reason=reason))

    # ------------------------------------------------------------ events

    async def _handle(self, event: e.Event) -> None:
        try:
            effects = self.state.handle(event, now=self._clock())
        except PipecompError as error:
            effects = self.state.handle(e.WorkFailed(activity=self._work.activity.text, reason=str(error)), now=self._clock())
        if isinstance(event, e.MessageReceived):
            self._heed(event.message)
        for effect in effects:
            await self._perform(effect)

    def _heed(self, message: m.Message) -> None:
        """What a message means for the patience with the coordinator: more until its first plan, for which all are ready."""
        welcome = self.state.welcome
        if isinstance(message, m.Welcome):
            patience_s = loading_timeout_s(message.heartbeat_timeout_s)
            self._session = Session(interval_s=message.heartbeat_interval_s, timeout_s=patience_s, now=self._clock())
            self._say(f"{message.worker}: joined; waiting for the other workers")
        elif isinstance(message, m.StepPlan | m.EvaluationPlan) and not self._is_under_way:
            assert self._session is not None and welcome is not None
            self._is_under_way = True
            self._session.be_patient(welcome.heartbeat_timeout_s, self._clock())

    async def _perform(self, effect: e.Effect) -> None:
        work = self._work
        match effect:
            case e.Send(message=message):
                if isinstance(message, _REPORTS):
                    await self._send_spans()
                if isinstance(message, m.Goodbye) and self._round_trips:  # a short run's clocks were not told yet
                    await self._send(self._heartbeat())
                await self._send(message)
            case e.Load(assignment=assignment):
                assert self.state.welcome is not None
                held = ", ".join(
                    f"{s.first_layer}-{s.end_layer - 1}" for s in assignment.stages if s.rank == assignment.rank
                )
                self._say(f"{self.options.name}: loading layers {held}")
                self._start(work.load(assignment, self._weights_address(self.state.welcome)), "load")
                self._watch()
            case e.RunStep(plan=plan, buffers=buffers):
                self._step_task = self._start(work.run_step(plan, buffers), f"step {plan.step}")
            case e.ApplyCommit(commit=commit, learning_rate=learning_rate):
                self._start(work.commit(commit, learning_rate), f"commit {commit.step}")
            case e.ApplyAbort(abort=abort):
                self._start(self._abort(abort), f"abort {abort.step}")
            case e.RunEvaluation(plan=plan, buffers=buffers):
                self._start(work.evaluate(plan, buffers), f"evaluation {plan.evaluation}")
            case e.Survey(order=order):
                self._say(f"{self.options.name}: {describe_survey(order)}")
                self._start(work.survey(order), "survey")
            case e.UploadWeights():
                self._say(f"{self.options.name}: sending the trained layers back")
                self._start(work.upload(), "send weights")
            case e.Finish():
                self._finish = effect
                if effect.exit_code == 0:
                    self._say(f"{self.options.name}: done, {effect.reason}")

    async def _abort(self, abort: m.Abort) -> e.Event:
        if self._step_task is not None:
            self._step_task.cancel()
            await asyncio.gather(self._step_task, return_exceptions=True)
        return await self._work.abort(abort)

    # ------------------------------------------------------------ tasks

    def _start(self, work: Coroutine[Any, Any, e.Event], name: str) -> asyncio.Task[None]:
        """Run one piece of work; its result, or its failure, becomes an event."""
        return self._spawn(self._report(work), name)

    async def _report(self, work: Coroutine[Any, Any, e.Event]) -> None:
        self._events.put_nowait(await work)

    def _watch(self) -> None:
        self._spawn(self._report(self._work.failed()), "links")

    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        self._events.put_nowait(failure_event(error, self._work.activity.text))
        if not isinstance(error, PipecompError):
            logger.error("%s failed", task.get_name(), exc_info=error)

    # ------------------------------------------------------------ the control session

    async def _dial(self) -> Connection:
        """Dial until the coordinator is there; workers may be started before it."""
        address = Address(with_scheme(self.options.coordinator))
        deadline = self._clock() + _DIAL_S
        while True:
            try:
                return await self._control.dial(address, timeout_s=_DIAL_ONCE_S)
            except PeerLost as error:
                if self._clock() >= deadline:
                    raise CoordinatorLost(
                        f"no coordinator answers at {self.options.coordinator} after {_DIAL_S:.0f} s ({error}). Is it running, "
                        "is the address right, and does its firewall let this port through?"
                    ) from error
            await self._sleep(_TICK_S)

    def _join(self, data_address: Address) -> m.Join:
        return m.Join(
            protocol_version=m.PROTOCOL_VERSION,
            version=__version__,
            worker=self.options.name,
            host=socket.gethostname(),
            process_id=os.getpid(),
            data_address=data_address,
            device=self.options.device,
            num_cores=num_cores(),
            memory_nbytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            message_memory_nbytes=self.options.message_memory_nbytes,
            message_disk_nbytes=self.options.message_disk_nbytes,
            keeps_messages=self.options.store_folder is not None,
            config_hash=self.options.config_hash,
            model_hash=self._work.model_hash,
            tokenizer_hash=self._work.tokenizer_hash,
        )

    async def _send(self, message: m.Message, buffers: Sequence[wire.Buffer] = ()) -> None:
        assert self._connection is not None
        try:
            await self._connection.send(wire.encode(message, buffers))
            self._has_told |= isinstance(message, m.Failed)
        except TransportError as error:
            self._events.put_nowait(self._gone(error))

    async def _send_spans(self) -> None:
        noted, num_dropped = self._work.recorder.take()
        for start in range(0, len(noted), spans.MAX_SPANS):
            batch = spans.pack(noted[start : start + spans.MAX_SPANS])
            message = m.Spans(names=batch.names, num_dropped=num_dropped, buffer_nbytes=(len(batch.deflated),))
            await self._send(message, [batch.deflated])
            num_dropped = 0

    async def _receive(self) -> None:
        assert self._connection is not None and self._session is not None
        while True:
            try:
                received = wire.decode(await self._connection.receive())
            except TransportError as error:
                self._events.put_nowait(self._gone(error))
                return
            now = self._clock()
            self._session.heard(now)
            if isinstance(received.message, m.HeartbeatReply):
                reply = received.message
                self._round_trips.append(m.RoundTrip(reply.sent_at_s, reply.answered_at_s, now))
            self._events.put_nowait(e.MessageReceived(message=received.message, buffers=received.buffers))

    async def _keep_alive(self) -> None:
        while True:
            await self._sleep(_TICK_S)
            assert self._session is not None
            for effect in self._session.poll(self._clock()):
                match effect:
                    case SendHeartbeat():
                        await self._send(self._heartbeat())
                        await self._send_spans()
                    case PeerSilent(silence_s=silence_s):
                        self._events.put_nowait(self._gone(f"nothing heard for {silence_s:.1f} s"))

    def _heartbeat(self) -> m.Heartbeat:
        activity = self._work.activity
        round_trips, self._round_trips = tuple(self._round_trips), []
        return m.Heartbeat(
            sent_at_s=self._clock(),
            activity=activity.text,
            step=activity.step,
            memory_nbytes=peak_memory_nbytes(),
            round_trips=round_trips,
        )

    def _gone(self, why: object) -> e.CoordinatorGone:
        doing = self._work.activity.text
        return e.CoordinatorGone(reason=f"lost the coordinator at {self.options.coordinator} ({why}) during {doing}")

    def _weights_address(self, welcome: m.Welcome) -> Address:
        """The coordinator may be bound to every interface; then the host is the one dialled here."""
        scheme, _, rest = welcome.weights_address.partition("://")
        host, colon, port = rest.rpartition(":")
        if host in _EVERY_INTERFACE:
            dialled = self.options.coordinator.rpartition("://")[2].rpartition(":")[0]
            return Address(f"{scheme}://{dialled}{colon}{port}")
        return Address(welcome.weights_address)

    async def _close(self) -> None:
        for task in list(self._tasks):
            task.remove_done_callback(self._ended)
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await self._work.close()
        finally:  # whatever a store says at its end: what was said before has to arrive
            if self._connection is not None:
                await self._connection.close(linger_s=_LAST_WORDS_S)
            await self._control.close()


def failure_event(error: BaseException, activity: str) -> e.Event:
    """What an exception of a piece of work means for the state machine."""
    from workers.job import LinkDown, StepCannotBePrepared

    match error:
        case StepCannotBePrepared():
            return e.StepRefused(step=error.step, stage=error.stage, reason=str(error))
        case LinkDown():
            return e.LinkFailed(link=error.link, peer_worker=error.peer_worker, reason=str(error))
        case PipecompError():
            return e.WorkFailed(activity=activity, reason=str(error))
        case MemoryError():
            return e.WorkFailed(activity=activity, reason="out of memory")
        case _:
            return e.WorkFailed(activity=activity, reason=f"{type(error).__name__}: {error}")


def default_name() -> str:
    """Host name and process id: unique enough among two to thirty machines."""
    return f"{socket.gethostname()}-{os.getpid()}"


def run_worker(options: WorkerOptions) -> int:
    """Run a worker process to its end and return its exit code; one line on stderr says why it ended.

    Raises:
        ConfigError, AddressError, CoordinatorLost: it could not even join.
    """
    keep_freed_memory()
    try:
        import uvloop

        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    except ImportError:
        runner = asyncio.Runner()
    with runner:
        finish = runner.run(_run(options))
    if finish.exit_code and finish.reason:
        sys.stderr.write(f"{options.name}: {finish.reason}\n")
    return finish.exit_code


def _print(line: str) -> None:
    with contextlib.suppress(OSError):  # whoever read it has left
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


async def _run(options: WorkerOptions) -> e.Finish:
    from pipecomp.transport.zeromq import ZeromqTransport

    host, _, port = options.bind.rpartition(":")
    if not host or not port.isdigit():
        raise AddressError(f"--bind {options.bind}: write HOST:PORT, for example 0.0.0.0:7701 (port 0 takes a free one)")
    source = source_address(options.coordinator)
    if options.advertise is not None:
        check_advertised(options.advertise)
    check_store_folder(options.store_folder)
    work = AssignedWork(
        name=options.name,
        data_address=Address(f"tcp://{options.bind}"),
        advertise=options.advertise or source,
        model_folder=options.model_folder,
        num_threads=options.num_threads,
        home=StoreHome(
            None if options.store_folder is None else Path(options.store_folder),
            options.message_memory_nbytes,
            options.message_disk_nbytes,
        ),
    )
    say = None if options.is_launched else _print
    service = WorkerService(options, control=ZeromqTransport(), work=work, say=say)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, service.leave, f"{options.name} was stopped by {number.name}")
    import_all()  # from here on nothing holds the loop for long, and heartbeats are on time
    finish = await service.run()
    if options.is_launched and service.is_told:  # the coordinator says it on the same terminal
        return msgspec.structs.replace(finish, reason="")
    return finish
