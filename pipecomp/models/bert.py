"""BERT with a classifier: an encoder that sees both ways. Knows where its layers are; nothing else of the model.

    layer 0      bert.embeddings: words + token types (all 0) + positions, LayerNorm, dropout
    layer 1..n   bert.encoder.layer.0 .. n-1
    layer n+1    bert.pooler (dense + tanh of each sample's first row), dropout, classifier

Each module named is the whole model's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pipecomp.errors import ConfigError
from pipecomp.models._family import BlockContext, Layer, ModelFamily, TransformersConfig
from pipecomp.models.base import CLASSIFICATION

_EMBEDDINGS = "bert.embeddings."
_NORM_NAMES = {"weight": "gamma", "bias": "beta"}
"""What a LayerNorm's parameters are called in checkpoints that were converted from TensorFlow."""


class Bert(ModelFamily):
    """`model_type = "bert"`: BERT, MiniLM and what shares their layout, with the head of `BertForSequenceClassification`."""

    model_type = "bert"
    task = CLASSIFICATION
    prefix = "bert."
    dropout_keys = ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout")
    embedding = _EMBEDDINGS + "word_embeddings.weight"
    projection = "classifier.weight"
    rotary = None

    def tiny_config(self) -> dict[str, Any]:
        size = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 67}
        heads = {"num_attention_heads": 4, "max_position_embeddings": 32, "num_labels": 3}
        return {"model_type": "bert", **size, **heads, **dict.fromkeys(self.dropout_keys, 0.0)}

    def layer_paths(self, config: TransformersConfig) -> tuple[tuple[str, ...], ...]:
        if config.is_decoder or config.add_cross_attention:
            raise ConfigError("this BERT is a decoder (is_decoder or add_cross_attention): only encoders can be trained")
        if getattr(config, "position_embedding_type", "absolute") != "absolute":
            raise ConfigError(f"position_embedding_type = {config.position_embedding_type!r}: only 'absolute' can be trained")
        parts = ("word_embeddings", "token_type_embeddings", "position_embeddings", "LayerNorm", "dropout")
        embeddings = tuple(_EMBEDDINGS + part for part in parts)
        blocks = tuple((f"bert.encoder.layer.{i}",) for i in range(config.num_hidden_layers))
        return embeddings, *blocks, ("bert.pooler", "dropout", "classifier")

    def stored_aliases(self, config: Mapping[str, Any]) -> dict[str, str]:
        norms = [_EMBEDDINGS + "LayerNorm"]
        for i in range(int(config.get("num_hidden_layers", 12))):
            norms += [f"bert.encoder.layer.{i}.{part}.LayerNorm" for part in ("attention.output", "output")]
        return {f"{norm}.{name}": f"{norm}.{old}" for norm in norms for name, old in _NORM_NAMES.items()}

    def attention_mask(
        self, config: TransformersConfig, hidden: torch.Tensor, real: torch.Tensor, position_ids: torch.Tensor
    ) -> torch.Tensor | None:
        from transformers.masking_utils import create_bidirectional_mask

        mask: torch.Tensor | None = create_bidirectional_mask(config=config, inputs_embeds=hidden, attention_mask=real)
        return mask

    def embed(self, layer: Layer, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        words, token_types, positions, norm, dropout = layer
        hidden = words(input_ids) + token_types(torch.zeros_like(input_ids))
        output: torch.Tensor = dropout(norm(hidden + positions(position_ids)))
        return output

    def block(self, layer: Layer, hidden: torch.Tensor, context: BlockContext) -> torch.Tensor:
        output: torch.Tensor = layer[0](hidden, context.attention_mask)
        return output

    def head(self, layer: Layer, hidden: torch.Tensor) -> torch.Tensor:
        pooler, dropout, classifier = layer
        logits: torch.Tensor = classifier(dropout(pooler(hidden)))
        return logits


PLUGIN = Bert()
