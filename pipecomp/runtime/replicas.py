"""The sum of all replicas' gradients, over the links between the workers of one rank. Knows codecs, links and one row of
gradients; no schedule and no optimizer.

Each piece of the row has an owner. Both ways are coded, and what coding loses is fed back at the next step:

    reduce    every other replica  -> owner    its own gradient of the piece; its error stays with it
              the owner adds up, in fp32 and in the order of replicas, what was sent and its own gradient as it is
    gather    owner -> every other replica     the sum; its error stays with the owner

All decode the same bytes of the sum, the owner too, so every replica ends with the same bits. A bucket starts as soon as its
last gradient is there, beside what is still computed. Errors are kept or forgotten with the step (law 3).

Source: reduce-scatter and all-gather with both hops compressed as in Wang et al., "Fine-tuning Language Models over Slow Networks
using Activation Compression with Guarantees", 2022, section 3.3 (there for momenta).
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from pipecomp.codecs.base import Codec
from pipecomp.errors import NonFiniteValues
from pipecomp.protocol.checks import check_gradient_message
from pipecomp.protocol.messages import GradientMessage, LinkMeter
from pipecomp.protocol.spans import Doing, Subject
from pipecomp.protocol.wire import Received
from pipecomp.runtime.channel import CodecThreads, Destination, Inbox
from pipecomp.runtime.gradient_row import PIECE, Bucket, GradientRow, Piece
from pipecomp.runtime.seeds import derive_seed
from pipecomp.types import Kind, TensorSpec

T = TypeVar("T")
REDUCE, GATHER = "reduce", "gather"


class Peers(NamedTuple):
    """The workers of one rank in all replicas."""

    replica: int  # this one
    inboxes: Mapping[int, Inbox]  # of the links to the others
    to: Mapping[int, Destination]  # what messages to each have in common

    @property
    def num_replicas(self) -> int:
        return len(self.inboxes) + 1


class Coding(NamedTuple):
    """How gradients are coded."""

    codec: Codec
    has_feedback: bool
    run_seed: int


class _Key(NamedTuple):
    """What an error belongs to: a piece at its sender, or at its owner."""

    hop: str
    start: int


class ReplicaExchange:
    """One worker's part in the sums of one row."""

    def __init__(
        self,
        name: str,
        row: GradientRow,
        peers: Peers,
        coding: Coding,
        threads: CodecThreads,
        *,
        first_offset: int = 0,
        piece: int = PIECE,
    ) -> None:
        """`name` enters the seeds: rows of the same name and values, wherever they are, are coded to the same bits. Messages'
        offsets begin at `first_offset`; up to `last_offset` they are this row's."""
        self.row = row
        self._name = name
        self._peers = peers
        self._coding = coding
        self._threads = threads
        self._first_offset = first_offset
        self.last_offset = first_offset + 2 * row.num_values
        self._buckets = list(row.buckets(peers.num_replicas, piece))
        self._errors: dict[_Key, torch.Tensor] = {}
        self._staged: dict[_Key, torch.Tensor] = {}
        self._meters: list[LinkMeter] = []
        self._ready: list[asyncio.Event] = []
        self._missing: list[set[int]] = []
        self._is_there: set[int] = set()
        self._places = {id(parameter): index for index, parameter in enumerate(row.parameters)}

    @property
    def num_replicas(self) -> int:
        return self._peers.num_replicas

    @property
    def error_nbytes(self) -> int:
        """What is kept of errors."""
        return sum(error.nbytes for error in self._errors.values())

    def begin(self) -> None:
        """A step's gradients will come."""
        self._ready = [asyncio.Event() for _ in self._buckets]
        self._missing = [set(bucket.parameters) for bucket in self._buckets]
        self._is_there = set()

    def complete(self, parameter: torch.nn.Parameter) -> None:
        """The gradient of `parameter` is complete and readable; of another row's it says nothing."""
        index = self._places.get(id(parameter))
        if index is not None and index not in self._is_there:
            self._is_there.add(index)
            for missing, ready in zip(self._missing, self._ready, strict=True):
                missing.discard(index)
                if not missing:
                    ready.set()

    def complete_all(self) -> None:
        """No more gradients will come."""
        for parameter in self.row.parameters:
            self.complete(parameter)

    async def run(self, step: int) -> None:
        """Exchange all buckets of a step; the row then holds the sums.

        Raises:
            NonFiniteValues: a gradient or a sum is not finite.
            RemoteProtocolError: a message is not about what it should be.
        """
        others = [replica for replica in range(self._peers.num_replicas) if replica != self._peers.replica]
        sums: dict[int, asyncio.Queue[tuple[Piece, np.ndarray]]] = {other: asyncio.Queue() for other in others}
        tasks = [asyncio.create_task(self._reduce(step, sums))]
        for other in others:
            tasks.append(asyncio.create_task(self._send_own(step, other)))
            tasks.append(asyncio.create_task(self._send_sums(step, other, sums[other])))
            tasks.append(asyncio.create_task(self._take_sums(step, other)))
        try:
            await asyncio.gather(*tasks)  # the first that fails ends the exchange: the others would wait for it
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def commit(self) -> None:
        """The step counts: its errors are fed back to the next."""
        self._errors.update(self._staged)
        self._staged = {}

    def abort(self) -> None:
        """The step never was."""
        self._staged = {}
        self._meters = []

    def scale_errors(self, factor: float) -> None:
        """What is exchanged from now on is so many times what it was."""
        for error in self._errors.values():
            error.mul_(factor)

    def rehearse(self, step: int) -> None:
        """All coding of one step and its commit, as if every other replica sent what this one has: to measure what it costs."""
        for bucket in self._buckets:
            sent = {
                piece.owner: self._encode_own(step, piece.owner, piece, is_metered=False)
                for piece in bucket.pieces
                if piece.owner != self._peers.replica
            }
            for piece in bucket.pieces:
                if piece.owner == self._peers.replica:
                    like = self._encode(step, REDUCE, piece, self.row.read(piece), self._peers.replica)[0]
                    self._add_up(step, piece, dict.fromkeys(self._peers.inboxes, like))
                else:
                    self._put(piece, sent[piece.owner])
        self.commit()

    def take_meters(self) -> list[LinkMeter]:
        """Meters since the last call: of the first piece to each other replica."""
        meters, self._meters = self._meters, []
        return meters

    # ------------------------------------------------------------ the four ways of a piece

    async def _send_own(self, step: int, other: int) -> None:
        """This replica's part of the pieces that `other` owns."""
        is_metered = True
        for bucket, ready in zip(self._buckets, self._ready, strict=True):
            piece = bucket.piece(other)
            if piece is None:
                continue
            await ready.wait()
            encode = functools.partial(self._encode_own, step, other, piece, is_metered=is_metered)
            buffer = await self._coded(Doing.ENCODE, REDUCE, step, other, piece, encode)
            is_metered = False
            await self._send(step, REDUCE, other, piece, buffer)

    async def _reduce(self, step: int, sums: Mapping[int, asyncio.Queue[tuple[Piece, np.ndarray]]]) -> None:
        """The pieces that this replica owns: wait for all parts, add up, hand the sum to everybody."""
        for bucket, ready in zip(self._buckets, self._ready, strict=True):
            piece = bucket.piece(self._peers.replica)
            if piece is None:
                continue
            await ready.wait()
            frames: dict[int, np.ndarray] = {}
            received = []
            try:
                for other in sums:
                    received.append((other, await self._take(step, REDUCE, other, piece)))
                    frames[other] = np.frombuffer(received[-1][1].buffers[0], np.uint8)
                add = functools.partial(self._add_up, step, piece, frames)
                buffer = await self._coded(Doing.ENCODE, GATHER, step, min(sums), piece, add)
            finally:
                frames.clear()
                for other, message in received:
                    self._peers.inboxes[other].link.taken(message)
            for queue in sums.values():
                queue.put_nowait((piece, buffer))

    async def _send_sums(self, step: int, other: int, sums: asyncio.Queue[tuple[Piece, np.ndarray]]) -> None:
        for bucket in self._buckets:
            if bucket.piece(self._peers.replica) is not None:
                piece, buffer = await sums.get()
                await self._send(step, GATHER, other, piece, buffer)

    async def _take_sums(self, step: int, other: int) -> None:
        """The sums of the pieces that `other` owns."""
        for bucket in self._buckets:
            piece = bucket.piece(other)
            if piece is None:
                continue
            received = await self._take(step, GATHER, other, piece)
            try:
                frame = np.frombuffer(received.buffers[0], np.uint8)
                put = functools.partial(self._put, piece, frame)
                await self._coded(Doing.DECODE, GATHER, step, other, piece, put)
            finally:
                self._peers.inboxes[other].link.taken(received)

    # ------------------------------------------------------------ in codec threads

    def _encode_own(self, step: int, other: int, piece: Piece, *, is_metered: bool) -> np.ndarray:
        values = self.row.read(piece)
        buffer, error = self._encode(step, REDUCE, piece, values, self._peers.replica)
        if is_metered and error is not None:
            self._meters.append(self._meter(other, values, error))
        return buffer

    def _add_up(self, step: int, piece: Piece, frames: Mapping[int, np.ndarray]) -> np.ndarray:
        """The sum of all replicas' parts, in their order; it is put into the row as others will decode it."""
        spec, own = TensorSpec(1, piece.num_values), self._peers.replica
        first, second, *rest = (
            self.row.read(piece) if replica == own else self._coding.codec.decode(frames[replica], None, spec).values
            for replica in range(self._peers.num_replicas)
        )
        total = first + second
        for part in rest:
            total += part
        buffer, _ = self._encode(step, GATHER, piece, total, self._peers.replica)
        self._put(piece, buffer)
        return buffer

    def _encode(
        self, step: int, hop: str, piece: Piece, values: torch.Tensor, replica: int
    ) -> tuple[np.ndarray, torch.Tensor | None]:
        codec = self._coding.codec
        out = np.empty(codec.encoded_nbytes(TensorSpec(1, piece.num_values), first_visit=True), np.uint8)
        seed = derive_seed(f"gradients/{self._name}/{hop}", self._coding.run_seed, step, piece.start, replica)
        key = _Key(hop, piece.start)
        try:
            if codec.is_exact or not self._coding.has_feedback:
                codec.encode(values, None, seed=seed, out=out)
                return out, None
            error = codec.encode_with_feedback(values, self._errors.get(key), seed=seed, out=out)
        except NonFiniteValues as e:
            whose = f"gradients of replica {replica}" if hop == REDUCE else "sums of gradients"
            raise NonFiniteValues(f"{whose}, from value {piece.start} of the row on: {e}") from e
        self._staged[key] = error
        return out, error

    def _put(self, piece: Piece, frame: np.ndarray) -> None:
        self.row.write(piece, self._coding.codec.decode(frame, None, TensorSpec(1, piece.num_values)).values)

    def _meter(self, other: int, values: torch.Tensor, error: torch.Tensor) -> LinkMeter:
        return LinkMeter(
            link=self._peers.inboxes[other].link.name,
            kind=Kind.GRADIENTS,
            squared_error=float(torch.dot(error.view(-1), error.view(-1))),
            squared_values=float(torch.dot(values.view(-1), values.view(-1))),
            squared_delta=0.0,
            squared_delta_values=0.0,
            first_visits=0,
            fallbacks=0,
            samples=0,
        )

    # ------------------------------------------------------------ messages

    def _offset(self, hop: str, piece: Piece) -> int:
        """Sums come behind all parts, so that what crosses a link in a step has numbers of its own in both directions."""
        return self._first_offset + piece.start + (self.row.num_values if hop == GATHER else 0)

    async def _coded(
        self, doing: Doing, hop: str, step: int, other: int, piece: Piece, function: Callable[[], T]
    ) -> T:
        link = self._peers.inboxes[other].link
        about = Subject(Kind.GRADIENTS, link.name, step, self._peers.to[other].stage, self._offset(hop, piece))
        return await self._threads.run(link.recorder.timed(doing, about, function))

    async def _take(self, step: int, hop: str, other: int, piece: Piece) -> Received:
        inbox, to = self._peers.inboxes[other], self._peers.to[other]
        received = await inbox.take(Kind.GRADIENTS, step, self._offset(hop, piece))
        message = received.message
        assert isinstance(message, GradientMessage)
        try:
            check_gradient_message(
                message,
                run=to.run,
                epoch=to.epoch,
                replica=self._peers.replica,
                kind=Kind.GRADIENTS,
                stage=to.stage,
                codec=self._coding.codec.name,
                name=hop,
                num_values=piece.num_values,
            )
        except BaseException:
            inbox.link.taken(received)
            raise
        return received

    async def _send(self, step: int, hop: str, other: int, piece: Piece, buffer: np.ndarray) -> None:
        to = self._peers.to[other]
        message = GradientMessage(
            sequence=0,
            run=to.run,
            epoch=to.epoch,
            replica=to.replica,
            kind=to.kind,
            step=step,
            stage=to.stage,
            codec=self._coding.codec.name,
            name=hop,
            offset=self._offset(hop, piece),
            num_values=piece.num_values,
            buffer_nbytes=(len(buffer),),
        )
        await self._peers.inboxes[other].link.send(message, [buffer.data], values=piece.num_values)


def planned_nbytes(buckets: Sequence[Bucket], codec: Codec, replica: int, num_replicas: int) -> int:
    """Payload bytes that one replica sends in a step: its part of what others own, and its sums to all of them."""
    sizes = [
        (piece.owner, codec.encoded_nbytes(TensorSpec(1, piece.num_values), first_visit=True))
        for bucket in buckets
        for piece in bucket.pieces
    ]
    return sum(nbytes * (num_replicas - 1 if owner == replica else 1) for owner, nbytes in sizes)
