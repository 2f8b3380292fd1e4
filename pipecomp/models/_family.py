"""What tells one model family from another: where its layers are and how its forward strings them together. Knows torch only.

A family never repeats transformers' arithmetic: its modules are those of the whole model, cut out of it, and what it does
between them (adding positions, making rotary angles) is what the whole model's own `forward` does, op for op.
"""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

import torch
from torch import nn

Layer = nn.ModuleList  # the modules of one flat layer, in the order of the family's paths
TransformersConfig = Any  # each family's own class of transformers; its attributes are the family's to know


class BlockContext(NamedTuple):
    """What all blocks of a microbatch share; made once for each shard's forward."""

    attention_mask: torch.Tensor | None  # transformers' own causal mask; None where the attention's `is_causal` does
    position_ids: torch.Tensor  # (1, T)
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None  # cosines and sines


class ModelFamily(abc.ABC):
    """A plugin of `pipecomp.models`.

    Attributes:
        model_type: what transformers' configurations call the family.
        prefix: what checkpoint names of everything but the output projection start with.
        dropout_keys: every dropout in the family's configuration.
        embedding: name of the embedding's weight, the one that may be tied.
        projection: name of the output projection's weight, its alias where it is tied.
        rotary: path of the module that makes the angles every block needs, None where positions are learned.
    """

    model_type: str
    prefix: str
    dropout_keys: tuple[str, ...]
    embedding: str
    projection: str
    rotary: str | None

    @abc.abstractmethod
    def tiny_config(self) -> dict[str, Any]:
        """A configuration small enough for the conformance suite: at least 3 blocks, dropout 0, untied."""

    @abc.abstractmethod
    def layer_paths(self, config: TransformersConfig) -> tuple[tuple[str, ...], ...]:
        """For each flat layer the paths of its modules in transformers' causal language model."""

    def max_positions(self, config: TransformersConfig) -> int:
        """The longest sample the model takes."""
        positions: int = config.max_position_embeddings
        return positions

    @abc.abstractmethod
    def embed(self, layer: Layer, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """(B, T) token ids and (1, T) positions -> (B, T, H)."""

    @abc.abstractmethod
    def block(self, layer: Layer, hidden: torch.Tensor, context: BlockContext) -> torch.Tensor:
        """(B, T, H) -> (B, T, H)."""

    @abc.abstractmethod
    def head(self, layer: Layer, hidden: torch.Tensor) -> torch.Tensor:
        """(B, T, H) -> (B, T, vocab)."""
