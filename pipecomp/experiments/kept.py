"""Rows of a benchmark, each kept as soon as it is there and not measured again. Knows keys, rows, one file; no benchmark."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from pipecomp import results
from pipecomp.errors import ConfigError

Key = TypeVar("Key", bound=Hashable)
Row = results.Row


class KeptRows(Generic[Key]):
    """The rows so far, in memory and, with a path, on disk.

    Args:
        path: where they are kept; None: nowhere.
        command: what the file says it was made by.
        key_of: what a row is of; None for a row that is of nothing any more.
        order: rows stand in the order of this.
        wanted: the settings that a row of these keys must have been measured with, or it is measured again. Rows of other
            keys stay as they are.
        bars: of all rows.

    Raises:
        ConfigError: the file is not such a result.
    """

    def __init__(
        self,
        path: Path | None,
        command: str,
        *,
        key_of: Callable[[Row], Key | None],
        order: Callable[[Key], Any],
        wanted: Mapping[Key, str],
        bars: Callable[[Sequence[Row]], list[Row]],
    ) -> None:
        self.rows: dict[Key, Row] = {}
        self._path, self._command, self._order, self._bars = path, command, order, bars
        self._stored = {"rows": [], "bars": []} if path is None or not path.exists() else _read(path, command)
        for row in self._stored["rows"]:
            key = key_of(row)
            if key is not None and wanted.get(key, row["settings"]) == row["settings"]:
                self.rows[key] = row

    def add(self, key: Key, row: Row) -> None:
        """Keep a row, at once."""
        self.rows[key] = row
        self._write()

    def finish(self) -> Row:
        """The result; it is written again where rows or bars are no longer those of the file."""
        outcome = self.result()
        if self._path is not None and self._path.exists() and outcome["bars"] != self._stored["bars"]:
            self._write()
        return outcome

    def result(self) -> Row:
        """All rows in their order, and the bars."""
        rows = [self.rows[key] for key in sorted(self.rows, key=self._order)]
        return results.result(self._command, rows, self._bars(rows))

    def _write(self) -> None:
        if self._path is not None:
            self._stored = self.result()
            results.write(self._path, self._stored, quiet=True)


def _read(path: Path, command: str) -> Row:
    try:
        stored: Row = json.loads(path.read_text(encoding="utf-8"))
        return {"rows": stored["rows"], "bars": stored["bars"]}
    except (ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{path} is not a result of {command} ({e}): move it away, or get it back as it was") from e
