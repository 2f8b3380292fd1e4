"""What a worker measures for a plan: its machine with the model's layers, and the way to a neighbour. Decides nothing."""

from __future__ import annotations

import os

from pipecomp.config import RunConfig
from pipecomp.errors import PeerLost
from pipecomp.models.base import Model
from pipecomp.protocol import messages as m
from pipecomp.transport.base import Address, Transport

_DIAL_S = 10.0


def survey_machine(order: m.SurveyMachine, config: RunConfig, model: Model, num_threads: int) -> m.MachineSurveyed:
    """Run one layer of each kind. Takes seconds, in the compute thread."""
    from pipecomp.runtime.probe import probe_machine

    probe = probe_machine(config, model, order.lengths, num_threads=num_threads)
    return m.MachineSurveyed(
        layers=tuple(
            m.LayerFigures(kind=kind, forward_s=layer.forward_s, backward_s=layer.backward_s, weights_s=layer.weights_s)
            for kind, layer in probe.layers.items()
        ),
        updates_per_s=probe.updates_per_s,
        coded_values_per_s=probe.coded_values_per_s,
    )


async def survey_link(order: m.SurveyLink, transport: Transport, worker: str) -> m.LinkSurveyed:
    """Measure both directions.

    Raises:
        PeerLost: the neighbour cannot be dialled from here, or went away.
    """
    from pipecomp.runtime.link_speed import measure

    try:
        connection = await transport.dial(Address(order.data_address), timeout_s=_DIAL_S)
    except PeerLost as error:
        raise PeerLost(
            f"{order.worker} cannot be dialled at {order.data_address.removeprefix('tcp://')} ({error}): open that port in its "
            "firewall, or say with --advertise there what to dial"
        ) from error
    try:
        speed = await measure(connection, worker, order.worker, order.duration_s)
    except PeerLost as error:
        raise PeerLost(f"the link to {order.worker} broke while it was measured: {error}") from error
    finally:
        await connection.close()
    return m.LinkSurveyed(
        worker=order.worker,
        sent_nbytes_per_s=speed.sent_nbytes_per_s,
        received_nbytes_per_s=speed.received_nbytes_per_s,
        round_trip_s=speed.round_trip_s,
    )


def describe_survey(order: m.SurveyMachine | m.SurveyLink) -> str:
    """For people."""
    return "measuring this machine" if isinstance(order, m.SurveyMachine) else f"measuring the link to {order.worker}"


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
