"""The coordinator's end of every weights link: serves checkpoint tensors, takes trained ones. Knows links, chunks and the
model's names; no control session and no steps.

    serve     WeightsRequest  ->  <- WeightsChunk       one tensor at a time is in memory for each link
    collect   WeightsChunk    ->                        one worker at a time; its shard is in memory until it is written
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from pipecomp.errors import PipecompError, RemoteProtocolError
from pipecomp.protocol.messages import TensorEntry, Traffic, WeightsChunk, WeightsRequest, weights_link
from pipecomp.protocol.wire import Received
from pipecomp.runtime.compute import ComputeThread
from pipecomp.types import Kind

if TYPE_CHECKING:
    import torch

    from pipecomp.models import CheckpointReader
    from pipecomp.runtime.link import Link, LinkHub

MAX_CHUNK_NBYTES = 4 << 20
_VALUE_NBYTES: Mapping[str, int] = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


class TrainedTensor:
    """One tensor on its way in: chunks come in order."""

    def __init__(self, chunk: WeightsChunk) -> None:
        self.shape = chunk.shape
        self.content = bytearray(chunk.total_nbytes)
        self.filled = 0

    @property
    def is_complete(self) -> bool:
        return self.filled == len(self.content)

    def take(self, chunk: WeightsChunk, piece: memoryview) -> None:
        if chunk.shape != self.shape or chunk.total_nbytes != len(self.content) or chunk.offset != self.filled:
            raise RemoteProtocolError(
                f"weights of {chunk.name} go on at byte {chunk.offset} of {chunk.total_nbytes}, shape {chunk.shape}; "
                f"expected byte {self.filled} of {len(self.content)}, shape {self.shape}"
            )
        if self.filled + len(piece) > len(self.content):
            raise RemoteProtocolError(f"weights of {chunk.name} are longer than the {len(self.content)} bytes promised")
        self.content[self.filled : self.filled + len(piece)] = piece
        self.filled += len(piece)

    def tensor(self) -> torch.Tensor:
        import torch

        if not self.content:
            return torch.empty(self.shape)
        return torch.frombuffer(self.content, dtype=torch.float32).reshape(self.shape)


class TrainedShard:
    """What one worker has sent of its trained tensors."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes
        self._tensors: dict[str, TrainedTensor] = {}

    @property
    def num_complete(self) -> int:
        return sum(tensor.is_complete for tensor in self._tensors.values())

    def take(self, received: Received) -> None:
        """Raises RemoteProtocolError for a chunk of a tensor that this worker does not hold, or of another shape."""
        chunk = received.message
        assert isinstance(chunk, WeightsChunk)
        shape = self._shapes.get(chunk.name)
        count = 1
        for size in chunk.shape:
            count *= size
        if shape is None or chunk.shape != shape or chunk.dtype != "F32" or chunk.total_nbytes != 4 * count:
            raise RemoteProtocolError(
                f"weights of {chunk.name}: {chunk.dtype} of shape {chunk.shape} in {chunk.total_nbytes} bytes; expected "
                f"{'no such tensor of this worker' if shape is None else f'F32 of shape {shape}'}"
            )
        if chunk.name not in self._tensors:
            self._tensors[chunk.name] = TrainedTensor(chunk)
        self._tensors[chunk.name].take(chunk, received.buffers[0])

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor.tensor() for name, tensor in self._tensors.items()}


class WeightsReader(Protocol):
    """Reads one stored tensor as bytes; runs in a thread."""

    def __call__(self, name: str) -> memoryview: ...


