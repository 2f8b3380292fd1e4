"""How long a step takes with an exchange of gradients between replicas at its end. Pure; knows steps on paper and rates.

    compute    | last backward of the rank |
    uplink     |== its messages ===========|===|######## gradients ########|
                                     still to be sent    then the exchange

Every rank begins as soon as it has computed its last gradient, in what its up- and downlink leave it.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipecomp.planning.setting import Setting
from pipecomp.planning.step import Step


def with_exchange_s(step: Step, setting: Setting, nbytes: Sequence[float]) -> float:
    """Seconds from a step's start until all ranks have exchanged their gradients, if links never idle while there is something
    to send and the exchange delays no message of the pipeline.

    Args:
        step: of one replica, on paper; the others' are the same at the same time.
        setting: its.
        nbytes: that each rank sends to the other replicas, and receives from them.
    """
    ends = [0.0] * len(setting.hosts)
    for span in step.timeline.spans:
        ends[span.rank] = max(ends[span.rank], float(span.end))
    return max(
        (_end_s(step, setting, rank, end_s, nbytes[rank]) for rank, end_s in enumerate(ends)), default=0.0
    )


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
