"""The messages of one end of one link, in memory. Knows tensors and steps, not codecs or sockets."""

from __future__ import annotations

import threading

import torch

from pipecomp.buffers.base import MessageBuffer, StoreCounts
from pipecomp.buffers.formats import MessageFormat, StoredMessage
from pipecomp.errors import LocalProtocolError
from pipecomp.types import SampleId


class MemoryBuffer(MessageBuffer):
    """Two dictionaries: what is committed, and what each open step would leave (None: no longer kept)."""

    def __init__(self, message_format: MessageFormat = MessageFormat("fp32")) -> None:  # noqa: B008 - a frozen value
        super().__init__(message_format)
        self._committed: dict[SampleId, StoredMessage] = {}
        self._staged: dict[int, dict[SampleId, StoredMessage | None]] = {}
        self._lock = threading.Lock()
        self._hits = self._misses = 0

    def get_stored(self, sample_id: SampleId) -> StoredMessage | None:
        with self._lock:
            stored = self._committed.get(sample_id)
            self._hits += stored is not None
            self._misses += stored is None
            return stored

    def stage(self, step: int, sample_id: SampleId, values: torch.Tensor) -> None:
        stored = self.format.pack(step, values)
        with self._lock:
            staged = self._staged.setdefault(step, {})
            if staged.get(sample_id) is not None:
                raise LocalProtocolError(f"sample {sample_id} was already staged in step {step}")
            staged[sample_id] = stored

    def drop(self, step: int, sample_id: SampleId) -> None:
        with self._lock:
            self._staged.setdefault(step, {}).setdefault(sample_id, None)

    def commit(self, step: int) -> None:
        with self._lock:
            for sample_id, stored in self._staged.pop(step, {}).items():
                if stored is None:
                    self._committed.pop(sample_id, None)
                else:
                    self._committed[sample_id] = stored

    def abort(self, step: int) -> None:
        with self._lock:
            self._staged.pop(step, None)

    def messages(self) -> dict[SampleId, StoredMessage]:
        """All that is committed."""
        with self._lock:
            return dict(self._committed)

    @property
    def nbytes(self) -> int:
        with self._lock:
            held = [*self._committed.values(), *(m for staged in self._staged.values() for m in staged.values() if m)]
        return sum(stored.payload.nbytes for stored in held)

    def counts(self) -> StoreCounts:
        nbytes = self.nbytes
        with self._lock:
            return StoreCounts(hits=self._hits, misses=self._misses, memory_nbytes=nbytes)

    def digest(self) -> dict[SampleId, tuple[int, int]]:
        with self._lock:
            return {sample_id: (stored.version, stored.checksum) for sample_id, stored in self._committed.items()}
