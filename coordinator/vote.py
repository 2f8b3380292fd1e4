"""One step's vote: who is prepared, and what loss and gradient norm the whole pipeline has. Pure fp64 arithmetic.

    Prepared from every worker  ->  loss = sum of the microbatches' loss sums, in order, / targets
                                    norm = sqrt(sum of each parameter's squared norm, in layer order, then of definition)
                                    clip = min(1, max_grad_norm / (norm + 1e-6))

The sums run one after the other in that order whatever the split, so any split gives the same bits (law 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from pipecomp.protocol.messages import LayerNorms, Prepared


class Verdict(NamedTuple):
    """What the vote says; `objection` is empty when the step can be committed."""

    loss: float
    gradient_norm: float
    clip_coefficient: float
    objection: str


def mean_loss(loss_sums: Iterable[float], num_targets: int) -> float:
    """Token-weighted mean of a batch; a batch without targets has loss 0."""
    total = 0.0
    for value in loss_sums:
        total += value
    return total / max(1, num_targets)


def global_norm(layer_norms: Iterable[LayerNorms]) -> float:
    """The gradient norm of the whole model. A layer may come once only."""
    total = 0.0
    for layer in sorted(layer_norms, key=lambda norms: norms.layer):
        for squared_norm in layer.squared_norms:
            total += squared_norm
    return math.sqrt(total) if total >= 0 else math.nan


def clip_coefficient(gradient_norm: float, max_grad_norm: float) -> float:
    """torch.nn.utils.clip_grad_norm_'s factor; 1 with clipping off (`max_grad_norm` 0)."""
    return min(1.0, max_grad_norm / (gradient_norm + 1e-6)) if max_grad_norm > 0 else 1.0


def count_votes(votes: Iterable[Prepared], *, num_targets: int, max_grad_norm: float) -> Verdict:
    """Join what all workers said of one step."""
    prepared = list(votes)
    heads = [vote for vote in prepared if vote.loss_sums]
    loss = mean_loss(heads[0].loss_sums if heads else (), num_targets)
    norms = [norms for vote in prepared for norms in vote.layer_norms]
    gradient_norm = global_norm(norms)
    objection = ""
    if len(heads) != 1:
        objection = f"{len(heads)} workers reported a loss; exactly one must"
    elif len({norms.layer for norms in norms}) != len(norms):
        objection = "two workers reported gradients of the same layer"
    elif not math.isfinite(loss):
        objection = f"the loss is {loss}"
    elif not math.isfinite(gradient_norm):
        objection = f"the gradient norm is {gradient_norm}"
    return Verdict(loss, gradient_norm, clip_coefficient(gradient_norm, max_grad_norm), objection)
