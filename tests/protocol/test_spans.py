"""Spans as bytes: what goes in comes out, and what nobody packs is refused."""

from __future__ import annotations

import struct
import zlib

import pytest

from pipecomp.errors import RemoteProtocolError
from pipecomp.protocol import spans as s
from pipecomp.types import Kind

SPANS = (
    s.Span(s.Doing.FORWARD, "compute", s.Subject(Kind.FORWARD, "", 3, 1, 2), 10, 25),
    s.Span(s.Doing.SEND, "0/0-1 out", s.Subject(Kind.TIED, "0/tied", 2**64 - 1, 2**16 - 1, 2**40, 2**50), 2**63, 2**64 - 1),
    s.Span(s.Doing.VOTE, "compute", s.Subject(step=3), 25, 25),
)


def test_what_is_packed_comes_out_again():
    batch = s.pack(SPANS)
    assert batch.num_spans == 3
    assert s.received(batch.names, batch.deflated) == batch
    assert tuple(batch.spans()) == SPANS


@pytest.mark.parametrize("doing", s.Doing)
@pytest.mark.parametrize("kind", Kind)
def test_every_doing_and_kind_crosses(doing: s.Doing, kind: Kind):
    span = s.Span(doing, "lane", s.Subject(kind), 0, 1)
    assert list(s.pack([span]).spans()) == [span]


def test_a_record_is_48_bytes():
    assert len(zlib.decompress(s.pack(SPANS).deflated)) == 3 * s.SPAN_NBYTES == 3 * 48


def test_nothing_is_a_batch_of_its_own():
    assert list(s.received((), s.pack([]).deflated).spans()) == []


def record(doing: int = 0, kind: int = 0, lane: int = 0, link: int = 0, start: int = 1, end: int = 2) -> bytes:
    return struct.pack("<BBHHHQQQQQ", doing, kind, lane, link, 0, 0, 0, 0, start, end)


@pytest.mark.parametrize(
    "records",
    [
        record()[:-1],
        record(doing=len(s.Doing)),
        record(doing=255),
        record(kind=len(Kind)),
        record(lane=1),
        record(link=1),
        record() + record(start=3, end=2),
    ],
)
def test_what_is_no_span_is_refused(records: bytes):
    with pytest.raises(RemoteProtocolError, match="sent"):
        s.received(("only",), zlib.compress(records))


def test_as_many_spans_as_a_message_holds_cross_and_one_more_is_refused():
    assert s.received(("n",), zlib.compress(record() * s.MAX_SPANS)).num_spans == s.MAX_SPANS
    with pytest.raises(RemoteProtocolError, match="more than 1024 spans"):
        s.received(("n",), zlib.compress(record() * (s.MAX_SPANS + 1)))


def test_a_buffer_that_would_fill_the_memory_is_not_inflated():
    with pytest.raises(RemoteProtocolError, match="more than 1024 spans"):
        s.received(("n",), zlib.compress(bytes(100 << 20)))


@pytest.mark.parametrize("deflated", [b"", b"12345", zlib.compress(record())[:-1], zlib.compress(record()) + b"more"])
def test_what_is_no_stream_is_refused(deflated: bytes):
    with pytest.raises(RemoteProtocolError, match="sent spans"):
        s.received(("n",), deflated)


def test_too_many_names_are_refused():
    with pytest.raises(RemoteProtocolError, match="2049 names"):
        s.received(("n",) * 2049, s.pack([]).deflated)
