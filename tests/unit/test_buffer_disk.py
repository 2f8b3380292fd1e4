"""Messages on disk: what moves between memory and disk, when, and that no two rows ever share an array."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from pipecomp.buffers.disk import DiskBuffer, DiskLimits
from pipecomp.buffers.files import DiskCalls
from pipecomp.buffers.formats import ByteArray, MessageFormat, StoredMessage, is_intact
from pipecomp.buffers.records import HEADER_NBYTES, Row
from pipecomp.buffers.tiered import TieredBuffer
from pipecomp.errors import StoreError
from pipecomp.types import SampleId

FP32 = MessageFormat("fp32")
A, B, C, D = (SampleId(i) for i in range(4))
NBYTES = 24
RECORD = HEADER_NBYTES + 64
PATIENCE_S = 20


def values(step: int, sample: int) -> torch.Tensor:
    return torch.arange(6.0).reshape(2, 3) + 100 * step + sample / 16


def run_steps(buffer: DiskBuffer | TieredBuffer, steps: range, samples: range = range(3)) -> None:
    for step in steps:
        for sample in samples:
            buffer.stage(step, SampleId(sample), values(step, sample))
        buffer.commit(step)


def check(buffer: DiskBuffer | TieredBuffer, sample: int, step: int) -> None:
    stored = buffer.get_stored(SampleId(sample))
    assert stored is not None, f"sample {sample} of step {step} is not there"
    assert is_intact(stored)
    assert stored.version == step
    assert torch.equal(FP32.unpack(stored), values(step, sample))


# ------------------------------------------------------------------------------------- write-back and reading ahead at once


class Score:
    """The order in which three threads pass their points: `s` stage, `w` around a write, `r` around a read."""

    def __init__(self, order: str) -> None:
        self._order = order
        self._position = 0
        self._turned = threading.Condition()

    def play(self, part: str) -> None:
        with self._turned:
            if part in self._order[self._position :]:
                self._turned.wait_for(lambda: self._order[self._position : self._position + 1] in ("", part), PATIENCE_S)
                self._position += 1
                self._turned.notify_all()


class ScoredCalls(DiskCalls):
    score = Score("")

    def write(self, descriptor: int, parts: list[bytes | memoryview]) -> None:
        is_row = len(parts) == 3
        if is_row:
            self.score.play("w")
        super().write(descriptor, parts)
        if is_row:
            self.score.play("w")


class ScoredBuffer(DiskBuffer):
    """Reads and writes in the order of a score. Where the payloads live is DiskBuffer's own."""

    def __init__(self, folder: Path) -> None:
        self.scored = ScoredCalls()
        super().__init__(FP32, folder, {}, calls=self.scored)

    def _read(self, row: Row) -> ByteArray | None:
        self.scored.score.play("r")
        payload = self._load(row)
        self.scored.score.play("r")
        return payload

    def _load(self, row: Row) -> ByteArray | None:
        return super()._read(row)


class SharedStaging(ScoredBuffer):
    """The fault that the buffer must not have: rows on their way to and from the disk share one array."""

    def __init__(self, folder: Path) -> None:
        self._shared = np.zeros(NBYTES, np.uint8)
        super().__init__(folder)

    def _pack(self, step: int, values: torch.Tensor) -> StoredMessage:
        stored = super()._pack(step, values)
        self._shared[:] = stored.payload
        return stored._replace(payload=self._shared)

    def _load(self, row: Row) -> ByteArray | None:
        payload = super()._load(row)
        if payload is not None:
            self._shared[:] = payload
        return self._shared


ORDERS = ["".join(order) for order in dict.fromkeys(itertools.permutations("rrsww")) if order.index("s") < order.index("w")]


def interleave(buffer: ScoredBuffer, order: str) -> None:
    """A is read ahead while B is written back; then both must be what they were."""
    run_steps(buffer, range(1, 2), range(2))
    buffer.flush()
    score = buffer.scored.score = Score(order)
    buffer.prefetch([A])
    score.play("s")
    buffer.stage(2, B, values(2, 1))
    buffer.flush()
    buffer.commit(2)
    buffer.scored.score = Score("")
    buffer.flush()
    check(buffer, A, 1)
    check(buffer, B, 2)


