"""Damaged and hostile frames by the hundred thousand, and what decoding makes of them. Knows `wire` and chance; no network.

What must hold for any frames at all: `decode` raises RemoteProtocolError, or gives a message that encodes to the same bytes.
A frame of the next protocol version may hold unknown fields, so there the message, encoded, must be one that decodes to itself.

    damage   bits flipped, cut, inserted, two messages spliced, buffers dropped, added, swapped, the version changed
    forgery  values of the map replaced, moved, removed, added; written in another way than ours
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import msgpack
import xxhash

from pipecomp.errors import RemoteProtocolError
from pipecomp.protocol import wire
from pipecomp.protocol.messages import PROTOCOL_VERSION
from pipecomp.testing.message_examples import examples

Frames = list[bytes]
_VERSION_AT = len(wire.MAGIC)
_BODY_AT = wire.PREFIX_NBYTES
_ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 0.0, -0.0, 1.5, float("nan"), float("inf"),
    "", "x", "forward", "ä" * 40, "x" * 70_000, b"", b"bytes", [], [1], [[]], {}, {"": None}, {"type": "Ack"},
    msgpack.ExtType(5, b"x"), msgpack.Timestamp(0),
)  # fmt: skip


class Tally(NamedTuple):
    """What became of the frames."""

    refused: int
    accepted: int  # of our own version: encode to their own bytes
    accepted_next_version: int
    reasons: Counter[str]  # the first words of each refusal, so that it shows how deep the frames came

    def __str__(self) -> str:
        lines = [
            f"{self.refused} refused, {self.accepted} accepted, {self.accepted_next_version} of the next version accepted"
        ]
        lines += [f"{count:8} {reason}" for reason, count in self.reasons.most_common(25)]
        return "\n".join(lines)


def fuzz(count: int, seed: int) -> Tally:
    """Decode `count` mutated frames.

    Raises:
        AssertionError: a message was accepted that does not encode to its own bytes.
        Exception: anything but RemoteProtocolError that `decode` let through.
    """
    chance = random.Random(seed)
    originals = [[bytes(f) for f in wire.encode(*example)] for example in examples()]
    refused, accepted, accepted_next = 0, 0, 0
    reasons: Counter[str] = Counter()
    for _ in range(count):
        frames = _mutate(chance, chance.choice(originals), chance.choice(originals))
        try:
            received = wire.decode(frames)
        except RemoteProtocolError as e:
            refused += 1
            reasons[_kind_of_reason(str(e))] += 1
            continue
        again = [bytes(f) for f in wire.encode(received.message, received.buffers)]
        if frames[0][_VERSION_AT] == PROTOCOL_VERSION:
            assert again == frames, f"accepted {frames!r}, which encodes to {again!r}"
            accepted += 1
        else:
            twice = wire.decode(again)
            assert [bytes(f) for f in wire.encode(twice.message, twice.buffers)] == again
            accepted_next += 1
    return Tally(refused, accepted, accepted_next, reasons)


def _kind_of_reason(text: str) -> str:
    """The first words, without the numbers and names that differ from frame to frame."""
    text = re.sub(r"\b[A-Z][A-Za-z]+\b(?=( is not in| promises|:))", "MESSAGE", text)
    return " ".join(re.sub(r"-?\d+", "N", text).split()[:4])


def _mutate(chance: random.Random, original: Frames, other: Frames) -> Frames:
    frames = list(original)
    num_mutations = chance.choice((1, 1, 1, 2, 3))
    while num_mutations > 0 or frames == original:
        frames = chance.choice(_MUTATIONS)(chance, frames, other)
        num_mutations -= 1
    # Mostly made right again: a wrong checksum stops a frame at the door, and what lies behind it would go untried.
    return _with_right_checksum(frames) if chance.random() < 0.9 else frames


def _with_right_checksum(frames: Frames) -> Frames:
    if not frames or len(frames[0]) < _BODY_AT:
        return frames
    head = frames[0]
    digest = xxhash.xxh3_64(head[: _VERSION_AT + 1] + head[_BODY_AT:])
    for buffer in frames[1:]:
        digest.update(buffer)
    return [head[: _VERSION_AT + 1] + digest.digest() + head[_BODY_AT:], *frames[1:]]


def _flip(chance: random.Random, frames: Frames, _other: Frames) -> Frames:
    return _edit(chance, frames, lambda f: _flipped(chance, f))


def _flipped(chance: random.Random, frame: bytes) -> bytes:
    if not frame:
        return frame
    at, mask = chance.randrange(len(frame)), 1 << chance.randrange(8)
    return frame[:at] + bytes([frame[at] ^ mask]) + frame[at + 1 :]


def _cut(chance: random.Random, frames: Frames, _other: Frames) -> Frames:
    return _edit(chance, frames, lambda f: f[: chance.randrange(len(f) + 1)])


def _insert(chance: random.Random, frames: Frames, _other: Frames) -> Frames:
    def inserted(frame: bytes) -> bytes:
        at = chance.randrange(len(frame) + 1)
        return frame[:at] + chance.randbytes(chance.randrange(1, 9)) + frame[at:]

    return _edit(chance, frames, inserted)


def _splice(chance: random.Random, frames: Frames, other: Frames) -> Frames:
    if not frames:
        return other
    at, other_at = chance.randrange(len(frames[0]) + 1), chance.randrange(len(other[0]) + 1)
    return [frames[0][:at] + other[0][other_at:], *chance.choice((frames, other))[1:]]


def _change_buffers(chance: random.Random, frames: Frames, _other: Frames) -> Frames:
    header, buffers = frames[:1], frames[1:]
    if buffers and chance.random() < 0.3:
        buffers.pop(chance.randrange(len(buffers)))
    elif chance.random() < 0.5:
        buffers.insert(chance.randrange(len(buffers) + 1), chance.randbytes(chance.randrange(40)))
    else:
        chance.shuffle(buffers)
    return header + buffers


def _change_version(chance: random.Random, frames: Frames, _other: Frames) -> Frames:
    if not frames or len(frames[0]) <= _VERSION_AT:
        return frames
    version = chance.choice((PROTOCOL_VERSION + 1, PROTOCOL_VERSION + 1, 0, PROTOCOL_VERSION + 2, 255))
    return [frames[0][:_VERSION_AT] + bytes([version]) + frames[0][_VERSION_AT + 1 :], *frames[1:]]


def _forge(chance: random.Random, frames: Frames, _other: Frames) -> Frames:
    """Change the map as a value, and write it again."""
    try:
        plain = msgpack.unpackb(frames[0][_BODY_AT:], strict_map_key=False)
        for _ in range(chance.choice((1, 1, 2))):
            plain = _forged(chance, plain)
        body = msgpack.packb(plain, use_single_float=chance.random() < 0.1, use_bin_type=chance.random() < 0.9)
    except (ValueError, TypeError, IndexError, OverflowError):
        return frames
    return [frames[0][:_BODY_AT] + body, *frames[1:]]


def _forged(chance: random.Random, value: Any) -> Any:  # noqa: ANN401 - any plain value
    """Descend to some place in the value, and change what is there."""
    if isinstance(value, dict) and value and chance.random() < 0.85:
        key = chance.choice(list(value))
        return {k: _forged(chance, v) if k == key else v for k, v in value.items()}
    if isinstance(value, list) and value and chance.random() < 0.8:
        at = chance.randrange(len(value))
        return [*value[:at], _forged(chance, value[at]), *value[at + 1 :]]
    return _replaced(chance, value)


def _replaced(chance: random.Random, value: Any) -> Any:  # noqa: ANN401
    choice = chance.random()
    if isinstance(value, dict):
        items = [*value.items(), (chance.choice(("extra", 5, b"k", "config")), chance.choice(_ODD_VALUES))]
        chance.shuffle(items)
        return dict(items[: chance.randrange(len(items) + 1)] if choice < 0.3 else items)
    if isinstance(value, list):
        return value + value[:1] if choice < 0.4 else value[1:]
    if type(value) is int and choice < 0.5:
        return value + chance.choice((1, -1, 256))
    if choice < 0.05:
        for _ in range(chance.choice((5, 30, 600))):
            value = [value]
        return value
    return chance.choice(_ODD_VALUES)


def _edit(chance: random.Random, frames: Frames, edit: Callable[[bytes], bytes]) -> Frames:
    """Mostly of the header."""
    if not frames:
        return frames
    at = 0 if chance.random() < 0.7 else chance.randrange(len(frames))
    return [*frames[:at], edit(frames[at]), *frames[at + 1 :]]


_MUTATIONS = (_flip, _cut, _insert, _splice, _change_buffers, _change_version, *[_forge] * 8)
