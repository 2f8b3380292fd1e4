"""From settings to a message buffer. Knows every kind of buffer; no run file, no link.

    memory   all in memory                                          gone at the end
    disk     all in FOLDER/NAME                                     opens again
    tiered   `memory_nbytes` of it in memory, the others on disk    opens again complete

Without a folder, disk and tiered use a fresh temporary one, which `close` deletes. Rows on their way to and from a disk take
memory of their own beside `memory_nbytes`: an eighth of it in each direction, at least 32 MiB and at most 256 MiB.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import quote

from pipecomp.buffers.base import MessageBuffer
from pipecomp.buffers.disk import DiskBuffer, DiskLimits, nobody_hears
from pipecomp.buffers.files import Identity, make_folder
from pipecomp.buffers.formats import MessageDtype, MessageFormat
from pipecomp.buffers.memory import MemoryBuffer
from pipecomp.buffers.records import record_nbytes
from pipecomp.buffers.tiered import TieredBuffer
from pipecomp.errors import StoreError
from pipecomp.types import TensorSpec

StoreKind = Literal["memory", "disk", "tiered"]

LEAST_FREE_NBYTES = 64 << 20
_LEAST_STAGING_NBYTES, _MOST_STAGING_NBYTES = 32 << 20, 256 << 20
_log = logging.getLogger(__name__)


class StoreSettings(NamedTuple):
    """How one end of one link keeps its messages. Bytes are for this buffer alone."""

    store: StoreKind
    dtype: MessageDtype
    memory_nbytes: int
    disk_nbytes: int  # of its files, dead bytes included
    folder: Path | None  # of all buffers; None: a temporary one
    direct: bool = False  # read past the page cache: for measuring

    @property
    def capacity_nbytes(self) -> int:
        """What the messages of all kept samples may come to."""
        return capacity_nbytes(self.store, self.memory_nbytes, self.disk_nbytes, is_kept=self.folder is not None)


def capacity_nbytes(store: StoreKind, memory_nbytes: int, disk_nbytes: int, *, is_kept: bool) -> int:
    """What the messages of all kept samples may come to within these budgets.

    On disk it is half: the rest is for versions that are dead and not reclaimed yet, for the copies of a compaction, for headers,
    and for the rows of an open step, which alone may exceed it. A folder that is kept takes what is in memory too in the end.
    """
    match store:
        case "memory":
            return memory_nbytes
        case "disk":
            return disk_nbytes // 2
        case "tiered":
            return disk_nbytes // 2 + (0 if is_kept else memory_nbytes)


def kept_nbytes(store: StoreKind, dtype: MessageDtype, spec: TensorSpec) -> int:
    """What a kept message of this shape takes of a buffer's capacity, as the buffer itself counts it."""
    payload = MessageFormat(dtype).nbytes(spec)
    return payload if store == "memory" else record_nbytes(payload)


def open_buffer(
    settings: StoreSettings, identity: Identity, name: str, *, on_wait: Callable[[float], None] = nobody_hears
) -> MessageBuffer:
    """The buffer `name` (link and end), which belongs to `identity` (run configuration, ...). `on_wait` hears in the thread of
    a `get` or `stage` how many seconds it has just waited for a disk.

    Raises:
        StoreError: the folder is in use, belongs to something else, cannot be written, or its disk is full. Says what to do.
    """
    message_format = MessageFormat(settings.dtype)
    if settings.store == "memory":
        return MemoryBuffer(message_format)
    staging_nbytes = min(max(settings.memory_nbytes // 8, _LEAST_STAGING_NBYTES), _MOST_STAGING_NBYTES)
    folder = _temporary_folder() if settings.folder is None else settings.folder / quote(name, safe="")
    made = make_folder(folder)
    try:
        _check_free(folder, settings.disk_nbytes)
        disk = DiskBuffer(
            message_format,
            folder,
            {**identity, "buffer": name, "dtype": settings.dtype},
            limits=DiskLimits(
                write_behind_nbytes=staging_nbytes,
                read_ahead_nbytes=staging_nbytes,
                disk_nbytes=settings.disk_nbytes,
            ),
            direct=settings.direct,
            is_kept=settings.folder is not None,
            on_wait=on_wait,
        )
    except StoreError:
        if settings.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
        for path in made:
            with contextlib.suppress(OSError):  # something is in it
                path.rmdir()
        raise
    return disk if settings.store == "disk" else TieredBuffer(settings.memory_nbytes, disk)


def _temporary_folder() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="pipecomp-store-"))
    except OSError as e:
        raise StoreError(
            f"no temporary folder for messages: {e.strerror}; name a folder on a disk with space (--store-folder)"
        ) from e


def _check_free(folder: Path, wanted_nbytes: int) -> None:
    """What the folder has already counts as free: it is part of what is wanted."""
    own = sum(path.stat().st_size for path in folder.glob("*.segment"))
    free = shutil.disk_usage(folder).free + own
    if free < LEAST_FREE_NBYTES:
        raise StoreError(
            f"message store {folder}: its disk has {free >> 20} MiB free and {LEAST_FREE_NBYTES >> 20} MiB are the least; "
            "free space or choose another folder (--store-folder)"
        )
    if free < wanted_nbytes:
        _log.warning(
            "message store %s may take %d MiB and its disk has %d MiB free", folder, wanted_nbytes >> 20, free >> 20
        )
