"""Messages in memory while a budget lasts, on disk beyond it. Knows two buffers and which sample is where; no files.

    memory   the samples that came first      disk   all others, behind a queue and read ahead

A sample is in one tier, never in both. An epoch visits all samples in turn, which makes any cache of the latest ones useless: the
sample that will be wanted first is the one that was pushed out first. So nothing is pushed out. A sample moves to memory at a
visit if a drop has made room, and to the disk at a visit at which its new message no longer fits.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from pipecomp.buffers.base import MessageBuffer, StoreCounts
from pipecomp.buffers.disk import DiskBuffer
from pipecomp.buffers.formats import StoredMessage
from pipecomp.buffers.memory import MemoryBuffer
from pipecomp.types import SampleId, TensorSpec


class TieredBuffer(MessageBuffer):
    """A MemoryBuffer in front of a DiskBuffer."""

    def __init__(self, memory_nbytes: int, disk: DiskBuffer) -> None:
        """`memory_nbytes`: of messages in memory once all steps have ended; an open step holds old and new ones for a while."""
        super().__init__(disk.format)
        self._memory = MemoryBuffer(disk.format)
        self._disk = disk
        self._budget_nbytes = memory_nbytes
        self._in_memory: dict[SampleId, int] = {}  # committed samples and their bytes
        self._in_memory_nbytes = 0
        self._claims: dict[int, dict[SampleId, int | None]] = {}  # by open step: bytes staged in memory; None: on disk
        self._grown_nbytes: dict[int, int] = {}  # by open step: what its claims exceed the present bytes by
        self._dropped: dict[int, set[SampleId]] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def get_stored(self, sample_id: SampleId) -> StoredMessage | None:
        while True:
            with self._lock:
                if sample_id in self._in_memory:
                    return self._memory.get_stored(sample_id)
            stored = self._disk.get_stored(sample_id)  # may wait for the disk, so not with the lock
            with self._lock:
                if stored is not None or sample_id not in self._in_memory:
                    return stored

    def stage(self, step: int, sample_id: SampleId, values: torch.Tensor) -> None:
        nbytes = self.format.nbytes(TensorSpec(values.shape[0], values.shape[1]))
        with self._lock:
            is_for_memory = self._claim(step, sample_id, nbytes)
        tier, other = (self._memory, self._disk) if is_for_memory else (self._disk, self._memory)
        tier.stage(step, sample_id, values)
        other.drop(step, sample_id)

    def drop(self, step: int, sample_id: SampleId) -> None:
        with self._lock:
            self._dropped.setdefault(step, set()).add(sample_id)
        self._memory.drop(step, sample_id)
        self._disk.drop(step, sample_id)

    def commit(self, step: int) -> None:
        with self._lock:  # nobody sees one tier committed and the other not
            self._disk.commit(step)  # first, since it can fail
            self._memory.commit(step)
            claims, dropped = self._forget_step(step)
            for sample_id in dropped:
                self._in_memory_nbytes -= self._in_memory.pop(sample_id, 0)
            for sample_id, nbytes in claims.items():
                self._in_memory_nbytes -= self._in_memory.pop(sample_id, 0)
                if nbytes is not None:
                    self._in_memory[sample_id] = nbytes
                    self._in_memory_nbytes += nbytes

    def abort(self, step: int) -> None:
        with self._lock:
            self._disk.abort(step)
            self._memory.abort(step)
            self._forget_step(step)

    def prefetch(self, sample_ids: Sequence[SampleId]) -> None:
        with self._lock:
            on_disk = [sample_id for sample_id in sample_ids if sample_id not in self._in_memory]
        self._disk.prefetch(on_disk)

    def kept_nbytes(self, spec: TensorSpec) -> int:
        return self._disk.kept_nbytes(spec)

    def committed_nbytes(self) -> dict[SampleId, int]:
        return self._disk.committed_nbytes()  # all of them, when it was just opened

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes + self._disk.nbytes

    def counts(self) -> StoreCounts:
        memory, disk = self._memory.counts(), self._disk.counts()
        return disk._replace(hits=memory.hits + disk.hits, memory_nbytes=memory.memory_nbytes + disk.memory_nbytes)

    def digest(self) -> dict[SampleId, tuple[int, int]]:
        with self._lock:
            return {**self._disk.digest(), **self._memory.digest()}

    def checkpoint(self, folder: Path) -> None:
        """Put all that is committed, that in memory too, into an empty folder, from which it can be opened. Waits for the disk.

        Raises:
            StoreError: the folder is not empty or cannot be written.
        """
        self._disk.checkpoint(folder, self._memory.messages())

    def close(self) -> None:
        """As the disk's; a folder that is kept gets what is in memory, so that it opens again complete."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        try:
            if self._disk.is_kept:
                self._disk.keep(self._memory.messages())
        finally:
            self._disk.close()

    def _claim(self, step: int, sample_id: SampleId, nbytes: int) -> bool:
        """Whether the message goes to memory. Room that an open step gives back counts once it has ended."""
        claims = self._claims.setdefault(step, {})
        if sample_id in claims:  # its tier refuses it
            return claims[sample_id] is not None
        growth = max(nbytes - self._in_memory.get(sample_id, 0), 0)
        taken = self._in_memory_nbytes + sum(self._grown_nbytes.values())
        fits = taken + growth <= self._budget_nbytes
        claims[sample_id] = nbytes if fits else None
        if fits:
            self._grown_nbytes[step] = self._grown_nbytes.get(step, 0) + growth
        return fits

    def _forget_step(self, step: int) -> tuple[dict[SampleId, int | None], set[SampleId]]:
        self._grown_nbytes.pop(step, None)
        return self._claims.pop(step, {}), self._dropped.pop(step, set())
