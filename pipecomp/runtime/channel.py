"""Tensors in and out of one link, beside compute. Knows links, coders and the event loop; never runs torch layers.

    submit -> [encode in a codec thread] -> queue of two -> [send: credit, socket]         sender
    [receive, route] -> inbox by (kind, step, microbatch) -> [decode in a codec thread]    receiver (inlet.py)

A message of a step that has not begun here waits in the inbox with its credit; one of a step that is over is dropped.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar, cast

import torch

from pipecomp.errors import CodecError, RemoteProtocolError
from pipecomp.protocol.messages import GradientMessage, LinkMeter, Resend, Resent, SampleRef, TensorMessage
from pipecomp.protocol.spans import Doing, Subject
from pipecomp.protocol.wire import Received
from pipecomp.runtime.coding import EncodedMicrobatch, LinkCoder
from pipecomp.runtime.link import Link
from pipecomp.types import Kind

T = TypeVar("T")
_QUEUE_LENGTH = 2


class _OfSample(NamedTuple):
    """Part of a step: a sample's message, sent again."""

    sample_id: int


_Key = tuple[Kind, int, int | _OfSample]


class CodecThreads:
    """Where encoding and decoding run; their kernels release the GIL."""

    def __init__(self, num_threads: int = 2) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(num_threads, thread_name_prefix="codec")
        self._running: set[asyncio.Future[object]] = set()

    async def run(self, function: Callable[[], T]) -> T:
        """Run `function` in a codec thread. A cancelled caller leaves it running: `idle` waits for it."""
        future = asyncio.get_running_loop().run_in_executor(self._pool, function)
        running = cast("asyncio.Future[object]", future)
        self._running.add(running)
        running.add_done_callback(self._ended)
        return await asyncio.shield(future)

    def _ended(self, future: asyncio.Future[object]) -> None:
        self._running.discard(future)
        if not future.cancelled():
            future.exception()  # a cancelled caller does not ask, and asyncio would complain

    async def idle(self) -> None:
        """Wait until nothing runs, so that nothing more can be staged for an aborted step."""
        while self._running:
            await asyncio.wait(self._running)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


class Destination(NamedTuple):
    """What every TensorMessage of a channel has in common (law 6)."""

    run: str
    epoch: int
    replica: int
    kind: Kind
    stage: int
    num_columns: int


class _Job(NamedTuple):
    step: int
    microbatch: int
    refs: Sequence[SampleRef]
    tensor: torch.Tensor
    metered: bool


class OutChannel:
    """Encodes and sends the microbatches of one kind of traffic, in the order of `submit`."""

    def __init__(
        self,
        link: Link,
        coder: LinkCoder,
        threads: CodecThreads,
        to: Destination,
        on_refused: Callable[[int, CodecError], None],
    ) -> None:
        """`on_refused(step, error)` hears of values that cannot be encoded; the channel goes on with the next."""
        self.coder = coder
        self._on_refused = on_refused
        self._link = link
        self._threads = threads
        self._to = to
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue()
        self._encoded: asyncio.Queue[tuple[_Job, EncodedMicrobatch]] = asyncio.Queue(_QUEUE_LENGTH)
        self._requests: asyncio.Queue[Received] = asyncio.Queue()
        self._meters: list[LinkMeter] = []
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> list[asyncio.Task[None]]:
        """The tasks that do the work; one that ends, ends with the error of the link or codec."""
        name = f"{self._link.name}/{self._to.kind}"
        self._tasks = [
            asyncio.create_task(self._encode_all(), name=f"encode {name}"),
            asyncio.create_task(self._send_all(), name=f"send {name}"),
            asyncio.create_task(self._answer_all(), name=f"send again {name}"),
        ]
        return self._tasks

    def submit(self, step: int, microbatch: int, refs: Sequence[SampleRef], tensor: torch.Tensor, *, metered: bool) -> None:
        """Take (B, T, H) fp32; it must not change afterwards."""
        self._jobs.put_nowait(_Job(step, microbatch, refs, tensor, metered))

    def answer(self, request: Received) -> None:
        """Send a sample's message whole, since the receiver does not hold it."""
        self._requests.put_nowait(request)

    async def encoded(self) -> None:
        """Wait until all that was submitted is encoded and its messages are staged."""
        done = asyncio.ensure_future(self._jobs.join())
        try:
            await asyncio.wait([done, self._tasks[0]], return_when=asyncio.FIRST_COMPLETED)
        finally:
            done.cancel()
        if self._tasks[0].done():
            await self._tasks[0]

    def take_meters(self) -> list[LinkMeter]:
        """Meters since the last call."""
        meters, self._meters = self._meters, []
        return meters

    def forget(self) -> None:
        """Drop what is submitted and not encoded yet (an aborted step)."""
        while not self._jobs.empty():
            self._jobs.get_nowait()
            self._jobs.task_done()

    async def _encode_all(self) -> None:
        while True:
            job = await self._jobs.get()
            encode = functools.partial(self.coder.encode, job.tensor, job.refs, step=job.step, metered=job.metered)
            about = Subject(self._to.kind, self._link.name, job.step, self._to.stage, job.microbatch)
            try:
                encoded = await self._threads.run(self._link.recorder.timed(Doing.ENCODE, about, encode))
            except CodecError as e:
                self._on_refused(job.step, e)
            else:
                self._meters.append(encoded.meter)
                await self._encoded.put((job, encoded))
            finally:
                self._jobs.task_done()

    async def _send_all(self) -> None:
        while True:
            job, encoded = await self._encoded.get()
            message = TensorMessage(
                sequence=0,  # the link numbers it
                run=self._to.run,
                epoch=self._to.epoch,
                replica=self._to.replica,
                kind=self._to.kind,
                step=job.step,
                microbatch=job.microbatch,
                stage=self._to.stage,
                codec=self.coder.codec.name,
                num_columns=self._to.num_columns,
                samples=encoded.samples,
                evicted=encoded.evicted,
                buffer_nbytes=tuple(len(b) for b in encoded.buffers),
            )
            await self._link.send(message, encoded.buffers, values=encoded.num_values)


    async def _answer_all(self) -> None:
        while True:
            received = await self._requests.get()
            request = received.message
            assert isinstance(request, Resend)
            self._link.taken(received)
            stored = await self._threads.run(functools.partial(self.coder.resend, request.sample_id))
            buffers = () if stored is None else (stored.payload.data,)
            answer = Resent(
                sequence=0,
                step=request.step,
                microbatch=request.microbatch,
                kind=request.kind,
                sample_id=request.sample_id,
                version=0 if stored is None else stored.version,
                checksum=0 if stored is None else stored.checksum,
                dtype=self.coder.message_dtype,
                num_rows=0 if stored is None else stored.spec.num_rows,
                num_columns=0 if stored is None else stored.spec.num_columns,
                reason="it is lost here too" if stored is None else "",
                buffer_nbytes=tuple(len(b) for b in buffers),
            )
            await self._link.send(answer, buffers)


