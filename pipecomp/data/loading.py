"""From a file to a data set: read, tokenize, cut or pack, number, keep. Joins its neighbours; knows no batch and no step."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import xxhash

from pipecomp.data.cache import read_entry, write_entry
from pipecomp.data.records import DataSettings, read_records
from pipecomp.data.samples import Counts, Dataset, Tokenized, assemble
from pipecomp.data.tokenization import tokenize_records
from pipecomp.data.tokenizer import tokenizer_hash
from pipecomp.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FORMAT_VERSION = 2
"""Goes up when the same file and settings would give other samples; old cache entries are then left alone."""


def load_dataset(
    path: Path, tokenizer: PreTrainedTokenizerBase, settings: DataSettings, *, cache_folder: Path | None
) -> Dataset:
    """All samples of `path`, in the order of the file.

    Nothing is dropped: a record longer than `max_length` becomes consecutive samples, and empty records are counted. One with
    a label is one sample: what is longer is cut off, and counted too.
    With a `cache_folder`, the result is kept there under a hash of the file's bytes, the tokenizer and the settings.

    Raises:
        ConfigError: the file cannot be used; the text says where and what to change.
    """
    settings_hash = _hash_settings(tokenizer, settings)
    entry = None if cache_folder is None else cache_folder / _entry_name(path, settings_hash)
    kept = None if entry is None else read_entry(entry)
    if kept is not None:
        return kept
    documents = tokenize_records(read_records(path, settings), tokenizer, max_length=settings.max_length)
    dataset = _number(path, documents, settings, settings_hash)
    if entry is not None:
        write_entry(entry, dataset)
    return dataset


def _number(path: Path, documents: Iterable[Tokenized], settings: DataSettings, settings_hash: str) -> Dataset:
    sequences = list(documents)
    filled = [s for s in sequences if len(s.input_ids)]
    counts = Counts(
        records=len(sequences),
        empty_records=len(sequences) - len(filled),
        split_records=sum(len(s.input_ids) > settings.max_length for s in filled),
        cut_records=sum(s.num_cut > 0 for s in filled),
    )
    dataset = assemble(
        _cut(_joined(filled) if settings.packing else filled, settings.max_length), settings_hash, counts
    )
    if not len(dataset):
        raise ConfigError(
            f"{path} has no text: {counts.records} records, all of them empty; check data.train and data.eval"
        )
    if not dataset.num_targets:
        raise ConfigError(
            f"{path} has nothing to train on: in all {len(dataset)} samples every token is masked or stands alone; "
            "check the completions, or the roles of the messages"
        )
    return dataset


def _cut(sequences: Iterable[Tokenized], max_length: int) -> Iterable[Tokenized]:
    for sequence in sequences:
        for start in range(0, len(sequence.input_ids), max_length):
            end = start + max_length
            yield sequence._replace(input_ids=sequence.input_ids[start:end], trained=sequence.trained[start:end])


def _joined(sequences: list[Tokenized]) -> list[Tokenized]:
    """One long sequence; each record already ends with the end-of-text token."""
    if not sequences:
        return []
    return [Tokenized(np.concatenate([s.input_ids for s in sequences]), np.concatenate([s.trained for s in sequences]))]


def _hash_settings(tokenizer: PreTrainedTokenizerBase, settings: DataSettings) -> str:
    described = msgspec.json.encode(settings, order="sorted") + tokenizer_hash(tokenizer).encode()
    return xxhash.xxh3_128_hexdigest(described + b"/%d" % _FORMAT_VERSION)


def _entry_name(path: Path, settings_hash: str) -> str:
    digest = xxhash.xxh3_128(settings_hash.encode())
    digest.update(path.suffix.lower().encode())
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as e:
        raise ConfigError(f"cannot read the data file {path}: {e.strerror or e}; check data.train and data.eval") from e
    return digest.hexdigest()
