"""Write a trained model as an ordinary Hugging Face folder, one stage at a time. Knows files and names; no layers, no sockets.

    .NAME.tmp-1a2b3c4d/                     written here first
        config.json                         dtype float32
        model-00001-of-00004.safetensors    what the first stage sent
        ...
        model.safetensors.index.json
        tokenizer.json ...
    NAME/                                   renamed to, once everything is there
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from pipecomp import registry
from pipecomp.errors import ConfigError
from pipecomp.models._checkpoint import INDEX_FILE, SINGLE_FILE
from pipecomp.models._transformers import whole_on_meta
from pipecomp.models.base import ModelMaker, ModelPlan


class ModelFolderWriter:
    """One folder being written. Never holds more than the tensors it is given in one call.

    Use it as a context: leaving without `finish` removes what was written.

    Args:
        folder: where the model will be; may exist if it is empty or holds an older model.
        plan: which tensors a whole model has.
        config: the model's configuration as plain JSON values (`Model.config`).
        num_files: how many times `add` will be called at most.
        extra_files: copied as they are: tokenizer, generation settings.

    Raises:
        ConfigError: the folder holds something that is not a model, or cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        plan: ModelPlan,
        config: Mapping[str, Any],
        *,
        num_files: int,
        extra_files: Sequence[Path] = (),
    ) -> None:
        self._folder = folder
        self._num_files = num_files
        self._shapes = {p.name: p.shape for p in plan.parameters}
        self._alias = plan.tied.alias if plan.tied is not None else None
        self._weight_map: dict[str, str] = {}
        self._nbytes = 0
        self._num_added = 0
        _refuse_foreign(folder)
        self._draft = folder.with_name(f".{folder.name}.tmp-{secrets.token_hex(4)}")
        try:
            self._draft.mkdir(parents=True)
            for file in extra_files:
                shutil.copyfile(file, self._draft / file.name)
            _write_config(self._draft, config, plan.task)
        except OSError as e:
            self.discard()
            raise ConfigError(f"cannot write a model to {folder}: {e.strerror or e}") from e

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.discard()

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write one stage's tensors as one file, in fp32. The alias of a tied weight is left out: it is the embedding.

        Raises:
            ValueError: a name or shape that the model does not have, a name that was written before, or a file too many.
            ConfigError: the disk refuses.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        if self._num_added >= self._num_files:
            raise ValueError(f"{self._num_files} files were announced, this is one more")
        kept = {name: tensor for name, tensor in tensors.items() if name != self._alias}
        for name, tensor in kept.items():
            if self._shapes.get(name) != tuple(tensor.shape):
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, the model has {self._shapes.get(name)}")
            if name in self._weight_map:
                raise ValueError(f"{name} comes from two stages")
        self._num_added += 1
        if not kept:  # a stage of nothing but a tied head
            return
        file = f"part-{self._num_added:05d}.safetensors"  # gets its name once it is known how many there are
        plain = {name: t.detach().to("cpu", torch.float32).contiguous() for name, t in kept.items()}
        try:
            save_file(plain, self._draft / file, metadata={"format": "pt"})
            (self._draft / file).chmod(0o666 & ~_umask())  # readable like any other file, not by its owner alone
        except (OSError, SafetensorError) as e:
            raise ConfigError(f"cannot write {file} of the model for {self._folder}: {getattr(e, 'strerror', None) or e}") from e
        self._weight_map.update(dict.fromkeys(kept, file))
        self._nbytes += sum(t.nbytes for t in plain.values())

    def finish(self) -> Path:
        """Write the index and give the folder its name.

        Raises:
            ValueError: a tensor of the model was never added.
            ConfigError: the disk refuses.
        """
        missing = [name for name in self._shapes if name not in self._weight_map]
        if missing:
            raise ValueError(f"{len(missing)} tensors were not added, {missing[0]} first")
        try:
            self._name_files()
            if len(set(self._weight_map.values())) > 1:
                metadata = {"total_size": self._nbytes}
                index = {"metadata": metadata, "weight_map": dict(sorted(self._weight_map.items()))}
                (self._draft / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
            _refuse_foreign(self._folder)
            if self._folder.exists():
                old = self._draft.with_name(self._draft.name + "-old")
                self._folder.rename(old)
                self._draft.rename(self._folder)
                shutil.rmtree(old)
            else:
                self._draft.rename(self._folder)
        except OSError as e:
            raise ConfigError(f"cannot give the model its folder {self._folder}: {e.strerror or e}") from e
        return self._folder

    def _name_files(self) -> None:
        """`model.safetensors`, or `model-0000k-of-0000n.safetensors` where there are n."""
        parts = sorted(set(self._weight_map.values()))
        names = {part: f"model-{k:05d}-of-{len(parts):05d}.safetensors" for k, part in enumerate(parts, start=1)}
        if len(parts) == 1:
            names[parts[0]] = SINGLE_FILE
        for part, name in names.items():
            (self._draft / part).rename(self._draft / name)
        self._weight_map = {tensor: names[part] for tensor, part in self._weight_map.items()}

    def discard(self) -> None:
        """Remove what was written and not finished. Does nothing after `finish`."""
        shutil.rmtree(self._draft, ignore_errors=True)


def save_folder(
    folder: Path,
    plan: ModelPlan,
    config: Mapping[str, Any],
    stages: Iterable[Mapping[str, torch.Tensor]],
    *,
    num_stages: int,
    extra_files: Sequence[Path] = (),
) -> Path:
    """Write a whole model from its stages' tensors, taking one stage at a time. Raises as `ModelFolderWriter` does."""
    with ModelFolderWriter(folder, plan, config, num_files=num_stages, extra_files=extra_files) as writer:
        for tensors in stages:
            writer.add(tensors)
        return writer.finish()


def _write_config(folder: Path, config: Mapping[str, Any], task: str) -> None:
    from transformers import AutoConfig

    if isinstance(registry.load("pipecomp.models", config["model_type"]), ModelMaker):  # transformers does not know it
        (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
        return
    parsed = type(AutoConfig.for_model(config["model_type"])).from_dict(dict(config))
    parsed.architectures = [type(whole_on_meta(parsed, task)).__name__]
    parsed.save_pretrained(folder)


def _refuse_foreign(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() and not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} exists and is not a model folder: choose another train.output_dir, or empty it")


def _umask() -> int:
    """The process's file creation mask, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
