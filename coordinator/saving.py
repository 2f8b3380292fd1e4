"""The trained model's folder: one file a worker, tokenizer, run file and step log. Knows files and tensors; no sockets."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.preparation import PreparedRun
from coordinator.summary import FP32_NBYTES, format_nbytes
from pipecomp.config import resolved_toml
from pipecomp.errors import ConfigError, TrainingFailed

if TYPE_CHECKING:
    import torch

    from pipecomp.models import ModelFolderWriter

RUN_FILE = "run.toml"
STEP_LOG = "steps.jsonl"


def check_folder(prepared: PreparedRun) -> None:
    """Find out before hours of training whether the model can be written. Raises ConfigError."""
    if not prepared.config.train.save_model:
        return
    _open_writer(prepared).discard()
    folder = _folder(prepared)
    needed = FP32_NBYTES * sum(math.prod(p.shape) for p in prepared.model.plan.parameters)
    free = shutil.disk_usage(folder.parent).free
    if free < needed:
        raise ConfigError(
            f"train.output_dir = {folder}: the trained model needs {format_nbytes(needed)}, the disk has {format_nbytes(free)} "
            "left; free some, or choose a folder on another disk"
        )


class ModelSaver:
    """Writes one model, a worker's tensors at a time. All methods may take long and run in a thread."""

    def __init__(self, prepared: PreparedRun, step_log: Path | None) -> None:
        self._prepared = prepared
        self._step_log = step_log
        self._writer: ModelFolderWriter | None = None
        self._names: set[str] = set()

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write what one worker sent. Raises ConfigError, TrainingFailed."""
        if self._writer is None:
            self._writer = _open_writer(self._prepared)
        try:
            self._writer.add(tensors)
        except ValueError as error:
            raise TrainingFailed(f"the trained model cannot be put together: {error}") from error
        self._names.update(tensors)

    def finish(self) -> str:
        """Complete the folder; what no worker sent because it was not trained comes from the original model."""
        assert self._writer is not None
        prepared = self._prepared
        missing = [p for p in prepared.model.plan.parameters if p.name not in self._names]
        trained = [p.name for p in missing if p.trainable]
        reader = prepared.model.weights
        if trained or (missing and reader is None):
            names = trained or [p.name for p in missing]
            raise TrainingFailed(f"no worker sent {', '.join(names[:4])} ({len(names)} tensors): the model is not whole")
        try:
            self._writer.add({p.name: reader[p.name] for p in missing} if reader is not None else {})
            folder = self._writer.finish()
        except ValueError as error:
            raise TrainingFailed(f"the trained model cannot be put together: {error}") from error
        try:
            self._add_files(folder)
        except OSError as error:
            raise ConfigError(f"cannot write to {folder}: {error.strerror or error}") from error
        return str(folder)

    def discard(self) -> None:
        """Remove what is not finished."""
        if self._writer is not None:
            self._writer.discard()

    def _add_files(self, folder: Path) -> None:
        for name, content in self._prepared.tokenizer_files.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        (folder / RUN_FILE).write_text(resolved_toml(self._prepared.config), encoding="utf-8")
        if self._step_log is not None:
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(self._step_log, folder / STEP_LOG)


def _open_writer(prepared: PreparedRun) -> ModelFolderWriter:
    from pipecomp.models import ModelFolderWriter

    num_files = prepared.config.cluster.num_stages + 1  # one a worker, and one for what nobody trained
    return ModelFolderWriter(_folder(prepared), prepared.model.plan, prepared.model.config, num_files=num_files)


def _folder(prepared: PreparedRun) -> Path:
    return Path(prepared.config.train.output_dir).expanduser().resolve()
