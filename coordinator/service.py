"""The coordinator's only awaits: sockets, threads and clocks around the pure machine in `state`. Decides nothing itself.

    control connections ─┐                        ┌─> control connections
    weights links ───────┼─> queue ─> state.handle ┼─> heavy thread (read, tokenize, save)
    ticks, signals ──────┘                        └─> console, step log, ledger

The loop never computes: what may take long runs in `work` (reading, saving) or in the weights desk's own thread (law 9).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec

from coordinator import events as e
from coordinator.batches import Wanted
from coordinator.budgets import describe_budget
from coordinator.console import Console
from coordinator.ledger import Ledger
from coordinator.peers import Peers
from coordinator.preparation import PreparedRun
from coordinator.roster import Identity
from coordinator.saving import ModelSaver
from coordinator.split import describe_split, threads_share
from coordinator.state import CoordinatorState
from coordinator.steplog import StepLog
from coordinator.timeline import Timeline
from coordinator.tracefile import Trace
from coordinator.weights import WeightsDesk, tensor_reader
from pipecomp.config import RunConfig, config_hash, resolved_toml
from pipecomp.errors import LocalProtocolError, PipecompError
from pipecomp.protocol.messages import EvaluationPlan, StepPlan, Traffic
from pipecomp.runtime.compute import ComputeThread
from pipecomp.runtime.link import LinkHub
from pipecomp.transport.base import Address, Transport

logger = logging.getLogger(__name__)

WEIGHTS_LINK_TIMEOUT_S = 600.0
"""How long a worker may take from its assignment to its weights link."""


class ServiceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the service is told besides the run file."""

    run: str
    version: str
    bind: Address
    weights_bind: Address
    weights_advertise: str | None = None  # HOST that workers dial; None: what the listener says
    num_worker_threads: int = 0
    kept_spans_nbytes: int = 0  # of what workers report, for a trace


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """What the service works with and tests replace."""

    transport: Transport
    clock: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]
    prepare: Callable[[RunConfig], PreparedRun]
    work: ComputeThread
    disk: ComputeThread
    console: Console
    step_log: StepLog | None


