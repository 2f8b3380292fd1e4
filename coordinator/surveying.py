"""A survey carried out: sockets and time around the pure machine in `survey`. Decides nothing itself."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Sequence

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
from pipecomp.planning.machines import LayerSeconds, Machine
from pipecomp.protocol import messages as m
from pipecomp.runtime.probe import HANDLING_S
from pipecomp.transport.base import Address, Transport


class SurveyFailed(PipecompError):
    """A worker could not measure, or never came."""


def survey_machines(config: RunConfig, run: ReadRun, bind: str, lengths: Sequence[int]) -> tuple[Machine, ...]:
    """Wait for the run's workers at `bind`, let them measure themselves and their links, and send them away; by rank.

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
        return runner.run(_over_zeromq(config, run, address, lengths))


async def _over_zeromq(config: RunConfig, run: ReadRun, bind: Address, lengths: Sequence[int]) -> tuple[Machine, ...]:
    from pipecomp.transport.zeromq import ZeromqTransport

    transport = ZeromqTransport()
    try:
        return await survey(config, run, bind, lengths, transport=transport, say=_say)
    finally:
        await transport.close()


async def survey(
    config: RunConfig,
    run: ReadRun,
    bind: Address,
    lengths: Sequence[int],
    *,
    transport: Transport,
    say: Callable[[str], None],
    on_listening: Callable[[Address], None] = lambda _: None,
) -> tuple[Machine, ...]:
    """See `survey_machines`. `lengths` of the samples of a usual microbatch."""

    def order(joins: Sequence[m.Join], rank: int) -> m.SurveyMachine:
        return m.SurveyMachine(
            config=msgspec.to_builtins(config),
            model_config=dict(run.model.config),
            model_hash=run.model.hash,
            lengths=tuple(lengths),
            num_threads=threads_share(joins, rank),
        )

    events: asyncio.Queue[e.Event] = asyncio.Queue()
    state = SurveyState(config.cluster, terms_of(config, run), __version__, order=order, say=say)
    listener = await transport.listen(bind)
    peers = Peers(listener, events.put_nowait)
    say(
        f"listening at {listener.address.removeprefix('tcp://')}; start {config.cluster.num_stages} workers with: "
        "pipecomp worker --coordinator HOST:PORT"
    )
    on_listening(listener.address)
    tasks = [asyncio.create_task(peers.accept()), asyncio.create_task(_tick(config, events))]
    try:
        finish = await _until_finished(state, peers, events)
    finally:
        await peers.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if finish.exit_code:
        raise SurveyFailed(finish.cause)
    return tuple(machine_of(each) for each in state.results())


async def _until_finished(state: SurveyState, peers: Peers, events: asyncio.Queue[e.Event]) -> e.Finish:
    while True:
        for effect in state.handle(await events.get(), now=time.monotonic()):
            match effect:
                case e.Send(peer, message):
                    peers.send([peer], message)
                case e.Disconnect(peer):
                    peers.disconnect(peer)
                case e.Finish():
                    return effect


async def _tick(config: RunConfig, events: asyncio.Queue[e.Event]) -> None:
    while True:
        events.put_nowait(e.Tick())
        await asyncio.sleep(min(config.cluster.heartbeat_interval_s, 0.5) / 2)


def machine_of(each: Surveyed) -> Machine:
    """As `--figures` has it."""
    layers = {layer.kind: LayerSeconds(layer.forward_s, layer.backward_s, layer.weights_s) for layer in each.found.layers}
    return Machine(
        name=each.join.worker,
        block=layers.get("block"),
        head=layers.get("head"),
        embedding=layers.get("embedding"),
        updates_per_s=each.found.updates_per_s,
        coded_values_per_s=each.found.coded_values_per_s,
        handling_s=HANDLING_S,
        memory=f"{each.join.memory_nbytes}B",
        up=_rate(each.up_nbytes_per_s),
        down=_rate(each.down_nbytes_per_s),
        latency_ms=round(1e3 * each.latency_s, 3),
    )


def _rate(nbytes_per_s: float | None) -> str | None:
    return None if nbytes_per_s is None else f"{max(1.0, 8 * nbytes_per_s / 1e3):.0f}kbit"


def _say(line: str) -> None:
    """Beside the plan, which goes to standard output."""
    with contextlib.suppress(OSError):
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
