"""Token buffers of a plan -> one padded Batch a microbatch. Knows lengths and tensors; no codecs, no sockets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pipecomp.errors import RemoteProtocolError
from pipecomp.models.base import Batch
from pipecomp.protocol.messages import EvaluationPlan, SampleRef, StepPlan

_IGNORED = -100


def make_batches(
    plan: StepPlan | EvaluationPlan, buffers: Sequence[memoryview], *, labels_are_classes: bool
) -> list[Batch]:
    """Pad each microbatch to its own longest sample.

    Args:
        plan: sample lengths by microbatch.
        buffers: `input_ids` and then `labels`, int32 little-endian, those of the two that the plan says it has.
        labels_are_classes: one label for each sample, not for each token.

    Raises:
        RemoteProtocolError: a buffer's length is not that of the samples.
    """
    remaining = list(buffers)
    num_tokens = sum(ref.length for refs in plan.microbatches for ref in refs)
    ids = _take(remaining, "input_ids", num_tokens) if plan.has_input_ids else None
    num_labels = sum(map(len, plan.microbatches)) if labels_are_classes else num_tokens
    labels = _take(remaining, "labels", num_labels) if plan.has_labels else None
    batches, start, first = [], 0, 0
    for refs in plan.microbatches:
        lengths = tuple(ref.length for ref in refs)
        batches.append(
            Batch(
                lengths,
                None if ids is None else _padded(ids[start:], lengths, 0),
                None
                if labels is None
                else torch.from_numpy(labels[first : first + len(refs)].astype(np.int64))
                if labels_are_classes
                else _padded(labels[start:], lengths, _IGNORED),
            )
        )
        start += sum(lengths)
        first += len(refs)
    return batches


def _take(buffers: list[memoryview], name: str, num_values: int) -> np.ndarray:
    if not buffers or len(buffers[0]) != 4 * num_values:
        got = len(buffers[0]) if buffers else "no"
        raise RemoteProtocolError(f"{name} needs {4 * num_values} bytes for {num_values} values, got {got}")
    return np.frombuffer(buffers.pop(0), dtype="<i4")


def _padded(flat: np.ndarray, lengths: tuple[int, ...], fill: int) -> torch.Tensor:
    rows = np.full((len(lengths), max(lengths)), fill, dtype=np.int64)
    start = 0
    for row, length in zip(rows, lengths, strict=True):
        row[:length] = flat[start : start + length]
        start += length
    return torch.from_numpy(rows)


def check_refs(microbatches: Sequence[Sequence[SampleRef]]) -> None:
    """Raise RemoteProtocolError unless every microbatch has samples and every sample a token and a place of its own. A plan
    without microbatches is one of a batch in which this replica has no sample."""
    ids = [ref.sample_id for refs in microbatches for ref in refs]
    if any(not refs for refs in microbatches):
        raise RemoteProtocolError("each microbatch of a plan needs a sample")
    if any(ref.length < 1 for refs in microbatches for ref in refs):
        raise RemoteProtocolError("a sample of no tokens stands in a plan")
    if len(set(ids)) != len(ids):
        raise RemoteProtocolError("a sample stands twice in one plan")
