"""What is slow to import, imported before it is needed. Knows names of modules.

Importing torch and transformers takes seconds of one core and holds the interpreter for long stretches of them. A worker that
did so after it has joined would be late with its heartbeats on a busy machine, and be taken for dead.
"""

from __future__ import annotations

import importlib
import importlib.util

_SLOW = (
    "torch",
    "transformers",
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


def import_all(*more: str) -> None:
    """Import what every worker needs, and `more`."""
    for name in (*_SLOW, *more):
        if importlib.util.find_spec(name.partition(".")[0]) is not None:  # uvloop is not there on every system
            importlib.import_module(name)
