"""How long the model's own layers take on this machine, and what they keep. Knows torch, models and clocks; no links.

One layer of each kind is built with random weights and run as a worker runs it: the embedding, a block from the middle, the head;
then again with its backward pass in two halves. Then the optimizer's step over the block, and the run's codecs over one
microbatch of made values, both ends. Of several measurements the fastest counts: what another program took meanwhile is no
property of the layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from pipecomp.buffers.formats import MessageFormat
from pipecomp.buffers.memory import MemoryBuffer
from pipecomp.config import RunConfig
from pipecomp.models.base import CLASSIFICATION, Batch, Model, StageModule
from pipecomp.protocol.messages import SampleRef
from pipecomp.runtime.coding import LinkCoder
from pipecomp.runtime.optimizer import OwnedParameter, ShardOptimizer, Update
from pipecomp.runtime.rehearsal import make_codec
from pipecomp.runtime.stage import StageRuntime
from pipecomp.types import Kind, SampleId, Shard

HANDLING_S = 0.0015
"""What a worker takes around each action: threads, event loop, messages. Not measured here but once: processor time of the demo's
workers beyond that of their layers, on two cores of an AMD EPYC."""

_REPEATS = 7
_WARM_UPS = 2
_ENOUGH_S = 2.0
"""Of one measurement; a layer that takes long is run once after its warm-up."""


class ProbedLayer(NamedTuple):
    """One layer, one microbatch."""

    forward_s: float
    backward_s: float
    weights_s: float
    """The part of `backward_s` that may be left for later."""


class Probe(NamedTuple):
    """What this machine does with a run's layers, on one torch thread pool of the given size."""

    layers: dict[str, ProbedLayer]
    """By kind: `embedding`, `block`, `head`."""
    updates_per_s: float
    coded_values_per_s: float


def probe_machine(config: RunConfig, model: Model, lengths: Sequence[int], *, num_threads: int) -> Probe:
    """Measure.

    Args:
        config: of the run: codecs, recompute, optimizer.
        model: whose layers to build.
        lengths: of the samples of a usual microbatch.
        num_threads: torch's, as a worker would have; set back afterwards.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        layers = _one_of_each(model)
        probed = {kind: _probe_layer(config, model, layer, lengths) for kind, layer in layers.items()}
        return Probe(probed, _updates_per_s(config, model, layers["block"]), _coded_values_per_s(config, model, lengths))
    finally:
        torch.set_num_threads(before)


def kept_nbytes(config: RunConfig, model: Model, lengths: Sequence[int]) -> dict[str, float]:
    """By kind of layer: bytes that a microbatch of these lengths keeps from its forward to its backward, parameters left out."""
    kept = {}
    for kind, layer in _one_of_each(model).items():
        run = _LayerRun(config, model, layer, lengths)
        kept[kind] = _saved_nbytes(run.forward, run.module) + (0 if run.hidden is None else 4.0 * run.hidden.numel())
    return kept


def deferred_nbytes(config: RunConfig, model: Model, lengths: Sequence[int]) -> dict[str, float]:
    """By kind of layer: bytes that a microbatch keeps from its backward to its gradients of weights, where they wait."""
    kept = {}
    for kind, layer in _one_of_each(model).items():
        run = _LayerRun(config, model, layer, lengths, split_backward=True)
        run.forward()
        run.backward()
        kept[kind] = float(run.stage.deferred_nbytes)
    return kept


def _one_of_each(model: Model) -> dict[str, int]:
    """A layer of each kind; a model without blocks has its head measured for one."""
    last = len(model.plan.layers) - 1
    return {"embedding": 0, "block": min(max(1, last // 2), max(1, last - 1)), "head": last}


def usual_batch(model: Model, lengths: Sequence[int]) -> Batch:
    """A microbatch of made tokens."""
    generator = torch.Generator().manual_seed(0)
    shape = (len(lengths), max(lengths))
    ids = torch.randint(0, model.plan.vocab_size, shape, generator=generator)
    if model.plan.task == CLASSIFICATION:
        return Batch(tuple(lengths), ids, torch.zeros(len(lengths), dtype=torch.int64))
    labels = ids.clone()
    for row, length in enumerate(lengths):
        labels[row, length:] = -100
    return Batch(tuple(lengths), ids, labels)


def _build(model: Model, layer: int) -> StageModule:
    module = model.build(Shard(layer, layer + 1))
    model.initialize(module, None, seed=0)
    return module


class _LayerRun:
    """One layer as a stage of its own, with made values on both sides."""

    def __init__(
        self, config: RunConfig, model: Model, layer: int, lengths: Sequence[int], *, split_backward: bool = False
    ) -> None:
        self.module = _build(model, layer)
        recompute = config.train.gradient_checkpointing
        self.stage = StageRuntime(
            self.module, needs_input_gradient=layer > 0, recompute=recompute, run_seed=0, split_backward=split_backward
        )
        self._batch = usual_batch(model, lengths)
        self._num_targets = sum(lengths)
        shape = (len(lengths), max(lengths), model.plan.hidden_size)
        values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        self.hidden = None if self.module.is_first else values
        self._gradient = None if self.module.is_last else values

    def forward(self) -> None:
        self.stage.forward(1, 0, self._batch, self.hidden, num_targets=self._num_targets)

    def backward(self) -> None:
        if self.stage.has_backward:
            self.stage.backward(1, 0, self._gradient, num_targets=self._num_targets)

    def timed(self) -> tuple[float, float, float]:
        """Seconds of a forward, of its backward, and of gradients of weights that it left."""
        started = time.perf_counter()
        self.forward()
        forward_end = time.perf_counter()
        self.backward()
        backward_end = time.perf_counter()
        self.stage.weights()
        return forward_end - started, backward_end - forward_end, time.perf_counter() - backward_end


def _probe_layer(config: RunConfig, model: Model, layer: int, lengths: Sequence[int]) -> ProbedLayer:
    times = _repeat(_LayerRun(config, model, layer, lengths).timed)
    forward_s, backward_s, _ = (min(each) for each in zip(*times, strict=True))
    halves = _repeat(_LayerRun(config, model, layer, lengths, split_backward=True).timed)
    weights_s = min(weights for _, _, weights in halves)
    return ProbedLayer(forward_s, backward_s, min(weights_s, backward_s))


def _repeat(measure: Callable[[], tuple[float, ...]]) -> list[tuple[float, ...]]:
    started = time.perf_counter()
    for _ in range(_WARM_UPS):
        measure()
        if time.perf_counter() - started > _ENOUGH_S:
            break
    times: list[tuple[float, ...]] = []
    started = time.perf_counter()
    while len(times) < _REPEATS and (not times or time.perf_counter() - started < _ENOUGH_S):
        times.append(measure())
    return times


def _saved_nbytes(forward: Callable[[], None], module: StageModule) -> float:
    """Bytes of what autograd keeps; views of one storage count once, parameters and the input not at all."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    storages: dict[int, int] = {}
    alive: list[torch.Tensor] = []  # else memory that is given back could be counted as the same storage

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return float(sum(storages.values()))


