"""Qwen3: Llama's layout, with norms on queries and keys. Knows its name; the rest is Llama's."""

from __future__ import annotations

from typing import Any

from pipecomp.models.llama import Llama


class Qwen3(Llama):
    """`model_type = "qwen3"`: Qwen3 (dense) and what shares its layout."""

    model_type = "qwen3"

    def tiny_config(self) -> dict[str, Any]:
        return {**super().tiny_config(), "head_dim": 8}


PLUGIN = Qwen3()
