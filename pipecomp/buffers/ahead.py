"""Which rows to read ahead next, and those that were. Knows rows and bytes; no threads, no files: its owner has both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pipecomp.buffers.formats import ByteArray
from pipecomp.buffers.records import Row
from pipecomp.types import SampleId


class _Ahead(NamedTuple):
    row: Row
    payload: ByteArray
    was_read: bool  # from the disk; else it was about to leave memory
    request: int


class ReadAhead:
    """A list of wished samples and a bounded stock of rows. One row may always be in stock, however large."""

    def __init__(self, limit_nbytes: int) -> None:
        self.nbytes = 0
        self.request = 0  # how many there were
        self._limit_nbytes = limit_nbytes
        self._wanted: dict[SampleId, None] = {}  # in order
        self._stock: dict[SampleId, _Ahead] = {}  # oldest first

    def ask(self, sample_ids: Sequence[SampleId]) -> None:
        """Replaces what was asked before and is not read yet."""
        self._wanted = dict.fromkeys(sample_ids)
        self.request += 1

    def cancel(self, sample_id: SampleId) -> None:
        """It need not be read: somebody else does."""
        self._wanted.pop(sample_id, None)

    def next(self, rows: Mapping[SampleId, Row]) -> Row | None:
        """The next row to read; None while there is none, or no room for it. A row still in memory needs no reading."""
        while self._wanted:
            sample_id = next(iter(self._wanted))
            row = rows.get(sample_id)
            if row is not None and sample_id not in self._stock:
                while self._stock and self.nbytes + row.nbytes > self._limit_nbytes:
                    if not self._discard_stale():
                        return None
                if row.payload is None:
                    del self._wanted[sample_id]
                    return row
                self.put(row, row.payload, was_read=False, request=self.request)
            del self._wanted[sample_id]
        return None

    def put(self, row: Row, payload: ByteArray, *, was_read: bool, request: int) -> None:
        self.discard(row.sample_id)
        self._stock[row.sample_id] = _Ahead(row, payload, was_read, request)
        self.nbytes += row.nbytes

    def take(self, row: Row) -> tuple[ByteArray | None, bool]:
        """A row's payload, once, and whether it came from the disk."""
        ahead = self._stock.get(row.sample_id)
        if ahead is None:
            return None, False
        self.discard(row.sample_id)
        return (ahead.payload, ahead.was_read) if ahead.row is row else (None, False)

    def discard(self, sample_id: SampleId) -> None:
        ahead = self._stock.pop(sample_id, None)
        if ahead is not None:
            self.nbytes -= ahead.row.nbytes

    def _discard_stale(self) -> bool:
        """Let go of a row of two requests ago that was never taken; the last request may still be on its way through a step."""
        oldest = next(iter(self._stock.values()))
        if oldest.request > self.request - 2:
            return False
        self.discard(oldest.row.sample_id)
        return True
