"""An append-only log of messages in a folder. Knows records and files; no tensors and no threads: one thread writes it.

    00000001.segment   |OPEN|MESSAGE a1|MESSAGE b1|COMMIT 1|MESSAGE a2| ...    sealed when full, then never written again
    00000002.segment   |OPEN|COMMIT 2|MESSAGE c3| ...                          the tail; every session begins a new one
    00000007.index     what all records before some point come to

A row is never overwritten: a new version is a new record, and the old one's bytes are dead. Segments in which nothing is alive
are deleted; while more than a third of all bytes is dead, the live rows of the deadest sealed segment are written anew at the
tail and the segment is deleted. A snapshot without it is written before, since its records of commits and drops go with it. A
reader that has the file open reads on; one that comes too late asks the row for its new place.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import numpy as np

from pipecomp.buffers import replay
from pipecomp.buffers.files import BLOCK_NBYTES, DiskCalls, StoreFolder, aligned
from pipecomp.buffers.formats import ByteArray, checksum
from pipecomp.buffers.records import (
    ENTRY_NBYTES,
    HEADER_NBYTES,
    Place,
    Record,
    RecordKind,
    Row,
    decode,
    encode_ids,
    encode_snapshot,
    marker,
    padding,
    record_nbytes,
)
from pipecomp.errors import StoreError
from pipecomp.types import SampleId

SEGMENT_NBYTES = 64 << 20
LARGEST_DEAD_SHARE = 1 / 3
_SNAPSHOT_SHARE = 16  # at most one byte of snapshots to so many of records
_NUM_VICTIMS = 4  # segments compacted before the writer goes on with new rows
_LEAST_GAIN = 1 / 8  # a segment with less dead than this is not worth copying, however full the disk is


class SegmentLog:
    """The log of one folder, open for writing. `state` is what a replay of it would come to now."""

    def __init__(
        self,
        folder: StoreFolder,
        dtype_code: int,
        *,
        segment_nbytes: int,
        disk_nbytes: int | None,
        direct: bool,
        calls: DiskCalls,
    ) -> None:
        """`disk_nbytes`: what all segments may come to. Raises StoreError: the folder cannot be read."""
        self._folder = folder
        self._dtype_code = dtype_code
        self._segment_nbytes = segment_nbytes if disk_nbytes is None else min(segment_nbytes, max(disk_nbytes // 8, 1))
        self._budget_nbytes = disk_nbytes
        self._direct = direct
        self._calls = calls
        self._session = secrets.randbits(63) | 1
        try:
            replayed = replay.replay(folder, dtype_code)
        except OSError as e:
            raise StoreError(f"message store {folder.path}: {e.strerror}; delete the folder or choose another") from e
        self.state = replayed.state
        self.num_lost = replayed.num_lost
        self._segments = replayed.segments
        self.nbytes = sum(replayed.segments.values())  # dead bytes included
        self._number = replayed.last_number
        self._descriptor = -1  # of the tail; none before the first record of a session
        self._snapshot_number = max(folder.numbers("index"), default=0)
        self._nbytes_since_snapshot = int(replayed.was_scanned)

    def stage(self, row: Row) -> None:
        """Write a row's payload; it counts once its step commits."""
        self._write_row(row, RecordKind.MESSAGE)
        self.state.stage(row)

    def keep(self, row: Row) -> None:
        """Write a row that counts at once."""
        self._write_row(row, RecordKind.KEPT)
        self.state.keep(row)

    def commit(self, step: int, dropped: list[SampleId]) -> None:
        parts: list[bytes | memoryview] = []
        if dropped:
            ids = encode_ids(dropped)
            drop = Record(RecordKind.DROP, 0, 0, step, 0, 0, ids.nbytes, checksum(ids), self._session)
            parts = [drop.encode(), ids.data, padding(ids.nbytes)]
        self._append([*parts, marker(RecordKind.COMMIT, self._session, step=step)])
        self.state.drop(step, dropped)
        self.state.commit(step)

    def abort(self, step: int) -> None:
        self._append([marker(RecordKind.ABORT, self._session, step=step)])
        self.state.abort(step)

    def forget(self, row: Row) -> None:
        """A row turned out to be damaged. The next snapshot will not have it."""
        self.state.forget(row)
        self._nbytes_since_snapshot += 1

    def read(self, row: Row) -> ByteArray | None:
        """A row's payload, in memory of its own; None if it is damaged or gone. Any thread may call."""
        while True:
            place = row.place
            assert place is not None
            payload = self._read_at(place, row)
            if payload is not None or row.place == place:
                return payload

    def checkpoint(self, target: Path) -> None:
        """Link all that is committed into another folder, from which it can be opened. Waits for the disk."""
        self._seal()
        self._write_snapshot()
        paths = [*map(self._folder.segment, sorted(self._segments)), self._folder.index(self._snapshot_number)]
        self._folder.copy_to(target, paths)

    def close(self) -> None:
        """Seal the tail and write what opening needs."""
        self._seal()
        if self._nbytes_since_snapshot:
            self._write_snapshot()

    def give_up(self) -> None:
        """Close without writing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    # -------------------------------------------------------------------------------------------------------- writing

    def _write_row(self, row: Row, kind: RecordKind) -> None:
        assert row.payload is not None
        row.place = self._append_row(row, row.payload, kind, may_compact=True)

    def _append_row(self, row: Row, payload: ByteArray, kind: RecordKind, *, may_compact: bool) -> Place:
        header = row.header(kind, self._dtype_code, self._session)
        return self._append([header, payload.data, padding(payload.nbytes)], may_compact=may_compact)

    def _append(self, parts: list[bytes | memoryview], *, may_compact: bool = False) -> Place:
        nbytes = sum(len(part) for part in parts)
        if self._descriptor < 0:
            self._roll()
        elif HEADER_NBYTES < self._segments[self._number] > self._segment_nbytes - nbytes:
            self._roll()  # a row larger than a segment has one for itself
            if may_compact:
                self._tidy()
        if may_compact and self._budget_nbytes is not None:
            self._make_room(nbytes, self._budget_nbytes)
        place = Place(self._number, self._segments[self._number])
        self._calls.write(self._descriptor, parts)
        self._segments[self._number] += nbytes
        self.nbytes += nbytes
        self._nbytes_since_snapshot += nbytes
        return place

    def _roll(self) -> None:
        self._seal()
        number = self._number + 1
        self._descriptor = self._calls.create(self._folder.segment(number))
        self._number = number
        self._segments[number] = 0
        opening = marker(RecordKind.OPEN, self._session, sample_id=number)
        self._calls.write(self._descriptor, [opening])
        self._segments[number] = len(opening)
        self.nbytes += len(opening)
        self.state.begin(self._session)

    def _seal(self) -> None:
        """Nothing is synchronised, but where pages are not to stay in the cache: only clean ones can be dropped."""
        if self._descriptor < 0:
            return
        descriptor, self._descriptor = self._descriptor, -1
        try:
            if self._direct:
                os.fdatasync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)

    def _write_snapshot(self) -> None:
        end = Place(self._number, self._segments.get(self._number, 0))
        content = encode_snapshot(self.state, end)
        older = self._folder.numbers("index")[:-1]
        self._folder.replace(self._folder.index(self._snapshot_number + 1), content)
        self._snapshot_number += 1
        self._nbytes_since_snapshot = 0
        for number in older:  # the last but one stays, should the newest be damaged
            self._folder.index(number).unlink(missing_ok=True)

    # ---------------------------------------------------------------------------------------------------- compaction

    def _tidy(self) -> None:
        """After a segment is full: a snapshot if one is due, and the deadest segments go."""
        is_due = self._nbytes_since_snapshot >= _SNAPSHOT_SHARE * ENTRY_NBYTES * len(self.state.rows)
        if is_due or self._dead_share() > LARGEST_DEAD_SHARE:
            self._reclaim(self._choose(only_while_dead=True, count=_NUM_VICTIMS), needs_snapshot=is_due)

    def _make_room(self, nbytes: int, budget_nbytes: int) -> None:
        """Compact until `nbytes` more and a compaction's own copies fit. Rows of open steps may exceed the budget until they end,
        since nothing else could make room for them. Raises StoreError where committed ones would."""
        reserve = self._segment_nbytes
        while self.nbytes + nbytes + reserve > budget_nbytes:
            victims = self._choose(only_while_dead=False, count=1)
            if not victims:
                break
            self._reclaim(victims, needs_snapshot=True)
        pending = sum(record_nbytes(row.nbytes) for rows in self.state.pending.values() for row in rows.values())
        taken = sum(self.state.live_nbytes.values()) - pending
        if taken > budget_nbytes:
            raise StoreError(
                f"message store {self._folder.path}: {taken} bytes of {budget_nbytes} are taken by messages still needed; "
                "allow it more disk or keep fewer samples"
            )

    def _choose(self, *, only_while_dead: bool, count: int) -> list[int]:
        busy = {row.place.segment for rows in self.state.pending.values() for row in rows.values() if row.place}
        sealed = {
            number: size for number, size in self._segments.items() if number != self._number and number not in busy
        }
        live = self.state.live_nbytes
        total, dead = self.nbytes, self.nbytes - sum(live.values())
        chosen: list[int] = []
        for number in sorted(sealed, key=lambda n: (live[n] / max(sealed[n], 1), n)):
            gain = sealed[number] - live[number]
            is_wanted = dead > LARGEST_DEAD_SHARE * total if only_while_dead else gain >= _LEAST_GAIN * sealed[number]
            if live[number] > 0 and (not is_wanted or len(chosen) >= count or gain <= HEADER_NBYTES):
                break
            chosen.append(number)
            total, dead = total - sealed[number], dead - gain
        return chosen

    def _reclaim(self, victims: list[int], *, needs_snapshot: bool) -> None:
        if not victims and not needs_snapshot:
            return
        chosen = set(victims)
        rows = [row for row in self.state.rows.values() if row.place and row.place.segment in chosen]
        for row in rows:
            payload = self.read(row)
            if payload is None:
                self.state.forget(row)
            else:
                self.state.move(row, self._append_row(row, payload, RecordKind.KEPT, may_compact=False))
        self._write_snapshot()
        for number in victims:
            self._folder.segment(number).unlink(missing_ok=True)
            self.nbytes -= self._segments.pop(number)
            self.state.live_nbytes.pop(number, None)

    def _dead_share(self) -> float:
        total = self.nbytes
        return (total - sum(self.state.live_nbytes.values())) / max(total, 1)

    # -------------------------------------------------------------------------------------------------------- reading

    def _read_at(self, place: Place, row: Row) -> ByteArray | None:
        wanted = HEADER_NBYTES + row.nbytes
        skipped = place.offset % BLOCK_NBYTES if self._direct else 0
        size = -(-(skipped + wanted) // BLOCK_NBYTES) * BLOCK_NBYTES if self._direct else wanted
        whole = aligned(size) if self._direct else np.empty(size, np.uint8)
        try:
            done = self._calls.read(
                self._folder.segment(place.segment), place.offset - skipped, whole, direct=self._direct
            )
        except OSError:  # gone with its segment, or a sector that cannot be read: either way there is no row
            return None
        if done < skipped + wanted:
            return None
        record = decode(whole[skipped : skipped + HEADER_NBYTES].data)
        payload = whole[skipped + HEADER_NBYTES : skipped + wanted]
        if record is None or not row.is_in(record, self._dtype_code) or checksum(payload) != row.checksum:
            return None
        return payload
