"""Read the records of a text or JSONL file, one at a time, each with the line it stands on. Knows no tokenizer and no sample.

    .txt, .md       documents with blank lines between them; a file without blank lines is one document
    .jsonl          one JSON object a line, told apart by its columns:
                      {"text": ...}                          every token is trained
                      {"prompt": ..., "completion": ...}     the completion is trained
                      {"messages": [{"role": ..., "content": ...}, ...]}     the assistant's turns are trained
                    for classification each has a text and a label
                      {"text": ..., "label": 1}              a class number from 0, or
                      {"text": ..., "label": "positive"}     the name of a class

Which columns count is decided by the first record and holds for the whole file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from pipecomp.errors import ConfigError

_SUFFIXES: Mapping[str, Literal["text", "jsonl"]] = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
}


class DataSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a file becomes samples. Whatever is here is part of every sample's id."""

    format: Literal["auto", "text", "jsonl"] = "auto"
    """`auto` goes by the file's suffix."""
    text_column: str = "text"
    label_column: str | None = None
    """Where each record's class stands; None: records have none."""
    max_length: int = 256
    """Most tokens in a sample; a longer record becomes several samples, or with a label is cut off."""
    packing: bool = False
    """Join all records in the order of the file and cut the whole at every `max_length`-th token."""

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise ConfigError(f"data.max_length is {self.max_length}; a prediction needs at least 2 tokens")


Label = int | str
"""A class: its number, or its name."""


class Place(NamedTuple):
    """Where a record begins; prints as error messages name it."""

    path: Path
    line: int

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}"


class TextRecord(NamedTuple):
    place: Place
    text: str


class PromptRecord(NamedTuple):
    place: Place
    prompt: str
    completion: str


class ChatRecord(NamedTuple):
    place: Place
    messages: list[dict[str, Any]]


class LabelledRecord(NamedTuple):
    place: Place
    text: str
    label: Label


Record = TextRecord | PromptRecord | ChatRecord | LabelledRecord
_Row = Mapping[str, Any]
_Parse = Callable[[Place, _Row], Record]


def read_records(path: Path, settings: DataSettings) -> Iterator[Record]:
    """The records of `path` in the order of the file, the empty ones among them.

    Raises:
        ConfigError: the file is missing, of an unknown kind, not UTF-8, not JSON, or a column is missing or of the wrong type.
    """
    kind = _file_format(path, settings)
    if kind == "text" and settings.label_column is not None:
        raise ConfigError(
            f"{path} is plain text, which has no labels: sequence classification needs a .jsonl file with a text and a label "
            "in each line"
        )
    lines = _lines(path)
    return _documents(lines) if kind == "text" else _rows(lines, settings)


def _file_format(path: Path, settings: DataSettings) -> Literal["text", "jsonl"]:
    if settings.format != "auto":
        return settings.format
    if path.suffix.lower() not in _SUFFIXES:
        raise ConfigError(
            f"{path}: the suffix {path.suffix!r} says nothing about the file's format; name it .txt or .jsonl, "
            'or set data.format to "text" or "jsonl"'
        )
    return _SUFFIXES[path.suffix.lower()]


def _lines(path: Path) -> Iterator[tuple[Place, str]]:
    """Lines end at a newline only: JSON strings may hold the other characters that Python splits lines at."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                place = Place(path, number)
                yield place, _decode(place, raw)
    except OSError as e:
        raise ConfigError(f"cannot read the data file {path}: {e.strerror or e}; check data.train and data.eval") from e


def _decode(place: Place, raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig" if place.line == 1 else "utf-8")
    except UnicodeDecodeError as e:
        raise ConfigError(f"{place}: byte {e.start + 1} is not valid UTF-8; save the file as UTF-8") from e


def _documents(lines: Iterator[tuple[Place, str]]) -> Iterator[Record]:
    collected: list[str] = []
    begin: Place | None = None
    for place, line in lines:
        if line.strip():
            begin = begin or place
            collected.append(line)
        elif begin is not None:
            yield TextRecord(begin, "".join(collected).rstrip("\r\n"))
            collected, begin = [], None
    if begin is not None:
        yield TextRecord(begin, "".join(collected).rstrip("\r\n"))


def _rows(lines: Iterator[tuple[Place, str]], settings: DataSettings) -> Iterator[Record]:
    parse: _Parse | None = None
    for place, line in lines:
        if not line.strip():
            continue
        row = _parse_json(place, line)
        if parse is None:
            parse = _choose(place, row, settings) if settings.label_column is None else _labelled(settings, settings.label_column)
        yield parse(place, row)


def _parse_json(place: Place, line: str) -> _Row:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as e:
        raise ConfigError(f"{place}: not valid JSON ({e}); a .jsonl file holds one JSON object a line") from e
    if "\\u" in line and not _is_text(row):
        raise ConfigError(f"{place}: half of a surrogate pair (\\ud800 to \\udfff) stands alone, which is no character")
    if not isinstance(row, dict):
        raise ConfigError(
            f'{place}: a {_json_type(row)}, not a JSON object; each line must look like {{"text": "..."}}'
        )
    return row


def _is_text(value: object) -> bool:
    """Whether every string in a JSON value can be encoded; an escape may name half a character."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return False
    if isinstance(value, dict):
        return all(_is_text(key) and _is_text(part) for key, part in value.items())
    return not isinstance(value, list) or all(map(_is_text, value))


