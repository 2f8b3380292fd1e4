"""Messages to frames and back, and what is refused on the way."""

from __future__ import annotations

from typing import get_args

import msgpack
import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from pipecomp.errors import LocalProtocolError, RemoteProtocolError
from pipecomp.protocol import wire
from pipecomp.protocol.messages import PROTOCOL_VERSION, Ack, Commit, Message, Prepared, StepPlan, WeightsChunk
from pipecomp.testing.message_examples import examples
from pipecomp.testing.wire_fuzz import fuzz

CHUNK = WeightsChunk(sequence=0, name="w", dtype="F32", shape=(3,), offset=0, total_nbytes=12, buffer_nbytes=(12,))


def frame(
    plain: object, buffers: tuple[bytes, ...] = (), version: int = PROTOCOL_VERSION, magic: bytes = b"pc"
) -> list[bytes]:
    """What a peer could send: the map as given, with a right checksum."""
    body = plain if isinstance(plain, bytes) else msgpack.packb(plain)
    start = magic + bytes([version])
    digest = xxhash.xxh3_64(start + body)
    for buffer in buffers:
        digest.update(buffer)
    return [start + digest.digest() + body, *buffers]


@pytest.mark.parametrize("example", examples(), ids=lambda e: type(e.message).__name__)
def test_a_message_arrives_as_it_was(example):
    frames = wire.encode(*example)
    received = wire.decode(frames)
    # By their bytes: some of the examples hold NaN, which equals nothing.
    assert wire.encode(received.message, received.buffers)[0] == frames[0]
    assert type(received.message) is type(example.message)
    assert received.buffers == example.buffers
    assert received.header_nbytes == len(frames[0]) == wire.header_nbytes(example.message)
    assert received.payload_nbytes == sum(map(len, example.buffers))


def test_there_is_an_example_of_every_message():
    assert {type(example.message) for example in examples()} == set(get_args(Message))


def test_buffers_are_neither_copied_nor_joined():
    buffer = bytearray(12)
    frames = wire.encode(CHUNK, [buffer])
    assert frames[1] is buffer
    assert wire.decode(frames).buffers[0].obj is buffer


def test_the_header_is_laid_out_as_documented():
    header, buffer = wire.encode(CHUNK, [b"0123456789ab"])
    assert header[:3] == b"pc" + bytes([PROTOCOL_VERSION])
    assert header[3:11] == xxhash.xxh3_64_digest(header[:3] + header[11:] + buffer)
    assert msgpack.unpackb(header[11:])["type"] == "WeightsChunk"


@pytest.mark.parametrize("buffers", [(), (b"x" * 11,), (b"x" * 12, b"")])
def test_buffers_that_were_not_promised_are_this_ends_mistake(buffers):
    with pytest.raises(LocalProtocolError, match=r"WeightsChunk promises buffers of \(12,\) bytes"):
        wire.encode(CHUNK, buffers)


@pytest.mark.parametrize("value", ["1.0", 2**64, -1, None, b"x", "\ud800"])
def test_a_field_that_no_peer_would_accept_is_this_ends_mistake(value):
    with pytest.raises(LocalProtocolError, match="Ack cannot be encoded"):
        wire.encode(Ack(sequence=value))


def test_a_whole_number_in_a_field_of_fractions_is_sent_as_a_fraction():
    commit = Commit(epoch=1, step=2, gradient_norm=3, clip_coefficient=1)
    assert wire.decode(wire.encode(commit)).message == commit


