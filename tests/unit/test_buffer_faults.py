"""Stores that were damaged, cut, taken or filled: what cannot be read is lost and counted, and nothing is ever wrong."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pipecomp.buffers.disk import DiskBuffer, DiskLimits
from pipecomp.buffers.files import DiskCalls
from pipecomp.buffers.formats import MessageFormat
from pipecomp.buffers.records import HEADER_NBYTES, decode
from pipecomp.errors import StoreError
from pipecomp.types import SampleId

FP32 = MessageFormat("fp32")
SHAPE = (2, 3)
RECORD = HEADER_NBYTES + 64  # of one row: 24 bytes, padded
IDENTITY = {"run": "abc", "link": 1}
SMALL = DiskLimits(segment_nbytes=3 * RECORD + 2 * HEADER_NBYTES)  # a step of three rows a segment


def values(step: int, sample: int) -> torch.Tensor:
    return torch.arange(6.0).reshape(SHAPE) + 100 * step + sample / 16


def opened(folder: Path, limits: DiskLimits = SMALL, **options: object) -> DiskBuffer:
    return DiskBuffer(FP32, folder, IDENTITY, limits=limits, **options)


def run_steps(buffer: DiskBuffer, steps: range, samples: range = range(3)) -> None:
    for step in steps:
        for sample in samples:
            buffer.stage(step, SampleId(sample), values(step, sample))
        buffer.commit(step)


def contents(buffer: DiskBuffer, samples: range = range(3)) -> list[int | None]:
    """Version of each sample's message, None if there is none; a message that is not what its step left fails."""
    found: list[int | None] = []
    for sample in samples:
        message = buffer.get(SampleId(sample))
        found.append(None if message is None else message.version)
        assert message is None or torch.equal(message.values, values(message.version, sample))
    return found


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Three samples after one step, in one segment, with a snapshot."""
    folder = tmp_path / "store"
    buffer = opened(folder)
    run_steps(buffer, range(1, 2))
    buffer.close()
    return folder


@pytest.fixture
def long_store(tmp_path: Path) -> Path:
    """Four samples of four steps, each in a segment of its own; the fifth segment overwrites the first sample."""
    folder = tmp_path / "long"
    buffer = opened(folder)
    for step in range(1, 5):
        run_steps(buffer, range(step, step + 1), range(3 * step - 3, 3 * step))
    run_steps(buffer, range(5, 6), range(1))
    buffer.close()
    return folder


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.segment"))


def without_snapshots(folder: Path) -> None:
    for path in folder.glob("*.index"):
        path.unlink()


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def flips_of_the_second_row() -> Iterator[int]:
    start = HEADER_NBYTES + RECORD
    return iter(range(8 * start, 8 * (start + HEADER_NBYTES + 24)))


def test_any_flipped_bit_of_a_row_makes_it_lost_and_no_other(store: Path) -> None:
    (segment,) = segments(store)
    (snapshot,) = store.glob("*.index")
    whole, index = segment.read_bytes(), snapshot.read_bytes()
    for bit in flips_of_the_second_row():
        flip(segment, bit)
        buffer = opened(store)
        assert contents(buffer) == [1, None, 1], bit
        assert buffer.counts().lost == 1
        assert sorted(buffer.digest()) == [0, 2]
        buffer.close()
        without_snapshots(store)  # the newer one knows of the loss
        segment.write_bytes(whole)
        snapshot.write_bytes(index)


def test_a_lost_row_is_counted_once(store: Path) -> None:
    flip(segments(store)[0], next(flips_of_the_second_row()))
    for lost in (1, 0):
        buffer = opened(store)
        assert contents(buffer) == [1, None, 1]
        assert buffer.counts().lost == lost
        buffer.close()


def test_any_flipped_bit_of_a_log_without_snapshot_gives_no_wrong_value(store: Path) -> None:
    without_snapshots(store)
    (segment,) = segments(store)
    whole = segment.read_bytes()
    for bit in flips_of_the_second_row():
        flip(segment, bit)
        buffer = opened(store)
        found = contents(buffer)
        # A damaged header hides all that follows it, the commit too; a damaged payload is one sample's.
        assert found == ([1, None, 1] if bit >= 8 * (2 * HEADER_NBYTES + RECORD) else [None] * 3), bit
        assert buffer.counts().lost == 1
        buffer.close()
        without_snapshots(store)
        segment.write_bytes(whole)


def test_a_bit_that_flips_while_the_store_is_open_is_seen(tmp_path: Path) -> None:
    buffer = opened(tmp_path / "store", DiskLimits())
    run_steps(buffer, range(1, 2))
    buffer.flush()
    flip(segments(tmp_path / "store")[0], 8 * (HEADER_NBYTES + HEADER_NBYTES + 5))
    assert contents(buffer) == [None, 1, 1]
    assert contents(buffer) == [None, 1, 1]
    assert buffer.counts().lost == 1
    run_steps(buffer, range(2, 3))
    assert contents(buffer) == [2, 2, 2]
    buffer.close()


def test_a_damaged_row_that_is_fetched_ahead_is_lost(tmp_path: Path) -> None:
    buffer = opened(tmp_path / "store", DiskLimits())
    run_steps(buffer, range(1, 2))
    buffer.flush()
    flip(segments(tmp_path / "store")[0], 8 * (HEADER_NBYTES + HEADER_NBYTES + 5))
    buffer.prefetch([SampleId(0), SampleId(1), SampleId(2)])
    assert contents(buffer) == [None, 1, 1]
    assert buffer.counts().lost == 1
    buffer.close()


@pytest.mark.parametrize("has_valid_header", [True, False])
def test_a_version_that_is_changed_on_disk_is_no_message(store: Path, has_valid_header: bool) -> None:
    (segment,) = segments(store)
    content = bytearray(segment.read_bytes())
    header = slice(HEADER_NBYTES, 2 * HEADER_NBYTES)
    if has_valid_header:
        record = decode(bytes(content[header]))
        content[header] = record._replace(step=record.step + 1).encode()
    else:
        content[HEADER_NBYTES + 16] += 1
    segment.write_bytes(content)
    buffer = opened(store)
    assert contents(buffer) == [None, 1, 1]
    buffer.close()


@pytest.mark.parametrize("has_snapshot", [True, False])
def test_any_damaged_byte_of_any_file_gives_no_wrong_value(long_store: Path, tmp_path: Path, has_snapshot: bool) -> None:
    if not has_snapshot:
        without_snapshots(long_store)
    for path in sorted(long_store.iterdir()):
        for position in range(0, path.stat().st_size, 7):
            copy = tmp_path / "copy"
            shutil.copytree(long_store, copy)
            flip(copy / path.name, 8 * position + position % 8)
            try:
                buffer = opened(copy)
            except StoreError:
                assert path.name == "store.json"
            else:
                contents(buffer, range(12))
                buffer.close()
            shutil.rmtree(copy)


def test_a_damaged_snapshot_costs_nothing_while_the_log_is_whole(long_store: Path) -> None:
    newest = max(long_store.glob("*.index"))
    flip(newest, 8 * 30)
    buffer = opened(long_store)
    assert contents(buffer, range(12)) == [5, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    buffer.close()


@pytest.mark.parametrize("has_snapshot", [True, False])
@pytest.mark.parametrize("index", range(5))
def test_what_a_missing_segment_held_is_lost_and_the_rest_stays(long_store: Path, index: int, has_snapshot: bool) -> None:
    if not has_snapshot:
        without_snapshots(long_store)
    segments(long_store)[index].unlink()
    buffer = opened(long_store)
    expected = [5, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    gone = {0: [1, 2], 1: [3, 4, 5], 2: [6, 7, 8], 3: [9, 10, 11], 4: [0]}[index]
    found = contents(buffer, range(12))
    if has_snapshot:  # which knows what was lost, and that it was the latest
        assert found == [None if sample in gone else version for sample, version in enumerate(expected)]
        assert buffer.counts().lost == len(gone)
    else:
        assert [v for s, v in enumerate(found) if s not in gone] == [v for s, v in enumerate(expected) if s not in gone]
    run_steps(buffer, range(6, 7), range(12))
    buffer.close()
    buffer = opened(long_store)
    assert contents(buffer, range(12)) == [6] * 12
    buffer.close()


def test_a_log_cut_at_any_byte_opens_at_the_last_whole_step(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    buffer = opened(folder, DiskLimits())
    run_steps(buffer, range(1, 3))
    buffer.drop(3, SampleId(1))
    buffer.stage(3, SampleId(2), values(3, 2))
    buffer.commit(3)
    buffer.stage(4, SampleId(0), values(4, 0))
    buffer.abort(4)
    buffer.close()
    without_snapshots(folder)
    (segment,) = segments(folder)
    whole = segment.read_bytes()
    states = []
    for length in range(len(whole) + 1):
        segment.write_bytes(whole[:length])
        for path in [*folder.glob("*.index"), *segments(folder)[1:]]:
            path.unlink()
        buffer = opened(folder)
        states.append(tuple(contents(buffer)))
        buffer.close()
    assert list(dict.fromkeys(states)) == [(None, None, None), (1, 1, 1), (2, 2, 2), (2, None, 3)]
    assert states[-1] == (2, None, 3)


@pytest.mark.parametrize("has_snapshot", [True, False])
def test_a_cut_store_is_written_on_and_keeps_what_came_after(store: Path, has_snapshot: bool) -> None:
    if not has_snapshot:
        without_snapshots(store)
    (segment,) = segments(store)
    os.truncate(segment, HEADER_NBYTES + RECORD + HEADER_NBYTES + 23)  # a byte of the second row's payload is missing
    buffer = opened(store)
    assert contents(buffer) == ([1, None, None] if has_snapshot else [None] * 3)
    assert buffer.counts().lost > 0
    run_steps(buffer, range(1, 2), range(2, 3))  # steps start again in a new run
    buffer.close()
    buffer = opened(store)
    assert contents(buffer) == ([1, None, 1] if has_snapshot else [None, None, 1])
    buffer.close()


def test_a_step_of_an_earlier_session_cannot_be_committed_by_a_later_one(tmp_path: Path) -> None:
    buffer = opened(tmp_path / "store")
    buffer.stage(1, SampleId(0), values(1, 0))
    buffer.close()
    buffer = opened(tmp_path / "store")
    buffer.stage(1, SampleId(1), values(1, 1))
    buffer.commit(1)
    buffer.close()
    buffer = opened(tmp_path / "store")
    assert contents(buffer) == [None, 1, None]
    buffer.close()


def test_a_record_of_another_session_ends_its_segment(tmp_path: Path, store: Path) -> None:
    buffer = opened(tmp_path / "other")
    buffer.stage(1, SampleId(0), values(1, 0))
    buffer.close()
    without_snapshots(tmp_path / "other")
    (segment,) = segments(tmp_path / "other")
    foreign_commit = segments(store)[0].read_bytes()[-HEADER_NBYTES:]
    with segment.open("ab") as file:
        file.write(foreign_commit)
    buffer = opened(tmp_path / "other")
    assert contents(buffer) == [None, None, None]
    assert buffer.counts().lost == 1
    buffer.close()


def test_segments_under_each_other_s_names_are_not_replayed_in_the_wrong_order(tmp_path: Path) -> None:
    buffer = opened(tmp_path / "store")
    run_steps(buffer, range(1, 3))
    buffer.close()
    without_snapshots(tmp_path / "store")
    first, second = segments(tmp_path / "store")
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    buffer = opened(tmp_path / "store")
    assert contents(buffer) == [None, None, None]
    assert buffer.counts().lost == 2
    buffer.close()


def test_another_run_s_store_is_refused_with_what_differs(store: Path) -> None:
    with pytest.raises(StoreError, match="run is 'abc' there and 'xyz' here; delete the folder or choose another"):
        DiskBuffer(FP32, store, {**IDENTITY, "run": "xyz"})
    with pytest.raises(StoreError, match="end is None there and 'sender' here"):
        DiskBuffer(FP32, store, {**IDENTITY, "end": "sender"})


def test_another_format_is_refused(store: Path) -> None:
    manifest = json.loads((store / "store.json").read_text())
    (store / "store.json").write_text(json.dumps({**manifest, "format": 2}))
    with pytest.raises(StoreError, match="written in format 2, this version reads 1; delete the folder"):
        opened(store)


@pytest.mark.parametrize("manifest", ["", "{", "[]", '{"format": 1}', '{"format": 1, "identity": 3}', "\x00\xff"])
def test_a_manifest_that_says_nothing_is_refused(store: Path, manifest: str) -> None:
    (store / "store.json").write_text(manifest)
    with pytest.raises(StoreError, match=r"store\.json .*; delete the folder or choose another"):
        opened(store)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("all of it")
    with pytest.raises(StoreError, match=r"has thesis\.txt and no store\.json; delete the folder or choose another"):
        opened(tmp_path)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("")
    with pytest.raises(StoreError, match="choose a folder that can be written"):
        opened(tmp_path / "store")


def test_a_store_is_open_once(tmp_path: Path) -> None:
    buffer = opened(tmp_path / "store")
    with pytest.raises(StoreError, match="another process has it open"):
        opened(tmp_path / "store")
    buffer.close()
    opened(tmp_path / "store").close()


def test_a_folder_that_cannot_be_locked_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StoreError, match="cannot be locked: No locks available; choose a folder on a local disk"):
        opened(tmp_path / "store")


CHILD = """
import sys
from pathlib import Path
import torch
from pipecomp.buffers.disk import DiskBuffer, DiskLimits
from pipecomp.buffers.formats import MessageFormat
buffer = DiskBuffer(MessageFormat("fp32"), Path(sys.argv[1]), {"run": "abc", "link": 1}, limits=DiskLimits(segment_nbytes=4096))
step = 0
while True:
    step += 1
    for sample in range(3):
        buffer.stage(step, sample, torch.arange(6.0).reshape(2, 3) + 100 * step + sample / 16)
    buffer.commit(step)
    if step % 50 == 0:
        buffer.flush()
        print(step, flush=True)
