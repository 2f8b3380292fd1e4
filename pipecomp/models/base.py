"""What a model is to the runtime: a flat list of layers, of which a worker builds only some. Knows torch; no sockets, no steps.

    layer 0      embedding             token ids -> hidden states
    layer 1..n   transformer blocks    hidden states -> hidden states
    layer n+1    head                  final norm + output projection: hidden states -> logits (-> loss);
                                       for classification pooler + classifier: one row of logits a sample

A family (`gpt2`, `llama`, ...) says how transformers' own modules make up that list and which checkpoint names each layer
owns.

Tied weights are the one thing that joins two layers; `TiedWeight` names them. The head always has a Parameter of its own
with a gradient of its own, and the runtime adds the two (embedding's first) once, at the end of a step:

    embedding and head in one shard, or joined by `share_tied_storage`
                    two Parameters, one storage (`tied_alias_shares_storage`): only the embedding's is stepped, and counted
    head alone      two storages that start equal and take the same step from the same sum, and so stay bit-equal
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from pipecomp.models._checkpoint import CheckpointReader
from pipecomp.models._deferral import Deferral, Half
from pipecomp.types import Shard

__all__ = [
    "CAUSAL_LM",
    "CLASSIFICATION",
    "Batch",
    "Deferral",
    "Half",
    "LayerSeeds",
    "LayerSpec",
    "Model",
    "ModelMaker",
    "ModelPlan",
    "ParameterSpec",
    "StageModule",
    "TiedWeight",
]

CAUSAL_LM = "causal-lm"
CLASSIFICATION = "sequence-classification"
"""The tasks: predict each next token, or one class for each sample."""


class Batch(NamedTuple):
    """One microbatch as every stage sees it, padded on the right to its longest sample."""

    lengths: tuple[int, ...]  # real tokens of each sample; B = len(lengths), T = max(lengths)
    input_ids: torch.Tensor | None  # (B, T) int64, only where the embedding is
    labels: torch.Tensor | None
    """Only where the head is, int64: (B, T), -100 where no loss, shifted by the loss itself; or (B,) classes."""


class ParameterSpec(msgspec.Struct, frozen=True):
    """One parameter as the checkpoint names it."""

    name: str  # Hugging Face's full name, for example `transformer.h.3.attn.c_attn.weight`
    shape: tuple[int, ...]
    layer: int  # index in the flat list of layers
    trainable: bool


class LayerSpec(msgspec.Struct, frozen=True):
    """What partitioning needs to know of a layer."""

    index: int
    kind: str  # "embedding" | "block" | "head"
    num_parameters: int  # a tied weight counts where it is used: in both layers
    cost: float  # multiply-adds per token of a forward pass


class TiedWeight(msgspec.Struct, frozen=True):
    """A weight that two layers share. The checkpoint holds it once, under `name`."""

    name: str  # the embedding's name, for example `transformer.wte.weight`
    alias: str  # the head's name, for example `lm_head.weight`
    first_layer: int
    last_layer: int
    num_values: int


class ModelPlan(msgspec.Struct, frozen=True):
    """Everything about a model that can be known without its weights."""

    family: str
    hidden_size: int
    vocab_size: int
    max_positions: int
    layers: tuple[LayerSpec, ...]
    parameters: tuple[ParameterSpec, ...]  # in layer order; a tied weight stands once, in its first layer
    tied: TiedWeight | None
    task: str = CAUSAL_LM

    @property
    def new_in_task(self) -> frozenset[str]:
        """Parameters that a checkpoint of another task lacks, so that they start at random: a classifier's head."""
        head = len(self.layers) - 1
        return frozenset(p.name for p in self.parameters if self.task == CLASSIFICATION and p.layer == head)