class Inbox:
    """Messages of one link by what they are about, until someone wants them."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._waiting: dict[_Key, asyncio.Future[Received]] = {}
        self._finished: dict[Kind, int] = {}
        self._answerers: dict[Kind, Callable[[Received], None]] = {}

    def on_resend(self, kind: Kind, answer: Callable[[Received], None]) -> None:
        """Who answers when the other end asks for a message of `kind` again."""
        self._answerers[kind] = answer

    async def run(self) -> None:
        """Receive until the link is lost."""
        while True:
            received = await self.link.receive()
            message = received.message
            key: _Key
            if isinstance(message, Resend):
                answer = self._answerers.get(message.kind)
                if answer is None:
                    raise RemoteProtocolError(f"link {self.link.name}: no {message.kind} values with messages are sent from here")
                answer(received)
                continue
            if isinstance(message, TensorMessage):
                key = (message.kind, message.step, message.microbatch)
            elif isinstance(message, Resent):
                key = (message.kind, message.step, _OfSample(message.sample_id))
            elif isinstance(message, GradientMessage):
                key = (message.kind, message.step, message.offset)
            else:
                raise RemoteProtocolError(f"link {self.link.name}: unexpected {type(message).__name__}")
            if message.step <= self._finished.get(message.kind, -1):
                self.link.taken(received)
                continue
            future = self._future(key)
            if future.cancelled():  # whoever waited is being cancelled: the step is about to end
                future = self._waiting[key] = asyncio.get_running_loop().create_future()
            if future.done():
                raise RemoteProtocolError(f"link {self.link.name}: a second message for {key}")
            future.set_result(received)

    async def take(self, kind: Kind, step: int, part: int) -> Received:
        """The message for one microbatch (or piece of a gradient); call `link.taken` once done with it."""
        return await self._take((kind, step, part))

    async def take_resent(self, kind: Kind, step: int, sample_id: int) -> Received:
        """The answer to a Resend; call `link.taken` once done with it."""
        return await self._take((kind, step, _OfSample(sample_id)))

    async def _take(self, key: _Key) -> Received:
        future = self._future(key)
        try:
            return await future
        except asyncio.CancelledError:
            if not future.cancelled():  # it came just when nobody wanted it any more
                self.link.taken(future.result())
            raise
        finally:
            if self._waiting.get(key) is future:
                del self._waiting[key]

    def finish(self, kind: Kind, step: int) -> None:
        """Steps up to `step` are over: drop what is here of them and what still comes."""
        self._finished[kind] = max(step, self._finished.get(kind, -1))
        for key in [k for k in self._waiting if k[0] == kind and k[1] <= step]:
            future = self._waiting.pop(key)
            if future.done() and not future.cancelled():
                self.link.taken(future.result())
            else:
                future.cancel()

    def _future(self, key: _Key) -> asyncio.Future[Received]:
        if key not in self._waiting:
            self._waiting[key] = asyncio.get_running_loop().create_future()
        return self._waiting[key]
