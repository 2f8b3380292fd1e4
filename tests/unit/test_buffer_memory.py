"""Messages in memory: nothing staged is seen before its step commits."""

from __future__ import annotations

import pytest
import torch

from pipecomp.buffers.formats import MessageFormat
from pipecomp.buffers.memory import MemoryBuffer
from pipecomp.errors import LocalProtocolError
from pipecomp.types import SampleId

ONE, TWO = SampleId(1), SampleId(2**64 - 1)


def message(fill: float = 1.0) -> torch.Tensor:
    return torch.full((2, 3), fill)


def test_a_staged_message_is_not_seen_before_its_commit() -> None:
    buffer = MemoryBuffer()
    buffer.stage(7, ONE, message())
    assert buffer.get(ONE) is None
    buffer.commit(7)
    assert buffer.get(ONE).version == 7


def test_an_aborted_step_leaves_no_trace() -> None:
    buffer = MemoryBuffer()
    buffer.stage(1, ONE, message())
    buffer.commit(1)
    before = buffer.digest()
    buffer.stage(2, ONE, message(5.0))
    buffer.stage(2, TWO, message())
    buffer.abort(2)
    buffer.commit(2)
    assert buffer.digest() == before
    assert buffer.nbytes == 24


def test_steps_end_independently_of_each_other() -> None:
    buffer = MemoryBuffer()
    buffer.stage(1, ONE, message())
    buffer.stage(2, TWO, message())
    buffer.commit(2)
    buffer.abort(1)
    assert list(buffer.digest()) == [TWO]


def test_a_sample_is_staged_once_a_step() -> None:
    buffer = MemoryBuffer()
    buffer.stage(1, ONE, message())
    with pytest.raises(LocalProtocolError, match="sample 1 was already staged in step 1"):
        buffer.stage(1, ONE, message())


def test_a_step_without_messages_can_end_either_way() -> None:
    buffer = MemoryBuffer()
    buffer.commit(1)
    buffer.abort(2)
    assert buffer.digest() == {}


def test_staged_messages_count_as_held() -> None:
    buffer = MemoryBuffer()
    buffer.stage(1, ONE, message())
    assert buffer.nbytes == 24
    buffer.commit(1)
    buffer.stage(2, ONE, message())
    assert buffer.nbytes == 48
    buffer.commit(2)
    assert buffer.nbytes == 24


def test_a_digest_tells_versions_and_bits_apart() -> None:
    digests = []
    for step, values in ((1, message()), (2, message()), (1, message(-0.0)), (1, message(0.0))):
        buffer = MemoryBuffer()
        buffer.stage(step, ONE, values)
        buffer.commit(step)
        digests.append(buffer.digest()[ONE])
    assert len(set(digests)) == 4


def test_a_message_that_is_dropped_goes_with_the_commit() -> None:
    buffer = MemoryBuffer()
    buffer.stage(1, ONE, message())
    buffer.commit(1)
    buffer.drop(2, ONE)
    assert buffer.get(ONE) is not None
    buffer.abort(2)
    buffer.drop(3, ONE)
    buffer.commit(3)
    assert buffer.get(ONE) is None


@pytest.mark.parametrize("order", [("stage", "drop"), ("drop", "stage")])
def test_a_sample_that_is_visited_and_dropped_in_one_step_is_kept(order: tuple[str, str]) -> None:
    buffer = MemoryBuffer()
    for what in order:
        if what == "stage":
            buffer.stage(1, ONE, message())
        else:
            buffer.drop(1, ONE)
    buffer.commit(1)
    assert buffer.get(ONE) is not None


def test_a_message_in_fp32_is_not_copied() -> None:
    buffer, values = MemoryBuffer(), message()
    buffer.stage(1, ONE, values)
    buffer.commit(1)
    assert buffer.get(ONE).values.data_ptr() == values.data_ptr()


def test_a_coarser_format_is_what_is_held() -> None:
    buffer = MemoryBuffer(MessageFormat("bf16"))
    buffer.stage(1, ONE, torch.full((2, 3), 1 + 2**-10))
    buffer.commit(1)
    assert buffer.nbytes == 12
    assert torch.equal(buffer.get(ONE).values, message())
