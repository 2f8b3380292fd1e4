"""What a run asks of its machines: layers, microbatches, bytes. Pure values; knows no machine, codec or tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class LayerWork(NamedTuple):
    """One layer of the model."""

    kind: str
    """`embedding`, `block` or `head`."""
    cost: float
    """Multiply-adds per token of a forward pass."""
    num_parameters: int
    """That its worker holds; a tied weight counts in both its layers."""
    num_trainable: int
    kept_nbytes: float
    """Of one microbatch, from its forward to its backward."""
    deferred_nbytes: float = 0.0
    """Of one microbatch, from its backward to its gradients of weights, where they are deferred."""


class Exchange(NamedTuple):
    """A row of gradients that the replicas' workers of one rank add up, in one step."""

    num_values: int
    nbytes: tuple[float, ...]
    """That each replica's worker sends to the others, and receives from them; headers included."""
    num_rounds: int
    """What of it can be coded while the rest is sent: the row crosses in so many pieces of each replica."""

    def plus(self, other: Exchange) -> Exchange:
        """Both rows."""
        nbytes = tuple(one + more for one, more in zip(self.nbytes, other.nbytes, strict=True))
        return Exchange(self.num_values + other.num_values, nbytes, self.num_rounds + other.num_rounds)


class Gradients(NamedTuple):
    """How the gradients of weights are added up over several replicas."""

    options: dict[str, object]
    """Of the codec, as the run file writes it."""
    exchange: Callable[[int], Exchange]
    """Of a row of so many values."""
    bits: float
    """Of a value each time that it crosses, in the model's whole row, everything counted."""
    keeps_errors: bool
    """Whether a worker keeps what coding lost, a value in fp32 for each that it trains."""


class Width(NamedTuple):
    """One setting of the codecs, and what a microbatch then sends over one link. Means over all samples, headers included."""

    label: str
    forward: dict[str, object]
    """As the run file writes it."""
    backward: dict[str, object]
    first_forward_nbytes: float
    """In the first epoch, when no sample has a message yet."""
    forward_nbytes: float
    """In later epochs."""
    backward_nbytes: float
    num_values: float
    """Of a microbatch, one way."""
    message_nbytes: float
    """Messages of all samples of a replica, at one end of one link; 0 where the codec has none."""
    tied_nbytes: float
    """Each way in a step, where a tied weight's gradients are exchanged."""
    gradients: Gradients | None = None
    """Where there are several replicas."""

    @property
    def forward_bits(self) -> float:
        """Of a value, in later epochs, everything counted."""
        return 8 * self.forward_nbytes / self.num_values

    @property
    def backward_bits(self) -> float:
        return 8 * self.backward_nbytes / self.num_values

    @property
    def gradient_bits(self) -> float:
        """Of a weight's gradient each time that it crosses; 0 with one replica."""
        return 0.0 if self.gradients is None else self.gradients.bits


class Evaluations(NamedTuple):
    """Passes over the held-out samples."""

    num_passes: int
    num_plans: int
    """Of a pass; the pipeline drains after each."""
    num_microbatches: int
    """Of a plan, over all replicas, which share them out."""
    message_nbytes: float
    """Of a microbatch over one link, headers included."""


class Work(NamedTuple):
    """One run, as far as its time and size depend on it."""

    layers: tuple[LayerWork, ...]
    first_trainable: int
    """The first layer with a parameter that is trained: nothing goes back below it."""
    num_tokens: float
    """Of a microbatch as it is computed, padding included."""
    num_microbatches: int
    """Of a step, in each replica."""
    steps_per_epoch: int
    total_steps: int
    recompute: bool
    evaluations: Evaluations
    weight_nbytes: tuple[float, ...]
    """Of each layer: what the coordinator sends, before the first step."""
    returned_nbytes: tuple[float, ...]
    """Of each layer: what comes back after the last one."""
    store: str
    """`memory`, `disk` or `tiered`."""
    store_nbytes: float
    """What a worker may keep of messages, for all its links."""
    num_deferred: int = 0
    """Of so many microbatches a stage may leave gradients of weights for later."""
    num_replicas: int = 1
    tied_values: int = 0
    """Of a weight that embedding and head share, if it is trained."""

    @property
    def block(self) -> LayerWork:
        """The model's usual layer."""
        return next((layer for layer in self.layers if layer.kind == "block"), self.layers[-1])
