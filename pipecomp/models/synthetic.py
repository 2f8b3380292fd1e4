"""A model that computes nothing and sends everything: tensors of any size, made once, and sleep in place of work. Knows torch and
the clock; no transformers.

    layer 0      embedding, takes no time
    layer 1..n   blocks: what each gives is a view into a ring of tensors, after `forward_s` of sleep; its backward pass
                 gives gradients of the same kind after `backward_s`
    layer n+1    head, takes no time: one score a token, out of the first columns of what it is given

For measuring links: what crosses, and when, is as with a real model of that width and those times, on a machine that could not
run one. Every layer has a parameter whose gradient comes from values that did cross, so that norms, optimizer, saving and loss
go on working; but a block gives the same whatever it is given and whatever its parameter is. Recomputing (in
`train.gradient_checkpointing`) sleeps for `forward_s` once more.

Which tensor of the ring a microbatch is given is a function of the seeds of its layer, that is of run, step and microbatch.
"""

from __future__ import annotations

import difflib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import torch
import xxhash
from torch import nn

from pipecomp.config import Count, NonNegative, Positive
from pipecomp.errors import ConfigError
from pipecomp.models._checkpoint import CheckpointReader
from pipecomp.models._deferral import Deferral, Half
from pipecomp.models._plan import frozen_names
from pipecomp.models._ring import RingSpec, TensorRing
from pipecomp.models.base import Batch, LayerSeeds, LayerSpec, Model, ModelMaker, ModelPlan, ParameterSpec, StageModule
from pipecomp.types import Shard

_SCORED = 8
"""Columns that the head looks at, so that it costs nothing either."""
_NUM_GRADIENTS = 2
"""Gradients cross without messages, so few tensors do."""
_IGNORED = -100


class SyntheticConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[model] config = {model_type = "synthetic", ...}`."""

    model_type: Literal["synthetic"] = "synthetic"
    n_layer: Positive = 8
    n_embd: Annotated[int, msgspec.Meta(ge=8, le=2**20)] = 1600
    n_positions: Annotated[int, msgspec.Meta(ge=2, le=2**20)] = 1024
    """Rows of each tensor of the ring, so memory too: the longest sample."""
    vocab_size: Positive = 50257
    forward_s: NonNegative = 0.0
    """Seconds that a block's forward pass takes, for a microbatch of any size."""
    backward_s: NonNegative = 0.0
    weights_s: NonNegative = 0.0
    """The part of `backward_s` that gradients of weights take, for which the layer below need not wait."""
    change: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.1
    """Relative change of a sample's activations from one visit to the next."""
    num_tensors: Annotated[int, msgspec.Meta(ge=2, le=64)] = 4
    block_parameters: Count = 0
    """Values of each block's parameter, for gradients that replicas exchange; 0: as many as its width. More than that get their
    gradient once a step, in the first backward pass: adding to it 16 times over would cost what a device does by the way."""


class _Work(NamedTuple):
    """One call of one layer."""

    first: int  # which element of the rings
    shape: tuple[int, int]  # B, T
    model: SyntheticModel
    is_block: bool
    deferral: Deferral | None

    def activations(self) -> torch.Tensor:
        return self.model.activations.take(self.first, *self.shape)

    def gradients(self) -> torch.Tensor:
        return self.model.gradients.take(self.first, *self.shape)

    def times(self) -> tuple[float, float]:
        values = self.model.values
        return (values.forward_s, values.backward_s - self.deferred_s) if self.is_block else (0.0, 0.0)

    @property
    def deferred_s(self) -> float:
        return self.model.values.weights_s if self.is_block and self.deferral is not None else 0.0


class _Layer(torch.autograd.Function):
    """Embedding or block: (B, T, H) out of the ring, whatever came in."""

    @staticmethod
    def forward(ctx: Any, _hidden: torch.Tensor | None, weight: nn.Parameter, work: _Work) -> torch.Tensor:  # noqa: ANN401
        end = time.perf_counter() + work.times()[0]
        ctx.work, ctx.weight = work, weight
        output = work.activations()
        _sleep_until(end)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:  # noqa: ANN401
        """The weight's gradient is that of the first token of each sample, summed; of a large weight, made once a step."""
        end = time.perf_counter() + ctx.work.times()[1]
        hidden = ctx.work.gradients() if ctx.needs_input_grad[0] else None
        weight = _weight_gradient(ctx.weight, gradients[0]) if ctx.needs_input_grad[1] else None
        _sleep_until(end)
        if ctx.work.deferred_s:
            ctx.work.deferral.later(Half(lambda: time.sleep(ctx.work.deferred_s)))
        return hidden, weight, None


def _weight_gradient(weight: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor | None:
    """(B, T, H) -> the weight's shape: columns' sums, one after the other until it is full."""
    columns = gradient[:, 0].sum(0)
    if weight.numel() == columns.numel():
        return columns
    if weight.grad is not None:
        return None
    return columns.repeat(-(-weight.numel() // columns.numel()))[: weight.numel()]


class _Head(torch.autograd.Function):
    """(B, T, H) -> (B, T, 1)."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, work: _Work) -> torch.Tensor:  # noqa: ANN401
        scored = hidden[..., :_SCORED].contiguous()
        ctx.work = work
        ctx.save_for_backward(scored)
        return scored @ weight[:_SCORED, None]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:  # noqa: ANN401
        hidden = ctx.work.gradients() if ctx.needs_input_grad[0] else None
        weight = None
        if ctx.needs_input_grad[1]:
            (scored,) = ctx.saved_tensors
            weight = torch.zeros(ctx.work.model.values.n_embd)
            weight[:_SCORED] = (gradients[0] * scored).sum((0, 1))
        return hidden, weight, None


def _sleep_until(end: float) -> None:
    """Sleeping lets other threads and processes run, as a computing device would."""
    rest = end - time.perf_counter()
    if rest > 0:
        time.sleep(rest)


class SyntheticStage(StageModule):
    """Some consecutive layers of a synthetic model."""

    def __init__(self, model: SyntheticModel, shard: Shard) -> None:
        super().__init__()
        self.shard = shard
        self.is_first = shard.first_layer == 0
        self.is_last = shard.end_layer == len(model.plan.layers)
        self.tied_alias_shares_storage = False
        self._deferral: Deferral | None = None
        self._model = model
        self._specs = [p for p in model.plan.parameters if shard.first_layer <= p.layer < shard.end_layer]
        self.weights = nn.ParameterList(
            nn.Parameter(torch.empty(spec.shape, device="meta"), requires_grad=spec.trainable) for spec in self._specs
        )

    def forward_layers(self, hidden: torch.Tensor | None, batch: Batch, *, seeds: LayerSeeds | None) -> torch.Tensor:
        """See `StageModule.forward_layers`; the head's logits are (B, T, 1), one score a token."""
        num_positions, shape = self._model.plan.max_positions, (len(batch.lengths), max(batch.lengths))
        if shape[1] > num_positions:
            raise ConfigError(f"{shape[1]} tokens in a sample, the model takes {num_positions}: lower data.max_length")
        last = len(self._model.plan.layers) - 1
        for index, weight in enumerate(self.weights, self.shard.first_layer):
            first = 0 if seeds is None else xxhash.xxh3_64_intdigest(f"ring element {seeds.seed(index)}".encode())
            work = _Work(first, shape, self._model, 0 < index < last, self._deferral)
            hidden = (_Head if index == last else _Layer).apply(hidden, weight, work)  # type: ignore[no-untyped-call]
        assert hidden is not None
        return hidden

    def loss_sum(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Softplus of the score before each label token: a token is the better predicted the lower its score is."""
        assert batch.labels is not None
        return nn.functional.softplus(logits[:, :-1, 0][batch.labels[:, 1:] != _IGNORED]).sum()

    def split_backward(self) -> Deferral:
        """See `StageModule.split_backward`: what waits is `weights_s` of sleep."""
        self._deferral = Deferral()
        return self._deferral

    def named_checkpoint_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """See `StageModule.named_checkpoint_parameters`."""
        for spec, parameter in zip(self._specs, self.weights, strict=True):
            yield spec.name, parameter


class SyntheticModel(Model):
    """Known by its configuration; all stages of a process share its two rings."""

    def __init__(self, values: SyntheticConfig, freeze: Sequence[str], weights: CheckpointReader | None) -> None:
        self.values = values
        self.config = msgspec.to_builtins(values)
        self.hash = xxhash.xxh3_64_hexdigest(json.dumps(self.config, sort_keys=True, separators=(",", ":")).encode())
        self.weights = weights
        self.plan = _make_plan(values, freeze)
        size = (values.n_positions, values.n_embd)
        self.activations = TensorRing(RingSpec("activations", values.num_tensors, *size, values.change, 1.0, 0.0))
        self.gradients = TensorRing(RingSpec("gradients", _NUM_GRADIENTS, *size, values.change, 1e-5, 1.0))

    def build(self, shard: Shard) -> SyntheticStage:
        """See `Model.build`."""
        if shard.end_layer > len(self.plan.layers):
            raise ConfigError(f"{shard} of a model that has {len(self.plan.layers)} layers")
        return SyntheticStage(self, shard)

    def checkpoint_names(self, shard: Shard) -> tuple[str, ...]:
        """See `Model.checkpoint_names`."""
        return tuple(p.name for p in self.plan.parameters if shard.first_layer <= p.layer < shard.end_layer)

    def initialize(self, module: StageModule, weights: Mapping[str, torch.Tensor] | None, *, seed: int) -> None:
        """See `Model.initialize`."""
        assert isinstance(module, SyntheticStage)
        module.to_empty(device="cpu")
        faults = []
        for index, (name, parameter) in enumerate(module.named_checkpoint_parameters(), module.shard.first_layer):
            if weights is None:
                chance = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"initialize {seed} {index}".encode()) >> 1)
                parameter.data.normal_(0.0, 0.02, generator=chance)
            elif name not in weights:
                faults.append(f"{name} is missing")
            elif weights[name].shape != parameter.shape or not weights[name].is_floating_point():
                faults.append(f"{name} is {weights[name].dtype} {tuple(weights[name].shape)}, not {tuple(parameter.shape)}")
            else:
                parameter.data.copy_(weights[name])
        if faults:
            raise ConfigError(f"the weights do not fit the model's config.json: {'; '.join(faults)}")

    def share_tied_storage(self, first: StageModule, last: StageModule) -> None:
        """See `Model.share_tied_storage`: no weight is tied."""


class Synthetic(ModelMaker):
    """`model_type = "synthetic"`."""

    model_type = "synthetic"

    def tiny_config(self) -> dict[str, Any]:
        return {"model_type": "synthetic", "n_layer": 3, "n_embd": 32, "n_positions": 16, "vocab_size": 67, "num_tensors": 16}

    def make(
        self,
        config: Mapping[str, object],
        *,
        freeze: Sequence[str] = (),
        dropout: float | None = None,
        weights: CheckpointReader | None = None,
    ) -> SyntheticModel:
        """See `ModelMaker.make`; there is no dropout to replace."""
        known = SyntheticConfig.__struct_fields__
        for key in config:
            if key not in known:
                close = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {close[0]!r}? " if close else ""
                raise ConfigError(f"model.config: synthetic has no {key!r}; {hint}There are: {', '.join(known)}")
        try:
            values = msgspec.convert(dict(config), SyntheticConfig)
        except msgspec.ValidationError as e:
            reason, _, place = str(e).partition(" - at `$.")
            key = place.rstrip("`")
            raise ConfigError(f"model.config: synthetic's {key} = {config.get(key)!r}: {reason}") from e
        if values.weights_s > values.backward_s:
            parts = f"weights_s = {values.weights_s:g} is part of backward_s = {values.backward_s:g}"
            raise ConfigError(f"model.config: synthetic's {parts}: make it smaller")
        return SyntheticModel(values, freeze, weights)


def _make_plan(values: SyntheticConfig, freeze: Sequence[str]) -> ModelPlan:
    names = ["wte.weight", *(f"h.{i}.weight" for i in range(values.n_layer)), "head.weight"]
    kinds = ["embedding", *["block"] * values.n_layer, "head"]
    frozen = frozen_names(names, freeze, ())
    sizes = [values.n_embd, *[values.block_parameters or values.n_embd] * values.n_layer, values.n_embd]
    return ModelPlan(
        family="synthetic",
        hidden_size=values.n_embd,
        vocab_size=values.vocab_size,
        max_positions=values.n_positions,
        layers=tuple(
            LayerSpec(index=i, kind=kind, num_parameters=size, cost=float(kind == "block"))
            for i, (kind, size) in enumerate(zip(kinds, sizes, strict=True))
        ),
        parameters=tuple(
            ParameterSpec(name, (size,), i, name not in frozen) for i, (name, size) in enumerate(zip(names, sizes, strict=True))
        ),
        tied=None,
    )


PLUGIN = Synthetic()
