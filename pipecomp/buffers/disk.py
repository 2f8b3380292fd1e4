"""The messages of one end of one link, on disk. Knows tensors, steps and threads; of files only that a log has them.

    stage    row in memory --queue--> writer thread --> log             readable from memory until it is written
    commit   the index changes at once; COMMIT queues behind its rows
    get      row in memory | read ahead | being read: waits | reads itself
    prefetch reader thread: log --> row in memory, in the order asked for, within a bound

Each row that moves has memory of its own, from `stage` to the end of its write, or from its read to `get`. No two rows ever share
an array, so what is written back and what is read ahead cannot meet. One thread writes, so the log has the order of the queue.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch

from pipecomp.buffers.ahead import ReadAhead
from pipecomp.buffers.base import MessageBuffer, StoreCounts
from pipecomp.buffers.files import DiskCalls, Identity, StoreFolder
from pipecomp.buffers.formats import ByteArray, MessageFormat, StoredMessage
from pipecomp.buffers.records import DTYPE_CODES, Row, record_nbytes
from pipecomp.buffers.segments import SEGMENT_NBYTES, SegmentLog
from pipecomp.errors import LocalProtocolError, StoreError
from pipecomp.types import SampleId, TensorSpec


def nobody_hears(_seconds: float) -> None:
    """For those who do not ask how long a buffer waits."""


class DiskLimits(NamedTuple):
    """Bytes. `disk_nbytes`: of all files; None for as much as there is."""

    write_behind_nbytes: int = 256 << 20  # staged and not written yet; one row may always be
    read_ahead_nbytes: int = 256 << 20  # read and not asked for yet; one row may always be
    segment_nbytes: int = SEGMENT_NBYTES
    disk_nbytes: int | None = None


class DiskBuffer(MessageBuffer):
    """Committed rows by sample, those of open steps, and two threads."""

    def __init__(
        self,
        message_format: MessageFormat,
        folder: Path,
        identity: Identity,
        *,
        limits: DiskLimits = DiskLimits(),  # noqa: B008 - a frozen value
        direct: bool = False,
        is_kept: bool = True,
        calls: DiskCalls | None = None,
        on_wait: Callable[[float], None] = nobody_hears,
    ) -> None:
        """`direct`: read past the page cache and keep nothing in it, so that what is timed is the disk; silently not so where
        the file system cannot (`is_direct` tells). `is_kept`: False deletes the folder at `close`. `on_wait`: called in the
        thread of a `get` or `stage` that had to wait, with the seconds.

        Raises:
            StoreError: the folder cannot be used; says why and what to do.
        """
        super().__init__(message_format)
        self.is_kept = is_kept
        self._limits = limits
        self._folder = StoreFolder(folder, identity)
        try:
            self.is_direct = direct and self._folder.reads_directly()
            self._log = SegmentLog(
                self._folder,
                DTYPE_CODES[message_format.dtype],
                segment_nbytes=limits.segment_nbytes,
                disk_nbytes=limits.disk_nbytes,
                direct=self.is_direct,
                calls=calls or DiskCalls(),
            )
        except BaseException:
            self._folder.close()
            raise
        self._rows: dict[SampleId, Row] = dict(self._log.state.rows)
        self._staged: dict[int, dict[SampleId, Row | None]] = {}
        self._lock = threading.Lock()
        self._queued = threading.Condition(self._lock)  # the writer waits for work
        self._wanting = threading.Condition(self._lock)  # the reader waits for requests and for room
        self._changed = threading.Condition(self._lock)  # callers wait for either of them
        self._queue: deque[tuple[Callable[[], None], Future[None] | None]] = deque()
        self._unwritten_nbytes = 0
        self._ahead = ReadAhead(limits.read_ahead_nbytes)
        self._reading: Row | None = None
        self._failure: StoreError | None = None
        self._is_failure_told = False
        self._is_closed = False
        self._hits = self._misses = self._disk_reads = 0
        self._lost = self._log.num_lost
        self._wait_s = 0.0
        self._on_wait = on_wait
        self._threads = [
            threading.Thread(target=target, name=f"{name} {folder.name}", daemon=True)
            for target, name in ((self._write_all, "message writer"), (self._read_all, "message reader"))
        ]
        for thread in self._threads:
            thread.start()

    # -------------------------------------------------------------------------------------------------------- callers

    def get_stored(self, sample_id: SampleId) -> StoredMessage | None:
        started, waited = time.perf_counter(), False
        while True:
            with self._lock:
                while (row := self._rows.get(sample_id)) is not None and self._reading is row and row.payload is None:
                    waited = True
                    self._changed.wait()
                payload, is_from_disk = (None, False) if row is None else self._at_hand(row)
                if row is None or payload is not None:
                    self._hits += row is not None
                    self._misses += row is None
                    self._disk_reads += is_from_disk
                    if waited:
                        self._waited(started)
                    return None if row is None or payload is None else _stored(row, payload)
                self._ahead.cancel(sample_id)
            waited = True
            payload = self._read(row)
            with self._lock:
                if payload is None:
                    self._lose(row)
                elif self._rows.get(sample_id) is row:
                    self._hits += 1
                    self._disk_reads += 1
                    self._waited(started)
                    return _stored(row, payload)

    def stage(self, step: int, sample_id: SampleId, values: torch.Tensor) -> None:
        stored = self._pack(step, values)
        nbytes = stored.payload.nbytes
        row = _row(sample_id, stored)
        with self._lock:
            self._check_usable()
            self._check_not_staged(step, sample_id)
            if self._unwritten_nbytes and self._unwritten_nbytes + nbytes > self._limits.write_behind_nbytes:
                self._wait_for_writer(nbytes)
                self._check_not_staged(step, sample_id)
            self._staged.setdefault(step, {})[sample_id] = row
            self._unwritten_nbytes += nbytes
            self._enqueue(partial(self._write, row, self._log.stage))

    def drop(self, step: int, sample_id: SampleId) -> None:
        with self._lock:
            self._staged.setdefault(step, {}).setdefault(sample_id, None)

    def commit(self, step: int) -> None:
        """Raises StoreError where an earlier write failed; the step's messages are then not committed."""
        with self._lock:
            self._check_usable()
            staged = self._staged.pop(step, None)
            if not staged:
                return
            dropped = []
            for sample_id, row in staged.items():
                self._ahead.discard(sample_id)
                if row is not None:
                    self._rows[sample_id] = row
                elif self._rows.pop(sample_id, None) is not None:
                    dropped.append(sample_id)
            self._wanting.notify()  # there may be room to read ahead
            if dropped or any(staged.values()):
                self._enqueue(partial(self._log.commit, step, dropped))

    def abort(self, step: int) -> None:
        with self._lock:
            staged = self._staged.pop(step, {})
            rows = [row for row in staged.values() if row is not None]
            for row in rows:
                row.cancelled = True  # the writer passes over what it has not begun
            if rows:
                self._enqueue(partial(self._log.abort, step))

    def prefetch(self, sample_ids: Sequence[SampleId]) -> None:
        with self._lock:
            self._ahead.ask(sample_ids)
            self._wanting.notify()

    def kept_nbytes(self, spec: TensorSpec) -> int:
        return record_nbytes(self.format.nbytes(spec))

    def committed_nbytes(self) -> dict[SampleId, int]:
        with self._lock:
            rows = sorted(self._rows.values(), key=lambda row: (row.version, row.sample_id))
        return {row.sample_id: record_nbytes(row.nbytes) for row in rows}

    @property
    def nbytes(self) -> int:
        with self._lock:
            return self._unwritten_nbytes + self._ahead.nbytes

    def counts(self) -> StoreCounts:
        with self._lock:
            return StoreCounts(
                hits=self._hits,
                misses=self._misses,
                lost=self._lost,
                disk_reads=self._disk_reads,
                wait_s=self._wait_s,
                memory_nbytes=self._unwritten_nbytes + self._ahead.nbytes,
                disk_nbytes=self._log.nbytes,
            )

    def digest(self) -> dict[SampleId, tuple[int, int]]:
        with self._lock:
            return {sample_id: (row.version, row.checksum) for sample_id, row in self._rows.items()}

    def keep(self, messages: Mapping[SampleId, StoredMessage]) -> None:
        """Write committed messages of elsewhere; they are committed here at once. May wait for the disk."""
        for sample_id, stored in messages.items():
            row = _row(sample_id, stored)
            with self._lock:
                self._check_usable()
                if self._unwritten_nbytes:
                    self._wait_for_writer(row.nbytes)
                self._ahead.discard(sample_id)
                self._rows[sample_id] = row
                self._unwritten_nbytes += row.nbytes
                self._enqueue(partial(self._write, row, self._log.keep))

    def checkpoint(self, folder: Path, others: Mapping[SampleId, StoredMessage] = MappingProxyType({})) -> None:
        """Link all that is committed now into an empty folder, from which it can be opened, and write `others` into it too.
        Waits for the disk.

        Raises:
            StoreError: the folder is not empty or cannot be written.
        """
        self._wait_for(partial(self._checkpoint, folder, others))

    def flush(self) -> None:
        """Wait until all that was staged and committed is written."""
        self._wait_for(lambda: None)

    def close(self) -> None:
        """Write what is not written, end threads, close files.

        Raises:
            StoreError: a write failed and nobody was told yet. All is closed all the same.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._ahead.ask(())
            self._wake_all()
        for thread in self._threads:
            thread.join()
        try:
            if self._failure is not None or not self.is_kept:
                self._log.give_up()
            else:
                self._log.close()
        except OSError as e:
            self._failure = self._explained(e)
        finally:
            self._folder.close()
            if not self.is_kept:
                shutil.rmtree(self._folder.path, ignore_errors=True)
        if self._failure is not None and self.is_kept and not self._is_failure_told:
            raise self._failure

    # ------------------------------------------------------------------------------------------- inside, with the lock

    def _at_hand(self, row: Row) -> tuple[ByteArray | None, bool]:
        """A row's payload if it is in memory, and whether it came from the disk. What was read ahead is handed over once."""
        payload, was_read = self._ahead.take(row)
        self._wanting.notify()
        return (payload, was_read) if row.payload is None else (row.payload, False)

    def _check_usable(self) -> None:
        if self._failure is not None:
            self._is_failure_told = True
            raise self._failure
        if self._is_closed:
            raise StoreError(f"message store {self._folder.path} is closed")

    def _check_not_staged(self, step: int, sample_id: SampleId) -> None:
        if self._staged.get(step, {}).get(sample_id) is not None:
            raise LocalProtocolError(f"sample {sample_id} was already staged in step {step}")

    def _wait_for_writer(self, nbytes: int) -> None:
        started = time.perf_counter()
        try:
            while self._unwritten_nbytes and self._unwritten_nbytes + nbytes > self._limits.write_behind_nbytes:
                self._changed.wait()
                self._check_usable()
        finally:
            self._waited(started)

    def _waited(self, since: float) -> None:
        seconds = time.perf_counter() - since
        self._wait_s += seconds
        self._on_wait(seconds)

    def _enqueue(self, work: Callable[[], None], done: Future[None] | None = None) -> None:
        if self._failure is None:
            self._queue.append((work, done))
            self._queued.notify()

    def _lose(self, row: Row) -> None:
        """A row that is damaged or gone; not so if another took its place meanwhile."""
        if self._rows.get(row.sample_id) is row:
            del self._rows[row.sample_id]
            self._lost += 1
            self._enqueue(partial(self._log.forget, row))

    def _wake_all(self) -> None:
        for condition in (self._queued, self._wanting, self._changed):
            condition.notify_all()

    # --------------------------------------------------------------------------------------------------------- writer

    def _write_all(self) -> None:
        while True:
            with self._lock:
                while not self._queue:
                    if self._is_closed:
                        return
                    self._queued.wait()
                work, done = self._queue.popleft()
            try:
                work()
            except Exception as e:  # noqa: BLE001 - whatever ends the writer must reach those who wait for it
                error = e if isinstance(e, StoreError) else self._explained(e)
                if done is None:
                    self._fail(error)
                    return
                done.set_exception(error)
            else:
                if done is not None:
                    done.set_result(None)

    def _write(self, row: Row, into_log: Callable[[Row], None]) -> None:
        if not row.cancelled:
            into_log(row)
        with self._lock:
            row.payload = None
            self._unwritten_nbytes -= row.nbytes
            self._changed.notify_all()

    def _checkpoint(self, folder: Path, others: Mapping[SampleId, StoredMessage]) -> None:
        """The rows of others are in the log for as long as it takes to link it."""
        rows = [_row(sample_id, stored) for sample_id, stored in others.items()]
        try:
            for row in rows:
                self._log.keep(row)
            self._log.checkpoint(folder)
        finally:
            for row in rows:
                self._log.forget(row)

    def _wait_for(self, work: Callable[[], None]) -> None:
        done: Future[None] = Future()
        with self._lock:
            self._check_usable()
            self._enqueue(work, done)
        done.result()

    def _fail(self, failure: StoreError) -> None:
        """Nothing is written any more: a log with a gap would tell a wrong story."""
        with self._lock:
            self._failure = failure
            waiting = [done for _, done in self._queue if done is not None]
            self._is_failure_told = bool(waiting)
            self._queue.clear()
            self._wake_all()
        for done in waiting:
            done.set_exception(failure)

    def _explained(self, error: BaseException) -> StoreError:
        cause = error.strerror if isinstance(error, OSError) else repr(error)
        failure = StoreError(
            f"message store {self._folder.path}: {cause}; free space on that disk, or choose another folder or a smaller budget, "
            "and start again"
        )
        failure.__cause__ = error
        return failure

    # --------------------------------------------------------------------------------------------------------- reader

    def _read_all(self) -> None:
        while True:
            with self._lock:
                while (row := self._ahead.next(self._rows)) is None:
                    if self._is_closed:
                        return
                    self._wanting.wait()
                self._reading = row
                request = self._ahead.request
            payload = self._read(row)
            with self._lock:
                self._reading = None
                if payload is None:
                    self._lose(row)
                elif self._rows.get(row.sample_id) is row:
                    self._ahead.put(row, payload, was_read=True, request=request)
                self._changed.notify_all()

    # ------------------------------------------------------------------------------------- what a test may break on purpose

    def _pack(self, step: int, values: torch.Tensor) -> StoredMessage:
        return self.format.pack(step, values)

    def _read(self, row: Row) -> ByteArray | None:
        return self._log.read(row)


def _stored(row: Row, payload: ByteArray) -> StoredMessage:
    return StoredMessage(row.version, row.checksum, row.spec, payload)


def _row(sample_id: SampleId, stored: StoredMessage) -> Row:
    return Row(sample_id, stored.version, stored.checksum, stored.spec, stored.payload.nbytes, stored.payload)
