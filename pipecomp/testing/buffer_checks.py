"""What every message buffer must do, as checks that any implementation can run. Knows the contract of `buffers.base` only.

    @pytest.mark.parametrize("check", BUFFER_CHECKS, ids=lambda check: check.__name__)
    def test_my_buffer(check, tmp_path):
        check(lambda message_format: MyBuffer(message_format, ...))

`make` gives a new, empty buffer of a format each time. Each check closes what it made and takes well under a second.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import get_args

import torch

from pipecomp.buffers.base import MessageBuffer
from pipecomp.buffers.formats import MessageDtype, MessageFormat, is_intact
from pipecomp.buffers.memory import MemoryBuffer
from pipecomp.errors import LocalProtocolError
from pipecomp.types import SampleId, TensorSpec

MakeBuffer = Callable[[MessageFormat], MessageBuffer]
BufferCheck = Callable[[MakeBuffer], None]

_FP32 = MessageFormat("fp32")
_FORMATS = [MessageFormat(dtype) for dtype in get_args(MessageDtype)]
_ONE, _TWO, _LAST = SampleId(0), SampleId(1), SampleId(2**64 - 1)
_SHAPES = [(1, 1), (0, 8), (3, 5), (7, 1), (1, 64), (9, 33), (16, 257)]


def check_buffer(make: MakeBuffer) -> None:
    """Run every check. Raises AssertionError, or what the buffer raised."""
    for check in BUFFER_CHECKS:
        check(make)


def values(seed: int, shape: tuple[int, int] = (4, 6)) -> torch.Tensor:
    """Normal fp32 values, another array for each seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@contextlib.contextmanager
def _made(make: MakeBuffer, message_format: MessageFormat = _FP32) -> Iterator[MessageBuffer]:
    buffer = make(message_format)
    try:
        yield buffer
    finally:
        buffer.close()


def _agrees(buffer: MessageBuffer, sample_id: SampleId, version: int, expected: torch.Tensor) -> None:
    """The buffer has exactly what its format makes of `expected`."""
    packed = buffer.format.pack(version, expected)
    stored = buffer.get_stored(sample_id)
    assert stored is not None, f"sample {sample_id} is not there"
    assert (stored.version, stored.checksum, stored.spec) == packed[:3], (stored, packed)
    assert stored.payload.tobytes() == packed.payload.tobytes()
    assert is_intact(stored)
    message = buffer.get(sample_id)
    assert message is not None
    assert message[:2] == packed[:2]
    assert message.values.dtype == torch.float32
    assert message.values.shape == expected.shape
    assert torch.equal(message.values, buffer.format.unpack(packed))


def what_is_staged_is_not_seen_before_its_commit(make: MakeBuffer) -> None:
    with _made(make) as buffer:
        buffer.stage(7, _ONE, values(1))
        assert buffer.get(_ONE) is None
        assert buffer.digest() == {}
        buffer.commit(7)
        _agrees(buffer, _ONE, 7, values(1))
        buffer.stage(8, _ONE, values(2))
        _agrees(buffer, _ONE, 7, values(1))
        buffer.commit(8)
        _agrees(buffer, _ONE, 8, values(2))


def an_aborted_step_leaves_no_trace(make: MakeBuffer) -> None:
    with _made(make) as buffer:
        buffer.stage(1, _ONE, values(1))
        buffer.stage(1, _LAST, values(3))
        buffer.commit(1)
        before = buffer.digest()
        buffer.stage(2, _ONE, values(2))
        buffer.stage(2, _TWO, values(2))
        buffer.drop(2, _LAST)
        buffer.abort(2)
        buffer.commit(2)
        assert buffer.digest() == before
        _agrees(buffer, _ONE, 1, values(1))
        _agrees(buffer, _LAST, 1, values(3))
        assert buffer.get(_TWO) is None


def steps_end_independently_of_each_other(make: MakeBuffer) -> None:
    with _made(make) as buffer:
        for step, sample_id in ((1, _ONE), (2, _TWO), (3, _LAST)):
            buffer.stage(step, sample_id, values(step))
        buffer.commit(2)
        buffer.abort(1)
        assert list(buffer.digest()) == [_TWO]
        buffer.commit(3)
        assert sorted(buffer.digest()) == [_TWO, _LAST]


def a_step_without_messages_ends_either_way(make: MakeBuffer) -> None:
    with _made(make) as buffer:
        buffer.commit(1)
        buffer.abort(2)
        assert buffer.digest() == {}


def a_dropped_message_goes_with_its_step(make: MakeBuffer) -> None:
    with _made(make) as buffer:
        buffer.stage(1, _ONE, values(1))
        buffer.stage(1, _TWO, values(2))
        buffer.commit(1)
        buffer.drop(2, _ONE)
        buffer.drop(2, _LAST)  # there is none
        _agrees(buffer, _ONE, 1, values(1))
        buffer.commit(2)
        assert buffer.get(_ONE) is None
        assert list(buffer.digest()) == [_TWO]
        buffer.stage(3, _ONE, values(3))
        buffer.commit(3)
        _agrees(buffer, _ONE, 3, values(3))


def what_is_staged_outlasts_a_drop_in_the_same_step(make: MakeBuffer) -> None:
    with _made(make) as buffer:
        buffer.stage(1, _ONE, values(1))
        buffer.drop(1, _ONE)
        buffer.drop(1, _TWO)
        buffer.stage(1, _TWO, values(2))
        buffer.commit(1)
        _agrees(buffer, _ONE, 1, values(1))
        _agrees(buffer, _TWO, 1, values(2))


