"""The records of a message log as bytes, and what a sequence of them comes to. Knows no files and no threads.

    header, 64 bytes   magic 4 | kind 1 | dtype 1 | 0 2 | sample 8 | step 8 | rows 4 | columns 4 | payload nbytes 8
                       | xxh3-64 of the payload 8 | session 8 | xxh3-64 of the 56 bytes before 8
    payload            as many bytes as the header says, then zeros up to the next multiple of 64

    OPEN       a session begins; first record of every segment. `sample` is the segment's number
    MESSAGE    a row staged in `step`                  DROP     these samples (payload: their ids) go when `step` commits
    COMMIT     `step` counts                           ABORT    it does not
    KEPT       a row that counts at once: it was committed before and is written anew

Integers are little-endian and unsigned. Later in the log wins; step numbers order nothing, since they start again in a new run.
"""

from __future__ import annotations

import enum
import struct
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from pipecomp.buffers.formats import ByteArray
from pipecomp.types import SampleId, TensorSpec

FORMAT_VERSION = 1
HEADER_NBYTES = 64
DTYPE_CODES = {"fp32": 1, "bf16": 2, "int8": 3, "int4": 4}
_ALIGNMENT = 64  # payloads start and end where any dtype and any vector register may
_MAGIC = b"pcRc"
_FIELDS = struct.Struct("<4sBBHQQIIQQQ")
_SUM = struct.Struct("<Q")


class RecordKind(enum.IntEnum):
    OPEN = 1
    MESSAGE = 2
    KEPT = 3
    DROP = 4
    COMMIT = 5
    ABORT = 6


class Record(NamedTuple):
    """A header."""

    kind: int
    dtype_code: int
    sample_id: int
    step: int
    num_rows: int
    num_columns: int
    nbytes: int  # of the payload
    checksum: int  # xxh3-64 of the payload
    session: int

    def encode(self) -> bytes:
        fields = _FIELDS.pack(_MAGIC, self.kind, self.dtype_code, 0, *self[2:])
        return fields + _SUM.pack(xxhash.xxh3_64_intdigest(fields))


def decode(header: bytes | memoryview) -> Record | None:
    """None for anything but 64 bytes that `encode` made."""
    if len(header) != HEADER_NBYTES:
        return None
    fields = bytes(header[: _FIELDS.size])
    if _SUM.unpack_from(header, _FIELDS.size)[0] != xxhash.xxh3_64_intdigest(fields):
        return None
    magic, kind, dtype_code, zero, *rest = _FIELDS.unpack(fields)
    return Record(kind, dtype_code, *rest) if magic == _MAGIC and zero == 0 else None


def marker(kind: RecordKind, session: int, *, sample_id: int = 0, step: int = 0) -> bytes:
    """A record without payload."""
    return Record(kind, 0, sample_id, step, 0, 0, 0, 0, session).encode()


def padding(nbytes: int) -> bytes:
    """The zeros after a payload."""
    return bytes(-nbytes % _ALIGNMENT)


def record_nbytes(payload_nbytes: int) -> int:
    """Bytes of a whole record."""
    return HEADER_NBYTES + payload_nbytes + -payload_nbytes % _ALIGNMENT


class Place(NamedTuple):
    """Where a row's header starts."""

    segment: int
    offset: int


class Row:
    """One message of one sample. `payload` and `place` are set by one thread and may be read by any: each is one reference."""

    __slots__ = ("cancelled", "checksum", "nbytes", "payload", "place", "sample_id", "spec", "version")

    def __init__(
        self, sample_id: SampleId, version: int, checksum: int, spec: TensorSpec, nbytes: int, payload: ByteArray | None
    ) -> None:
        self.sample_id = sample_id
        self.version = version
        self.checksum = checksum
        self.spec = spec
        self.nbytes = nbytes
        self.payload = payload  # until it is written
        self.place: Place | None = None  # once it is written
        self.cancelled = False  # its step was aborted: need not be written

    def header(self, kind: RecordKind, dtype_code: int, session: int) -> bytes:
        spec = self.spec
        return Record(
            kind,
            dtype_code,
            self.sample_id,
            self.version,
            spec.num_rows,
            spec.num_columns,
            self.nbytes,
            self.checksum,
            session,
        ).encode()

    def is_in(self, record: Record, dtype_code: int) -> bool:
        """Whether the header is this row's."""
        return record.kind in (RecordKind.MESSAGE, RecordKind.KEPT) and record[1:8] == (
            dtype_code, self.sample_id, self.version, self.spec.num_rows, self.spec.num_columns, self.nbytes, self.checksum
        )  # fmt: skip


