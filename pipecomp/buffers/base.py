"""Where the per-sample messages m(xi) of one end of one link live between steps. Knows tensors and steps, not codecs or sockets.

    get          what the last committed step left                   prefetch   soon wanted, in this order
    stage, drop  what this step would leave, or no longer keep; readers do not see it yet
    commit       make it so                                          abort      forget it

Nothing staged is visible before `commit`, so an aborted step leaves no trace (law 3). A message's version is the step that left
it; steps never repeat within a run, so an older message cannot be taken for a newer one. A message whose bytes no longer have
their checksum is lost: `get` answers None, it is counted, and the link sends the sample afresh. All calls come from codec
threads and from the event loop, so implementations are thread-safe; `get` and `stage` may wait for a disk and so are called from
codec threads only.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import NamedTuple

import torch

from pipecomp.buffers.formats import MessageFormat, StoredMessage
from pipecomp.types import SampleId, TensorSpec


class SampleMessage(NamedTuple):
    """What both ends of a link agree a sample's activation to be."""

    version: int  # the step that left it
    checksum: int  # xxh3-64 of its stored bytes; equal at both ends
    values: torch.Tensor  # (L, H) fp32, read-only by agreement


class StoreCounts(NamedTuple):
    """What happened since the buffer was made (first five), and what it holds now."""

    hits: int = 0  # `get` found the message
    misses: int = 0  # `get` found none: a first visit, or one that is not kept
    lost: int = 0  # messages given up since their bytes were damaged or gone
    disk_reads: int = 0  # hits that came from a disk
    wait_s: float = 0.0  # time that `get` and `stage` waited for a disk
    memory_nbytes: int = 0
    disk_nbytes: int = 0  # of files, dead bytes included


class MessageBuffer(abc.ABC):
    """One end of one link's messages."""

    def __init__(self, message_format: MessageFormat) -> None:
        self.format = message_format

    @abc.abstractmethod
    def get_stored(self, sample_id: SampleId) -> StoredMessage | None:
        """The committed message as it is kept; None before the first committed visit, and where it is lost."""

    def get(self, sample_id: SampleId) -> SampleMessage | None:
        """The committed message, or None."""
        stored = self.get_stored(sample_id)
        return None if stored is None else SampleMessage(stored.version, stored.checksum, self.format.unpack(stored))

    @abc.abstractmethod
    def stage(self, step: int, sample_id: SampleId, values: torch.Tensor) -> None:
        """Keep `values`, (L, H) fp32, aside for `step`; they must not change afterwards.

        Raises:
            LocalProtocolError: the sample is already staged in this step.
            StoreError: a disk cannot take it; says why and what to do.
        """

    @abc.abstractmethod
    def drop(self, step: int, sample_id: SampleId) -> None:
        """The sample's message is no longer kept once `step` commits; nothing happens if there is none."""

    @abc.abstractmethod
    def commit(self, step: int) -> None:
        """Make all that was staged for `step` the committed messages, and forget what was dropped. Waits for no disk."""

    @abc.abstractmethod
    def abort(self, step: int) -> None:
        """Forget all that was staged and dropped for `step`. Waits for no disk."""

    def prefetch(self, sample_ids: Sequence[SampleId]) -> None:  # noqa: B027 - a buffer in memory has nothing to fetch
        """These will be wanted soon, in this order. Returns at once; replaces what was asked before and is not read yet."""

    def kept_nbytes(self, spec: TensorSpec) -> int:
        """What a kept message of this shape takes of the budget, headers included; equal at both ends of a link."""
        return self.format.nbytes(spec)

    def committed_nbytes(self) -> dict[SampleId, int]:
        """What each committed message takes of the budget, oldest version first. For a buffer that was just opened."""
        return {}

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes of messages in memory now, staged ones included."""

    @abc.abstractmethod
    def counts(self) -> StoreCounts:
        """Counters and sizes."""

    @abc.abstractmethod
    def digest(self) -> dict[SampleId, tuple[int, int]]:
        """For each committed sample its version and checksum; equal at both ends (law 2)."""

    def close(self) -> None:  # noqa: B027 - a buffer in memory has nothing to close
        """Write what is not written, end threads, close files."""
