"""Messages to frames and back. Knows bytes, checksums and message types; no sockets, links, steps or tensors.

    frame 0    magic "pc" | protocol version (1 byte) | xxh3-64 (8 bytes, big-endian) | MessagePack map of the message
    frame 1..  raw buffers, in the order and of the lengths of the message's `buffer_nbytes`

The checksum covers all of frame 0 but itself, and every buffer. A frame of our own version is canonical: encoding the decoded
message again gives exactly its bytes. A frame of a neighbouring version may hold fields that are not known here; they are
ignored. `decode` trusts nothing: whatever the bytes, it returns a message or raises RemoteProtocolError.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

import msgpack
import msgspec
import xxhash

from pipecomp.errors import LocalProtocolError, RemoteProtocolError
from pipecomp.protocol.messages import PROTOCOL_VERSION, Message

Buffer = bytes | bytearray | memoryview

MAGIC = b"pc"
PREFIX_NBYTES = len(MAGIC) + 1 + 8
MAX_HEADER_NBYTES = 16 * 2**20
MAX_BUFFERS = 2**16
MAX_DEPTH = 24
"""Of nested lists and maps; a transformers configuration nests the deepest, by four or five."""
VERSIONS = range(max(1, PROTOCOL_VERSION - 1), PROTOCOL_VERSION + 2)
"""Protocol versions understood here: our own and its neighbours."""

_MAX_COUNT = 2**20
_MAX_INT = 2**64 - 1
_TYPES: Mapping[str, type[Message]] = types.MappingProxyType({t.__name__: t for t in get_args(Message)})
_HARMLESS = frozenset({str, bool, float, type(None)})
_OPEN_FIELDS = frozenset({"config", "model_config"})
"""Fields that hold any plain values, negative numbers included. Everywhere else an integer is a count, an index or an id."""


class Received(NamedTuple):
    """A decoded message with its raw buffers, which are views of the frames it came in."""

    message: Message
    buffers: tuple[memoryview, ...]
    header_nbytes: int

    @property
    def payload_nbytes(self) -> int:
        return sum(b.nbytes for b in self.buffers)


def encode(message: Message, buffers: Sequence[Buffer] = ()) -> list[Buffer]:
    """Frames of `message`: its header, then `buffers` themselves, neither copied nor joined.

    Raises:
        LocalProtocolError: the buffers are not those that `buffer_nbytes` promises, or a field holds what no peer accepts.
    """
    views = [memoryview(b) for b in buffers]
    promised = tuple(getattr(message, "buffer_nbytes", ()))
    actual = tuple(v.nbytes for v in views)
    if promised != actual:
        raise LocalProtocolError(f"{type(message).__name__} promises buffers of {promised} bytes but is given {actual}")
    return [_header(PROTOCOL_VERSION, _pack(message), views), *buffers]


def header_nbytes(message: Message) -> int:
    """Length of the first frame of `message`."""
    return PREFIX_NBYTES + len(_pack(message))


def decode(frames: Sequence[Buffer]) -> Received:
    """The message that `frames` hold.

    Raises:
        RemoteProtocolError: they hold none; the text says what is wrong.
    """
    header, buffers = _views(frames)
    version = _check_prefix(header, buffers)
    body = header[PREFIX_NBYTES:]
    plain = _unpack(body)
    message = _convert(plain)
    if version == PROTOCOL_VERSION and _repack(message) != body:
        raise RemoteProtocolError(f"a {type(message).__name__} is not in canonical form")
    promised = tuple(getattr(message, "buffer_nbytes", ()))
    actual = tuple(b.nbytes for b in buffers)
    if promised != actual:
        raise RemoteProtocolError(
            f"a {type(message).__name__} promises {len(promised)} buffers of {sum(promised)} bytes together, "
            f"but {len(actual)} of {sum(actual)} bytes came; lengths promised {_few(promised)}, got {_few(actual)}"
        )
    return Received(message, buffers, header.nbytes)


# ------------------------------------------------------------------------------------------------------------ encoding


def _pack(message: Message) -> bytes:
    """The canonical MessagePack map. The detour through `convert` makes sure that what leaves here is accepted there."""
    try:
        plain = msgspec.to_builtins(message)
        checked = msgspec.convert(plain, type(message))
        packed: bytes = msgpack.packb(msgspec.to_builtins(checked))
        _check_plain(plain)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.ValidationError, RemoteProtocolError) as e:
        raise LocalProtocolError(f"{type(message).__name__} cannot be encoded: {e}") from e
    if len(packed) > MAX_HEADER_NBYTES:
        raise LocalProtocolError(
            f"{type(message).__name__} has a header of {len(packed)} bytes; {MAX_HEADER_NBYTES} is the limit"
        )
    return packed


def _header(version: int, body: bytes, buffers: Sequence[memoryview]) -> bytes:
    start = MAGIC + bytes([version])
    return start + _checksum(start, body, buffers) + body


def _checksum(start: Buffer, body: Buffer, buffers: Sequence[memoryview]) -> bytes:
    digest = xxhash.xxh3_64(start)
    digest.update(body)
    for buffer in buffers:
        digest.update(buffer)
    return digest.digest()


# ------------------------------------------------------------------------------------------------------------ decoding


def _views(frames: Sequence[Buffer]) -> tuple[memoryview, tuple[memoryview, ...]]:
    if not frames:
        raise RemoteProtocolError("a message without frames")
    if len(frames) - 1 > MAX_BUFFERS:
        raise RemoteProtocolError(f"a message of {len(frames)} frames; {1 + MAX_BUFFERS} is the limit")
    header, *buffers = (memoryview(f).cast("B") for f in frames)
    return header, tuple(buffers)


def _check_prefix(header: memoryview, buffers: Sequence[memoryview]) -> int:
    """The protocol version, once magic, version, length and checksum are seen to be right."""
    if header.nbytes < PREFIX_NBYTES:
        raise RemoteProtocolError(f"a first frame of {header.nbytes} bytes; a header has at least {PREFIX_NBYTES}")
    if header[: len(MAGIC)] != MAGIC:
        raise RemoteProtocolError(
            f"a first frame begins with {bytes(header[:4])!r}, not {MAGIC!r}: not a pipecomp message"
        )
    version = header[len(MAGIC)]
    if version not in VERSIONS:
        raise RemoteProtocolError(
            f"a message of protocol version {version}; this pipecomp speaks {PROTOCOL_VERSION} and understands "
            f"{VERSIONS.start} to {VERSIONS.stop - 1}: install the same pipecomp on every machine"
        )
    if header.nbytes - PREFIX_NBYTES > MAX_HEADER_NBYTES:
        raise RemoteProtocolError(f"a header of {header.nbytes} bytes; {MAX_HEADER_NBYTES} is the limit")
    claimed = header[len(MAGIC) + 1 : PREFIX_NBYTES]
    actual = _checksum(header[: len(MAGIC) + 1], header[PREFIX_NBYTES:], buffers)
    if claimed != actual:
        raise RemoteProtocolError(f"a message has checksum {actual.hex()} but says {claimed.hex()}: damaged on the way")
    return version


def _unpack(body: memoryview) -> dict[str, Any]:
    try:
        # Every element takes at least a byte, so that no claim of a length can make the unpacker reserve much more.
        most = min(len(body), _MAX_COUNT)
        plain = msgpack.unpackb(
            body, max_array_len=most, max_map_len=most, max_str_len=len(body), max_bin_len=0, max_ext_len=0
        )
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as e:
        raise RemoteProtocolError(f"a header is not MessagePack: {type(e).__name__}: {e}") from e
    if not isinstance(plain, dict):
        raise RemoteProtocolError(f"a header is a {type(plain).__name__}, not a map")
    _check_plain(plain)
    return plain


def _check_plain(value: object, depth: int = 0, *, negative: bool = False) -> None:
    """Refuse what no message holds: bytes and other MessagePack types, deep nesting, and negative counts."""
    if isinstance(value, str) or value is None or isinstance(value, (bool, float)):
        return
    if isinstance(value, int):
        if value < 0 and not negative:
            raise RemoteProtocolError(f"a header holds {value} where only numbers from 0 to {_MAX_INT} are allowed")
        return
    if depth >= MAX_DEPTH:
        raise RemoteProtocolError(f"a header nests deeper than {MAX_DEPTH}")
    if isinstance(value, (list, tuple)):
        for item in value:
            if type(item) not in _HARMLESS and not (type(item) is int and item >= 0):  # most are
                _check_plain(item, depth + 1, negative=negative)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise RemoteProtocolError(f"a header has the key {key!r}; keys are text")
            if type(item) not in _HARMLESS and not (type(item) is int and item >= 0):
                _check_plain(item, depth + 1, negative=negative or (depth == 0 and key in _OPEN_FIELDS))
    else:
        raise RemoteProtocolError(f"a header holds a {type(value).__name__}")


def _convert(plain: dict[str, Any]) -> Message:
    name = plain.get("type")
    message_type = _TYPES.get(name) if isinstance(name, str) else None
    if message_type is None:
        raise RemoteProtocolError(f"a message of unknown type {name!r:.80}")
    try:
        return msgspec.convert(plain, message_type)
    except (ValueError, TypeError, OverflowError, RecursionError) as e:  # ValidationError is a ValueError
        raise RemoteProtocolError(f"not a {name}: {e}") from e


def _repack(message: Message) -> bytes:
    try:
        packed: bytes = msgpack.packb(msgspec.to_builtins(message))
    except (ValueError, TypeError, OverflowError) as e:  # text with lone surrogates, for one
        raise RemoteProtocolError(f"a {type(message).__name__} cannot be written again: {e}") from e
    return packed


def _few(lengths: tuple[int, ...]) -> str:
    return f"{list(lengths[:8])}{'...' if len(lengths) > 8 else ''}"
