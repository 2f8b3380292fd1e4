"""A run as planning needs it: layers, bytes and microbatches, out of its files. Knows models, codecs and messages; no machine.

Bytes are exact for whole epochs: each sample's size is what its codec says of its length, each message has the header that the
wire gives it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from coordinator.batches import Batches
from coordinator.preparation import ReadRun, split_model
from pipecomp.buffers.opening import capacity_nbytes, kept_nbytes
from pipecomp.config import CodecOptions, CompressionConfig, RunConfig
from pipecomp.data.samples import Dataset
from pipecomp.models.base import Model
from pipecomp.partition import StagePlan
from pipecomp.planning.work import Evaluations, Exchange, Gradients, LayerWork, Width, Work
from pipecomp.protocol import wire
from pipecomp.protocol.messages import GradientMessage, SampleHeader, TensorMessage
from pipecomp.runtime.gradient_row import GradientRow, Piece
from pipecomp.runtime.rehearsal import make_codec
from pipecomp.runtime.replicas import GATHER, REDUCE, planned_nbytes
from pipecomp.types import Kind, TensorSpec
from pipecomp.units import parse_size

AS_WRITTEN = "as written"
UNCOMPRESSED = "fp32"
BITS = ((4, 8), (3, 6), (2, 4))
"""Forward and backward."""
GRADIENT_BITS = 4
"""Of gradients between replicas, with each of these."""
_SizeOf = Callable[[TensorSpec], int]
_LARGE = 1 << 63
"""An id or checksum as most are: eight bytes long on the wire."""


class Way(NamedTuple):
    """One setting of the codecs, the run file with it, and the split that this gives."""

    config: RunConfig
    width: Width
    split: StagePlan


def ways_of(config: RunConfig, run: ReadRun) -> list[Way]:
    """As the run file has it, uncompressed, and at several widths; one that the run file has already stands once."""
    compression = config.compression
    exact: CodecOptions = {"codec": "identity"}
    wanted = [(AS_WRITTEN, compression), (UNCOMPRESSED, _recoded(config, exact, exact, exact))]
    for forward_bits, backward_bits in BITS:
        forward, backward = {"codec": "delta", "bits": forward_bits}, {"codec": "uniform", "bits": backward_bits}
        gradients = {"codec": "uniform", "bits": GRADIENT_BITS}
        wanted.append((f"{forward_bits}/{backward_bits} bits", _recoded(config, forward, backward, gradients)))
    ways: list[Way] = []
    for label, recoded in wanted:
        if label != AS_WRITTEN and recoded == compression:
            ways[0] = ways[0]._replace(width=ways[0].width._replace(label=f"{label}, {AS_WRITTEN}"))
            continue
        changed = msgspec.structs.replace(config, compression=recoded)
        ways.append(Way(changed, width_of(changed, run, label), split_model(changed, run.model, run.train)))
    return ways


def _recoded(config: RunConfig, forward: CodecOptions, backward: CodecOptions, gradients: CodecOptions) -> CompressionConfig:
    """Gradients of weights cross only between replicas: with one, they stay as they are written."""
    if config.cluster.num_replicas == 1:
        gradients = config.compression.gradients
    return msgspec.structs.replace(config.compression, forward=forward, backward=backward, gradients=gradients)


def work_of(config: RunConfig, run: ReadRun, held_nbytes: dict[str, float], deferred_nbytes: dict[str, float]) -> Work:
    """What the run asks of its machines.

    Args:
        held_nbytes: by kind of layer, what a microbatch holds until its backward.
        deferred_nbytes: the same of gradients of weights that wait.
    """
    plan = run.model.plan
    trainable = [p.layer for p in plan.parameters if p.trainable]
    lengths = run.batches.usual_lengths()
    tied = plan.tied
    messages = config.messages
    memory = parse_size(messages.memory_budget, "messages.memory_budget")
    disk = parse_size(messages.disk_budget, "messages.disk_budget")
    return Work(
        layers=tuple(
            LayerWork(
                layer.kind,
                layer.cost,
                layer.num_parameters,
                _num_trainable(run.model, layer.index),
                held_nbytes.get(layer.kind, 0.0),
                deferred_nbytes.get(layer.kind, 0.0),
            )
            for layer in plan.layers
        ),
        first_trainable=min(trainable),
        num_tokens=len(lengths) * max(lengths),
        num_microbatches=_num_microbatches(config, run),
        steps_per_epoch=run.batches.steps_per_epoch,
        total_steps=run.batches.total_steps,
        recompute=config.train.gradient_checkpointing,
        evaluations=_evaluations(config, run),
        weight_nbytes=_weight_nbytes(run.model, len(plan.layers)),
        returned_nbytes=tuple(
            4.0 * sum(_count(p.shape) for p in plan.parameters if p.layer == layer.index) * config.train.save_model
            for layer in plan.layers
        ),
        store=messages.store,
        store_nbytes=capacity_nbytes(messages.store, memory, disk, is_kept=False),
        num_deferred=config.cluster.num_deferred,
        num_replicas=config.cluster.num_replicas,
        tied_values=sum(_count(p.shape) for p in plan.parameters if tied is not None and p.name == tied.name and p.trainable),
    )


def width_of(config: RunConfig, run: ReadRun, label: str) -> Width:
    """What a microbatch sends over one link."""
    hidden_size = run.model.plan.hidden_size
    num_replicas = config.cluster.num_replicas
    num_parts = run.batches.steps_per_epoch * num_replicas * _num_microbatches(config, run)
    forward, backward = make_codec(config, Kind.FORWARD), make_codec(config, Kind.BACKWARD)
    tied = run.model.plan.tied
    tied_codec = make_codec(config, Kind.TIED)
    sizes = _Sizes(run.train, hidden_size, num_parts)
    store, dtype = config.messages.store, config.messages.dtype
    message_nbytes = sizes.total(lambda spec: kept_nbytes(store, dtype, spec)) / num_replicas if forward.has_messages else 0.0
    return Width(
        label=label,
        forward=config.compression.forward,
        backward=config.compression.backward,
        first_forward_nbytes=sizes.mean(lambda spec: forward.encoded_nbytes(spec, first_visit=True))
        + sizes.header_nbytes(Kind.FORWARD, forward.name, has_messages=False),
        forward_nbytes=sizes.mean(lambda spec: forward.encoded_nbytes(spec, first_visit=False))
        + sizes.header_nbytes(Kind.FORWARD, forward.name, has_messages=forward.has_messages),
        backward_nbytes=sizes.mean(lambda spec: backward.encoded_nbytes(spec, first_visit=False))
        + sizes.header_nbytes(Kind.BACKWARD, backward.name, has_messages=False),
        num_values=run.train.num_tokens * hidden_size / num_parts,
        message_nbytes=message_nbytes,
        tied_nbytes=0.0 if tied is None else tied_codec.encoded_nbytes(TensorSpec(1, tied.num_values), first_visit=False),
        gradients=None if num_replicas == 1 else gradients_of(config, run.model),
    )


def _num_microbatches(config: RunConfig, run: ReadRun) -> int:
    """Of a whole batch, in each replica."""
    share = -(-min(config.train.batch_size, len(run.train)) // config.cluster.num_replicas)
    return min(config.train.num_microbatches, share)


# ---------------------------------------------------------------- gradients between replicas


def gradients_of(config: RunConfig, model: Model) -> Gradients:
    """What replicas exchange in a step, by how many values a worker trains."""
    codec = make_codec(config, Kind.GRADIENTS)
    num_replicas = config.cluster.num_replicas

    @functools.cache
    def exchange(num_values: int) -> Exchange:
        row = GradientRow([torch.nn.Parameter(torch.empty(num_values, device="meta"))])
        buckets = list(row.buckets(num_replicas))
        headers = [0.0] * num_replicas
        for piece in (piece for bucket in buckets for piece in bucket.pieces):
            for replica in range(num_replicas):
                header_nbytes = _gradient_header_nbytes(codec.name, row, piece, is_sum=replica == piece.owner)
                headers[replica] += header_nbytes * (num_replicas - 1 if replica == piece.owner else 1)
        payloads = [planned_nbytes(buckets, codec, replica, num_replicas) for replica in range(num_replicas)]
        nbytes = tuple(payload + header for payload, header in zip(payloads, headers, strict=True))
        return Exchange(num_values, nbytes, len(buckets))

    whole = exchange(sum(_count(p.shape) for p in model.plan.parameters if p.trainable))
    return Gradients(
        options=config.compression.gradients,
        exchange=exchange,
        bits=8 * sum(whole.nbytes) / (2 * (num_replicas - 1) * whole.num_values),
        keeps_errors=config.replicas.error_feedback and not codec.is_exact,
    )


def _gradient_header_nbytes(codec: str, row: GradientRow, piece: Piece, *, is_sum: bool) -> int:
    message = GradientMessage(
        sequence=100,
        run="0" * 16,
        epoch=1,
        replica=0,
        kind=Kind.GRADIENTS,
        step=100,
        stage=1,
        codec=codec,
        name=GATHER if is_sum else REDUCE,
        offset=piece.start + (row.num_values if is_sum else 0),
        num_values=piece.num_values,
        buffer_nbytes=(1 << 15,),
    )
    return wire.header_nbytes(message)


class _Sizes:
    """Sums over the samples of a data set, by length; means over the microbatches that they are in."""

    def __init__(self, dataset: Dataset, num_columns: int, num_microbatches: int) -> None:
        lengths, counts = np.unique(dataset.table.lengths, return_counts=True)
        self._specs = [(TensorSpec(int(length), num_columns), int(count)) for length, count in zip(lengths, counts, strict=True)]
        self._num_columns = num_columns
        self._num_samples = len(dataset)
        self._num_microbatches = num_microbatches

    def total(self, nbytes: _SizeOf) -> float:
        return float(sum(count * nbytes(spec) for spec, count in self._specs))

    def mean(self, nbytes: _SizeOf) -> float:
        return self.total(nbytes) / self._num_microbatches

    def header_nbytes(self, kind: Kind, codec: str, *, has_messages: bool) -> float:
        """Of one message; `has_messages`: its values are coded against messages, and name them."""
        num_samples = max(1, round(self._num_samples / self._num_microbatches))
        spec = self._specs[-1][0]
        checksum = _LARGE if has_messages else 0
        header = SampleHeader(_LARGE, 100 if has_messages else 0, spec.num_rows, checksum, kind is Kind.FORWARD)
        message = TensorMessage(
            sequence=100,
            run="0" * 16,
            epoch=1,
            replica=0,
            kind=kind,
            step=100,
            microbatch=0,
            stage=1,
            codec=codec,
            num_columns=self._num_columns,
            samples=(header,) * num_samples,
            buffer_nbytes=(1 << 15,) * num_samples,
        )
        return float(wire.header_nbytes(message))


def _evaluations(config: RunConfig, run: ReadRun) -> Evaluations:
    parts = run.batches.evaluation_parts
    if run.held_out is None or not parts:
        return Evaluations(0, 0, 1, 0.0)
    codec = make_codec(config, Kind.EVALUATION)
    sizes = _Sizes(run.held_out, run.model.plan.hidden_size, sum(parts))
    payload_nbytes = sizes.mean(lambda spec: codec.encoded_nbytes(spec, first_visit=True))
    nbytes = payload_nbytes + sizes.header_nbytes(Kind.EVALUATION, codec.name, has_messages=False)
    return Evaluations(num_passes(config, run.batches), len(parts), max(1, round(sum(parts) / len(parts))), nbytes)


def num_passes(config: RunConfig, batches: Batches) -> int:
    """Before the first step, after the last one, and every `eval_steps` between them."""
    every = config.train.eval_steps
    between = 0 if every is None else (batches.total_steps - 1) // every
    return 2 + between


def _num_trainable(model: Model, layer: int) -> int:
    return sum(_count(p.shape) for p in model.plan.parameters if p.layer == layer and p.trainable)


def _weight_nbytes(model: Model, num_layers: int) -> tuple[float, ...]:
    """As the checkpoint keeps them; random weights do not travel."""
    reader = model.weights
    sizes = [0.0] * num_layers
    if reader is not None:
        for parameter in model.plan.parameters:
            if parameter.name in reader:
                sizes[parameter.layer] += reader.entry(parameter.name).nbytes
    return tuple(sizes)


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