def test_every_single_flipped_bit_is_found():
    frames = [bytes(f) for f in wire.encode(CHUNK, [b"0123456789ab"])]
    for at, whole in enumerate(frames):
        for bit in range(8 * len(whole)):
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            with pytest.raises(RemoteProtocolError):
                wire.decode([*frames[:at], damaged, *frames[at + 1 :]])


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "without frames"),
        ([b""], "a first frame of 0 bytes"),
        ([b"pc\x01"], "a first frame of 3 bytes"),
        ([b"GET / HTTP/1.1\r\n\r\n"], "not a pipecomp message"),
        (frame({"type": "Ack", "sequence": 1}, version=0), "protocol version 0; this pipecomp speaks 1 and understands 1 to 2"),
        (frame({"type": "Ack", "sequence": 1}, version=3), "protocol version 3"),
        (frame(b"\x00" * (wire.MAX_HEADER_NBYTES + 1)), "is the limit"),
        (frame(b""), "not MessagePack"),
        (frame(b"\xc1"), "not MessagePack"),
        (frame(b"\xdd\xff\xff\xff\xff"), "not MessagePack"),
        (frame(b"\x91" * 5000), "not MessagePack"),
        (frame(msgpack.packb({"type": "Ack", "sequence": 1}) + b"\x00"), "not MessagePack"),
        (frame([1]), "is a list, not a map"),
        (frame({}), "unknown type None"),
        (frame({"type": "Nonsense"}), "unknown type 'Nonsense'"),
        (frame({"type": ["Ack"]}), "unknown type"),
        (frame({"type": "Ack"}), "missing required field"),
        (frame({"type": "Ack", "sequence": "1"}), "Expected `int`, got `str`"),
        (frame({"type": "Ack", "sequence": True}), "Expected `int`, got `bool`"),
        (frame({"type": "Ack", "sequence": 1.0}), "Expected `int`, got `float`"),
        (frame({"type": "Ack", "sequence": -1}), "only numbers from 0"),
        (frame({"type": "Ack", "sequence": 1, "extra": 1}), "not in canonical form"),
        (frame({"sequence": 1, "type": "Ack"}), "not in canonical form"),
        (frame(b"\x82\xa4type\xa3Ack\xa8sequence\xcc\x01"), "not in canonical form"),
        (frame(b"\x82\xa4type\xa3Ack\xc4\x08sequence\x01"), "not MessagePack"),
        (frame({"type": "Ack", "sequence": [[[1]] * 3]}), "Expected `int`, got `array`"),
        (frame({"type": "Ack", "sequence": 1}, buffers=(b"x",)), "promises 0 buffers of 0 bytes together, but 1 of 1"),
        (frame({"type": "Resend", "sequence": 1, "step": 1, "microbatch": 0, "kind": "sideways", "sample_id": 1, "reason": ""}),
         "Invalid enum value 'sideways'"),
    ],
)  # fmt: skip
def test_what_is_no_message_is_refused_with_the_reason(frames, reason):
    with pytest.raises(RemoteProtocolError, match=reason):
        wire.decode(frames)


def test_nesting_has_a_limit():
    deep: object = 1
    for _ in range(wire.MAX_DEPTH):
        deep = [deep]
    plain = msgspec.to_builtins(next(e.message for e in examples() if type(e.message).__name__ == "Assignment"))
    with pytest.raises(RemoteProtocolError, match="nests deeper than"):
        wire.decode(frame({**plain, "config": {"x": deep}}))


def test_a_claim_of_many_values_reserves_no_room_for_them():
    # 200 nested lists, each said to hold 2**31 values, would take a terabyte if they were believed.
    with pytest.raises(RemoteProtocolError, match="not MessagePack"):
        wire.decode(frame(b"\xdd\x80\x00\x00\x00" * 200))


def test_the_next_version_may_have_fields_that_are_not_known_here():
    frames = frame({"type": "Ack", "extra": {"a": [1]}, "sequence": 7}, version=PROTOCOL_VERSION + 1)
    assert wire.decode(frames).message == Ack(sequence=7)


def test_losses_that_are_not_finite_arrive():
    prepared = Prepared(epoch=1, step=1, loss_sums=(float("nan"), float("inf"), -0.0), layer_norms=())
    got = wire.decode(wire.encode(prepared)).message.loss_sums
    assert [str(value) for value in got] == ["nan", "inf", "-0.0"]


def test_a_plan_of_many_samples_fits():
    refs = tuple((2**64 - 1 - i, 1024) for i in range(50_000))
    plan = msgspec.convert(
        {"type": "StepPlan", "epoch": 1, "step": 1, "learning_rate": 0.1, "num_targets": 1, "microbatches": [refs],
         "has_input_ids": False, "has_labels": False, "buffer_nbytes": []},
        StepPlan,
    )  # fmt: skip
    assert wire.decode(wire.encode(plan)).message == plan


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_no_bytes_at_all_give_anything_but_a_message_or_a_refusal(frames):
    with pytest.raises(RemoteProtocolError):
        wire.decode(frames)


@given(
    st.dictionaries(
        st.text(max_size=8), st.recursive(st.none() | st.floats() | st.integers(0, 2**64 - 1) | st.text(), st.lists)
    )
)
def test_no_map_at_all_gives_anything_but_a_message_or_a_refusal(plain):
    for name in ("Ack", "TensorMessage", "Assignment"):
        with pytest.raises(RemoteProtocolError):
            wire.decode(frame({**plain, "type": name}))


def test_mutated_frames_are_refused_or_are_their_own_messages():
    tally = fuzz(20_000, seed=7)
    print(tally)
    assert tally.refused + tally.accepted + tally.accepted_next_version == 20_000
    assert tally.accepted > 500, "mutations that reach the last check are the point"


@pytest.mark.slow
def test_two_hundred_thousand_mutated_frames_are_refused_or_are_their_own_messages():
    tally = fuzz(200_000, seed=2026)
    print(tally)
    assert tally.refused + tally.accepted + tally.accepted_next_version == 200_000
