"""Llama: rotary positions, RMSNorm, grouped keys and values. Knows where its layers are; nothing else of the model.

    layer 0      model.embed_tokens
    layer 1..n   model.layers.0 .. n-1
    layer n+1    model.norm, lm_head

Each module named is the whole model's own.
"""

from __future__ import annotations

from typing import Any

import torch

from pipecomp.models._family import BlockContext, Layer, ModelFamily, TransformersConfig


class Llama(ModelFamily):
    """`model_type = "llama"`: Llama 1-3, SmolLM, SmolLM2, TinyLlama and what shares their layout."""

    model_type = "llama"
    prefix = "model."
    dropout_keys = ("attention_dropout",)
    embedding = "model.embed_tokens.weight"
    projection = "lm_head.weight"
    rotary = "model.rotary_emb"

    def tiny_config(self) -> dict[str, Any]:
        size = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 67}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
        tokens = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False}
        return {"model_type": self.model_type, **size, **heads, **tokens, "attention_dropout": 0.0}

    def layer_paths(self, config: TransformersConfig) -> tuple[tuple[str, ...], ...]:
        blocks = tuple((f"model.layers.{i}",) for i in range(config.num_hidden_layers))
        return ("model.embed_tokens",), *blocks, ("model.norm", "lm_head")

    def max_positions(self, config: TransformersConfig) -> int:
        """Below a sliding window, where a family has one: up to there every position sees all before it, as here."""
        window = getattr(config, "sliding_window", None)
        positions = super().max_positions(config)
        return positions if window is None else min(positions, window - 1)

    def embed(self, layer: Layer, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = layer[0](input_ids)
        return hidden

    def block(self, layer: Layer, hidden: torch.Tensor, context: BlockContext) -> torch.Tensor:
        output: torch.Tensor = layer[0](
            hidden,
            attention_mask=context.attention_mask,
            position_ids=context.position_ids,
            use_cache=False,
            position_embeddings=context.position_embeddings,
        )
        return output

    def head(self, layer: Layer, hidden: torch.Tensor) -> torch.Tensor:
        norm, projection = layer
        logits: torch.Tensor = projection(norm(hidden))
        return logits


PLUGIN = Llama()