def test_every_order_is_tried() -> None:
    assert len(ORDERS) == 10


@pytest.mark.parametrize("order", ORDERS)
def test_reading_ahead_and_writing_back_never_meet(order: str, tmp_path: Path) -> None:
    buffer = ScoredBuffer(tmp_path / "store")
    try:
        interleave(buffer, order)
        assert buffer.counts().lost == 0
    finally:
        buffer.close()


def test_the_orders_find_a_buffer_with_one_staging_array(tmp_path: Path) -> None:
    failing = []
    for order in ORDERS:
        buffer = SharedStaging(tmp_path / order)
        try:
            interleave(buffer, order)
        except AssertionError:
            failing.append(order)
        finally:
            buffer.close()
    assert set(failing) >= {"rrsww", "srrww", "rsrww", "rswrw"}, failing


def test_rows_that_are_held_at_once_have_memory_of_their_own(tmp_path: Path) -> None:
    buffer = DiskBuffer(FP32, tmp_path / "store", {})
    run_steps(buffer, range(1, 2))
    buffer.flush()
    buffer.prefetch([A, B])
    held = [buffer.get_stored(sample).payload for sample in (A, B, C, A)]
    assert [(i, j) for i, j in itertools.combinations(range(4), 2) if np.shares_memory(held[i], held[j])] == []
    buffer.close()


# ------------------------------------------------------------------------------------------------------- staging, commits


class GatedCalls(DiskCalls):
    """Reads and writes that wait at a gate, where it is shut."""

    def __init__(self) -> None:
        self.may_write, self.may_read, self.is_reading = threading.Event(), threading.Event(), threading.Event()
        self.may_write.set()
        self.may_read.set()
        self.read_paths: list[tuple[str, int]] = []

    def write(self, descriptor: int, parts: list[bytes | memoryview]) -> None:
        assert self.may_write.wait(PATIENCE_S)
        super().write(descriptor, parts)

    def read(self, path: Path, offset: int, into: ByteArray, *, direct: bool) -> int:
        self.read_paths.append((path.name, offset))
        self.is_reading.set()
        assert self.may_read.wait(PATIENCE_S)
        return super().read(path, offset, into, direct=direct)


def gated(folder: Path, **limits: int) -> tuple[DiskBuffer, GatedCalls]:
    calls = GatedCalls()
    return DiskBuffer(FP32, folder, {}, limits=DiskLimits(**limits), calls=calls), calls


def test_who_waits_for_the_disk_is_told_in_its_own_thread_for_how_long(tmp_path: Path) -> None:
    told: list[tuple[float, threading.Thread]] = []
    calls = GatedCalls()
    buffer = DiskBuffer(
        FP32, tmp_path / "store", {}, calls=calls, on_wait=lambda seconds: told.append((seconds, threading.current_thread()))
    )
    calls.may_write.clear()
    run_steps(buffer, range(1, 2))
    check(buffer, 0, 1)
    assert told == []  # at hand in memory
    calls.may_write.set()
    buffer.flush()
    check(buffer, 0, 1)
    assert [thread for _, thread in told] == [threading.current_thread()]
    assert sum(seconds for seconds, _ in told) == buffer.counts().wait_s > 0
    buffer.close()


def test_a_commit_waits_for_no_disk_and_staged_rows_are_read_from_memory(tmp_path: Path) -> None:
    buffer, calls = gated(tmp_path / "store")
    calls.may_write.clear()
    run_steps(buffer, range(1, 3))
    buffer.abort(3)
    for sample in range(3):
        check(buffer, sample, 2)
    assert buffer.nbytes == 6 * NBYTES
    assert buffer.counts().disk_reads == 0
    calls.may_write.set()
    buffer.flush()
    assert buffer.nbytes == 0
    check(buffer, 0, 2)
    assert buffer.counts().disk_reads == 1
    buffer.close()


