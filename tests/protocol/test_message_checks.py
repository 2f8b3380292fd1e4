"""A data message names what it is about, and anything else than what is expected is refused by field (law 6)."""

from __future__ import annotations

import re

import msgspec
import pytest

from pipecomp.errors import RemoteProtocolError
from pipecomp.protocol.checks import check_gradient_message, check_tensor_message
from pipecomp.protocol.messages import GradientMessage, SampleHeader, TensorMessage
from pipecomp.types import Kind

TENSOR = TensorMessage(
    sequence=6, run="r", epoch=1, replica=0, kind=Kind.FORWARD, step=3, microbatch=1, stage=2, codec="delta", num_columns=64,
    samples=(SampleHeader(11, 0, 5), SampleHeader(12, 4, 7)), buffer_nbytes=(10, 14),
)  # fmt: skip
EXPECTED_TENSOR = {
    "run": "r", "epoch": 1, "replica": 0, "kind": Kind.FORWARD, "stage": 2, "codec": "delta", "num_columns": 64,
    "samples": [(11, 5), (12, 7)],
}  # fmt: skip
GRADIENT = GradientMessage(
    sequence=6, run="r", epoch=1, replica=0, kind=Kind.TIED, step=3, stage=0, codec="identity", name="wte", offset=0,
    num_values=25, buffer_nbytes=(100,),
)  # fmt: skip
EXPECTED_GRADIENT = {
    "run": "r", "epoch": 1, "replica": 0, "kind": Kind.TIED, "stage": 0, "codec": "identity", "name": "wte",
    "num_values": 25,
}  # fmt: skip


def test_the_message_that_is_expected_passes():
    check_tensor_message(TENSOR, **EXPECTED_TENSOR)
    check_gradient_message(GRADIENT, **EXPECTED_GRADIENT)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("run", "other", "run 'other', expected 'r'"),
        ("epoch", 2, "epoch 2, expected 1"),
        ("replica", 1, "replica 1, expected 0"),
        ("kind", Kind.BACKWARD, "kind <Kind.BACKWARD: 'backward'>, expected <Kind.FORWARD: 'forward'>"),
        ("stage", 1, "stage 1, expected 2"),
        ("codec", "uniform", "codec 'uniform', expected 'delta'"),
        ("num_columns", 63, "num_columns 63, expected 64"),
        ("samples", TENSOR.samples[:1], "number of samples 1, expected 2"),
        ("samples", TENSOR.samples[::-1], "sample_id of sample 0 12, expected 11"),
        ("samples", (TENSOR.samples[0], SampleHeader(12, 4, 8)), "num_rows of sample 1 8, expected 7"),
        ("buffer_nbytes", (24,), "number of buffers 1, expected 2"),
    ],
)
def test_a_tensor_message_of_something_else_is_refused_by_field(field, value, reason):
    message = msgspec.structs.replace(TENSOR, **{field: value})
    with pytest.raises(RemoteProtocolError, match=r"message 6 \(step 3, microbatch 1\) has " + reason):
        check_tensor_message(message, **EXPECTED_TENSOR)


@pytest.mark.parametrize(
    ("field", "value"),
    [("run", "x"), ("epoch", 2), ("replica", 1), ("kind", Kind.FORWARD), ("stage", 1), ("codec", "cast"), ("name", "wpe"),
     ("num_values", 24)],
)  # fmt: skip
def test_a_gradient_message_of_something_else_is_refused_by_field(field, value):
    message = msgspec.structs.replace(GRADIENT, **{field: value})
    with pytest.raises(
        RemoteProtocolError, match=rf"message 6 \(step 3, from value 0 on\) has {field} {re.escape(repr(value))}, expected"
    ):
        check_gradient_message(message, **EXPECTED_GRADIENT)


def test_every_field_that_says_what_a_message_is_about_is_checked():
    own = {"sequence", "step", "microbatch", "buffer_nbytes"}  # by the link, the receiver's inbox, and by number
    own |= {"evicted"}  # what the sender has decided, not what the message is about
    assert set(TensorMessage.__struct_fields__) - own == set(EXPECTED_TENSOR)
    own = {"sequence", "step", "offset", "buffer_nbytes"}
    assert set(GradientMessage.__struct_fields__) - own == set(EXPECTED_GRADIENT)