class CoordinatorService:
    """Runs one coordinator to its end."""

    def __init__(self, config: RunConfig, options: ServiceOptions, surroundings: Surroundings) -> None:
        self._config = config
        self._options = options
        self._around = surroundings
        self.ledger = Ledger()
        self.timeline = Timeline(keep_nbytes=options.kept_spans_nbytes)
        self.address = Address("")
        self._events: asyncio.Queue[e.Event] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._finish: e.Finish | None = None
        self._started_at = surroundings.clock()
        self._num_stop_requests = 0
        self._places: tuple[e.Peer, ...] = ()
        self._workers: tuple[str, ...] = ()
        self._state: CoordinatorState
        self._peers: Peers
        self._hub: LinkHub
        self._desk: WeightsDesk | None = None
        self._prepared: PreparedRun | None = None
        self._saver: ModelSaver | None = None

    async def run(self, on_listening: Callable[[Address], None]) -> e.Finish:
        """Serve one run; `on_listening` is told the address that workers dial.

        Raises:
            AddressError: an address cannot be bound.
        """
        await self._open()
        on_listening(self.address)
        self._around.console.say(f"{resolved_toml(self._config)}\nconfiguration hash {config_hash(self._config)}")
        self._spawn(self._peers.accept(), "accept")
        self._spawn(self._tick(), "tick")
        self._spawn(self._prepare(), "prepare")
        try:
            while self._finish is None:
                self._handle(await self._events.get())
            return self._finish
        finally:
            await self._close()

    def request_stop(self) -> None:
        """Once: after the step, saving the model. Twice: at once."""
        self._num_stop_requests += 1
        self._put(e.StopRequested(urgent=self._num_stop_requests > 1))

    def process_died(self, worker: str, description: str, *, by_signal: bool) -> None:
        """`launch` saw a worker process end."""
        self._put(e.ProcessDied(worker, description, by_signal))

    def own_traffic(self) -> tuple[Traffic, ...]:
        """All control connections in both directions, and what this end sent over the weights links."""
        return (self._peers.traffic(), *(() if self._desk is None else self._desk.traffic()))

    @property
    def wall_time_s(self) -> float:
        return self._around.clock() - self._started_at

    def trace(self) -> Trace:
        """How to draw what is kept of the timeline."""
        stages = () if self._prepared is None else self._prepared.terms.stages
        return Trace(self._workers, stages, self.timeline.clocks, self._started_at)

    # ------------------------------------------------------------ the loop

    async def _open(self) -> None:
        options = self._options
        listener = await self._around.transport.listen(options.bind)
        self.address = listener.address
        self._peers = Peers(listener, self._put)
        self._hub = LinkHub(self._around.transport, worker="coordinator")
        weights_address = await self._hub.listen(options.weights_bind)
        if options.weights_advertise is not None:
            scheme, _, rest = weights_address.partition("://")
            weights_address = Address(f"{scheme}://{options.weights_advertise}:{rest.rpartition(':')[2]}")
        self._hub.configure(options.run, 1, credit_nbytes=self._config.cluster.link_credit_nbytes)
        identity = Identity(options.run, options.version, weights_address)
        self._state = CoordinatorState(self._config, identity)

    def _put(self, event: e.Event) -> None:
        self._events.put_nowait(event)

    def _handle(self, event: e.Event) -> None:
        for effect in self._state.handle(event, now=self._around.clock()):
            self._perform(effect)

    def _perform(self, effect: e.Effect) -> None:
        match effect:
            case e.Send(peer, message):
                self._peers.send([peer], message)
            case e.Disconnect(peer):
                self._peers.disconnect(peer)
            case e.Assign():
                self._assign(effect)
            case e.SendStep(epoch, step, rate):
                batches = self._run.batches
                self._send_plans(
                    lambda r, w: batches.step_plan(epoch=epoch, step=step, learning_rate=rate, wanted=w, replica=r)
                )
            case e.SendEvaluation(epoch, number, part):
                batches = self._run.batches
                self._send_plans(
                    lambda r, w: batches.evaluation_plan(epoch=epoch, evaluation=number, part=part, wanted=w, replica=r)
                )
            case e.StoreStage(peer, worker, num_tensors):
                self._spawn(self._store(peer, worker, num_tensors), f"store {worker}")
            case e.SaveModel():
                self._spawn(self._save(), "save")
            case e.Log(record):
                self._record(record)
            case e.Finish():
                self._finish = effect

    async def _tick(self) -> None:
        """Tell the machine that time passes."""
        interval_s = min(self._config.cluster.heartbeat_interval_s, 0.5) / 2
        while True:
            await self._around.sleep(interval_s)
            self._put(e.Tick())

    async def _close(self) -> None:
        await self._peers.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._desk is not None:
            await self._desk.close()
        else:
            await self._hub.close()
        if self._saver is not None:
            self._saver.discard()
        self.timeline.accounting()()
        self.ledger.times = self.timeline.times()
        self._around.console.close()

    # ------------------------------------------------------------ effects

    @property
    def _run(self) -> PreparedRun:
        if self._prepared is None:
            raise LocalProtocolError("the run is used before it is read")
        return self._prepared

    def _assign(self, effect: e.Assign) -> None:
        run = self._run
        assert self._desk is not None
        self._places, self._workers = effect.peers, tuple(join.worker for join in effect.joins)
        self._around.console.say(describe_split(run, effect.joins))
        if shortage := describe_budget(run, effect.joins):
            self._around.console.say(shortage)
        self._around.console.begin(run.terms.total_steps, self._config.train.logging_steps)
        for place, (peer, join) in enumerate(zip(effect.peers, effect.joins, strict=True)):
            assignment = run.assignment(
                self._options.run,
                effect.epoch,
                place,
                effect.joins,
                self._options.num_worker_threads or threads_share(effect.joins, place),
            )
            self._peers.send([peer], assignment)
            self._desk.attend(join.worker, run.shapes(assignment.rank), timeout_s=WEIGHTS_LINK_TIMEOUT_S)

    def _send_plans(self, make: Callable[[int, Wanted], tuple[StepPlan | EvaluationPlan, list[memoryview]]]) -> None:
        """Make and encode a plan once for all workers of a replica that want the same buffers."""
        groups: dict[tuple[int, Wanted], list[e.Peer]] = {}
        for place, peer in enumerate(self._places):
            replica, rank = self._run.seat(place)
            groups.setdefault((replica, self._run.wanted(rank)), []).append(peer)
        for (replica, wanted), peers in groups.items():
            plan, buffers = make(replica, wanted)
            self._peers.send(peers, plan, buffers)

    def _record(self, record: e.Record) -> None:
        self.ledger.take(record)
        self.timeline.take(record)
        if self.timeline.is_due:
            self._spawn(self._around.work.run(self.timeline.accounting()), "accounts of time")
        self._around.console.show(record, self.ledger)
        if self._around.step_log is not None:
            self._around.step_log.write(record, self.ledger, self.wall_time_s)

    # ------------------------------------------------------------ work beside the loop

    async def _prepare(self) -> None:
        run = await self._around.work.run(self._around.prepare, self._config)
        self._prepared = run
        step_log = self._around.step_log
        self._saver = ModelSaver(run, None if step_log is None else step_log.path)
        reader = run.model.weights
        read = tensor_reader(reader) if reader is not None else _nothing_to_read
        self._desk = WeightsDesk(self._hub, run.entries, read, self._around.disk, self._weights_failed)
        self._put(e.TermsReady(run.terms))

    async def _store(self, peer: e.Peer, worker: str, num_tensors: int) -> None:
        assert self._desk is not None
        assert self._saver is not None
        tensors = await self._desk.collected(worker, num_tensors)
        await self._around.work.run(self._saver.add, tensors)
        self._put(e.StageStored(peer))

    async def _save(self) -> None:
        assert self._saver is not None
        folder = await self._around.work.run(self._saver.finish)
        self._put(e.ModelSaved(folder))

    def _weights_failed(self, worker: str, reason: str) -> None:
        self._put(e.WeightsLinkFailed(worker, reason))

    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, PipecompError):
            self._put(e.WorkFailed(str(error)))
        else:
            logger.error("%s failed", task.get_name(), exc_info=error)
            self._put(e.WorkFailed(f"{task.get_name()}: {type(error).__name__}: {error}"))


def _nothing_to_read(name: str) -> memoryview:
    raise LocalProtocolError(f"the model has random weights; {name} cannot be read")