def _choose(place: Place, row: _Row, settings: DataSettings) -> _Parse:
    """Tell the kind of a file from its first record."""

    def text(place: Place, row: _Row) -> Record:
        return TextRecord(place, _text(place, row, settings.text_column))

    if settings.text_column in row:
        return text
    if "prompt" in row and "completion" in row:
        return _prompt
    if "messages" in row:
        return _chat
    raise _missing(place, row, settings.text_column)


def _labelled(settings: DataSettings, column: str) -> _Parse:
    """Texts with classes, all of the file numbers or all of it names: a `1` among names is more likely a mistake."""
    kinds: dict[type, Place] = {}

    def parse(place: Place, row: _Row) -> Record:
        text, label = _text(place, row, settings.text_column), row.get(column)
        if column not in row:
            columns = ", ".join(map(repr, row))
            raise ConfigError(
                f"{place}: no column {column!r}; the columns there are: {columns}. Set data.label_column to the one that holds "
                "the class"
            )
        if not isinstance(label, int | str) or isinstance(label, bool) or label == "":
            shown = "an empty string" if label == "" else f"a {_json_type(label)}"
            shown += " with a fraction" if isinstance(label, float) else ""
            raise ConfigError(f"{place}: column {column!r} is {shown}; a label is a class number from 0 or the name of a class")
        if isinstance(label, int) and label < 0:
            raise ConfigError(f"{place}: label {label}; class numbers begin at 0")
        first = kinds.setdefault(type(label), place)
        for kind, other in kinds.items():
            if kind is not type(label):
                raise ConfigError(
                    f"{first}: label {label!r} is a {_json_type(label)}, but line {other.line} has a "
                    f"{'string' if kind is str else 'number'}; write all labels of a file as numbers or all as names"
                )
        return LabelledRecord(place, text, label)

    return parse


def _prompt(place: Place, row: _Row) -> Record:
    return PromptRecord(place, _text(place, row, "prompt"), _text(place, row, "completion"))


def _chat(place: Place, row: _Row) -> Record:
    messages = row.get("messages", None)
    if "messages" not in row:
        raise _missing(place, row, "messages")
    if not isinstance(messages, list):
        raise ConfigError(
            f"{place}: 'messages' is a {_json_type(messages)}; it must be a list of objects with role and content"
        )
    for index, message in enumerate(messages):
        fields = message if isinstance(message, dict) else {}
        if not isinstance(fields.get("role"), str) or not isinstance(fields.get("content"), str):
            raise ConfigError(f"{place}: messages[{index}] must be an object whose 'role' and 'content' are strings")
    return ChatRecord(place, messages)


def _text(place: Place, row: _Row, column: str) -> str:
    if column not in row:
        raise _missing(place, row, column)
    value = row[column]
    if not isinstance(value, str):
        raise ConfigError(f"{place}: column {column!r} is a {_json_type(value)}; it must be a string")
    return value


def _missing(place: Place, row: _Row, column: str) -> ConfigError:
    columns = ", ".join(map(repr, row)) or "none"
    return ConfigError(
        f"{place}: no column {column!r}; the columns there are: {columns}. Set data.text_column to the one that holds the text, "
        "or give each record 'prompt' and 'completion', or 'messages'"
    )


def _json_type(value: object) -> str:
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "list", dict: "object"}
    return names.get(type(value), "null")
