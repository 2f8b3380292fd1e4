"""A gradient hook for torch's DistributedDataParallel. Knows buckets, codecs and process groups; knows no run, worker or socket.

A bucket is averaged in two hops. Each parameter's gradient is cut into at most one piece a rank; each piece has an owner:

    rank 0   its part of a piece ── as it is ──▶ the piece's owner          the average ── encoded ──▶ every rank
    rank 1   its part of a piece ── encoded ───▶ sums in fp32, by rank,  ─▶ decodes it, as its owner does: the same bytes,
    rank 2   its part of a piece ── encoded ───▶ divides by their number    so the same bits
                        hop 0: to the owners                                    hop 1: from the owners

Both hops feed errors back: the error of a part stays with its sender, that of an average with the owner. Pieces are of parameters
and not of buckets, so that what a gradient becomes does not depend on the bucket that it came in, and errors outlive the new
buckets that DDP makes after its first step.

Source of two hops with an error each: Tang et al., "DoubleSqueeze: Parallel Stochastic Gradient Descent with Double-pass
Error-Compensated Compression", 2019.
"""

# Annotations are evaluated here: DDP compares those of a hook with the types themselves.
import collections
import contextlib
import copy
import functools
import itertools
import json
import queue
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import xxhash
from torch._C._distributed_c10d import GradBucket  # which is torch.distributed.GradBucket, but not for mypy

from pipecomp import registry
from pipecomp.codecs.base import Codec
from pipecomp.codecs.identity import Identity
from pipecomp.errors import CodecError, ConfigError, PeerLost, WorkerFailed
from pipecomp.types import TensorSpec

MULTIPLE = 256
"""All pieces of a parameter but its last are a multiple of so many values long, so that groups of quantizers are whole."""
HEADER_NBYTES = 4
"""Ahead of each message, little-endian: 0, or 1 + the rank that failed, and then the payload means nothing."""

_FORMAT = 1  # of state_dict
_EXACT = Identity()
_BUFFERS = [f"torch.strided torch.{dtype} on cpu" for dtype in ("float32", "bfloat16", "float16")]
_FIRST_TAG, _NUM_TAGS, _MAX_STATES = 0x50430000, 1024, 1 << 19  # of a group's 2^31 tags, far from those that people choose
_num_states: collections.Counter[str] = collections.Counter()  # of each process group, by its name

ByteArray = npt.NDArray[np.uint8]
_zeros = functools.partial(torch.zeros, dtype=torch.float32)  # whatever torch's default is
Encode = Callable[[int, "_Piece", torch.Tensor, ByteArray], None]  # hop, piece, its (1, n) fp32, where its bytes go


class _Piece(NamedTuple):
    """A run of one parameter's gradient, for one rank to average."""

    parameter: int  # its number, by the buckets of the first step
    at: int  # in the parameter
    start: int  # in the bucket's buffer
    owner: int
    length: int


