"""Gradients of one worker: norms, clipping, AdamW. Knows parameters in layer order; no microbatches, no sockets.

The global norm is one number for any split: each parameter's fp64 squared norm (`squared_norm`, whose order of summation is
fixed here) is added up by the coordinator in layer order, then in order of definition.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import xxhash

from pipecomp.config import TrainConfig
from pipecomp.protocol.messages import LayerNorms

_CHUNK = 1 << 20


class OwnedParameter(NamedTuple):
    """A parameter that this worker trains."""

    layer: int
    name: str  # checkpoint name
    parameter: torch.nn.Parameter
    counts_in_norm: bool  # False for the head's copy of a tied weight, which the embedding's worker reports


def squared_norm(gradient: torch.Tensor) -> float:
    """fp64 squared norm: sums of 2^20 values at a time in row-major order, added in that order."""
    flat = gradient.reshape(-1)
    total = 0.0
    for chunk in flat.split(_CHUNK):
        wide = chunk.double()
        total += float(torch.dot(wide, wide))
    return total


class ShardOptimizer:
    """AdamW over one worker's parameters; weights of matrices decay, vectors (biases, norms) do not."""

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

    def step(self, learning_rate: float, clip_coefficient: float) -> None:
        """Scale the gradients by `clip_coefficient` (fp32), step, and let the gradients go."""
        if self._adam is None:
            return
        for owned in self.owned:
            if owned.parameter.grad is None:
                owned.parameter.grad = torch.zeros_like(owned.parameter)
            owned.parameter.grad.mul_(clip_coefficient)
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        self._adam.step()
        self.forget()

    def forget(self) -> None:
        """Drop all gradients (an aborted step)."""
        for owned in self.owned:
            owned.parameter.grad = None
