"""The store that a run asks for. Knows settings and buffers; no link and no codec."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from pipecomp.buffers.base import MessageBuffer
from pipecomp.buffers.formats import MessageDtype, MessageFormat
from pipecomp.buffers.memory import MemoryBuffer
from pipecomp.errors import StoreError


class StoreSettings(NamedTuple):
    """How one end of one link keeps messages."""

    store: Literal["memory", "disk", "tiered"]
    dtype: MessageDtype
    memory_nbytes: int
    disk_nbytes: int
    folder: Path | None
    direct: bool


def open_buffer(settings: StoreSettings, identity: Mapping[str, str], name: str) -> MessageBuffer:
    """A buffer as `settings` say."""
    if settings.store != "memory":
        raise StoreError(f"messages.store = {settings.store!r} cannot be used here for {name} of {dict(identity)}")
    return MemoryBuffer(MessageFormat(settings.dtype))