def _updates_per_s(config: RunConfig, model: Model, layer: int) -> float:
    """Norms and AdamW, parameters a second."""
    module = _build(model, layer)
    owned = [OwnedParameter(layer, name, p, counts_in_norm=True) for name, p in module.named_checkpoint_parameters()]
    optimizer = ShardOptimizer(owned, config.train)
    num_parameters = sum(each.parameter.numel() for each in owned)

    def update() -> tuple[float]:
        for each in owned:
            each.parameter.grad = torch.full_like(each.parameter, 1e-3)
        started = time.perf_counter()
        optimizer.layer_norms()
        optimizer.step(Update(1e-6, 1.0))
        return (time.perf_counter() - started,)

    return num_parameters / min(seconds for (seconds,) in _repeat(update))


def _coded_values_per_s(config: RunConfig, model: Model, lengths: Sequence[int]) -> float:
    """The mean of forward and backward codecs, encoding and decoding together, later visits."""
    rates = []
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        codec = make_codec(config, kind)
        codec.warm_up(model.plan.hidden_size)
        sender, receiver = (_coder(config, kind, has_messages=codec.has_messages) for _ in range(2))
        rates.append(_coding_rate(sender, receiver, lengths, model.plan.hidden_size))
    return 2 / sum(1 / rate for rate in rates)


def _coder(config: RunConfig, kind: Kind, *, has_messages: bool) -> LinkCoder:
    buffer = MemoryBuffer(MessageFormat(config.messages.dtype)) if has_messages else None
    return LinkCoder(make_codec(config, kind), buffer, link="probe", kind=kind, run_seed=0)


def _coding_rate(sender: LinkCoder, receiver: LinkCoder, lengths: Sequence[int], num_columns: int) -> float:
    refs = [SampleRef(SampleId(index + 1), length) for index, length in enumerate(lengths)]
    values = torch.randn((len(lengths), max(lengths), num_columns), generator=torch.Generator().manual_seed(2))
    steps = iter(range(1, 1_000))

    def once() -> tuple[float]:
        step = next(steps)
        started = time.perf_counter()
        encoded = sender.encode(values, refs, step=step, metered=True)
        buffers = [memoryview(buffer) for buffer in encoded.buffers]
        receiver.decode(encoded.samples, buffers, num_columns=num_columns, step=step)
        seconds = time.perf_counter() - started
        sender.commit(step)
        receiver.commit(step)
        return (seconds,)

    return sum(lengths) * num_columns / min(seconds for (seconds,) in _repeat(once))
