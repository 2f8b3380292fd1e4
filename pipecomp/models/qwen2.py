"""Qwen2: Llama's layout, with biases on queries, keys and values. Knows its name; the rest is Llama's."""

from __future__ import annotations

from pipecomp.models.llama import Llama


class Qwen2(Llama):
    """`model_type = "qwen2"`: Qwen2, Qwen2.5 and what shares their layout."""

    model_type = "qwen2"


PLUGIN = Qwen2()
