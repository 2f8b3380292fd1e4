"""The folder that a person names for messages, looked at before anything is started. Knows the file system; no store, no run."""

from __future__ import annotations

import tempfile
from pathlib import Path

from pipecomp.errors import ConfigError


def check_store_folder(folder: str | None) -> None:
    """Make the folder of `--store-folder` where it is not there, and see that a file can be written in it.

    Raises:
        ConfigError: it cannot be used; the text says why.
    """
    if folder is None:
        return
    if not folder:
        raise ConfigError("--store-folder '': name a folder (. is the current one), or leave the option out")
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise ConfigError(f"--store-folder {folder}: this is a file; name a folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"messages")
    except OSError as e:
        raise ConfigError(f"--store-folder {folder}: {e.strerror or e}; choose a folder that can be written") from e
