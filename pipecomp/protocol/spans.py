"""What a worker did from when to when, and as bytes. Knows indices, names and times of the worker's own clock; reads no clock.

A span is one record of 48 bytes, little-endian. `lane` and `link` are positions in the message's `names`, since the same few
names come again and again. The records of a `Spans` message are its one buffer, deflated (zlib), which leaves a third of them:

    0        1       2       4       6        8       16      24       32         40        48
    +--------+-------+-------+-------+--------+-------+-------+--------+----------+---------+
    | doing  | kind  | lane  | link  | stage  | step  | part  | nbytes | start_ns | end_ns  |
    +--------+-------+-------+-------+--------+-------+-------+--------+----------+---------+

Spans of one lane do not overlap, or one lies within the other.
"""

from __future__ import annotations

import enum
import struct
import types
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from pipecomp.errors import RemoteProtocolError
from pipecomp.types import Kind

_RECORD = struct.Struct("<BBHHHQQQQQ")
SPAN_NBYTES = _RECORD.size
MAX_SPANS = 1024
"""In one message; bounds what a buffer may inflate to."""
MAX_NAMES = 2 * MAX_SPANS
MAX_STAGE = 2**16 - 1


class Doing(enum.Enum):
    """What a span is. The order is that of the codes on the wire: new ones come last."""

    STEP = "step"  # from the plan's arrival until the step is committed here; all else of the step lies within
    ABORTED = "aborted step"
    FORWARD = "forward"
    BACKWARD = "backward"
    EVALUATE = "evaluate"
    NORMS = "gradient norms"
    OPTIMIZER = "optimizer"
    WAIT = "wait for input"  # of the action that `kind`, `stage` and `part` name, over `link`
    WAIT_ENCODED = "wait for encoding"  # of the step's last values here
    TIED = "exchange of the tied gradient"
    VOTE = "wait for commit"
    IDLE = "idle"  # between a step and the next, or an evaluation
    ENCODE = "encode"
    DECODE = "decode"
    STORE = "wait for the store"  # within an encode or a decode
    CREDIT = "wait for credit"
    SEND = "send"
    RECEIVE = "receive"  # reading what has arrived; its end is when the message is here
    SEND_REPAIR = "send repair"  # a sample's message is asked for again, or sent again
    RECEIVE_REPAIR = "receive repair"
    WEIGHTS = "gradients of weights"  # that a backward has left for later
    REPLICAS = "exchange of gradients between replicas"  # what is left of it once the gradients are there


_DOINGS = tuple(Doing)
_KINDS = tuple(Kind)
_DOING_CODES: Mapping[Doing, int] = types.MappingProxyType({doing: code for code, doing in enumerate(_DOINGS)})
_KIND_CODES: Mapping[Kind, int] = types.MappingProxyType({kind: code for code, kind in enumerate(_KINDS)})


class Subject(NamedTuple):
    """What a span is about. Messages of one link, kind, step and part are one and the same at both ends."""

    kind: Kind = Kind.CONTROL  # of the values; control where there are none
    link: str = ""
    step: int = 0  # for evaluation the number of the evaluation
    stage: int = 0  # of an action, and of what it waits for; of a message the one that it is for
    part: int = 0  # microbatch; of a gradient the offset of the piece
    nbytes: int = 0  # on the wire, header included


class Span(NamedTuple):
    """One thing that a worker did, or waited for."""

    doing: Doing
    lane: str
    about: Subject
    start_ns: int
    end_ns: int


class SpanBatch(NamedTuple):
    """Some spans as they cross: a table of names, and deflated records."""

    names: tuple[str, ...]
    deflated: bytes
    num_spans: int

    def spans(self) -> Iterator[Span]:
        """The spans; of a batch that was made by `pack`, or that `received` has checked."""
        names, records = self.names, zlib.decompress(self.deflated)
        for doing, kind, lane, link, stage, step, part, nbytes, start_ns, end_ns in _RECORD.iter_unpack(records):
            about = Subject(_KINDS[kind], names[link], step, stage, part, nbytes)
            yield Span(_DOINGS[doing], names[lane], about, start_ns, end_ns)


def pack(spans: Iterable[Span]) -> SpanBatch:
    """Up to MAX_SPANS spans as a batch."""
    codes: dict[str, int] = {}
    records = bytearray()
    for doing, lane, about, start_ns, end_ns in spans:
        records += _RECORD.pack(
            _DOING_CODES[doing],
            _KIND_CODES[about.kind],
            codes.setdefault(lane, len(codes)),
            codes.setdefault(about.link, len(codes)),
            about.stage,
            about.step,
            about.part,
            about.nbytes,
            start_ns,
            end_ns,
        )
    return SpanBatch(tuple(codes), zlib.compress(records, 1), len(records) // SPAN_NBYTES)


def received(names: tuple[str, ...], deflated: bytes) -> SpanBatch:
    """A batch from elsewhere.

    Raises:
        RemoteProtocolError: it is not one.
    """
    records = _inflated(deflated)
    if len(records) % SPAN_NBYTES:
        raise RemoteProtocolError(f"sent spans of {len(records)} bytes; they are records of {SPAN_NBYTES}")
    if len(names) > MAX_NAMES:
        raise RemoteProtocolError(f"sent spans with {len(names)} names; {MAX_NAMES} are the most")
    for doing, kind, lane, link, _, _, _, _, start_ns, end_ns in _RECORD.iter_unpack(records):
        if doing >= len(_DOINGS) or kind >= len(_KINDS) or max(lane, link) >= len(names) or end_ns < start_ns:
            raise RemoteProtocolError(
                f"sent a span of doing {doing}, kind {kind}, lane {lane} and link {link} from {start_ns} to {end_ns}, with "
                f"{len(names)} names; there is no such span"
            )
    return SpanBatch(names, deflated, len(records) // SPAN_NBYTES)


def _inflated(deflated: bytes) -> bytes:
    inflater = zlib.decompressobj()
    try:
        records = inflater.decompress(deflated, MAX_SPANS * SPAN_NBYTES + 1)
    except zlib.error as e:
        raise RemoteProtocolError(f"sent spans that cannot be inflated: {e}") from e
    if len(records) > MAX_SPANS * SPAN_NBYTES:
        raise RemoteProtocolError(f"sent more than {MAX_SPANS} spans in one message")
    if not inflater.eof or inflater.unused_data:
        raise RemoteProtocolError(f"sent spans in {len(deflated)} bytes that are not one whole stream")
    return records
