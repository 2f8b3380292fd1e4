"""Gradients of one worker: norms, clipping, AdamW and quantized Adam. Knows parameters in layer order; no microbatches, no
sockets.

The global norm is one number for any split: each parameter's fp64 squared norm (`squared_norm`, whose order of summation is
fixed here, and for every machine alike) is added up by the coordinator in layer order, then in order of definition.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from pipecomp.config import TrainConfig
from pipecomp.protocol.messages import LayerNorms
from pipecomp.runtime.quantized_adam import FrozenAdam

_LANES, _ROWS = 1 << 12, 16


class OwnedParameter(NamedTuple):
    """A parameter that this worker trains."""

    layer: int
    name: str  # checkpoint name
    parameter: torch.nn.Parameter
    counts_in_norm: bool  # False for the head's copy of a tied weight, which the embedding's worker reports


def squared_norm(gradient: torch.Tensor) -> float:
    """fp64 squared norm, the same bits on every machine and with any number of threads.

    Lane i of 4,096 sums the squares of values i, i + 4096, ... in row-major order, one after the other; then lanes are folded in
    halves, i + (i + half). The square of an fp32 value is exact in fp64, so only these sums are rounded.
    """
    values = gradient.detach().reshape(-1).numpy()
    whole = len(values) // _LANES * _LANES
    sums, squares = np.zeros(_LANES), np.empty((_ROWS, _LANES))
    for start in range(0, whole, _ROWS * _LANES):
        part = values[start : min(start + _ROWS * _LANES, whole)].reshape(-1, _LANES)
        rows = squares[: len(part)]
        np.multiply(part, part, out=rows, dtype=np.float64)
        rows[0] += sums
        np.add.reduce(rows, axis=0, out=sums)
    rest = values[whole:].astype(np.float64)
    sums[: len(rest)] += rest * rest
    half = _LANES // 2
    while half:
        sums = sums[:half] + sums[half : 2 * half]
        half //= 2
    return float(sums[0])


class Update(NamedTuple):
    """What is decided of a prepared step."""

    learning_rate: float
    clip_coefficient: float
    freezes: bool = False
    """From the next step on second moments stay as they are."""
    averages: bool = False
    """Then the replicas' changes of parameters are averaged."""


class ShardOptimizer:
    """AdamW over one worker's parameters; weights of matrices decay, vectors (biases, norms) do not. Once second moments are
    frozen, what is exchanged and clipped is the momentum (`quantized_adam`)."""

    def __init__(self, owned: Iterable[OwnedParameter], train: TrainConfig) -> None:
        self.owned = tuple(owned)
        matrices = [o.parameter for o in self.owned if o.parameter.ndim >= 2]
        vectors = [o.parameter for o in self.owned if o.parameter.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": train.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        groups = [g for g in groups if g["params"]]
        self._adam = (
            torch.optim.AdamW(
                groups,
                lr=train.learning_rate,
                betas=(train.adam_beta1, train.adam_beta2),
                eps=train.adam_epsilon,
                fused=True,
            )
            if groups
            else None
        )
        self._frozen: FrozenAdam | None = None
        self._beta2 = train.adam_beta2
        self.gradient_part = 1.0 - train.adam_beta1
        """Of a gradient in a momentum."""

    def parameters_hash(self) -> str:
        """xxh3-64 of all parameters' bytes, in order, hexadecimal."""
        digest = xxhash.xxh3_64()
        for owned in self.owned:
            digest.update(owned.parameter.detach().contiguous().numpy().reshape(-1).data)
        return digest.hexdigest()

    def layer_norms(self) -> tuple[LayerNorms, ...]:
        """Squared norm of every gradient, by layer. A parameter that got no gradient counts as zero."""
        norms: dict[int, list[float]] = {}
        for layer, _, parameter, counts in self.owned:
            if counts:
                gradient = parameter.grad
                norms.setdefault(layer, []).append(0.0 if gradient is None else squared_norm(gradient))
        return tuple(LayerNorms(layer, tuple(values)) for layer, values in sorted(norms.items()))

    @property
    def is_frozen(self) -> bool:
        """Whether second moments stay as they are, and gradients become momenta before they are exchanged."""
        return self._frozen is not None

    def step(self, update: Update) -> None:
        """Scale the gradients (or momenta) by the update's `clip_coefficient` (fp32), step, and let them go."""
        if self._adam is None:
            return
        for owned in self.owned:
            if owned.parameter.grad is None:
                owned.parameter.grad = torch.zeros_like(owned.parameter)
            owned.parameter.grad.mul_(update.clip_coefficient)
        if self._frozen is not None:
            self._frozen.step(update.learning_rate)
        else:
            for group in self._adam.param_groups:
                group["lr"] = update.learning_rate
            self._adam.step()
        self.forget()

    def freeze(self) -> None:
        """Keep second moments as they are from now on. After at least one step."""
        if self._adam is not None and self._frozen is None:
            self._frozen = FrozenAdam(self._adam)

    def to_momentum(self, parameter: torch.nn.Parameter, num_replicas: int) -> None:
        """Once frozen, replace a gradient by this replica's part of the next momentum; before that it is left alone."""
        if self._frozen is not None:
            self._frozen.to_momentum(parameter, num_replicas)

    def second_moment(self) -> float:
        """Sum of all second moments, bias-corrected, in fp64; a tied weight's alias is left out. 0 before the first step."""
        if self._adam is None:
            return 0.0
        total = 0.0
        for owned in self.owned:
            state = self._adam.state.get(owned.parameter)
            if state and owned.counts_in_norm:
                correction = 1.0 - self._beta2 ** float(state["step"])
                total += float(state["exp_avg_sq"].sum(dtype=torch.float64)) / correction
        return total

    def forget(self) -> None:
        """Drop all gradients (an aborted step)."""
        for owned in self.owned:
            owned.parameter.grad = None
