"""One step's vote: who is prepared, and what loss and gradient norm the whole pipeline has. Pure fp64 arithmetic.

    Prepared from every worker  ->  loss = sum of the microbatches' loss sums, in order, / targets
                                    norm = sqrt(sum of each parameter's squared norm, in layer order, then of definition)
                                    clip = min(1, max_grad_norm / (norm + 1e-6))

Replicas have summed their gradients by then: each must say the same norms. Only where they train apart (local steps) has each
norms of its own. Their losses are added in the order of replicas.

The sums run one after the other in that order whatever the split, so any split gives the same bits (law 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pipecomp.protocol.messages import LayerNorms, Prepared

MUST_BE_THE_SAME = (
    ", and all replicas must have the same: is one machine's memory faulty, or do they run different builds of torch or numpy?"
)


class Verdict(NamedTuple):
    """What the vote says; `objection` is empty when the step can be committed."""

    loss: float
    norms: tuple[float, ...]
    """Gradient norm of the whole model, by replica: the same ones, but where replicas train apart."""
    clips: tuple[float, ...]
    """What it makes of gradients to keep to the limit, likewise."""
    objection: str
    fault: str = ""
    """Why the run cannot go on; empty while it can."""

    @property
    def gradient_norm(self) -> float:
        """The largest of all replicas'."""
        return max(self.norms)

    @property
    def clip_coefficient(self) -> float:
        """The smallest of all replicas'."""
        return min(self.clips)


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


def count_votes(
    votes: Mapping[str, Prepared],
    num_microbatches: Sequence[int],
    *,
    num_targets: int,
    max_grad_norm: float,
    train_apart: bool = False,
) -> Verdict:
    """Join what all workers said of one step.

    Args:
        votes: by worker, those of one replica after the other.
        num_microbatches: of each replica.
        num_targets: of the whole batch.
        train_apart: each replica applies its own gradients, which need not be the others'.
    """
    workers, num_ranks = list(votes), len(votes) // len(num_microbatches)
    replicas = [workers[start : start + num_ranks] for start in range(0, len(workers), num_ranks)]
    losses = [vote.loss_sums for vote in votes.values() if vote.loss_sums]
    loss = mean_loss((value for sums in losses for value in sums), num_targets)
    layers = [[norms for worker in replica for norms in votes[worker].layer_norms] for replica in replicas]
    norms = tuple(map(global_norm, layers if train_apart else layers[:1] * len(replicas)))
    objection = ""
    if [len(sums) for sums in losses] != [count for count in num_microbatches if count]:
        found = ", ".join(str(len(sums)) for sums in losses) or "none"
        objection = f"losses of {found} microbatches were reported; {', '.join(map(str, num_microbatches))} were planned"
    elif any(len({norms.layer for norms in own}) != len(own) for own in layers):
        objection = "two workers reported gradients of the same layer"
    elif not math.isfinite(loss):
        objection = f"the loss is {loss}"
    elif not all(map(math.isfinite, norms)):
        objection = f"the gradient norm is {next(norm for norm in norms if not math.isfinite(norm))}"
    clips = tuple(clip_coefficient(norm, max_grad_norm) for norm in norms)
    return Verdict(loss, norms, clips, objection, "" if objection or train_apart else _difference(votes, replicas))


def _difference(votes: Mapping[str, Prepared], replicas: Sequence[Sequence[str]]) -> str:
    """Which replicas do not have the same sum of gradients; empty where all have."""
    for number, replica in enumerate(replicas[1:], 1):
        for first, worker in zip(replicas[0], replica, strict=True):
            ours, theirs = votes[first].layer_norms, votes[worker].layer_norms
            if ours != theirs:
                layer = next((a.layer for a, b in zip(ours, theirs, strict=False) if a != b), "?")
                return (
                    f"{worker} (replica {number}) and {first} (replica 0) have summed different gradients of layer {layer}"
                    f"{MUST_BE_THE_SAME}"
                )
    return ""