"""


def test_a_killed_process_leaves_a_whole_step(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
    with child:
        for line in child.stdout:
            told = int(line)
            if told >= 100:
                break
        with pytest.raises(StoreError, match="another process has it open"):
            opened(tmp_path / "store")
        child.send_signal(signal.SIGKILL)
        told = max([told, *(int(line) for line in child.stdout if line.endswith("\n"))])
    buffer = opened(tmp_path / "store")
    found = contents(buffer)
    assert found[0] is not None
    assert found[0] >= told
    assert found == [found[0]] * 3
    buffer.close()


# ------------------------------------------------------------------------------------------------------------- full disks


class FullDisk(DiskCalls):
    """A disk that takes `room` bytes, then a part of a row, then nothing."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, descriptor: int, parts: list[bytes | memoryview]) -> None:
        whole = b"".join(parts)
        os.write(descriptor, whole[: self.room])
        self.room -= len(whole)
        if self.room < 0:
            self.room = 0
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


FULL = r"message store .*store: No space left on device; free space on that disk, or choose another folder"


def fill(buffer: DiskBuffer, samples: range, done: list[int]) -> None:
    """Steps until something stops them; `done` tells which were written."""
    for step in range(1, 100):
        run_steps(buffer, range(step, step + 1), samples)
        buffer.flush()
        done.append(step)