def test_staging_waits_while_too_much_is_unwritten(tmp_path: Path) -> None:
    buffer, calls = gated(tmp_path / "store", write_behind_nbytes=2 * NBYTES)
    calls.may_write.clear()
    run = threading.Thread(target=run_steps, args=(buffer, range(1, 2), range(4)))
    is_waiting, wait = threading.Event(), buffer._changed.wait

    def told_wait() -> bool:
        is_waiting.set()
        return wait(PATIENCE_S)

    buffer._changed.wait = told_wait
    run.start()
    assert is_waiting.wait(PATIENCE_S)
    assert buffer.nbytes == 2 * NBYTES
    calls.may_write.set()
    run.join()
    assert buffer.counts().wait_s > 0
    assert len(buffer.digest()) == 4
    buffer.close()


def test_a_row_larger_than_every_limit_passes(tmp_path: Path) -> None:
    limits = DiskLimits(write_behind_nbytes=1, read_ahead_nbytes=1, segment_nbytes=1)
    buffer = DiskBuffer(FP32, tmp_path / "store", {}, limits=limits)
    run_steps(buffer, range(1, 4))
    buffer.flush()
    buffer.prefetch([A, B, C])
    for sample in (2, 0, 1):
        check(buffer, sample, 3)
    buffer.close()


def test_nothing_is_synchronised_in_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fsync", "fdatasync", "sync"):
        monkeypatch.setattr(os, name, lambda *_: pytest.fail("waited for a disk"))
    buffer = DiskBuffer(FP32, tmp_path / "store", {}, limits=DiskLimits(segment_nbytes=512))
    run_steps(buffer, range(1, 20))
    buffer.close()


def test_rows_of_an_aborted_step_that_wait_to_be_written_are_not(tmp_path: Path) -> None:
    buffer, calls = gated(tmp_path / "store")
    calls.may_write.clear()
    run_steps(buffer, range(1, 2), range(1))
    buffer.stage(2, B, values(2, 1))
    buffer.abort(2)
    calls.may_write.set()
    buffer.flush()
    assert buffer.counts().disk_nbytes == HEADER_NBYTES + RECORD + 2 * HEADER_NBYTES  # OPEN, A, COMMIT, ABORT
    buffer.close()


# ---------------------------------------------------------------------------------------------------------- reading ahead


