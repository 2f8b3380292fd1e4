"""How long a step takes with an exchange of gradients between replicas at its end. Pure; knows steps on paper and rates.

    compute    | last backward of the rank |
    uplink     |== its messages ===========|===|######## gradients ########|
                                     still to be sent    then the exchange

Every rank begins as soon as it has computed its last gradient, in what its up- and downlink leave it. Half of what it sends are
parts for others to add up; the other half are sums, for which it needs the part of the slowest replica:

    replica 0  | computes |### parts ###|   waits   |### sums ###|
    replica 1  | computes ........................  |### parts ###|### sums ###|
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pipecomp.planning.setting import Path, Setting
from pipecomp.planning.step import BoundKind, Load, Step
from pipecomp.planning.work import Exchange
from pipecomp.types import Rank

Peers = Mapping[tuple[int, int], Path]
"""What holds between the machines of one rank besides their own connections, by (sending replica, receiving replica)."""


class Exchanging(NamedTuple):
    """One rank's exchange."""

    exchange: Exchange
    coding_s: tuple[float, ...]
    """Of each replica: what coding takes, one value after the other."""
    peers: Peers


def with_exchange_s(step: Step, setting: Setting, nbytes: Sequence[float]) -> float:
    """Seconds from a step's start until all ranks have exchanged their gradients, if links never idle while there is something
    to send and the exchange delays no message of the pipeline.

    Args:
        step: of one replica, on paper; the others' are the same at the same time.
        setting: its.
        nbytes: that each rank sends to the other replicas, and receives from them.
    """
    ends = _ends(step, setting)
    return max(
        (_end_s(step, setting, rank, end_s, nbytes[rank]) for rank, end_s in enumerate(ends)), default=0.0
    )


def with_exchanges(steps: Sequence[Step], settings: Sequence[Setting], exchanging: Sequence[Exchanging]) -> tuple[Step, ...]:
    """The same steps with the exchange at their end, and what it keeps busy among their loads. They end together, as a step is
    committed everywhere or nowhere.

    As `with_exchange_s`, and besides: no sum is sent before the slowest replica has computed, a word goes there and back, and
    what coding takes beyond sending comes on top.

    Args:
        steps: of each replica, on paper.
        settings: of each replica.
        exchanging: of each rank.
    """
    latest = [max(ends) for ends in zip(*map(_ends, steps, settings), strict=True)]
    outcomes = [_with_exchange(step, settings, replica, latest, exchanging) for replica, step in enumerate(steps)]
    end_s = max(end_s for end_s, _ in outcomes)
    return tuple(
        step._replace(loads=loads, exchange_s=end_s - float(step.timeline.end))
        for step, (_, loads) in zip(steps, outcomes, strict=True)
    )


def _with_exchange(
    step: Step, settings: Sequence[Setting], replica: int, latest: Sequence[float], exchanging: Sequence[Exchanging]
) -> tuple[float, tuple[Load, ...]]:
    """When one replica is done with it, and its loads."""
    setting, end_s, loads = settings[replica], float(step.timeline.end), list(step.loads)
    for rank, own_s in enumerate(_ends(step, setting)):
        exchange, coding_s, peers = exchanging[rank]
        nbytes = exchange.nbytes[replica]
        if not nbytes:
            continue
        alone_s = _sending_s(setting, rank, replica, exchange, peers)
        latency_s = setting.hosts[rank].latency_s
        done_s = max(
            _end_s(step, setting, rank, own_s, nbytes),
            _end_s(step, setting, rank, latest[rank], nbytes / 2),
            own_s + alone_s + latency_s,
            latest[rank] + alone_s / 2 + latency_s,
        )
        around_s = max(
            peers.get((replica, other), Path()).latency_s
            + peers.get((other, replica), Path()).latency_s
            + theirs.hosts[rank].latency_s
            for other, theirs in enumerate(settings)
            if other != replica
        )
        coding = coding_s[replica]
        beyond_s = max(0.0, coding - alone_s) + min(coding, alone_s) / exchange.num_rounds
        end_s = max(end_s, done_s + around_s + beyond_s)
        loads += _loads(step, setting, rank, alone_s, nbytes)
    loads.sort(key=lambda load: -float(f"{load.busy_s:.12g}"))
    return end_s, tuple(loads)


def _sending_s(setting: Setting, rank: int, replica: int, exchange: Exchange, peers: Peers) -> float:
    """Of one replica's part in an exchange, alone on its way; without latencies."""
    host, nbytes = setting.hosts[rank], exchange.nbytes[replica]
    each = nbytes / (len(exchange.nbytes) - 1)
    paths = [each / path.nbytes_per_s for pair, path in peers.items() if replica in pair]
    return max([nbytes / host.uplink_nbytes_per_s, nbytes / host.downlink_nbytes_per_s, *paths])


def _loads(step: Step, setting: Setting, rank: int, alone_s: float, nbytes: float) -> list[Load]:
    """What gradients keep busy: a link is named after what it carries more of."""
    host, ranks = setting.hosts[rank], (Rank(rank),)
    sent = sum(transfer.nbytes for transfer in step.transfers if transfer.sender == rank)
    received = sum(transfer.nbytes for transfer in step.transfers if transfer.receiver == rank)
    loads = [Load(BoundKind.EXCHANGE, ranks, None, alone_s)] if alone_s else []
    for kind, other, rate in (
        (BoundKind.UPLINK, sent, host.uplink_nbytes_per_s),
        (BoundKind.DOWNLINK, received, host.downlink_nbytes_per_s),
    ):
        busy_s = (other + nbytes) / rate
        if busy_s:
            loads.append(Load(BoundKind.EXCHANGE if nbytes >= other else kind, ranks, None, busy_s))
    return loads


def _ends(step: Step, setting: Setting) -> list[float]:
    """When each rank has computed its last gradient."""
    ends = [0.0] * len(setting.hosts)
    for span in step.timeline.spans:
        ends[span.rank] = max(ends[span.rank], float(span.end))
    return ends


def _end_s(step: Step, setting: Setting, rank: int, end_s: float, nbytes: float) -> float:
    host = setting.hosts[rank]
    if not nbytes:
        return end_s
    sent = sum(_left(t.start, t.end, t.nbytes, end_s) for t in step.transfers if t.sender == rank)
    received = sum(_left(t.start, t.end, t.nbytes, end_s) for t in step.transfers if t.receiver == rank)
    up_s, down_s = (sent + nbytes) / host.uplink_nbytes_per_s, (received + nbytes) / host.downlink_nbytes_per_s
    return end_s + max(up_s, down_s) + host.latency_s


def _left(start: float, end: float, nbytes: float, moment: float) -> float:
    """What of a transfer is still to come at a moment."""
    if end <= moment or end <= start:
        return 0.0
    return nbytes * (end - max(start, moment)) / (end - start)