@pytest.mark.parametrize("room", [0, 10, 64, 100, 64 + RECORD, 64 + 3 * RECORD, 900, 1500])
def test_a_full_disk_is_told_and_loses_no_committed_step(tmp_path: Path, room: int) -> None:
    buffer = opened(tmp_path / "store", DiskLimits(), calls=FullDisk(room))
    steps: list[int] = []
    with pytest.raises(StoreError, match=FULL):
        fill(buffer, range(3), steps)
    done = len(steps)
    with pytest.raises(StoreError, match=FULL):
        buffer.commit(100)
    with pytest.raises(StoreError, match=FULL):
        buffer.checkpoint(tmp_path / "other")
    assert contents(buffer) in ([done or None] * 3, [done + 1] * 3)
    buffer.abort(100)
    buffer.close()
    buffer = opened(tmp_path / "store")
    assert contents(buffer) == [done or None] * 3
    buffer.close()


def test_a_failed_write_that_nobody_was_told_of_is_told_at_the_end(tmp_path: Path) -> None:
    buffer = opened(tmp_path / "store", calls=FullDisk(0))
    buffer.stage(1, SampleId(1), values(1, 1))
    with pytest.raises(StoreError, match=FULL):
        buffer.close()
    buffer.close()
    opened(tmp_path / "store").close()


