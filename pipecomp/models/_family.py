"""What tells one model family from another: where its layers are and how its forward strings them together. Knows torch only.

A family never repeats transformers' arithmetic: its modules are those of the whole model, cut out of it, and what it does
between them (adding positions, making rotary angles) is what the whole model's own `forward` does, op for op.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from pipecomp.models.base import CAUSAL_LM

Layer = nn.ModuleList  # the modules of one flat layer, in the order of the family's paths
TransformersConfig = Any  # each family's own class of transformers; its attributes are the family's to know


class BlockContext(NamedTuple):
    """What all blocks of a microbatch share; made once for each shard's forward."""

    attention_mask: torch.Tensor | None  # transformers' own; None where the attention needs none
    position_ids: torch.Tensor  # (1, T)
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None  # cosines and sines


class ModelFamily(abc.ABC):
    """A plugin of `pipecomp.models`.

    Attributes:
        model_type: what transformers' configurations call the family.
        task: what its head is for, `base.CAUSAL_LM` or `base.CLASSIFICATION`.
        prefix: what checkpoint names of everything but the output projection start with.
        dropout_keys: every dropout in the family's configuration.
        embedding: name of the embedding's weight, the one that may be tied.
        projection: name of the output projection's weight, its alias where it is tied.
        rotary: path of the module that makes the angles every block needs, None where positions are learned.
    """

    model_type: str
    task: str = CAUSAL_LM
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
        """For each flat layer the paths of its modules in transformers' model for the family's task."""

    def max_positions(self, config: TransformersConfig) -> int:
        """The longest sample the model takes."""
        positions: int = config.max_position_embeddings
        return positions

    def stored_aliases(self, config: Mapping[str, Any]) -> dict[str, str]:
        """Parameter name -> another one it may have in a checkpoint; `config` as plain values.

        The default: a tied weight may be stored under either of its names."""
        return {self.embedding: self.projection, self.projection: self.embedding}

    def attention_mask(
        self, config: TransformersConfig, hidden: torch.Tensor, real: torch.Tensor, position_ids: torch.Tensor
    ) -> torch.Tensor | None:
        """The mask of all blocks as the whole model's `forward` makes it; the default is causal.

        Args:
            hidden: (B, T, H), asked for its shape, dtype and device only.
            real: (B, T) bool, False at padding.
            position_ids: (1, T).
        """
        from transformers.masking_utils import create_causal_mask

        mask: torch.Tensor | None = create_causal_mask(
            config=config, inputs_embeds=hidden, attention_mask=real, cache=None, position_ids=position_ids
        )
        return mask

    @abc.abstractmethod
    def embed(self, layer: Layer, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """(B, T) token ids and (1, T) positions -> (B, T, H)."""

    @abc.abstractmethod
    def block(self, layer: Layer, hidden: torch.Tensor, context: BlockContext) -> torch.Tensor:
        """(B, T, H) -> (B, T, H)."""

    @abc.abstractmethod
    def head(self, layer: Layer, hidden: torch.Tensor) -> torch.Tensor:
        """(B, T, H) -> (B, T, vocab), or (B, classes) where the task is classification."""
