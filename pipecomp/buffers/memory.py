"""The messages of one end of one link, in memory. Knows tensors and steps, not codecs or sockets."""

from __future__ import annotations

import threading

import xxhash

from pipecomp.buffers.base import MessageBuffer, SampleMessage
from pipecomp.errors import LocalProtocolError
from pipecomp.types import SampleId


class MemoryBuffer(MessageBuffer):
    """Two dictionaries: what is committed, and what each open step would leave. Costs 4 bytes a value and sample."""

    def __init__(self) -> None:
        self._committed: dict[SampleId, SampleMessage] = {}
        self._staged: dict[int, dict[SampleId, SampleMessage]] = {}
        self._lock = threading.Lock()

    def get(self, sample_id: SampleId) -> SampleMessage | None:
        with self._lock:
            return self._committed.get(sample_id)

    def stage(self, step: int, sample_id: SampleId, message: SampleMessage) -> None:
        with self._lock:
            staged = self._staged.setdefault(step, {})
            if sample_id in staged:
                raise LocalProtocolError(f"sample {sample_id} was already staged in step {step}")
            staged[sample_id] = message

    def commit(self, step: int) -> None:
        with self._lock:
            self._committed.update(self._staged.pop(step, {}))

    def abort(self, step: int) -> None:
        with self._lock:
            self._staged.pop(step, None)

    @property
    def nbytes(self) -> int:
        with self._lock:
            held = [*self._committed.values(), *(m for staged in self._staged.values() for m in staged.values())]
        return sum(message.values.nbytes for message in held)

    def digest(self) -> dict[SampleId, tuple[int, int]]:
        with self._lock:
            committed = dict(self._committed)
        return {
            sample_id: (message.version, xxhash.xxh3_64_intdigest(message.values.contiguous().numpy().data))
            for sample_id, message in committed.items()
        }