def test_a_waiting_stage_hears_that_the_disk_is_full(tmp_path: Path) -> None:
    disk, is_waiting = FullDisk(0), threading.Event()
    write = disk.write

    def write_later(descriptor: int, parts: list[bytes | memoryview]) -> None:
        assert is_waiting.wait(20)
        write(descriptor, parts)

    disk.write = write_later
    buffer = opened(tmp_path / "store", SMALL._replace(write_behind_nbytes=30), calls=disk)
    wait = buffer._changed.wait

    def told_wait() -> bool:
        is_waiting.set()
        return wait(20)

    buffer._changed.wait = told_wait
    buffer.stage(1, SampleId(1), values(1, 1))
    with pytest.raises(StoreError, match=FULL):
        buffer.stage(1, SampleId(2), values(1, 2))
    assert buffer.counts().wait_s > 0
    buffer.close()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_file_system_that_is_full_is_told(tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.decode().strip()}")
    try:
        buffer = opened(place / "store", DiskLimits(segment_nbytes=8192))
        with pytest.raises(StoreError, match=FULL):
            fill(buffer, range(200), [])
        buffer.close()
        buffer = opened(place / "store")
        assert contents(buffer, range(200)) == [1] * 200
        with pytest.raises(StoreError, match=FULL):  # there is no room for a snapshot either
            fill(buffer, range(200, 400), [])
        buffer.close()
    finally:
        subprocess.run(["umount", str(place)], check=True)