def a_sample_is_staged_once_a_step(make: MakeBuffer) -> None:
    with _made(make) as buffer:
        buffer.stage(1, _ONE, values(1))
        refusal = ""
        try:
            buffer.stage(1, _ONE, values(2))
        except LocalProtocolError as e:
            refusal = str(e)
        assert "sample 0 was already staged in step 1" in refusal, "a sample was staged twice in one step"
        buffer.commit(1)
        _agrees(buffer, _ONE, 1, values(1))


def every_dtype_and_shape_comes_back_bit_for_bit(make: MakeBuffer) -> None:
    for message_format in _FORMATS:
        with _made(make, message_format) as buffer:
            for i, shape in enumerate(_SHAPES):
                buffer.stage(1, SampleId(i), values(i, shape))
            buffer.commit(1)
            for i, shape in enumerate(_SHAPES):
                _agrees(buffer, SampleId(i), 1, values(i, shape))


def a_sample_may_change_its_shape(make: MakeBuffer) -> None:
    with _made(make) as buffer:
        for step, shape in enumerate(_SHAPES, 1):
            buffer.stage(step, _ONE, values(step, shape))
            buffer.commit(step)
            _agrees(buffer, _ONE, step, values(step, shape))


def all_bits_are_kept(make: MakeBuffer) -> None:
    special = torch.tensor([[0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, 3.4e38]])
    with _made(make) as buffer:
        buffer.stage(1, _ONE, special)
        buffer.commit(1)
        message = buffer.get(_ONE)
        assert message is not None
        assert torch.equal(message.values.view(torch.int32), special.view(torch.int32))


def digests_are_those_of_a_buffer_in_memory(make: MakeBuffer) -> None:
    for message_format in _FORMATS:
        reference = MemoryBuffer(message_format)
        with _made(make, message_format) as buffer:
            for each in (buffer, reference):
                for step in (1, 2, 3):
                    for i in range(5):
                        if (i + step) % 3:
                            each.stage(step, SampleId(i), values(10 * step + i))
                    each.drop(step, SampleId(step))
                    each.commit(step)
            assert buffer.digest() == reference.digest()


def what_is_fetched_ahead_is_what_is_got(make: MakeBuffer) -> None:
    ids = [SampleId(i) for i in range(12)]
    with _made(make) as buffer:
        buffer.prefetch(ids)  # none is there
        for step in (1, 2, 3):
            for i in ids:
                buffer.stage(step, i, values(100 * step + i))
            buffer.commit(step)
            buffer.prefetch([*ids, _LAST, *ids])
            buffer.prefetch(list(reversed(ids)))
            for i in ids:
                _agrees(buffer, i, step, values(100 * step + i))


def hits_and_misses_are_counted(make: MakeBuffer) -> None:
    with _made(make) as buffer:
        assert buffer.get(_ONE) is None
        buffer.stage(1, _ONE, values(1))
        buffer.commit(1)
        for _ in range(3):
            assert buffer.get(_ONE) is not None
        counts = buffer.counts()
        assert (counts.hits, counts.misses, counts.lost) == (3, 1, 0)
        assert counts.memory_nbytes == buffer.nbytes
        assert counts.memory_nbytes + counts.disk_nbytes >= buffer.format.nbytes(TensorSpec(4, 6))


def samples_of_many_threads_do_not_meet(make: MakeBuffer) -> None:
    num_threads, num_samples, num_steps = 4, 8, 5
    with _made(make) as buffer:
        failures: list[BaseException] = []
        barrier = threading.Barrier(num_threads + 1)

        def work(thread: int) -> None:
            own = [SampleId(thread * num_samples + i) for i in range(num_samples)]
            try:
                for step in range(1, num_steps + 1):
                    barrier.wait(20)
                    for sample_id in own:
                        if step > 1:
                            _agrees(buffer, sample_id, step - 1, values(100 * step - 100 + sample_id))
                        buffer.stage(step, sample_id, values(100 * step + sample_id))
                    barrier.wait(20)
            except BaseException as e:  # noqa: BLE001 - told by the check
                failures.append(e)
                barrier.abort()

        threads = [threading.Thread(target=work, args=(i,)) for i in range(num_threads)]
        for thread in threads:
            thread.start()
        with contextlib.suppress(threading.BrokenBarrierError):
            for step in range(1, num_steps + 1):
                barrier.wait(20)
                buffer.prefetch([SampleId(i) for i in range(num_threads * num_samples)])
                barrier.wait(20)
                buffer.commit(step)
        for thread in threads:
            thread.join()
        assert not failures, failures
        assert len(buffer.digest()) == num_threads * num_samples


def closing_twice_is_closing_once(make: MakeBuffer) -> None:
    buffer = make(_FP32)
    buffer.stage(1, _ONE, values(1))
    buffer.commit(1)
    buffer.close()
    buffer.close()


BUFFER_CHECKS: tuple[BufferCheck, ...] = (
    what_is_staged_is_not_seen_before_its_commit,
    an_aborted_step_leaves_no_trace,
    steps_end_independently_of_each_other,
    a_step_without_messages_ends_either_way,
    a_dropped_message_goes_with_its_step,
    what_is_staged_outlasts_a_drop_in_the_same_step,
    a_sample_is_staged_once_a_step,
    every_dtype_and_shape_comes_back_bit_for_bit,
    a_sample_may_change_its_shape,
    all_bits_are_kept,
    digests_are_those_of_a_buffer_in_memory,
    what_is_fetched_ahead_is_what_is_got,
    hits_and_misses_are_counted,
    samples_of_many_threads_do_not_meet,
    closing_twice_is_closing_once,
)
