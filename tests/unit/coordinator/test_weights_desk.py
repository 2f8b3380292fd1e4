"""Checkpoint tensors out, trained tensors in, over links that may say anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
import torch
import xxhash

from coordinator.weights import MAX_CHUNK_NBYTES, WeightsDesk
from pipecomp.protocol.messages import TensorEntry, WeightsChunk, WeightsRequest, weights_link
from pipecomp.runtime.compute import ComputeThread
from pipecomp.runtime.link import Link, LinkHub
from pipecomp.runtime.weights import fetch_tensors, send_tensors
from pipecomp.transport.base import Address
from pipecomp.transport.memory import MemoryNetwork, MemoryTransport

STORED = {
    "small": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "half": torch.arange(5, dtype=torch.bfloat16),
    "large": torch.from_numpy(np.random.default_rng(0).standard_normal(3 * MAX_CHUNK_NBYTES // 8, dtype=np.float32)),
}
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}


def content(name: str) -> memoryview:
    return STORED[name].view(torch.uint8).numpy().reshape(-1).data if STORED[name].dtype is torch.float32 else bfloat_bytes(name)


def bfloat_bytes(name: str) -> memoryview:
    return memoryview(STORED[name].view(torch.int16).numpy().tobytes())


def entry(name: str) -> TensorEntry:
    tensor = STORED[name]
    return TensorEntry(
        name=name,
        dtype=DTYPES[tensor.dtype],
        shape=tuple(tensor.shape),
        nbytes=tensor.nbytes,
        content_hash=xxhash.xxh3_64_hexdigest(content(name)),
    )


class Bench:
    """A desk that expects worker `w`, and that worker's end of the link."""

    def __init__(self, desk: WeightsDesk, link: Link, failures: asyncio.Queue[tuple[str, str]]) -> None:
        self.desk = desk
        self.link = link
        self.failures = failures

    async def failure(self) -> tuple[str, str]:
        return await asyncio.wait_for(self.failures.get(), 10)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    network, thread = MemoryNetwork(), ComputeThread()
    here, there = MemoryTransport(network), MemoryTransport(network)
    hub = LinkHub(here, worker="coordinator", run="r", epoch=1)
    failures: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    desk = WeightsDesk(
        hub, {name: entry(name) for name in STORED}, content, thread, lambda *failure: failures.put_nowait(failure)
    )
    address = await hub.listen(Address("memory://weights"))
    desk.attend("w", {"a": (2, 2), "b": (3,)}, timeout_s=10)
    worker = LinkHub(there, worker="w", run="r", epoch=1)
    link = await worker.dial(address, weights_link("w"), timeout_s=10)
    yield Bench(desk, link, failures)
    await worker.close()
    await desk.close()
    await here.close()
    await there.close()
    thread.close()


async def test_a_worker_gets_every_tensor_as_it_is_stored(bench):
    fetched = await fetch_tensors(bench.link, [entry(name) for name in STORED])
    assert all(torch.equal(fetched[name], tensor) and fetched[name].dtype is tensor.dtype for name, tensor in STORED.items())


async def test_trained_tensors_come_home(bench):
    trained = {"a": torch.rand(2, 2), "b": torch.rand(3)}
    count = await send_tensors(bench.link, trained.items())
    collected = await asyncio.wait_for(bench.desk.collected("w", count), 10)
    assert all(torch.equal(collected[name], trained[name]) for name in trained)


async def test_weights_are_counted_in_both_directions(bench):
    await fetch_tensors(bench.link, [entry("small")])
    await send_tensors(bench.link, [("a", torch.rand(2, 2))])
    await asyncio.wait_for(bench.desk.collected("w", 1), 10)
    weights = [part for part in bench.desk.traffic() if part.kind == "weights"]
    assert sum(part.values for part in weights) == 6 + 4
    assert sum(part.payload_nbytes for part in weights) == 24 + 16


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        (WeightsRequest(sequence=0, name="nothing", offset=0, nbytes=4), "'nothing'"),
        (WeightsRequest(sequence=0, name="small", offset=20, nbytes=8), "bytes 20 to 28 of small, which has 24"),
        (WeightsRequest(sequence=0, name="small", offset=0, nbytes=0), "bytes 0 to 0"),
        (WeightsRequest(sequence=0, name="large", offset=0, nbytes=MAX_CHUNK_NBYTES + 1), "at most"),
    ],
)
async def test_a_request_for_what_is_not_there_is_reported(bench, request_, complaint):
    await bench.link.send(request_)
    worker, reason = await bench.failure()
    assert worker == "w"
    assert complaint in reason


def chunk(**changes: object) -> WeightsChunk:
    fields = {
        "sequence": 0, "name": "b", "dtype": "F32", "shape": (3,), "offset": 0, "total_nbytes": 12, "buffer_nbytes": (12,),
        **changes,
    }  # fmt: skip
    return WeightsChunk(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (chunk(name="c"), "no such tensor of this worker"),
        (chunk(shape=(4,), total_nbytes=16), "expected F32 of shape (3,)"),
        (chunk(dtype="F16"), "expected F32 of shape (3,)"),
        (chunk(total_nbytes=1 << 40), "expected F32 of shape (3,)"),
        (chunk(offset=4), "expected byte 0 of 12"),
        (chunk(buffer_nbytes=(16,)), "longer than the 12 bytes promised"),
    ],
)
async def test_a_chunk_that_does_not_fit_is_reported_and_reserves_nothing(bench, message, complaint):
    await bench.link.send(message, [bytes(message.buffer_nbytes[0])])
    _, reason = await bench.failure()
    assert complaint in reason


async def test_a_lost_weights_link_is_reported(bench):
    await bench.link.close()
    worker, reason = await bench.failure()
    assert worker == "w"
    assert "its weights link was lost" in reason
