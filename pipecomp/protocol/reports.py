"""What workers measure and report with each step: traffic, errors of links, stores. Knows ids and sizes; parts of messages."""

from __future__ import annotations

import msgspec

from pipecomp.types import Kind


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker has sent since the start, of one kind, over one link."""

    link: str
    kind: Kind
    values: int  # real values only; padding is never counted
    payload_nbytes: int
    header_nbytes: int
    messages: int


class LinkMeter(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over one microbatch that was encoded for one link and kind; the sender measures them (fp64)."""

    link: str
    kind: Kind
    squared_error: float  # |a - m_out|^2, of one microbatch a step; 0 in the others
    squared_values: float  # |a|^2 of the same microbatch
    squared_delta: float  # |a - m_in|^2 over samples that had a message
    squared_delta_values: float  # |a|^2 over those samples
    first_visits: int  # samples without a message
    fallbacks: int  # samples whose message was of no use, and that were sent as on a first visit
    samples: int


class StoreMeter(msgspec.Struct, frozen=True, kw_only=True):
    """Messages at one end of one link: what happened since the start, and what is held now."""

    link: str
    end: str  # "sender" | "receiver"
    hits: int  # lookups that found a message
    misses: int
    lost: int  # messages given up because their bytes were damaged or gone
    healed: int  # messages that the other end sent whole (receiver) or was sent (sender)
    disk_reads: int
    wait_s: float  # time that encoding and decoding waited for a disk
    memory_nbytes: int
    disk_nbytes: int


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of itself after a step."""

    compute_s: float
    peak_memory_nbytes: int
    message_nbytes: int  # in memory
    traffic: tuple[Traffic, ...]
    meters: tuple[LinkMeter, ...]
    stores: tuple[StoreMeter, ...] = ()
    parameters_hash: str = ""  # of the worker's trainable parameters after the step, where replicas are compared: xxh3-64
    second_moment: float = 0.0  # sum of Adam's, bias-corrected, while a warm-up of `quantized_adam` waits for it to be steady
