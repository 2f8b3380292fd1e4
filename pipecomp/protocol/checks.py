"""Whether a data message is about what its receiver expects (law 6). Knows fields; re-derives nothing and decodes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from pipecomp.errors import RemoteProtocolError
from pipecomp.protocol.messages import GradientMessage, TensorMessage
from pipecomp.types import Kind


def check_tensor_message(
    message: TensorMessage,
    *,
    run: str,
    epoch: int,
    replica: int,
    kind: Kind,
    stage: int,
    codec: str,
    num_columns: int,
    samples: Sequence[tuple[int, int]],
) -> None:
    """Refuse a message that is about anything else than the microbatch that its own `step` and `microbatch` name.

    Args:
        samples: id and length of each sample of that microbatch, in order, as this end's plan has them.

    Raises:
        RemoteProtocolError: names the field, what was expected and what came.
    """
    about = f"{message.kind} message {message.sequence} (step {message.step}, microbatch {message.microbatch})"
    _check(about, "run", run, message.run)
    _check(about, "epoch", epoch, message.epoch)
    _check(about, "replica", replica, message.replica)
    _check(about, "kind", kind, message.kind)
    _check(about, "stage", stage, message.stage)
    _check(about, "codec", codec, message.codec)
    _check(about, "num_columns", num_columns, message.num_columns)
    _check(about, "number of samples", len(samples), len(message.samples))
    _check(about, "number of buffers", len(samples), len(message.buffer_nbytes))
    for i, ((sample_id, num_rows), got) in enumerate(zip(samples, message.samples, strict=True)):
        _check(about, f"sample_id of sample {i}", sample_id, got.sample_id)
        _check(about, f"num_rows of sample {i}", num_rows, got.num_rows)


def check_gradient_message(
    message: GradientMessage,
    *,
    run: str,
    epoch: int,
    replica: int,
    kind: Kind,
    stage: int,
    codec: str,
    name: str,
    num_values: int,
) -> None:
    """Refuse a message that is about anything else than the piece of a gradient that its own `step` and `offset` name.

    Raises:
        RemoteProtocolError: names the field, what was expected and what came.
    """
    about = f"{message.kind} message {message.sequence} (step {message.step}, from value {message.offset} on)"
    _check(about, "run", run, message.run)
    _check(about, "epoch", epoch, message.epoch)
    _check(about, "replica", replica, message.replica)
    _check(about, "kind", kind, message.kind)
    _check(about, "stage", stage, message.stage)
    _check(about, "codec", codec, message.codec)
    _check(about, "name", name, message.name)
    _check(about, "num_values", num_values, message.num_values)
    _check(about, "number of buffers", 1, len(message.buffer_nbytes))


def _check(about: str, field: str, expected: object, got: object) -> None:
    if got != expected:
        raise RemoteProtocolError(f"{about} has {field} {got!r}, expected {expected!r}")