class LogState:
    """What all records so far come to: the committed rows, those of open steps, and the live bytes of each segment."""

    def __init__(self) -> None:
        self.rows: dict[SampleId, Row] = {}
        self.pending: dict[int, dict[SampleId, Row]] = {}
        self.live_nbytes: defaultdict[int, int] = defaultdict(int)
        self.session = 0
        self._dropped: dict[int, list[SampleId]] = {}

    def begin(self, session: int) -> None:
        """A segment begins. Steps of an earlier session can no longer commit."""
        if session != self.session:
            self.session = session
            for step in list(self.pending):
                self.abort(step)
            self._dropped.clear()

    def stage(self, row: Row) -> None:
        step = self.pending.setdefault(row.version, {})
        self._bury(step.get(row.sample_id))
        step[row.sample_id] = row
        self._count(row, 1)

    def keep(self, row: Row) -> None:
        self._bury(self.rows.get(row.sample_id))
        self.rows[row.sample_id] = row
        self._count(row, 1)

    def drop(self, step: int, sample_ids: Iterable[SampleId]) -> None:
        self._dropped.setdefault(step, []).extend(sample_ids)

    def commit(self, step: int) -> None:
        for sample_id in self._dropped.pop(step, ()):
            self._bury(self.rows.pop(sample_id, None))
        for sample_id, row in self.pending.pop(step, {}).items():
            self._bury(self.rows.get(sample_id))
            self.rows[sample_id] = row

    def abort(self, step: int) -> None:
        self._dropped.pop(step, None)
        for row in self.pending.pop(step, {}).values():
            self._bury(row)

    def forget(self, row: Row) -> bool:
        """Give up a committed row; False if it is no longer the sample's."""
        if self.rows.get(row.sample_id) is not row:
            return False
        self._bury(self.rows.pop(row.sample_id))
        return True

    def move(self, row: Row, place: Place) -> None:
        self._count(row, -1)
        row.place = place
        self._count(row, 1)

    def _bury(self, row: Row | None) -> None:
        if row is not None:
            self._count(row, -1)

    def _count(self, row: Row, sign: int) -> None:
        assert row.place is not None
        self.live_nbytes[row.place.segment] += sign * record_nbytes(row.nbytes)


# A snapshot: a header of the same kind of care, then one entry a row. It says what the records up to `end` come to, so that
# opening reads neither payloads nor the headers before it.

_SNAPSHOT = struct.Struct(
    "<4sIQQQQ"
)  # magic, format, session, end's segment and offset, number of entries; then the sum
_SNAPSHOT_MAGIC = b"pcIx"
_ENTRY = struct.Struct("<QQQQQIIII")
_ENTRY_DTYPE = np.dtype("<u8,<u8,<u8,<u8,<u8,<u4,<u4,<u4,<u4")
ENTRY_NBYTES = _ENTRY.size


def encode_snapshot(state: LogState, end: Place) -> bytes:
    pending = [row for rows in state.pending.values() for row in rows.values()]
    entries = [*_entries(state.rows.values(), 0), *_entries(pending, 1)]
    head = _SNAPSHOT.pack(_SNAPSHOT_MAGIC, FORMAT_VERSION, state.session, end.segment, end.offset, len(entries))
    body = b"".join(entries)
    return head + _SUM.pack(xxhash.xxh3_64_intdigest(head + body)) + body


def decode_snapshot(content: bytes) -> tuple[LogState, Place] | None:
    """None for anything but bytes that `encode_snapshot` made."""
    start = _SNAPSHOT.size + _SUM.size
    if len(content) < start:
        return None
    head, body = content[: _SNAPSHOT.size], content[start:]
    if _SUM.unpack_from(content, _SNAPSHOT.size)[0] != xxhash.xxh3_64_intdigest(head + body):
        return None
    magic, version, session, segment, offset, count = _SNAPSHOT.unpack(head)
    if (magic, version, count * ENTRY_NBYTES) != (_SNAPSHOT_MAGIC, FORMAT_VERSION, len(body)):
        return None
    state = LogState()
    state.session = session
    for entry in np.frombuffer(body, _ENTRY_DTYPE).tolist():
        sample_id, step, checksum, nbytes, at, in_segment, num_rows, num_columns, is_pending = entry
        row = Row(SampleId(sample_id), step, checksum, TensorSpec(num_rows, num_columns), nbytes, None)
        row.place = Place(in_segment, at)
        (state.stage if is_pending else state.keep)(row)
    return state, Place(segment, offset)


def _entries(rows: Iterable[Row], is_pending: int) -> list[bytes]:
    pack, entries = _ENTRY.pack, []
    for row in rows:
        assert row.place is not None
        (segment, offset), spec = row.place, row.spec
        shape = spec.num_rows, spec.num_columns
        entries.append(pack(row.sample_id, row.version, row.checksum, row.nbytes, offset, segment, *shape, is_pending))
    return entries


def encode_ids(sample_ids: Sequence[SampleId]) -> ByteArray:
    return np.array(sample_ids, "<u8").view(np.uint8)


def decode_ids(payload: ByteArray) -> list[SampleId]:
    return [SampleId(value) for value in payload.view("<u8").tolist()]