class WeightsDesk:
    """All weights links of one run."""

    def __init__(
        self,
        hub: LinkHub,
        entries: Mapping[str, TensorEntry],
        read: WeightsReader,
        thread: ComputeThread,
        on_failure: Callable[[str, str], None],
    ) -> None:
        """`on_failure(worker, reason)` is told of a weights link that broke or broke the rules."""
        self._hub = hub
        self._entries = entries
        self._read = read
        self._thread = thread
        self._on_failure = on_failure
        self._links: dict[str, Link] = {}
        self._shards: dict[str, TrainedShard] = {}
        self._came: dict[str, Traffic] = {}
        self._arrived = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def attend(self, worker: str, shapes: Mapping[str, tuple[int, ...]], *, timeout_s: float) -> None:
        """Expect a worker's weights link; `shapes` are those of the tensors it will send back."""
        self._shards[worker] = TrainedShard(shapes)
        task = asyncio.create_task(self._guard(worker, timeout_s), name=f"weights of {worker}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def collected(self, worker: str, num_tensors: int) -> dict[str, torch.Tensor]:
        """All tensors of `worker`, once they are here; they are forgotten here then."""
        shard = self._shards[worker]
        async with self._arrived:
            await self._arrived.wait_for(lambda: shard.num_complete >= num_tensors)
        self._shards[worker] = TrainedShard({})
        return shard.tensors()

    def traffic(self) -> tuple[Traffic, ...]:
        """What this end has sent over all weights links, and the requests and weights that came to it."""
        return (*(part for link in self._links.values() for part in link.traffic()), *self._came.values())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._hub.close()

    async def _guard(self, worker: str, timeout_s: float) -> None:
        try:
            await self._attend(worker, timeout_s)
        except RemoteProtocolError as error:
            self._on_failure(worker, f"its weights link broke the protocol: {error}")
        except PipecompError as error:
            self._on_failure(worker, f"its weights link was lost: {error}")

    async def _attend(self, worker: str, timeout_s: float) -> None:
        link = await self._hub.accept(weights_link(worker), timeout_s=timeout_s)
        self._links[worker] = link
        name, content = "", memoryview(b"")
        while True:
            received = await link.receive()
            self._count(worker, received)
            request = received.message
            if isinstance(request, WeightsRequest):
                if request.name != name:
                    entry = self._entry(request)
                    name, content = entry.name, await self._thread.run(self._read, entry.name)
                await self._answer(link, request, content)
            elif isinstance(request, WeightsChunk) and len(received.buffers) == 1:
                self._shards[worker].take(received)
                async with self._arrived:
                    self._arrived.notify_all()
            else:
                raise RemoteProtocolError(f"{type(request).__name__} came over a weights link")
            link.taken(received)

    def _count(self, worker: str, received: Received) -> None:
        old = self._came.get(worker)
        self._came[worker] = Traffic(
            link=weights_link(worker),
            kind=Kind.WEIGHTS,
            values=(old.values if old else 0) + received.payload_nbytes // _VALUE_NBYTES["F32"],
            payload_nbytes=(old.payload_nbytes if old else 0) + received.payload_nbytes,
            header_nbytes=(old.header_nbytes if old else 0) + received.header_nbytes,
            messages=(old.messages if old else 0) + 1,
        )

    def _entry(self, request: WeightsRequest) -> TensorEntry:
        entry = self._entries.get(request.name)
        if entry is None:
            raise RemoteProtocolError(f"asked for weights of {request.name!r}, which the model does not have")
        return entry

    async def _answer(self, link: Link, request: WeightsRequest, content: memoryview) -> None:
        entry = self._entries[request.name]
        end = request.offset + request.nbytes
        if not 0 < request.nbytes <= MAX_CHUNK_NBYTES or end > entry.nbytes:
            raise RemoteProtocolError(
                f"asked for bytes {request.offset} to {end} of {request.name}, which has {entry.nbytes}; "
                f"at most {MAX_CHUNK_NBYTES} at once"
            )
        chunk = WeightsChunk(
            sequence=0,
            name=entry.name,
            dtype=entry.dtype,
            shape=entry.shape,
            offset=request.offset,
            total_nbytes=entry.nbytes,
            buffer_nbytes=(request.nbytes,),
        )
        await link.send(chunk, [content[request.offset : end]], values=request.nbytes // _VALUE_NBYTES[entry.dtype])


def tensor_reader(reader: CheckpointReader) -> WeightsReader:
    """Reads tensors of a checkpoint as they are stored."""
    from pipecomp.models import tensor_bytes

    return lambda name: tensor_bytes(reader[name])
