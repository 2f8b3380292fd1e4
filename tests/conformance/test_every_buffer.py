"""Every message buffer against the public checks, and against a plain dictionary over any sequence of calls."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from pipecomp.buffers.disk import DiskBuffer, DiskLimits
from pipecomp.buffers.memory import MemoryBuffer
from pipecomp.buffers.tiered import TieredBuffer
from pipecomp.testing.buffer_checks import BUFFER_CHECKS, BufferCheck, MakeBuffer

# Small enough that every check crosses segments, compacts, and waits for its writer.
TIGHT = DiskLimits(write_behind_nbytes=256, read_ahead_nbytes=512, segment_nbytes=1024)


def memory(path: Path) -> MakeBuffer:
    return MemoryBuffer


def disk(path: Path) -> MakeBuffer:
    folders = (path / str(i) for i in itertools.count())
    return lambda message_format: DiskBuffer(message_format, next(folders), {})


def tight_disk(path: Path) -> MakeBuffer:
    folders = (path / str(i) for i in itertools.count())
    return lambda message_format: DiskBuffer(message_format, next(folders), {}, limits=TIGHT)


def direct_disk(path: Path) -> MakeBuffer:
    folders = (path / str(i) for i in itertools.count())
    return lambda message_format: DiskBuffer(message_format, next(folders), {}, direct=True)


def tiered(path: Path) -> MakeBuffer:
    """Most messages of the checks fit in memory."""
    folders = (path / str(i) for i in itertools.count())
    return lambda message_format: TieredBuffer(5000, DiskBuffer(message_format, next(folders), {}))


def tight_tiered(path: Path) -> MakeBuffer:
    """A single small message does."""
    folders = (path / str(i) for i in itertools.count())
    return lambda message_format: TieredBuffer(100, DiskBuffer(message_format, next(folders), {}, limits=TIGHT))


def disk_behind_no_memory(path: Path) -> MakeBuffer:
    """No message does."""
    folders = (path / str(i) for i in itertools.count())
    return lambda message_format: TieredBuffer(0, DiskBuffer(message_format, next(folders), {}, is_kept=False))


KINDS: list[Callable[[Path], MakeBuffer]] = [memory, disk, tight_disk, direct_disk, tiered, tight_tiered, disk_behind_no_memory]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("check", BUFFER_CHECKS, ids=lambda check: check.__name__)
def test_a_buffer_keeps_the_contract(check: BufferCheck, kind: Callable[[Path], MakeBuffer], tmp_path: Path) -> None:
    check(kind(tmp_path))