class StageModule(torch.nn.Module, abc.ABC):
    """The layers of one shard, materialized. Parameters are fp32."""

    shard: Shard
    is_first: bool  # holds the embedding
    is_last: bool  # holds the head
    tied_alias_shares_storage: bool  # the head's copy of a tied weight is the embedding's memory: step the embedding's only
    labels_are_classes: bool = False  # one label for each sample, not for each token

    @abc.abstractmethod
    def forward_layers(self, hidden: torch.Tensor | None, batch: Batch, *, seeds: LayerSeeds | None) -> torch.Tensor:
        """Run the shard's layers.

        Args:
            hidden: (B, T, H) fp32, zeros at padding; None where the shard starts with the embedding.
            batch: lengths for masks and positions; `input_ids` where the embedding is.
            seeds: seed of each layer's dropout; None in evaluation (dropout off).

        Returns:
            (B, T, H) hidden states; where the shard ends with the head (B, T, vocab) logits, or (B, classes) ones.
        """

    @abc.abstractmethod
    def loss_sum(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Sum (not mean) of the losses of tokens or classes, fp32 scalar with graph; token labels are shifted here as
        transformers does.

        `(loss_sum(logits, batch) / num_tokens).backward()`, with `num_tokens` an int over the whole batch of microbatches,
        gives the bits of `model(..., labels=labels, num_items_in_batch=num_tokens).loss.backward()`.
        """

    def split_backward(self) -> Deferral:
        """From now on, leave gradients of large weights to the deferral that is returned, wherever that saves the layer below
        from waiting; call it once, before the first forward pass. The default leaves nothing to it."""
        return Deferral()

    def num_correct(self, logits: torch.Tensor, batch: Batch) -> int | None:
        """How many samples have their largest logit at their class; None where labels are tokens."""
        return None

    @abc.abstractmethod
    def named_checkpoint_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Parameters by Hugging Face name, in layer order then in order of definition. The head's copy of a tied weight
        appears under its alias, whether the embedding is in this shard too or not (it is a separate Parameter always)."""


class LayerSeeds(abc.ABC):
    """Gives each layer its dropout seed, a function of (run seed, step, microbatch, layer) (law 12)."""

    @abc.abstractmethod
    def seed(self, layer: int) -> int:
        """64-bit seed of one layer."""


class Model(abc.ABC):
    """A model that is known by its configuration; its weights are elsewhere.

    Attributes:
        plan: the flat list of layers and their parameters.
        config: transformers' configuration as plain JSON values. It is all that another process needs to build the same
            model, besides the freeze patterns and the dropout (which are not in it).
        hash: 16 hexadecimal digits, xxh3_64 over `config` in canonical JSON.
        weights: where pretrained tensors are read from; None where the weights are random or come from another process.
    """

    plan: ModelPlan
    config: dict[str, Any]
    hash: str
    weights: CheckpointReader | None

    @abc.abstractmethod
    def build(self, shard: Shard) -> StageModule:
        """The shard's modules on the meta device, parameters not materialized yet (requires_grad set per `trainable`)."""

    @abc.abstractmethod
    def checkpoint_names(self, shard: Shard) -> tuple[str, ...]:
        """Names of the tensors that `initialize` reads for a shard, each once, in layer order. A head without its
        embedding reads a tied weight under the embedding's name."""

    @abc.abstractmethod
    def initialize(self, module: StageModule, weights: Mapping[str, torch.Tensor] | None, *, seed: int) -> None:
        """Materialize a shard on the CPU: from `weights` (checkpoint name -> tensor, any float dtype) or, with None, at
        random. Tensors are asked for one at a time, in the order of `checkpoint_names`, and copied.

        Random weights of a layer depend on (seed, layer) only, so every split gives the same numbers. A tied weight is
        the same at both ends. Of `plan.new_in_task`, what `weights` lacks is random too. Raises ConfigError naming each
        other tensor that is missing, and each misshapen one.
        """

    @abc.abstractmethod
    def share_tied_storage(self, first: StageModule, last: StageModule) -> None:
        """Let the head of `last` use the memory of the embedding of `first`, where one process holds both in two shards.
        Call it after both are on their device; does nothing where the model ties no weights."""


class ModelMaker(abc.ABC):
    """A plugin of `pipecomp.models` whose layers are its own; a family of transformers is a `ModelFamily` instead.

    Its checkpoints name every tensor as `ModelPlan.parameters` does.

    Attributes:
        model_type: what configurations call it, and the plugin's name.
    """

    model_type: str

    @abc.abstractmethod
    def tiny_config(self) -> dict[str, Any]:
        """A configuration small enough for the conformance suite: at least 3 blocks."""

    @abc.abstractmethod
    def make(
        self,
        config: Mapping[str, object],
        *,
        freeze: Sequence[str] = (),
        dropout: float | None = None,
        weights: CheckpointReader | None = None,
    ) -> Model:
        """The model of a configuration, `model_type` included.

        Args:
            freeze: fnmatch patterns over parameter names.
            dropout: replaces every dropout of the configuration, where there are any.
            weights: where its tensors are read from; None: they start at random.

        Raises:
            ConfigError: a key or a value of `config` that is not allowed, or a pattern that matches nothing.
        """
