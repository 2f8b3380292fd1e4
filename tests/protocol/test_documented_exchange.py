"""A second implementation of replicas' exchange, written from docs/protocol.md alone, comes to the same bits as ours."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
import xxhash

from pipecomp import registry
from pipecomp.protocol import wire
from pipecomp.protocol.messages import GradientMessage, gradients_link
from pipecomp.runtime.channel import CodecThreads, Destination, Inbox
from pipecomp.runtime.gradient_row import ALIGNMENT, PIECE, GradientRow
from pipecomp.runtime.replicas import Coding, Peers, ReplicaExchange
from pipecomp.runtime.trace import DEAF
from pipecomp.types import Kind, TensorSpec

TEXT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
RANK, STAGE, SEED = 1, 1, 7
NUM_REPLICAS = 3
SMALL = 512  # in place of 2^20 values a piece
SHAPES = ((5, 300), (41,), (700, 3), (1,))
NUM_VALUES = sum(int(np.prod(shape)) for shape in SHAPES)
CODECS = [
    {"codec": "uniform", "bits": 4},
    {"codec": "uniform", "bits": 3, "rounding": "stochastic"},
    {"codec": "sparse", "bits": 4, "top": 0.3, "random": 0.5},
    {"codec": "identity"},
]
Frames = list[bytes]


def codec_of(options: dict[str, Any]) -> Any:
    rest = {key: value for key, value in options.items() if key != "codec"}
    return registry.load("pipecomp.codecs", options["codec"]).from_options(rest)


class Net:
    """Frames on their way, by (from, to)."""

    def __init__(self) -> None:
        pairs = [(a, b) for a in range(NUM_REPLICAS) for b in range(NUM_REPLICAS) if a != b]
        self.queues: dict[tuple[int, int], asyncio.Queue[Frames]] = {pair: asyncio.Queue() for pair in pairs}

    def send(self, replica: int, other: int, message: GradientMessage, buffer: Any) -> None:
        frames = wire.encode(message, [buffer])
        self.queues[replica, other].put_nowait([bytes(frame) for frame in frames])


# ------------------------------------------------------------------------------------------------------------ ours


class OneLink:
    """What the exchange needs of a link."""

    recorder = DEAF

    def __init__(self, net: Net, replica: int, other: int) -> None:
        self.name = gradients_link(RANK, replica, other)
        self._net, self._replica, self._other = net, replica, other

    async def send(self, message: GradientMessage, buffers: Any, *, values: int) -> None:
        assert values == message.num_values
        self._net.send(self._replica, self._other, message, buffers[0])

    async def receive(self) -> wire.Received:
        return wire.decode(await self._net.queues[self._other, self._replica].get())

    def taken(self, received: wire.Received) -> None:
        pass


class Ours:
    """One replica by `pipecomp.runtime`."""

    def __init__(self, net: Net, replica: int, options: dict[str, Any]) -> None:
        others = [other for other in range(NUM_REPLICAS) if other != replica]
        self._inboxes = {other: Inbox(cast("Any", OneLink(net, replica, other))) for other in others}
        to = {other: Destination("beef", 1, other, Kind.GRADIENTS, STAGE, 0) for other in others}
        self._parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        self._threads = CodecThreads()
        coding = Coding(codec_of(options), True, SEED)
        row = GradientRow(self._parameters)
        peers = Peers(replica, self._inboxes, to)
        self._exchange = ReplicaExchange(f"{RANK}", row, peers, coding, self._threads, piece=SMALL)
        self._readers = [asyncio.create_task(inbox.run()) for inbox in self._inboxes.values()]

    async def step(self, step: int, gradients: list[np.ndarray], *, is_committed: bool) -> list[np.ndarray]:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = torch.from_numpy(gradient.copy())
        self._exchange.begin()
        self._exchange.complete_all()
        await self._exchange.run(step)
        self._exchange.commit() if is_committed else self._exchange.abort()
        return [cast("torch.Tensor", parameter.grad).numpy() for parameter in self._parameters]

    async def close(self) -> None:
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        self._threads.close()


# ------------------------------------------------------------------------------------------- the page's, and nothing of ours


class Part(NamedTuple):
    owner: int
    start: int
    end: int


def cut(num_values: int, num_replicas: int, piece: int = 2**20) -> Iterator[Part]:
    """"Rows and pieces"."""
    for first in range(0, num_values, num_replicas * piece):
        size = min(num_replicas * piece, num_values - first)
        share = -(-size // (256 * num_replicas)) * 256
        for owner in range(num_replicas):
            start, end = min(owner * share, size), min((owner + 1) * share, size)
            if start < end:
                yield Part(owner, first + start, first + end)


class Theirs:
    """One replica by the page."""

    def __init__(self, net: Net, replica: int, options: dict[str, Any]) -> None:
        self._net, self._replica = net, replica
        self._name, self._codec = options["codec"], codec_of(options)
        self._errors: dict[tuple[str, int], np.ndarray] = {}
        self._staged: dict[tuple[str, int], np.ndarray] = {}
        self._come: dict[tuple[int, int], wire.Received] = {}

    async def step(self, step: int, gradients: list[np.ndarray], *, is_committed: bool) -> list[np.ndarray]:
        row = np.concatenate([gradient.ravel() for gradient in reversed(gradients)])
        total = np.empty_like(row)
        parts = list(cut(len(row), NUM_REPLICAS, SMALL))
        self._come = {}
        for part in parts:
            if part.owner != self._replica:
                self._send(step, "reduce", part, part.owner, self._code(step, "reduce", part, row[part.start : part.end]))
        for part in (part for part in parts if part.owner == self._replica):
            pieces = [
                row[part.start : part.end] if other == self._replica else await self._take(step, "reduce", part, other)
                for other in range(NUM_REPLICAS)
            ]
            summed = pieces[0]
            for piece in pieces[1:]:
                summed = summed + piece
            buffer = self._code(step, "gather", part, summed)
            total[part.start : part.end] = self._decode(buffer, part)
            for other in range(NUM_REPLICAS):
                if other != self._replica:
                    self._send(step, "gather", part, other, buffer)
        for part in (part for part in parts if part.owner != self._replica):
            total[part.start : part.end] = await self._take(step, "gather", part, part.owner)
        self._errors |= self._staged if is_committed else {}
        self._staged = {}
        ends = np.cumsum([gradient.size for gradient in reversed(gradients)])[:-1]
        return [
            piece.reshape(gradient.shape)
            for piece, gradient in zip(reversed(np.split(total, ends)), gradients, strict=True)
        ]

    async def close(self) -> None:
        pass

    def _code(self, step: int, name: str, part: Part, values: np.ndarray) -> np.ndarray:
        error = self._errors.get((name, part.start), np.zeros_like(values))
        meant = values if self._name == "identity" else values - error
        text = f"gradients/{RANK}/{name}".encode()
        seed = xxhash.xxh3_64_intdigest(text + struct.pack("<4Q", SEED, step, part.start, self._replica))
        buffer = np.empty(self._codec.encoded_nbytes(TensorSpec(1, len(values)), first_visit=True), np.uint8)
        self._codec.encode(torch.from_numpy(meant.reshape(1, -1)), None, seed=seed, out=buffer)
        decoded = self._decode(buffer, part)
        self._staged[name, part.start] = (error + decoded) - values if self._name == "uniform" else decoded - meant
        return buffer

    def _decode(self, buffer: Any, part: Part) -> np.ndarray:
        spec = TensorSpec(1, part.end - part.start)
        return cast("np.ndarray", self._codec.decode(np.frombuffer(buffer, np.uint8), None, spec).values.numpy().ravel())

    def _send(self, step: int, name: str, part: Part, other: int, buffer: np.ndarray) -> None:
        message = GradientMessage(
            sequence=0, run="beef", epoch=1, replica=other, kind=Kind.GRADIENTS, step=step, stage=STAGE, codec=self._name,
            name=name, offset=part.start + (NUM_VALUES if name == "gather" else 0), num_values=part.end - part.start,
            buffer_nbytes=(len(buffer),),
        )  # fmt: skip
        self._net.send(self._replica, other, message, buffer.data)

    async def _take(self, step: int, name: str, part: Part, other: int) -> np.ndarray:
        offset = part.start + (NUM_VALUES if name == "gather" else 0)
        while (other, offset) not in self._come:
            received = wire.decode(await self._net.queues[other, self._replica].get())
            message = cast("GradientMessage", received.message)
            assert (message.step, message.replica, message.stage) == (step, self._replica, STAGE)
            self._come[other, message.offset] = received
        return self._decode(self._come[other, offset].buffers[0], part)


# ------------------------------------------------------------------------------------------------------------------ tests


async def exchanged(ours: set[int], options: dict[str, Any]) -> list[list[list[np.ndarray]]]:
    """What all replicas have after each of four steps, of which the third is aborted."""
    net, found = Net(), []
    members = [(Ours if replica in ours else Theirs)(net, replica, options) for replica in range(NUM_REPLICAS)]
    for step in range(1, 5):
        draw = np.random.default_rng(step)
        gradients = [[draw.standard_normal(s).astype(np.float32) for s in SHAPES] for _ in members]
        steps = [m.step(step, own, is_committed=step != 3) for m, own in zip(members, gradients, strict=True)]
        found.append(await asyncio.wait_for(asyncio.gather(*steps), 60))
    for member in members:
        await member.close()
    return found


def bits(found: list[list[list[np.ndarray]]]) -> list[list[list[bytes]]]:
    return [[[gradient.tobytes() for gradient in replica] for replica in step] for step in found]


@pytest.mark.parametrize("options", CODECS, ids=lambda options: "-".join(map(str, options.values())))
@pytest.mark.parametrize("ours", [{0}, {1, 2}, {0, 1, 2}], ids=str)
async def test_replicas_of_both_implementations_come_to_the_same_bits(ours: set[int], options: dict[str, Any]) -> None:
    found = bits(await exchanged(ours, options))
    assert found == bits(await exchanged(set(), options))
    assert all(replica == step[0] for step in found for replica in step)


@pytest.mark.parametrize("num_replicas", [2, 3, 7])
@pytest.mark.parametrize("num_values", [1, 255, 257, 600, 5_000_000, 6 * 2**20])
def test_the_pages_rule_cuts_rows_as_we_do(num_replicas: int, num_values: int) -> None:
    row = GradientRow([torch.nn.Parameter(torch.empty(num_values))])
    ours = [(p.owner, p.start, p.start + p.num_values) for bucket in row.buckets(num_replicas) for p in bucket.pieces]
    assert list(cut(num_values, num_replicas)) == ours
    assert (PIECE, ALIGNMENT) == (2**20, 256)
    assert "bucket       D * 2^20 values" in TEXT
    assert "ceil(values of the bucket / (256 D)) * 256" in TEXT
