"""Whether a data message is about what its receiver expects (law 6). Knows fields; re-derives nothing and decodes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipecomp.errors import RemoteProtocolError
from pipecomp.protocol.messages import GradientMessage, Message, SampleHeader, TensorMessage
from pipecomp.types import Kind


def check_tensor_message(
    message: Message,
    *,
    run: str,
    epoch: int,
    replica: int,
    kind: Kind,
    step: int,
    microbatch: int,
    stage: int,
    codec: str,
    num_columns: int,
    samples: Sequence[SampleHeader],
    buffer_nbytes: Sequence[int],
) -> TensorMessage:
    """`message`, if it is the TensorMessage of exactly this microbatch.

    Args:
        samples: id, version of the message it is coded against, and length of each sample, as this end knows them.
        buffer_nbytes: what the codec's size function says for each of them (law 4).

    Raises:
        RemoteProtocolError: it is not; names the field, what was expected and what came.
    """
    if not isinstance(message, TensorMessage):
        raise RemoteProtocolError(f"a {type(message).__name__} came where a TensorMessage was expected")
    about = f"{message.kind} message {message.sequence} (step {message.step}, microbatch {message.microbatch})"
    expected: dict[str, Any] = {
        "run": run,
        "epoch": epoch,
        "replica": replica,
        "kind": kind,
        "step": step,
        "microbatch": microbatch,
        "stage": stage,
        "codec": codec,
        "num_columns": num_columns,
    }
    for field, value in expected.items():
        _check(about, field, value, getattr(message, field))
    _check(about, "number of samples", len(samples), len(message.samples))
    _check(about, "number of buffers", len(buffer_nbytes), len(message.buffer_nbytes))
    for i, (sample, got) in enumerate(zip(samples, message.samples, strict=True)):
        for field in SampleHeader.__struct_fields__:
            _check(about, f"{field} of sample {i}", getattr(sample, field), getattr(got, field))
    for i, (nbytes, got_nbytes) in enumerate(zip(buffer_nbytes, message.buffer_nbytes, strict=True)):
        _check(about, f"nbytes of buffer {i}", nbytes, got_nbytes)
    return message


def check_gradient_message(
    message: Message,
    *,
    run: str,
    epoch: int,
    replica: int,
    step: int,
    stage: int,
    codec: str,
    name: str,
    offset: int,
    num_values: int,
    nbytes: int,
) -> GradientMessage:
    """`message`, if it is the GradientMessage of exactly this piece of this parameter.

    Args:
        offset: first value of the piece in the flattened gradient.
        num_values: values of the piece.
        nbytes: what the codec's size function says for it.

    Raises:
        RemoteProtocolError: it is not; names the field, what was expected and what came.
    """
    if not isinstance(message, GradientMessage):
        raise RemoteProtocolError(f"a {type(message).__name__} came where a GradientMessage was expected")
    about = f"{message.kind} message {message.sequence} (step {message.step}, gradient of {message.name})"
    expected: dict[str, Any] = {
        "run": run,
        "epoch": epoch,
        "replica": replica,
        "kind": Kind.TIED,
        "step": step,
        "stage": stage,
        "codec": codec,
        "name": name,
        "offset": offset,
        "num_values": num_values,
        "buffer_nbytes": (nbytes,),
    }
    for field, value in expected.items():
        _check(about, field, value, getattr(message, field))
    return message


def _check(about: str, field: str, expected: object, got: object) -> None:
    if got != expected:
        raise RemoteProtocolError(f"{about} has {field} {got!r}, expected {expected!r}")
