"""What the files of a message log come to when they are opened: the newest readable snapshot, then the headers after it.
Reads no payload but those of drops. Knows records and files; writes nothing.

A header that is damaged or cut ends its segment: what follows it cannot be told apart. The rest of the log stays good.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipecomp.buffers.files import StoreFolder
from pipecomp.buffers.formats import checksum
from pipecomp.buffers.records import (
    HEADER_NBYTES,
    LogState,
    Place,
    Record,
    RecordKind,
    Row,
    decode,
    decode_ids,
    decode_snapshot,
    record_nbytes,
)
from pipecomp.types import SampleId, TensorSpec


class Replayed(NamedTuple):
    state: LogState  # its committed rows are there to be read; its open steps end when a session begins
    segments: dict[int, int]  # bytes of each
    num_lost: int  # rows that are known to be gone, and stretches that cannot be read
    last_number: int  # highest number that any file has or any row names
    was_scanned: bool  # a snapshot would save the next opening some work


def replay(folder: StoreFolder, dtype_code: int) -> Replayed:
    """Raises OSError where the folder itself cannot be read."""
    segments = {number: folder.segment(number).stat().st_size for number in folder.numbers("segment")}
    state, end, num_lost = _newest_snapshot(folder)
    last_number = max([end.segment, *segments, *(row.place.segment for row in state.rows.values() if row.place)])
    was_scanned = num_lost > 0
    for number in sorted(number for number in segments if number >= end.segment):
        start = end.offset if number == end.segment else 0
        if segments[number] > start:
            num_lost += not _Scan(folder.segment(number), number, segments[number], dtype_code).run(state, start)
            was_scanned = True
    gone = [row for row in state.rows.values() if not _is_there(row, segments)]
    for row in gone:
        state.forget(row)
    return Replayed(state, segments, num_lost + len(gone), last_number, was_scanned or bool(gone))


def _newest_snapshot(folder: StoreFolder) -> tuple[LogState, Place, int]:
    num_damaged = 0
    for number in reversed(folder.numbers("index")):
        try:
            found = decode_snapshot(folder.index(number).read_bytes())
        except OSError:
            found = None
        if found is not None:
            return *found, num_damaged
        num_damaged += 1
    return LogState(), Place(0, 0), num_damaged


def _is_there(row: Row, segments: dict[int, int]) -> bool:
    assert row.place is not None
    return row.place.offset + HEADER_NBYTES + row.nbytes <= segments.get(row.place.segment, 0)


class _Scan:
    """One segment's records in order."""

    def __init__(self, path: Path, number: int, nbytes: int, dtype_code: int) -> None:
        self._path = path
        self._number = number
        self._nbytes = nbytes
        self._dtype_code = dtype_code

    def run(self, state: LogState, offset: int) -> bool:
        """Apply all from `offset`; False where something could not be read."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY)
        except OSError:
            return False
        try:
            while offset < self._nbytes:
                record = decode(os.pread(descriptor, HEADER_NBYTES, offset))
                if record is None or offset + HEADER_NBYTES + record.nbytes > self._nbytes:
                    return False
                payload = (
                    os.pread(descriptor, record.nbytes, offset + HEADER_NBYTES)
                    if record.kind == RecordKind.DROP
                    else b""
                )
                if not self._apply(state, record, offset, payload):
                    return False
                offset += record_nbytes(record.nbytes)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return offset == self._nbytes  # the zeros after the last record may have been cut

    def _apply(self, state: LogState, record: Record, offset: int, payload: bytes) -> bool:
        if record.kind == RecordKind.OPEN:
            if record.sample_id != self._number:  # a segment under another's name
                return False
            state.begin(record.session)
            return True
        if record.session != state.session:
            return False
        match record.kind:
            case RecordKind.MESSAGE | RecordKind.KEPT:
                if record.dtype_code != self._dtype_code:
                    return False
                spec = TensorSpec(record.num_rows, record.num_columns)
                row = Row(SampleId(record.sample_id), record.step, record.checksum, spec, record.nbytes, None)
                row.place = Place(self._number, offset)
                (state.stage if record.kind == RecordKind.MESSAGE else state.keep)(row)
            case RecordKind.DROP:
                ids = np.frombuffer(payload, np.uint8)
                if checksum(ids) != record.checksum:
                    return False
                state.drop(record.step, decode_ids(ids))
            case RecordKind.COMMIT:
                state.commit(record.step)
            case RecordKind.ABORT:
                state.abort(record.step)
            case _:
                return False
        return True
