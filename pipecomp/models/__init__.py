"""Models as flat lists of layers: open one, build a shard of it, save it. Knows names only; the work is loaded on first use.

    open_model(config.model)                          the coordinator: a folder, a hub name or a bare configuration
    model_from_config(json, freeze=..., dropout=...)  a worker: from plain values, with no file at all
    with_classes(model, config.model, names)          for classification: the classes that the data has
    tokenizer_files(config.model)                     what a saved model needs besides its weights
    ModelFolderWriter, save_folder                    an ordinary Hugging Face folder, one file a stage

Every module here that is not `base` and does not start with `_` is a family's plugin.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipecomp.models._checkpoint import CheckpointReader, StoredTensor, tensor_bytes
    from pipecomp.models._export import ModelFolderWriter, save_folder
    from pipecomp.models._sources import model_from_config, open_model, tokenizer_files, with_classes
    from pipecomp.models._transformers import auto_class

__all__ = [
    "CheckpointReader",
    "ModelFolderWriter",
    "StoredTensor",
    "auto_class",
    "model_from_config",
    "open_model",
    "save_folder",
    "tensor_bytes",
    "tokenizer_files",
    "with_classes",
]

_HOMES = {
    "CheckpointReader": "_checkpoint",
    "ModelFolderWriter": "_export",
    "StoredTensor": "_checkpoint",
    "auto_class": "_transformers",
    "model_from_config": "_sources",
    "open_model": "_sources",
    "save_folder": "_export",
    "tensor_bytes": "_checkpoint",
    "tokenizer_files": "_sources",
    "with_classes": "_sources",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the module holds
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