def test_rows_are_read_in_the_order_asked_for(tmp_path: Path) -> None:
    buffer, calls = gated(tmp_path / "store")
    run_steps(buffer, range(1, 2), range(4))
    buffer.flush()
    buffer.prefetch([C, A, D, B])
    for sample in (2, 0, 3, 1):
        check(buffer, sample, 1)
    assert [(offset - HEADER_NBYTES) // RECORD for _, offset in calls.read_paths] == [2, 0, 3, 1]
    assert buffer.counts().disk_reads == buffer.counts().hits == 4
    buffer.close()


def test_a_row_that_is_being_read_is_waited_for_not_read_twice(tmp_path: Path) -> None:
    buffer, calls = gated(tmp_path / "store")
    run_steps(buffer, range(1, 2))
    buffer.flush()
    calls.may_read.clear()
    buffer.prefetch([A])
    assert calls.is_reading.wait(PATIENCE_S)
    opener = threading.Timer(0, calls.may_read.set)
    opener.start()
    check(buffer, 0, 1)
    opener.join()
    assert len(calls.read_paths) == 1
    buffer.close()


def until_read(buffer: DiskBuffer, calls: GatedCalls, count: int) -> None:
    """Wait until the reader has read so many rows and has gone to rest."""
    with buffer._lock:
        assert buffer._changed.wait_for(lambda: len(calls.read_paths) == count and buffer._reading is None, PATIENCE_S)


def test_reading_ahead_stops_at_its_bound_and_goes_on_as_rows_are_taken(tmp_path: Path) -> None:
    buffer, calls = gated(tmp_path / "store", read_ahead_nbytes=2 * NBYTES)
    run_steps(buffer, range(1, 2), range(4))
    buffer.flush()
    buffer.prefetch([A, B, C, D])
    until_read(buffer, calls, 2)
    assert buffer.nbytes == 2 * NBYTES
    check(buffer, 0, 1)
    until_read(buffer, calls, 3)
    assert buffer.nbytes == 2 * NBYTES
    buffer.close()


def test_rows_that_nobody_took_make_room_two_requests_later(tmp_path: Path) -> None:
    buffer, calls = gated(tmp_path / "store", read_ahead_nbytes=2 * NBYTES)
    run_steps(buffer, range(1, 2), range(4))
    buffer.flush()
    buffer.prefetch([A, B])
    until_read(buffer, calls, 2)
    buffer.prefetch([C, D])
    check(buffer, 0, 1)  # the step of the first request may still be running
    until_read(buffer, calls, 3)
    buffer.prefetch([D])
    until_read(buffer, calls, 4)
    assert buffer.nbytes == 2 * NBYTES
    check(buffer, 1, 1)
    buffer.close()


def test_a_row_that_is_replaced_is_not_taken_from_what_was_read_before(tmp_path: Path) -> None:
    buffer, calls = gated(tmp_path / "store")
    run_steps(buffer, range(1, 2))
    buffer.flush()
    buffer.prefetch([A, B])
    until_read(buffer, calls, 2)
    run_steps(buffer, range(2, 3))
    buffer.flush()
    for sample in range(3):
        check(buffer, sample, 2)
    buffer.close()


def test_a_row_that_is_replaced_while_it_is_read_is_read_anew(tmp_path: Path) -> None:
    buffer, calls = gated(tmp_path / "store")
    run_steps(buffer, range(1, 2))
    buffer.flush()
    calls.may_read.clear()
    buffer.prefetch([A])
    assert calls.is_reading.wait(PATIENCE_S)
    run_steps(buffer, range(2, 3))
    buffer.flush()
    calls.may_read.set()
    check(buffer, 0, 2)
    assert buffer.counts().lost == 0
    buffer.close()


# ------------------------------------------------------------------------------------------------------ segments on disk


def test_dead_bytes_are_reclaimed_and_every_message_stays(tmp_path: Path) -> None:
    limits = DiskLimits(segment_nbytes=16 * RECORD)
    buffer = DiskBuffer(FP32, tmp_path / "store", {}, limits=limits)
    latest: dict[int, int] = {}
    largest = 0
    for step in range(1, 400):
        samples = sorted({(step * k * k) % 101 for k in range(1, 5)})
        for sample in samples:
            buffer.stage(step, SampleId(sample), values(step, sample))
            latest[sample] = step
        buffer.commit(step)
        buffer.flush()
        largest = max(largest, buffer.counts().disk_nbytes)
    assert largest <= 1.5 * 101 * RECORD + 6 * 16 * RECORD
    for _ in range(2):
        for sample, step in latest.items():
            check(buffer, sample, step)
        buffer.close()
        on_disk = sum(path.stat().st_size for path in (tmp_path / "store").glob("*.segment"))
        assert on_disk == buffer.counts().disk_nbytes
        buffer = DiskBuffer(FP32, tmp_path / "store", {}, limits=limits)
    buffer.close()


def test_the_files_stay_within_their_budget(tmp_path: Path) -> None:
    budget = 200 * RECORD
    buffer = DiskBuffer(FP32, tmp_path / "store", {}, limits=DiskLimits(disk_nbytes=budget))
    for step in range(1, 300):
        samples = {(step * k * k + k) % 100 for k in range(1, 4)}
        for sample in samples:
            buffer.stage(step, SampleId(sample), values(step, sample))
        buffer.commit(step)
        buffer.flush()
        assert buffer.counts().disk_nbytes <= budget
    buffer.close()


def test_a_step_that_visits_every_sample_fits(tmp_path: Path) -> None:
    budget = 60 * RECORD
    buffer = DiskBuffer(FP32, tmp_path / "store", {}, limits=DiskLimits(disk_nbytes=budget))
    for step in range(1, 20):
        run_steps(buffer, range(step, step + 1), range(30))
        buffer.flush()
        assert buffer.counts().disk_nbytes <= budget + 30 * RECORD
    for sample in range(30):
        check(buffer, sample, 19)
    buffer.close()


def test_more_messages_than_the_budget_are_refused_with_what_to_do(tmp_path: Path) -> None:
    buffer = DiskBuffer(FP32, tmp_path / "store", {}, limits=DiskLimits(disk_nbytes=20 * RECORD))

    def fill() -> None:
        for step in range(1, 31):
            run_steps(buffer, range(step, step + 1), range(step, step + 1))
        buffer.flush()

    with pytest.raises(StoreError, match="are taken by messages still needed; allow it more disk or keep fewer samples"):
        fill()
    buffer.close()


class MovingCalls(DiskCalls):
    """Calls `before_read` once, just before a file is opened."""

    before_read = None

    def read(self, path: Path, offset: int, into: ByteArray, *, direct: bool) -> int:
        act, self.before_read = self.before_read, None
        if act is not None:
            act()
        return super().read(path, offset, into, direct=direct)


def test_a_row_that_moves_before_it_is_read_is_found_at_its_new_place(tmp_path: Path) -> None:
    calls = MovingCalls()
    limits = DiskLimits(segment_nbytes=4 * RECORD)
    buffer = DiskBuffer(FP32, tmp_path / "store", {}, limits=limits, calls=calls)
    run_steps(buffer, range(1, 2))
    buffer.flush()
    place = buffer._rows[A].place

    def overwrite_the_others() -> None:
        run_steps(buffer, range(2, 6), range(1, 3))
        buffer.flush()

    calls.before_read = overwrite_the_others
    check(buffer, 0, 1)
    assert buffer._rows[A].place != place
    assert not (tmp_path / "store" / f"{place.segment:08x}.segment").exists()
    buffer.close()


def test_a_checkpoint_opens_later_as_it_was_while_the_store_goes_on(tmp_path: Path) -> None:
    limits = DiskLimits(segment_nbytes=4 * RECORD)
    buffer = DiskBuffer(FP32, tmp_path / "store", {"run": 1}, limits=limits)
    run_steps(buffer, range(1, 4))
    buffer.stage(4, A, values(4, 0))
    buffer.checkpoint(tmp_path / "checkpoint")
    buffer.commit(4)
    run_steps(buffer, range(5, 30))
    buffer.close()
    copy = DiskBuffer(FP32, tmp_path / "checkpoint", {"run": 1}, limits=limits)
    for sample in range(3):
        check(copy, sample, 3)
    assert copy.counts().lost == 0
    run_steps(copy, range(4, 40))
    copy.close()
    buffer = DiskBuffer(FP32, tmp_path / "store", {"run": 1}, limits=limits)
    for sample in range(3):
        check(buffer, sample, 29)
    buffer.close()


def test_a_checkpoint_shares_its_segments_with_the_store(tmp_path: Path) -> None:
    buffer = DiskBuffer(FP32, tmp_path / "store", {})
    run_steps(buffer, range(1, 2))
    buffer.checkpoint(tmp_path / "checkpoint")
    (segment,) = (tmp_path / "checkpoint").glob("*.segment")
    assert segment.stat().st_nlink == 2
    buffer.close()


def test_a_checkpoint_is_copied_where_it_cannot_be_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    buffer = DiskBuffer(FP32, tmp_path / "store", {})
    run_steps(buffer, range(1, 2))
    buffer.checkpoint(tmp_path / "checkpoint")
    buffer.close()
    copy = DiskBuffer(FP32, tmp_path / "checkpoint", {})
    check(copy, 2, 1)
    copy.close()


def test_a_refused_checkpoint_harms_nothing(tmp_path: Path) -> None:
    buffer = DiskBuffer(FP32, tmp_path / "store", {})
    run_steps(buffer, range(1, 2))
    with pytest.raises(StoreError, match="the folder is not empty; choose another or delete it"):
        buffer.checkpoint(tmp_path)
    run_steps(buffer, range(2, 3))
    check(buffer, 0, 2)
    buffer.close()


def test_reading_past_the_page_cache_gives_the_same(tmp_path: Path) -> None:
    shapes = [(1, 1), (31, 33), (0, 4), (64, 64), (40, 1000)]
    rows = [torch.randn(shape, generator=torch.Generator().manual_seed(7)) for shape in shapes]
    buffer = DiskBuffer(FP32, tmp_path / "store", {}, limits=DiskLimits(segment_nbytes=20_000), direct=True)
    for i, row in enumerate(rows):
        buffer.stage(1, SampleId(i), row)
    buffer.commit(1)
    buffer.flush()
    buffer.prefetch([SampleId(1), SampleId(3)])
    for i, row in enumerate(rows):
        assert torch.equal(buffer.get(SampleId(i)).values, row)
    assert buffer.counts().disk_reads == len(rows)
    buffer.close()


# ------------------------------------------------------------------------------------------------------------------ tiers


def tiered(folder: Path, memory_nbytes: int, **options: object) -> TieredBuffer:
    return TieredBuffer(memory_nbytes, DiskBuffer(FP32, folder, {}, **options))


def test_samples_that_come_first_stay_in_memory(tmp_path: Path) -> None:
    buffer = tiered(tmp_path / "store", 2 * NBYTES)
    for step in range(1, 4):
        run_steps(buffer, range(step, step + 1), range(4))
        buffer._disk.flush()
        for sample in range(4):
            check(buffer, sample, step)
        assert buffer.counts().disk_reads == 2 * step
        assert buffer.nbytes == 2 * NBYTES
    assert sorted(buffer._memory.digest()) == [A, B]
    assert sorted(buffer._disk.digest()) == [C, D]
    buffer.close()


def test_a_drop_makes_room_for_a_sample_of_the_disk(tmp_path: Path) -> None:
    buffer = tiered(tmp_path / "store", NBYTES)
    run_steps(buffer, range(1, 2), range(2))
    buffer.drop(2, A)
    buffer.stage(2, B, values(2, 1))  # the room is there once the step has ended
    buffer.commit(2)
    assert sorted(buffer._disk.digest()) == [B]
    run_steps(buffer, range(3, 4), range(1, 3))
    assert sorted(buffer._memory.digest()) == [B]
    assert sorted(buffer._disk.digest()) == [C]
    check(buffer, 1, 3)
    buffer.close()


def test_a_message_that_grows_out_of_memory_goes_to_disk(tmp_path: Path) -> None:
    buffer = tiered(tmp_path / "store", 2 * NBYTES)
    run_steps(buffer, range(1, 2), range(2))
    buffer.stage(2, A, torch.ones(4, 4))
    buffer.commit(2)
    assert sorted(buffer._memory.digest()) == [B]
    assert torch.equal(buffer.get(A).values, torch.ones(4, 4))
    buffer.close()


def test_an_aborted_step_claims_no_memory(tmp_path: Path) -> None:
    buffer = tiered(tmp_path / "store", NBYTES)
    buffer.stage(1, A, values(1, 0))
    buffer.abort(1)
    run_steps(buffer, range(2, 3), range(1, 3))
    assert sorted(buffer._memory.digest()) == [B]
    buffer.close()


def test_what_is_in_memory_is_spilled_at_the_end(tmp_path: Path) -> None:
    buffer = tiered(tmp_path / "store", 2 * NBYTES)
    run_steps(buffer, range(1, 3), range(4))
    before = buffer.digest()
    buffer.close()
    buffer = tiered(tmp_path / "store", 2 * NBYTES)
    assert buffer.digest() == before
    for sample in range(4):
        check(buffer, sample, 2)
    run_steps(buffer, range(1, 2), range(4))
    assert len(buffer._memory.digest()) == 2
    buffer.close()


def test_a_checkpoint_has_both_tiers_and_leaves_each_sample_in_its_own(tmp_path: Path) -> None:
    buffer = tiered(tmp_path / "store", 2 * NBYTES)
    run_steps(buffer, range(1, 3), range(4))
    before = buffer.digest()
    buffer.checkpoint(tmp_path / "checkpoint")
    assert sorted(buffer._disk.digest()) == [C, D]
    run_steps(buffer, range(3, 4), range(4))
    after = buffer.digest()
    buffer.close()
    for folder, digest in (("checkpoint", before), ("store", after)):
        reopened = tiered(tmp_path / folder, 0)
        assert reopened.digest() == digest
        reopened.close()
