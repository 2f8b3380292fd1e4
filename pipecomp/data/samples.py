"""What a training sample is, and a compact sequence of them with stable ids. Knows arrays; knows no file, tokenizer or batch.

A data set is a few flat arrays, so that it can be mapped from disk and a part of it costs no copy:

    input_ids  [ a a a a | b b | c c c c c ]   int32, all samples one after the other
    trained    [ 0 1 1 1 | 1 1 | 0 0 1 1 1 ]   bool, where the loss looks
    starts     [ 0         4     6         ]   one number a sample, and so are lengths, targets, classes and ids

For classification every sample has a class in place of trained positions: one label, one target.

The id of a sample is a function of its content (its class as the file has it included), the settings it was tokenized with and
how often that content came before in the same data set. It therefore survives a restart, another order of epochs and the growth
of the file at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Self, overload

import numpy as np
import numpy.typing as npt
import xxhash

from pipecomp.types import SampleId

IGNORED_LABEL = -100
"""The label of a position that has no loss, as transformers writes it."""

NO_CLASS = -1

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class Sample(NamedTuple):
    """One sequence of tokens. Labels are not shifted: position i predicts `labels[i + 1]`."""

    id: SampleId
    input_ids: Int32Array  # (L,)
    labels: Int32Array  # (L,) `input_ids` where trained, IGNORED_LABEL elsewhere; or (1,) the sample's class
    num_targets: int
    """How many predictions the loss of this sample sums: the first label has nothing before it to predict it from."""


class Counts(NamedTuple):
    """What became of the records of a file."""

    records: int = 0
    """All records read, the empty ones among them."""
    empty_records: int = 0
    """Records without any text; they give no sample."""
    split_records: int = 0
    """Records longer than `max_length`, which became several samples."""
    cut_records: int = 0
    """Records with a label that are longer than `max_length`; their ends are left out."""
    duplicates: int = 0
    """Samples whose content came before in the file; they are kept."""
    without_targets: int = 0
    """Samples that the loss does not look at (one token only, or all of it a prompt); they are kept."""


class SampleTable(NamedTuple):
    """The arrays of a data set; see the drawing above."""

    input_ids: Int32Array  # (num_tokens,)
    trained: npt.NDArray[np.bool_]  # (num_tokens,)
    starts: Int64Array  # (num_samples,)
    lengths: Int64Array  # (num_samples,)
    targets: Int64Array  # (num_samples,)
    classes: Int64Array  # (num_samples,) NO_CLASS where labels are tokens
    ids: npt.NDArray[np.uint64]  # (num_samples,)


class Dataset(Sequence[Sample]):
    """An immutable sequence of samples with unique ids. The arrays are shared with every selection made from it."""

    __slots__ = ("_content_hash", "class_names", "counts", "table")

    def __init__(self, table: SampleTable, counts: Counts, class_names: Sequence[str] = ()) -> None:
        """`class_names`: in the order of `table.classes`; empty where classes are given by number, or there are none."""
        self.table = table
        self.counts = counts
        self.class_names = tuple(class_names)
        self._content_hash = ""

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> Sample | Self:
        if isinstance(index, slice):
            return self.select(np.arange(len(self))[index])
        start, length = int(self.table.starts[index]), int(self.table.lengths[index])
        # A copy: what is mapped from disk is read-only, and a caller may want to hand it to torch.
        input_ids = np.array(self.table.input_ids[start : start + length], dtype=np.int32)
        if self.table.classes[index] != NO_CLASS:
            labels = np.array([self.table.classes[index]], dtype=np.int32)
        else:
            labels = np.where(self.table.trained[start : start + length], input_ids, np.int32(IGNORED_LABEL))
        return Sample(SampleId(int(self.table.ids[index])), input_ids, labels, int(self.table.targets[index]))

    def __len__(self) -> int:
        return len(self.table.ids)

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"<Dataset {len(self)} samples, {self.num_tokens} tokens, {self.content_hash[:8]}>"

    @property
    def content_hash(self) -> str:
        """Hexadecimal hash of all ids in order, hence of every token, label and tokenization setting."""
        if not self._content_hash:
            self._content_hash = xxhash.xxh3_128_hexdigest(self.table.ids.astype("<u8").tobytes())
        return self._content_hash

    @property
    def num_tokens(self) -> int:
        return int(self.table.lengths.sum())

    @property
    def num_targets(self) -> int:
        return int(self.table.targets.sum())

    @property
    def max_sample_length(self) -> int:
        return int(self.table.lengths.max(initial=0))

    def select(self, indices: npt.ArrayLike) -> Self:
        """The samples at `indices`, in that order. Ids and counts stay as they are; no token is copied."""
        chosen = np.asarray(indices, dtype=np.int64)
        table = self.table._replace(
            starts=self.table.starts[chosen],
            lengths=self.table.lengths[chosen],
            targets=self.table.targets[chosen],
            classes=self.table.classes[chosen],
            ids=self.table.ids[chosen],
        )
        return type(self)(table, self.counts, self.class_names)

    def with_classes(self, classes: Int64Array, class_names: Sequence[str]) -> Self:
        """The same samples under other numbers of their classes; ids stay, since they know classes as the file has them."""
        return type(self)(self.table._replace(classes=classes), self.counts, class_names)


class Tokenized(NamedTuple):
    """One tokenized sequence before it has an id."""

    input_ids: Int32Array  # (L,)
    trained: npt.NDArray[np.bool_]  # (L,)
    label: int | str | None = None  # the class of the whole sequence
    num_cut: int = 0  # tokens that were left out


def assemble(sequences: Iterable[Tokenized], settings_hash: str, counts: Counts) -> Dataset:
    """Give every sequence its id and lay all of them out flat. `counts` is completed with what only the ids show."""
    labels: list[int | str | None] = []
    flat_ids: list[Int32Array] = []
    flat_trained: list[npt.NDArray[np.bool_]] = []
    keys: list[bytes] = []
    for input_ids, trained, label, _ in sequences:
        flat_ids.append(input_ids)
        flat_trained.append(trained)
        labels.append(label)
        keys.append(_content_key(settings_hash, input_ids, trained, label))
    lengths = np.array([len(ids) for ids in flat_ids], dtype=np.int64)
    per_sample = (np.count_nonzero(trained[1:]) for trained in flat_trained)
    targets = np.array([n if label is None else 1 for n, label in zip(per_sample, labels, strict=True)], dtype=np.int64)
    names = sorted({label for label in labels if isinstance(label, str)})
    numbers: dict[int | str | None, int] = {None: NO_CLASS, **{name: number for number, name in enumerate(names)}}
    table = SampleTable(
        input_ids=np.concatenate([np.empty(0, np.int32), *flat_ids]),
        trained=np.concatenate([np.empty(0, np.bool_), *flat_trained]),
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        targets=targets,
        classes=np.array([label if isinstance(label, int) else numbers[label] for label in labels], dtype=np.int64),
        ids=np.array(number_occurrences(keys), dtype=np.uint64),
    )
    duplicates, bare = len(keys) - len(set(keys)), int(np.count_nonzero(targets == 0))
    return Dataset(table, counts._replace(duplicates=duplicates, without_targets=bare), names)


def number_occurrences(
    keys: Sequence[bytes], hash64: Callable[[bytes], int] = xxhash.xxh3_64_intdigest
) -> list[SampleId]:
    """A unique 64-bit id for each content key: the hash of (key, occurrence number).

    Should another sample of this data set have that id already, the number goes up until the id is free. Both happen in the
    order of the file, so that the same file always gives the same ids.
    """
    next_number: dict[bytes, int] = {}
    taken: set[int] = set()
    ids: list[SampleId] = []
    for key in keys:
        number = next_number.get(key, 0)
        while (candidate := hash64(key + number.to_bytes(8, "little"))) in taken:
            number += 1
        next_number[key] = number + 1
        taken.add(candidate)
        ids.append(SampleId(candidate))
    return ids


def _content_key(
    settings_hash: str, input_ids: Int32Array, trained: npt.NDArray[np.bool_], label: int | str | None
) -> bytes:
    """128 bits, so that two contents with one key can be ruled out and a repeated key is a repeated content."""
    labels = np.where(trained, input_ids, np.int32(IGNORED_LABEL))
    digest = xxhash.xxh3_128(settings_hash.encode())
    digest.update(len(input_ids).to_bytes(8, "little"))
    digest.update(input_ids.astype("<i4").tobytes())
    digest.update(labels.astype("<i4").tobytes())
    if label is not None:
        digest.update(f"{type(label).__name__} {label}".encode())
    return digest.digest()
