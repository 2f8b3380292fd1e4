"""A tied weight's two gradients, exchanged between the worker of the embedding and the worker of the head. Knows one link,
one codec and two `.grad`s; no schedule.

Each end sends its own gradient in pieces and both add up the same two reconstructions, embedding first, so that the copies of
the weight stay bit-identical whatever the codec. With `identity` the sum is the one that a single process forms.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import torch

from pipecomp.codecs.base import Codec
from pipecomp.protocol.checks import check_gradient_message
from pipecomp.protocol.messages import GradientMessage
from pipecomp.protocol.spans import Doing, Subject
from pipecomp.protocol.wire import Received
from pipecomp.runtime.channel import CodecThreads, Destination, Inbox
from pipecomp.runtime.seeds import derive_seed
from pipecomp.types import TensorSpec

T = TypeVar("T")
_PIECE_NBYTES = 4 << 20


def add_tied_gradients(embedding: torch.nn.Parameter, head: torch.nn.Parameter) -> None:
    """Both on one worker: the embedding's `.grad` becomes embedding + head, and the head's is let go."""
    if head.grad is not None:
        embedding.grad = head.grad if embedding.grad is None else embedding.grad.add_(head.grad)
        head.grad = None


class TiedExchange:
    """One end of the exchange."""

    def __init__(
        self,
        inbox: Inbox,
        codec: Codec,
        threads: CodecThreads,
        to: Destination,
        *,
        own_stage: int,
        name: str,
        parameter: torch.nn.Parameter,
        run_seed: int,
    ) -> None:
        """`to` is the other end, `own_stage` this one; the embedding is the one at stage 0."""
        self.parameter = parameter
        self._inbox = inbox
        self._codec = codec
        self._threads = threads
        self._to = to
        self._name = name
        self.own_stage = own_stage
        self._is_embedding = own_stage == 0
        self._run_seed = run_seed

    async def exchange(self, step: int) -> None:
        """Replace the parameter's gradient by the sum of both ends'."""
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)
        pieces = list(self._pieces(self.parameter.grad.reshape(self.parameter.shape[0], -1)))
        encoded = [asyncio.Event() for _ in pieces]
        tasks = [
            asyncio.create_task(self._send_all(step, pieces, encoded)),
            asyncio.create_task(self._add_all(step, pieces, encoded)),
        ]
        try:
            await asyncio.gather(*tasks)  # the first that fails ends the exchange: the other would wait for it
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def finish(self, step: int) -> None:
        """The step is over; drop pieces of it that still come."""
        self._inbox.finish(self._to.kind, step)

    async def _send_all(
        self, step: int, pieces: list[tuple[int, torch.Tensor]], encoded: list[asyncio.Event]
    ) -> None:
        for (start, rows), done in zip(pieces, encoded, strict=True):
            encode = functools.partial(self._encode, step, start, rows)
            buffer = await self._threads.run(self._timed(Doing.ENCODE, step, start, encode))
            done.set()
            await self._send(step, start, rows.numel(), buffer)

    async def _add_all(
        self, step: int, pieces: list[tuple[int, torch.Tensor]], encoded: list[asyncio.Event]
    ) -> None:
        for (start, rows), mine_is_there in zip(pieces, encoded, strict=True):
            received = await self._inbox.take(self._to.kind, step, start)
            try:
                self._check(received, rows.numel())
                await mine_is_there.wait()
                frame = np.frombuffer(received.buffers[0], np.uint8)
                add = functools.partial(self._add, rows, frame)
                await self._threads.run(self._timed(Doing.DECODE, step, start, add))
            finally:
                self._inbox.link.taken(received)

    def _timed(self, doing: Doing, step: int, start: int, function: Callable[[], T]) -> Callable[[], T]:
        link = self._inbox.link
        return link.recorder.timed(doing, Subject(self._to.kind, link.name, step, self._to.stage, start), function)

    def _check(self, received: Received, num_values: int) -> None:
        """Law 6; the offset is what the inbox found the message by."""
        message = received.message
        assert isinstance(message, GradientMessage)
        check_gradient_message(
            message,
            run=self._to.run,
            epoch=self._to.epoch,
            replica=self._to.replica,
            kind=self._to.kind,
            stage=self.own_stage,
            codec=self._codec.name,
            name=self._name,
            num_values=num_values,
        )

    def _pieces(self, gradient: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        width = gradient.shape[1]
        num_rows = max(1, _PIECE_NBYTES // (4 * width))
        for first in range(0, gradient.shape[0], num_rows):
            yield first * width, gradient[first : first + num_rows]

    def _encode(self, step: int, start: int, rows: torch.Tensor) -> np.ndarray:
        """Encode one piece and leave its reconstruction in place of it."""
        spec = TensorSpec(rows.shape[0], rows.shape[1])
        out = np.empty(self._codec.encoded_nbytes(spec, first_visit=True), np.uint8)
        seed = derive_seed("tied", self._run_seed, step, start, int(self._is_embedding))
        self._codec.encode(rows, None, seed=seed, out=out)
        rows.copy_(self._codec.decode(out, None, spec).values)
        return out

    def _add(self, rows: torch.Tensor, frame: np.ndarray) -> None:
        theirs = self._codec.decode(frame, None, TensorSpec(rows.shape[0], rows.shape[1])).values
        embedding, head = (rows, theirs) if self._is_embedding else (theirs, rows)
        torch.add(embedding, head, out=rows)

    async def _send(self, step: int, start: int, num_values: int, buffer: np.ndarray) -> None:
        message = GradientMessage(
            sequence=0,
            run=self._to.run,
            epoch=self._to.epoch,
            replica=self._to.replica,
            kind=self._to.kind,
            step=step,
            stage=self._to.stage,
            codec=self._codec.name,
            name=self._name,
            offset=start,
            num_values=num_values,
            buffer_nbytes=(len(buffer),),
        )
        await self._inbox.link.send(message, [buffer.data], values=num_values)
