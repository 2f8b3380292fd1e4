"""What is slow to import, imported before it is needed. Knows names of modules, and where a model says its family.

Importing torch and transformers takes seconds of one core and holds the interpreter for long stretches of them. A worker that
did so after it has joined would be late with its heartbeats on a busy machine, and be taken for dead.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
from pathlib import Path

from pipecomp import registry
from pipecomp.config import ModelConfig

_SLOW = (
    "torch",
    "transformers",
    "transformers.modeling_utils",
    "transformers.masking_utils",
    "transformers.loss.loss_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "safetensors.torch",
    "tokenizers",
    "zmq",
    "uvloop",
    "pipecomp.native.ops",
    "pipecomp.transport.zeromq",
    "pipecomp.models._sources",
    "pipecomp.runtime.assembly",
)
"""Only imported: no operation, context or thread may exist before a fork."""


def modules_of(model: ModelConfig) -> tuple[str, ...]:
    """The module of transformers with the model's layers, where its family can be told without a network; else none."""
    family = _family(model)
    return (f"transformers.models.{family}.modeling_{family}",) if family in registry.names("pipecomp.models") else ()


def _family(model: ModelConfig) -> object:
    if model.config is not None:
        return model.config.get("model_type")
    try:
        config = json.loads((Path(model.name).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a hub name, or a mistake that is told where the model is opened
        return None
    return config.get("model_type") if isinstance(config, dict) else None


def import_all(*more: str) -> None:
    """Import what every worker needs, and `more`, those that there are."""
    for name in _SLOW:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:  # uvloop is not there on every system
            importlib.import_module(name)
    for name in more:
        with contextlib.suppress(ModuleNotFoundError):  # a family from elsewhere may keep its layers elsewhere
            importlib.import_module(name)
