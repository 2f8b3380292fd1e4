"""A worker's side of the weights link: fetch a shard's tensors, send the trained ones back. Knows tensors and one link; no
steps, no files but a folder of its own.

    fetch    WeightsRequest(name, offset) ->  <- WeightsChunk       a window of requests under way, hashes checked
    send     WeightsChunk(name, offset)  ->                         back-pressure is the link's credit
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import xxhash

from pipecomp.errors import ConfigError, RemoteProtocolError
from pipecomp.models import CheckpointReader, tensor_bytes
from pipecomp.protocol.messages import TensorEntry, WeightsChunk, WeightsRequest
from pipecomp.runtime.link import Link

CHUNK_NBYTES = 4 << 20
_WINDOW = 4
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


async def fetch_tensors(link: Link, entries: Sequence[TensorEntry]) -> dict[str, torch.Tensor]:
    """Every tensor of `entries`, in the dtype the coordinator stores.

    Raises:
        RemoteProtocolError: a chunk is not the one that was asked for, or a tensor's bytes do not have the promised hash.
    """
    storage = {entry.name: bytearray(entry.nbytes) for entry in entries}
    asked: deque[WeightsRequest] = deque()
    for request in _requests(entries):
        if len(asked) == _WINDOW:
            await _receive(link, asked.popleft(), storage)
        await link.send(request)
        asked.append(request)
    while asked:
        await _receive(link, asked.popleft(), storage)
    return {entry.name: _tensor(entry, storage.pop(entry.name)) for entry in entries}


async def send_tensors(link: Link, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Send fp32 tensors in chunks; return how many."""
    count = 0
    for name, tensor in tensors:
        content = tensor_bytes(tensor)
        for offset in range(0, max(1, len(content)), CHUNK_NBYTES):
            piece = content[offset : offset + CHUNK_NBYTES]
            message = WeightsChunk(
                sequence=0,
                name=name,
                dtype="F32",
                shape=tuple(tensor.shape),
                offset=offset,
                total_nbytes=len(content),
                buffer_nbytes=(len(piece),),
            )
            await link.send(message, [piece], values=len(piece) // 4)
        count += 1
    return count


def read_own_tensors(reader: CheckpointReader, entries: Sequence[TensorEntry], folder: str) -> dict[str, torch.Tensor]:
    """The tensors from this machine's own folder.

    Raises:
        ConfigError: one is missing, or is not the coordinator's.
    """
    tensors: dict[str, torch.Tensor] = {}
    for entry in entries:
        if entry.name not in reader:
            raise ConfigError(f"the model folder {folder} has no tensor {entry.name}; leave --model out to get it sent")
        tensor = reader[entry.name]
        mine = xxhash.xxh3_64_hexdigest(tensor_bytes(tensor))
        if mine != entry.content_hash:
            raise ConfigError(
                f"the model folder {folder} holds other weights than the coordinator: {entry.name} has hash {mine} here "
                f"and {entry.content_hash} there; leave --model out to get them sent"
            )
        tensors[entry.name] = tensor
    return tensors


def trained_tensors(
    named: Iterable[tuple[str, torch.nn.Parameter]], aliases: Mapping[str, str], *, frozen_too: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters to send back: all but a tied weight's alias and what the coordinator still has as it was."""
    return ((n, p.detach()) for n, p in named if n not in aliases and (p.requires_grad or frozen_too))


def _requests(entries: Sequence[TensorEntry]) -> Iterator[WeightsRequest]:
    for entry in entries:
        for offset in range(0, entry.nbytes, CHUNK_NBYTES):
            nbytes = min(CHUNK_NBYTES, entry.nbytes - offset)
            yield WeightsRequest(sequence=0, name=entry.name, offset=offset, nbytes=nbytes)


async def _receive(link: Link, request: WeightsRequest, storage: Mapping[str, bytearray]) -> None:
    received = await link.receive()
    chunk = received.message
    if not isinstance(chunk, WeightsChunk) or len(received.buffers) != 1:
        raise RemoteProtocolError(f"asked for weights, got {type(chunk).__name__} with {len(received.buffers)} buffers")
    got = (chunk.name, chunk.offset, len(received.buffers[0]))
    if got != (request.name, request.offset, request.nbytes):
        raise RemoteProtocolError(f"asked for {request.name} from byte {request.offset} on ({request.nbytes}), got {got}")
    storage[chunk.name][chunk.offset : chunk.offset + request.nbytes] = received.buffers[0]
    link.taken(received)


def _tensor(entry: TensorEntry, content: bytearray) -> torch.Tensor:
    found = xxhash.xxh3_64_hexdigest(content)
    if found != entry.content_hash:
        raise RemoteProtocolError(f"weights of {entry.name} arrived with hash {found}, promised was {entry.content_hash}")
    if entry.dtype not in _DTYPES:
        raise RemoteProtocolError(f"weights of {entry.name} are {entry.dtype}; this version reads {', '.join(_DTYPES)}")
    if not content:
        return torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
    return torch.frombuffer(content, dtype=_DTYPES[entry.dtype]).reshape(entry.shape)
