"""Mistral: Llama's layout, and on some models a sliding window. Knows its name; the rest is Llama's."""

from __future__ import annotations

from typing import Any

from pipecomp.models.llama import Llama


class Mistral(Llama):
    """`model_type = "mistral"`: Mistral 7B and what shares its layout."""

    model_type = "mistral"

    def tiny_config(self) -> dict[str, Any]:
        return {**super().tiny_config(), "sliding_window": None}


PLUGIN = Mistral()
