"""A survey carried out: sockets, time and reading around the pure machine in `survey`. Decides nothing itself."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from coordinator import events as e
from coordinator.peers import Peers
from coordinator.preparation import ReadRun, terms_of
from coordinator.process import parse_host_port
from coordinator.split import threads_share
from coordinator.survey import Surveyed, SurveyState
from pipecomp import __version__
from pipecomp.config import RunConfig
from pipecomp.errors import PipecompError
from pipecomp.partition import StagePlan
from pipecomp.planning.forecast import Cluster
from pipecomp.planning.machines import LayerSeconds, Machine, Way
from pipecomp.protocol import messages as m
from pipecomp.runtime.compute import ComputeThread
from pipecomp.runtime.probe import HANDLING_S
from pipecomp.transport.base import Address, Transport
from pipecomp.types import Rank


class SurveyFailed(PipecompError):
    """A worker could not measure, or never came."""


def survey_machines(config: RunConfig, read: Callable[[], ReadRun], bind: str) -> tuple[ReadRun, Cluster]:
    """Wait for the run's workers at `bind`, let them measure themselves and their links, and send them away.

    Args:
        config: of the run.
        read: its files; while that takes its time, workers may come.
        bind: HOST:PORT.

    Raises:
        AddressError: `bind` cannot be bound.
        SurveyFailed: names the worker that failed, or says how many came.
    """
    host, port = parse_host_port(bind, "--bind")
    address = Address(f"tcp://{host}:{port}")
    try:
        import uvloop

        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    except ImportError:
        runner = asyncio.Runner()
    with runner:
        return runner.run(_over_zeromq(config, read, address))


async def _over_zeromq(config: RunConfig, read: Callable[[], ReadRun], bind: Address) -> tuple[ReadRun, Cluster]:
    from pipecomp.transport.zeromq import ZeromqTransport

    transport = ZeromqTransport()
    try:
        return await survey(config, read, bind, transport=transport, say=_say)
    finally:
        await transport.close()


async def survey(
    config: RunConfig,
    read: Callable[[], ReadRun],
    bind: Address,
    *,
    transport: Transport,
    say: Callable[[str], None],
    on_listening: Callable[[Address], None] = lambda _: None,
) -> tuple[ReadRun, Cluster]:
    """See `survey_machines`."""
    events: asyncio.Queue[e.Event] = asyncio.Queue()
    listener = await transport.listen(bind)
    peers = Peers(listener, events.put_nowait)
    num_workers = config.cluster.num_stages * config.cluster.num_replicas
    say(
        f"listening at {listener.address.removeprefix('tcp://')}; start {num_workers} workers with: "
        "pipecomp worker --coordinator HOST:PORT"
    )
    on_listening(listener.address)
    tasks = [asyncio.create_task(peers.accept()), asyncio.create_task(_tick(config, events))]
    try:
        run, early = await _read(read, peers, events)
        state = _machine(config, run, say)
        finish = await _until_finished(state, peers, early, events)
    finally:
        await peers.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if finish.exit_code:
        raise SurveyFailed(finish.cause)
    return run, cluster_of(state.results())


def _machine(config: RunConfig, run: ReadRun, say: Callable[[str], None]) -> SurveyState:
    lengths = run.batches.usual_lengths()

    def order(joins: Sequence[m.Join], place: int) -> m.SurveyMachine:
        return m.SurveyMachine(
            config=msgspec.to_builtins(config),
            model_config=dict(run.model.config),
            model_hash=run.model.hash,
            lengths=tuple(lengths),
            num_threads=threads_share(joins, place),
        )

    pairs = pairs_of(run.stage_plan, config.cluster.num_replicas)
    return SurveyState(config.cluster, terms_of(config, run), __version__, pairs=pairs, order=order, say=say)


def pairs_of(split: StagePlan, num_replicas: int = 1) -> list[tuple[int, int]]:
    """Places whose workers exchange tensors in a run, the one that dials first; each pair once. Those within each replica come
    first, then those between replicas of one rank."""
    ways = [*itertools.pairwise(split.ranks)]
    if split.tied == "exchange":
        ways.append((split.ranks[0], split.ranks[-1]))
    within: list[tuple[int, int]] = []
    for one, other in ways:
        if one != other and (one, other) not in within and (other, one) not in within:
            within.append((int(one), int(other)))
    num_ranks = max(split.ranks) + 1
    firsts = range(0, num_ranks * num_replicas, num_ranks)
    pairs = [(first + one, first + other) for first in firsts for one, other in within]
    return pairs + [(a + rank, b + rank) for rank in range(num_ranks) for a, b in itertools.combinations(firsts, 2)]


async def _read(
    read: Callable[[], ReadRun], peers: Peers, events: asyncio.Queue[e.Event]
) -> tuple[ReadRun, list[e.Event]]:
    """The run, and what happened meanwhile: heartbeats are answered, all else is kept for later."""
    early: list[e.Event] = []
    thread = ComputeThread()
    try:
        reading = thread.start(read)
        while not reading.done():
            event = await events.get()  # ticks come all the time
            if isinstance(event, e.MessageReceived) and isinstance(event.message, m.Heartbeat):
                reply = m.HeartbeatReply(sent_at_s=event.message.sent_at_s, answered_at_s=time.monotonic())
                peers.send([event.peer], reply)
            elif not isinstance(event, e.Tick):
                early.append(event)
        return reading.result(), early
    finally:
        thread.close()


async def _until_finished(
    state: SurveyState, peers: Peers, early: Sequence[e.Event], events: asyncio.Queue[e.Event]
) -> e.Finish:
    for event in early:
        if finish := _take(state, peers, event):
            return finish
    try:
        while True:
            if finish := _take(state, peers, await events.get()):
                return finish
    except asyncio.CancelledError:  # Ctrl-C: workers are told before their connections close
        _take(state, peers, e.StopRequested(urgent=True))
        raise


def _take(state: SurveyState, peers: Peers, event: e.Event) -> e.Finish | None:
    finish = None
    for effect in state.handle(event, now=time.monotonic()):
        match effect:
            case e.Send(peer, message):
                peers.send([peer], message)
            case e.Disconnect(peer):
                peers.disconnect(peer)
            case e.Finish():
                finish = effect
    return finish


async def _tick(config: RunConfig, events: asyncio.Queue[e.Event]) -> None:
    while True:
        events.put_nowait(e.Tick())
        await asyncio.sleep(min(config.cluster.heartbeat_interval_s, 0.5) / 2)


# ---------------------------------------------------------------- what was found, as figures


def cluster_of(found: Surveyed) -> Cluster:
    """Machines and the ways between them, as `--figures` has them.

    What a machine sends over its best link is what it can send at all, and its nearest neighbour tells its own latency; the way
    to each neighbour has the rate that was measured, and what latency is left. A link that carries what its sender can send
    tells nothing of what its receiver could take, so that is left out then.

    Raises:
        SurveyFailed: a worker found what cannot be.
    """
    ways = _directed(found)
    machines = tuple(
        _machine_of(found, place, *_best(ways, place)) for place in range(len(found.joins))
    )
    names = [machine.name for machine in machines]
    return Cluster(
        machines,
        ways={
            (Rank(sender), Rank(receiver)): Way(
                sender=names[sender],
                receiver=names[receiver],
                rate=_rate(rate),
                latency_ms=round(max(0.0, 1e3 * latency_s - machines[sender].latency_ms), 3),
            )
            for (sender, receiver), (rate, latency_s) in ways.items()
        },
    )


_LIMITED = 0.8
"""Of what a sender can send at all: a link that carries less is held up elsewhere."""
_Ways = Mapping[tuple[int, int], tuple[float, float]]
"""Bytes a second and seconds one way, by sender and receiver."""


def _directed(found: Surveyed) -> _Ways:
    ways = {}
    for (dialler, other), link in found.links.items():
        figures = (link.sent_nbytes_per_s, link.received_nbytes_per_s, link.round_trip_s)
        if not all(math.isfinite(figure) for figure in figures) or min(figures[:2]) <= 0 or figures[2] < 0:
            raise SurveyFailed(f"{found.joins[dialler].worker} measured a link that cannot be: {link}")
        ways[dialler, other] = (link.sent_nbytes_per_s, link.round_trip_s / 2)
        ways[other, dialler] = (link.received_nbytes_per_s, link.round_trip_s / 2)
    return ways


def _best(ways: _Ways, place: int) -> tuple[float | None, float | None, float]:
    """Up, down and latency of one machine; None without a link."""
    sent = [way for (sender, _), way in ways.items() if sender == place]
    if not sent:
        return None, None, 0.0
    down, best_sender = max((rate, sender) for (sender, receiver), (rate, _) in ways.items() if receiver == place)
    is_limited = down < _LIMITED * _up(ways, best_sender)
    return _up(ways, place), down if is_limited else None, min(latency_s for _, latency_s in sent)


def _up(ways: _Ways, place: int) -> float:
    return max(rate for (sender, _), (rate, _) in ways.items() if sender == place)


def _machine_of(found: Surveyed, place: int, up: float | None, down: float | None, latency_s: float) -> Machine:
    join, figures = found.joins[place], found.machines[place]
    layers = {layer.kind: LayerSeconds(layer.forward_s, layer.backward_s, layer.weights_s) for layer in figures.layers}
    on_this_host = sum(other.host == join.host for other in found.joins)
    machine = Machine(
        name=join.worker,
        block=layers.get("block"),
        head=layers.get("head"),
        embedding=layers.get("embedding"),
        updates_per_s=figures.updates_per_s,
        coded_values_per_s=figures.coded_values_per_s,
        handling_s=HANDLING_S,
        memory=f"{join.memory_nbytes // on_this_host}B",
        up=_rate(up),
        down=_rate(down),
        latency_ms=round(1e3 * latency_s, 3),
    )
    if fault := next(_faults(machine), ""):
        raise SurveyFailed(f"{join.worker} measured what cannot be: {fault}")
    return machine


def _faults(machine: Machine) -> Iterator[str]:
    if machine.block is None:
        yield "no block"
    try:
        msgspec.convert(msgspec.to_builtins(machine), Machine)
    except msgspec.ValidationError as error:
        yield str(error)
    seconds = [layer for layer in (machine.block, machine.head, machine.embedding) if layer is not None]
    if any(layer.weights_s > layer.backward_s for layer in seconds):
        yield "gradients of weights that take longer than the backward pass that they are a part of"


def _rate(nbytes_per_s: float | None) -> str | None:
    return None if nbytes_per_s is None else f"{max(1.0, 8 * nbytes_per_s / 1e3):.0f}kbit"


def _say(line: str) -> None:
    """Beside the plan, which goes to standard output."""
    with contextlib.suppress(OSError):
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