class CompressionState:
    """What one rank keeps for the hook of one model: codec, step, errors, and a thread that exchanges one bucket after another.

    All ranks make it with the same arguments and, if there are several on one process group, in the same order. The group must
    carry tensors of the processor's memory, as gloo does. Chance is a function of seed, step, parameter, piece, hop and rank.

    Args:
        codec: its name under `codec`, and its options as in a run file: `{"codec": "uniform", "bits": 4}`.
        process_group: that of the model's DistributedDataParallel; None is torch's default.
        seed: of stochastic rounding, 0 .. 2^64 - 1.
        error_feedback: take the error of what was sent off what is sent next. An exact codec has none.
        warmup_steps: so many first steps take the same two hops uncompressed.

    Attributes:
        step: steps done, those before a resume among them.
        nbytes_sent: payload of all steps done since the state was made: the codec's sizes of what was sent, without headers.
        step_nbytes_sent: the same for the last step done.

    Raises:
        ConfigError: a codec, option or number that cannot be used; no process group.
    """

    def __init__(
        self,
        codec: Mapping[str, object],
        *,
        process_group: dist.ProcessGroup | None = None,
        seed: int = 0,
        error_feedback: bool = True,
        warmup_steps: int = 0,
    ) -> None:
        if not 0 <= seed < 2**64 or warmup_steps < 0:
            raise ConfigError(f"seed = {seed} must be from 0 to 2^64 - 1, and warmup_steps = {warmup_steps} not below 0")
        options = dict(codec)
        self._codec: Codec = registry.load("pipecomp.codecs", str(options.pop("codec", ""))).from_options(options)
        if self._codec.has_messages:
            raise ConfigError(f"codec {self._codec.name!r} remembers samples, and gradients are none; use one without messages")
        self._keeps_errors = error_feedback and not self._codec.is_exact
        self._ranks = _Ranks(process_group)
        self._settings: dict[str, Any] = {
            "format": _FORMAT, "world_size": self._ranks.world_size, "codec": dict(codec), "seed": seed,
            "error_feedback": error_feedback, "warmup_steps": warmup_steps,
        }  # fmt: skip
        self._parameters: dict[int, tuple[int, torch.Tensor]] = {}  # number by id; and what keeps that id
        self._buckets: list[list[int]] = []  # each parameter's number of values, as buckets had them when first seen
        self._saved_buckets: list[list[int]] = []  # what a state that was loaded had there
        self._errors: list[torch.Tensor] = []  # (n,) fp32 by parameter: of parts sent; in own pieces, of averages sent
        self._failure: Exception | None = None
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue()
        threading.Thread(target=_run_all, args=(self._calls,), name="gradients", daemon=True).start()
        weakref.finalize(self, self._calls.put, None)
        self.step = self.nbytes_sent = self.step_nbytes_sent = self._step_nbytes = 0

    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The hook itself: see `compressed_allreduce`."""
        self._raise_failure()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        try:
            _check_buffer(bucket.buffer())
            pieces = list(self._cut(bucket.parameters()))
            if bucket.is_last():
                _check_same(self._saved_buckets, self._buckets)
        except ConfigError as error:
            self._failure = error  # of a step whose first buckets may be under way
            raise
        codec = _EXACT if self.step < self._settings["warmup_steps"] else self._codec
        encode = functools.partial(self._encode, codec, self.step)
        name = f"bucket {bucket.index()} in step {self.step}"
        exchange = _Exchange(name, codec, self._ranks, encode, bucket.buffer(), pieces)
        self._calls.put(functools.partial(self._finish, exchange, future))
        if bucket.is_last():
            self._calls.join()  # not future.wait(), which Ctrl-C cannot end
            self._raise_failure()
            self.step += 1
            self.step_nbytes_sent, self._step_nbytes = self._step_nbytes, 0
            self.nbytes_sent += self.step_nbytes_sent
        return future

    def expected_nbytes(self, sizes: Sequence[int] | None = None) -> int:
        """Payload that this rank sends in a compressed step for parameters of so many values, in the order of the first step's
        buckets; without `sizes`, for those of its model (0 before the first step)."""
        sizes = [*itertools.chain(*self._buckets)] if sizes is None else sizes
        others, rank = len(self._ranks.others), self._ranks.rank
        pieces = [piece for number, size in enumerate(sizes) for piece in self._pieces(number, 0, size)]
        return sum(_nbytes(self._codec, piece.length) * (others if piece.owner == rank else min(others, 1)) for piece in pieces)

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on later with the same bits: tensors, numbers, texts, lists and dicts, and nothing else.

        To be called between steps. Raises what the last step raised, if it failed: errors are of no step then.
        """
        self._raise_failure()
        counts = {"rank": self._ranks.rank, "step": self.step, "buckets": self._buckets or self._saved_buckets}
        return copy.deepcopy({**self._settings, **counts, "errors": self._errors})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from this rank's `state_dict`, with the model wrapped as it was then. Either all ranks do, or none.

        Raises:
            ConfigError: it is of another codec, world size, rank, seed or model; says what differs. A model that the state has
            not seen yet is refused by the hook, at the first step.
        """
        own = {**self._settings, "rank": self._ranks.rank}
        if missing := [key for key in (*own, "step", "buckets", "errors") if key not in state]:
            raise ConfigError(f"this is no state of a compression hook: it has no {missing[0]!r}")
        for key, value in own.items():
            if state[key] != value:
                raise ConfigError(f"the saved state has {key} = {state[key]!r}, but here it is {value!r}")
        buckets = [list(sizes) for sizes in state["buckets"]]
        _check_same(buckets, self._buckets or buckets)
        sizes = [*itertools.chain(*(buckets or self._buckets))] if self._keeps_errors else []
        saved = state["errors"] if buckets else map(_zeros, sizes)  # without buckets it is of before the first step
        errors = [error.detach().cpu().clone() for error in saved]
        if [(error.dtype, tuple(error.shape)) for error in errors] != [(torch.float32, (size,)) for size in sizes]:
            raise ConfigError("the saved state is damaged: its errors are no fp32 tensors of its parameters' sizes")
        self.step, self._saved_buckets, self._errors = int(state["step"]), buckets, errors
        self._ranks.have_met = False

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _cut(self, parameters: Sequence[torch.Tensor]) -> Iterator[_Piece]:
        """A bucket's pieces. Parameters seen for the first time get the next numbers."""
        known = [id(parameter) in self._parameters for parameter in parameters]
        if not any(known):
            buckets = [*self._buckets, [parameter.numel() for parameter in parameters]]
            _check_same(self._saved_buckets[: len(buckets)], buckets)
            if self._keeps_errors and not self._saved_buckets:
                self._errors += map(_zeros, buckets[-1])
            self._buckets = buckets
            self._parameters |= {id(p): (number, p) for number, p in enumerate(parameters, len(self._parameters))}
        elif not all(known):
            raise ConfigError("a bucket has parameters both known and new: every model needs a CompressionState of its own")
        start = 0
        for parameter in parameters:
            yield from self._pieces(self._parameters[id(parameter)][0], start, parameter.numel())
            start += parameter.numel()

    def _pieces(self, number: int, start: int, size: int) -> Iterator[_Piece]:
        """Of one parameter. Who owns the first goes round, so that parameters of few pieces burden all ranks alike."""
        num_ranks = self._ranks.world_size
        length = max(1, -(-size // (num_ranks * MULTIPLE))) * MULTIPLE
        for at in range(0, size, length):
            yield _Piece(number, at, start + at, (number + at // length) % num_ranks, min(length, size - at))

    def _finish(self, exchange: "_Exchange", future: torch.futures.Future[torch.Tensor]) -> None:
        """In the state's thread. After a failure nothing more is exchanged: nobody is there to exchange it with."""
        try:
            self._raise_failure()
            if self._ranks.others:
                self._ranks.meet(json.dumps([self._settings, self.step], sort_keys=True, default=repr))
                self._step_nbytes += exchange.run()
            future.set_result(exchange.buffer)
        except Exception as error:  # noqa: BLE001 - raised by the hook that waits, or by the next one
            self._failure = error
            future.set_exception(error)  # type: ignore[arg-type]  # torch's own annotation is of a result

    def _encode(self, codec: Codec, step: int, hop: int, piece: _Piece, values: torch.Tensor, out: ByteArray) -> None:
        """Encode a piece's (1, n) fp32 into `out`, less the error that it had before; keep the new one."""
        parts = (self._settings["seed"], step, piece.parameter, piece.at, hop, self._ranks.rank)
        seed = xxhash.xxh3_64_intdigest(b"ddp" + struct.pack("<6Q", *parts))
        if self._keeps_errors and codec is self._codec:
            error = self._errors[piece.parameter][piece.at :][: piece.length].view(1, -1)
            error.copy_(codec.encode_with_feedback(values, error, seed=seed, out=out))
        else:
            codec.encode(values, None, seed=seed, out=out)


def compressed_allreduce(state: CompressionState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over all ranks, compressed: `model.register_comm_hook(CompressionState(...), compressed_allreduce)`.

    Buckets are exchanged in a thread of the state's while backward goes on. The hook of a step's last bucket, which comes when
    all gradients are there, waits for them all; so what goes wrong is raised by `backward` as the exception that it is. State
    and model wrapper are of no use afterwards.

    Args:
        bucket: (n,) fp32, or bf16 or fp16, which is averaged in fp32 and rounded again; in the processor's memory, dense.

    Returns:
        A future of the bucket's own buffer, holding the average: the same bits on all ranks. With one rank, as it was.

    Raises:
        NonFiniteValues, CodecError: a gradient here, or an average, that the codec cannot encode; names bucket, step, parameter.
        WorkerFailed: another rank raised one of these, for the same bucket; names the rank.
        PeerLost: the connection to another rank broke, or the process group's timeout went by.
        ConfigError: another dtype or device; ranks with other settings or at another step; a saved state of another model.
    """
    return state.average(bucket)


class _Transfer(NamedTuple):
    """One message under way, to or from a rank."""

    rank: int
    content: ByteArray
    work: dist.Work | None

    def wait(self) -> ByteArray:
        with _broken_by(self.rank):
            if self.work is not None:
                self.work.wait()
        return self.content


@contextlib.contextmanager
def _broken_by(rank: int) -> Iterator[None]:
    """What torch raises for a connection becomes PeerLost."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(f"the exchange of gradients with rank {rank} broke: {error}") from error


class _Ranks:
    """The ranks of a process group, and messages between them under tags that are one state's own.

    Messages from one rank to another, not collectives: those pair up by the order of calls, in which two threads cannot agree.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        group = process_group or dist.group.WORLD
        if group is None or dist.get_rank(group) < 0:
            raise ConfigError("this process is in no process group, or not in this one: call init_process_group first")
        self._group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.others = [rank for rank in range(self.world_size) if rank != self.rank]
        self.have_met = False
        first_tag = _FIRST_TAG + _num_states[group.group_name] % _MAX_STATES * _NUM_TAGS
        _num_states[group.group_name] += 1
        self._meeting_tag, self._tags = first_tag, itertools.cycle(range(first_tag + 2, first_tag + _NUM_TAGS, 2))

    def next_tags(self) -> tuple[int, int]:
        """Of the two hops of the next bucket."""
        tag = next(self._tags)
        return tag, tag + 1

    def send(self, rank: int, content: ByteArray, tag: int) -> _Transfer:
        with _broken_by(rank):
            return _Transfer(rank, content, dist.isend(torch.from_numpy(content), group=self._group, tag=tag, group_dst=rank))

    def receive(self, rank: int, nbytes: int, tag: int) -> _Transfer:
        content = np.empty(nbytes, np.uint8)
        with _broken_by(rank):
            return _Transfer(rank, content, dist.irecv(torch.from_numpy(content), group=self._group, tag=tag, group_src=rank))

    def meet(self, settings: str) -> None:
        """Once, compare `settings` with the others': where sizes of messages differed, gloo would end the process."""
        if self.have_met:
            return
        mine = np.frombuffer(xxhash.xxh3_64_digest(settings.encode()), np.uint8).copy()
        arriving = [self.receive(rank, mine.size, self._meeting_tag) for rank in self.others]
        sent = [self.send(rank, mine, self._meeting_tag) for rank in self.others]
        strange = [str(each.rank) for each in arriving if not np.array_equal(each.wait(), mine)]
        for each in sent:
            each.wait()
        if strange:
            differing = f"rank {self.rank} and rank {', '.join(strange)} have other settings, or are at another step"
            raise ConfigError(f"{differing}; here: {settings}")
        self.have_met = True


def _run_all(calls: queue.Queue[Callable[[], None] | None]) -> None:
    """A state's thread, until the state is gone. A daemon: Python's exit is not to wait for a peer that never answers."""
    while (call := calls.get()) is not None:
        call()
        del call  # it holds the state
        calls.task_done()


class _Exchange:
    """Both hops of one bucket. What fails here is told to the others ahead of the payload; what failed there is passed on.

    Every message is sent, whatever has failed, so that nobody waits for one that never comes. A failure at hop 0 is known to an
    owner at least, and an owner's to everybody at hop 1: so all ranks raise, for the same bucket.
    """

    def __init__(self, name: str, codec: Codec, ranks: _Ranks, encode: Encode, buffer: torch.Tensor, cut: list[_Piece]) -> None:
        self._name, self._codec, self._ranks, self._encode, self.buffer = name, codec, ranks, encode, buffer
        self._values = buffer.float()  # (n,): the buffer itself if it is fp32
        self._slots: dict[int, list[tuple[_Piece, slice]]] = {}  # each owner's pieces, and where in its messages they are
        self._sizes: dict[int, int] = {}  # of each owner's messages; none for one that owns nothing
        for piece in cut:
            begin = self._sizes.get(piece.owner, HEADER_NBYTES)
            self._sizes[piece.owner] = begin + _nbytes(codec, piece.length)
            self._slots.setdefault(piece.owner, []).append((piece, slice(begin, self._sizes[piece.owner])))
        self._culprit: int | None = None
        self._error: Exception | None = None

    def run(self) -> int:
        """Put the average into the bucket's buffer; return the payload's bytes that were sent."""
        ranks, sizes, me = self._ranks, self._sizes, self._ranks.rank
        owners, readers = [rank for rank in ranks.others if rank in sizes], ranks.others if me in sizes else []
        to_owners, from_owners = ranks.next_tags()
        parts = [ranks.receive(rank, sizes[me], to_owners) for rank in readers]
        averages = [ranks.receive(rank, sizes[rank], from_owners) for rank in owners]
        sent = [ranks.send(rank, self._message(rank, 0, self._part), to_owners) for rank in owners]
        if readers:
            arrived = {part.rank: self._arrived(part) for part in parts}
            own = self._message(me, 1, functools.partial(self._average, arrived))
            sent += [ranks.send(rank, own, from_owners) for rank in readers]
            self._take(me, own)
        for average in averages:
            self._take(average.rank, self._arrived(average))
        for sending in sent:
            sending.wait()
        self._raise_failure()
        if self._values is not self.buffer:
            self.buffer.copy_(self._values)
        return sum(sending.content.size - HEADER_NBYTES for sending in sent)

    def _message(self, owner: int, hop: int, values_of: Callable[[_Piece, slice], torch.Tensor]) -> ByteArray:
        """All pieces of `owner`, encoded behind a header."""
        message = np.zeros(self._sizes[owner], np.uint8)
        self._each(owner, lambda piece, where: self._encode(hop, piece, values_of(piece, where), message[where]))
        message[:HEADER_NBYTES].view("<u4")[0] = 0 if self._culprit is None else 1 + self._culprit
        return message

    def _arrived(self, transfer: _Transfer) -> ByteArray:
        message = transfer.wait()
        if self._culprit is None and (told := int(message[:HEADER_NBYTES].view("<u4")[0])):
            self._culprit = told - 1
        return message

    def _average(self, arrived: Mapping[int, ByteArray], piece: _Piece, where: slice) -> torch.Tensor:
        """(1, n) fp32: the ranks' parts of a piece, added in the order of ranks, divided by their number."""
        total = torch.empty(0)
        for rank in range(self._ranks.world_size):
            part = self._decoded(piece, arrived[rank][where]) if rank in arrived else self._part(piece, where)
            total = total.add_(part) if rank else part.clone()
        return total.div_(self._ranks.world_size)

    def _take(self, owner: int, message: ByteArray) -> None:
        """The averages of an owner's pieces into the bucket."""
        self._each(owner, lambda piece, where: self._part(piece, where).copy_(self._decoded(piece, message[where])))

    def _part(self, piece: _Piece, where: slice) -> torch.Tensor:
        """(1, n) fp32, a view of the bucket."""
        return self._values[piece.start : piece.start + piece.length].view(1, -1)

    def _decoded(self, piece: _Piece, encoded: ByteArray) -> torch.Tensor:
        return self._codec.decode(encoded, None, TensorSpec(1, piece.length)).values

    def _each(self, owner: int, act: Callable[[_Piece, slice], object]) -> None:
        """Act on the pieces of `owner` until something has failed, here or elsewhere."""
        for piece, where in self._slots[owner]:
            if self._culprit is not None:
                return
            try:
                act(piece, where)
            except Exception as error:  # noqa: BLE001 - told to the other ranks, then raised
                self._culprit, self._error = self._ranks.rank, error
                if isinstance(error, CodecError):
                    whose = f"parameter {piece.parameter} by the first step's buckets, from its value {piece.at} on"
                    self._error = type(error)(f"{self._name}, {whose}: {error}")

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error
        if self._culprit is not None:
            raise WorkerFailed(f"rank {self._culprit} could not exchange the gradients of {self._name}; its own error says why")


@functools.lru_cache(maxsize=4096)
def _nbytes(codec: Codec, num_values: int) -> int:
    return codec.encoded_nbytes(TensorSpec(1, num_values), first_visit=True)


def _check_buffer(buffer: torch.Tensor) -> None:
    found = f"{buffer.layout} {buffer.dtype} on {buffer.device}"
    if found not in _BUFFERS:
        raise ConfigError(f"gradients of {found} cannot be averaged here; they must be one of: {', '.join(_BUFFERS)}")


def _check_same(saved: list[list[int]], found: list[list[int]]) -> None:
    """ConfigError, saying where they differ, unless the buckets are the same, or none were saved."""
    for bucket, (was, now) in enumerate(itertools.zip_longest(saved, found) if saved else ()):
        if was != now:
            where = f"bucket {bucket} of the first step had parameters of {was} values, and here {now}"
            raise ConfigError(f"the saved state is of a model with other parameters, or wrapped with other options: {where}")
