"""Messages by which a plan measures machines and links before anything is trained. Knows sizes and times; no sockets or clocks.

Control session, once all workers have joined:          Between two workers, at the data port of the one that is dialled:

    worker                   coordinator                    dialling end                     listening end
                        <-   SurveyMachine                  SpeedProbe               ->
    MachineSurveyed     ->                                  Echo                    <->      Echo
                        <-   SurveyLink                     SpeedChunk               ->
    LinkSurveyed        ->                                                           <-      SpeedTaken
                                                            SpeedTurn                ->      and the other way round:
                                                                                     <-      SpeedChunk
                                                            SpeedTaken               ->
                                                                                     <-      SpeedTold
"""

from __future__ import annotations

from typing import Any

import msgspec

from pipecomp.protocol.tagged import Tagged


class LayerFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One layer of a kind, one microbatch, in seconds."""

    kind: str  # embedding | block | head
    forward_s: float
    backward_s: float
    weights_s: float  # the part of backward_s that gradients of weights take


class SurveyMachine(Tagged, frozen=True, kw_only=True):
    """Build one layer of each kind and measure it."""

    config: dict[str, Any]  # the resolved RunConfig as plain values
    model_config: dict[str, Any]
    model_hash: str
    lengths: tuple[int, ...]  # of the samples of a usual microbatch
    num_threads: int  # torch threads; 0: the worker decides


class MachineSurveyed(Tagged, frozen=True, kw_only=True):
    layers: tuple[LayerFigures, ...]
    updates_per_s: float  # parameters that the optimizer steps a second
    coded_values_per_s: float


class SurveyLink(Tagged, frozen=True, kw_only=True):
    """Dial this worker and measure the way there and back."""

    worker: str
    data_address: str
    duration_s: float  # of sending, each way


class LinkSurveyed(Tagged, frozen=True, kw_only=True):
    worker: str  # at the other end
    sent_nbytes_per_s: float
    received_nbytes_per_s: float
    round_trip_s: float


class SpeedProbe(Tagged, frozen=True, kw_only=True):
    """First message of a connection that measures; no link comes of it. Answered by Refused where another worker listens."""

    worker: str  # that measures
    to: str  # the worker that is meant
    duration_s: float


class Echo(Tagged, frozen=True, kw_only=True):
    """Sent back as it is."""

    number: int


class SpeedChunk(Tagged, frozen=True, kw_only=True):
    """Some bytes. Buffers: one."""

    buffer_nbytes: tuple[int, ...]


class SpeedTaken(Tagged, frozen=True, kw_only=True):
    """One more chunk was taken."""


class SpeedTurn(Tagged, frozen=True, kw_only=True):
    """Now the other end sends."""


class SpeedTold(Tagged, frozen=True, kw_only=True):
    """The end of a turn: how fast it was."""

    nbytes_per_s: float
