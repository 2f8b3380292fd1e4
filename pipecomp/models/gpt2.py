"""GPT-2: learned positions, LayerNorm, one fused attention projection. Knows where its layers are; nothing else of the model.

    layer 0      transformer.wte + transformer.wpe, dropout
    layer 1..n   transformer.h.0 .. n-1
    layer n+1    transformer.ln_f, lm_head

Each module named is the whole model's own.
"""

from __future__ import annotations

from typing import Any

import torch

from pipecomp.errors import ConfigError
from pipecomp.models._family import BlockContext, Layer, ModelFamily, TransformersConfig


class Gpt2(ModelFamily):
    """`model_type = "gpt2"`: GPT-2, DistilGPT-2 and what shares their layout."""

    model_type = "gpt2"
    prefix = "transformer."
    dropout_keys = ("embd_pdrop", "attn_pdrop", "resid_pdrop")
    embedding = "transformer.wte.weight"
    projection = "lm_head.weight"
    rotary = None

    def tiny_config(self) -> dict[str, Any]:
        size = {"n_layer": 3, "n_embd": 32, "n_head": 4, "n_positions": 32, "vocab_size": 67}
        tokens = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False}
        return {"model_type": "gpt2", **size, **tokens, **dict.fromkeys(self.dropout_keys, 0.0)}

    def layer_paths(self, config: TransformersConfig) -> tuple[tuple[str, ...], ...]:
        if config.add_cross_attention:
            raise ConfigError("this GPT-2 has cross-attention (add_cross_attention): only decoders alone can be trained")
        blocks = tuple((f"transformer.h.{i}",) for i in range(config.n_layer))
        return ("transformer.wte", "transformer.wpe", "transformer.drop"), *blocks, ("transformer.ln_f", "lm_head")

    def embed(self, layer: Layer, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        tokens, positions, dropout = layer
        hidden: torch.Tensor = dropout(tokens(input_ids) + positions(position_ids))
        return hidden

    def block(self, layer: Layer, hidden: torch.Tensor, context: BlockContext) -> torch.Tensor:
        output: torch.Tensor = layer[0](
            hidden, attention_mask=context.attention_mask, use_cache=False, position_ids=context.position_ids
        )
        return output

    def head(self, layer: Layer, hidden: torch.Tensor) -> torch.Tensor:
        norm, projection = layer
        logits: torch.Tensor = projection(norm(hidden))
        return logits


PLUGIN = Gpt2()
