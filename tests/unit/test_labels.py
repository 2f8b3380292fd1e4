"""Texts with classes: from the lines of a file to samples with one label each, and to the model's classes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipecomp.config import parse_run_config
from pipecomp.data.classes import choose_classes, number_classes
from pipecomp.data.loading import load_dataset
from pipecomp.data.records import DataSettings
from pipecomp.data.samples import Dataset
from pipecomp.data.splitting import hold_out
from pipecomp.errors import ConfigError

CLS, SEP = 1, 2
WORDS = ("good", "bad", "film", "so")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Words, with [CLS] before and [SEP] after them as BERT's tokenizers have."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    vocabulary = {name: number for number, name in enumerate(("[UNK]", "[CLS]", "[SEP]", *WORDS))}
    words = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)])
    return PreTrainedTokenizerFast(tokenizer_object=words, cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]")


def write(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rows_of(*labels: object) -> list[dict[str, object]]:
    return [{"text": f"good {' '.join(['so'] * n)} film", "label": label} for n, label in enumerate(labels)]


def load(path: Path, tokenizer: Any, cache_folder: Path | None = None, **options: Any) -> Dataset:
    settings = DataSettings(**{"label_column": "label", **options})
    return load_dataset(path, tokenizer, settings, cache_folder=cache_folder)


def labels(dataset: Dataset) -> list[list[int]]:
    return [sample.labels.tolist() for sample in dataset]


def test_a_sample_has_one_label_and_special_tokens_around_its_text(tmp_path: Path, tokenizer: Any) -> None:
    made = load(write(tmp_path / "d.jsonl", [{"text": "bad film", "label": 1}, {"text": "good", "label": 0}]), tokenizer)
    assert [sample.input_ids.tolist() for sample in made] == [[CLS, 4, 5, SEP], [CLS, 3, SEP]]
    assert labels(made) == [[1], [0]]
    assert [sample.num_targets for sample in made] == [1, 1]
    assert made.num_targets == 2


def test_a_long_text_is_cut_before_its_last_special_token_and_counted(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"text": "good so so so film", "label": 0}, {"text": "bad film", "label": 1}]
    made = load(write(tmp_path / "d.jsonl", rows), tokenizer, max_length=4)
    assert [sample.input_ids.tolist() for sample in made] == [[CLS, 3, 6, SEP], [CLS, 4, 5, SEP]]
    expected = tokenizer([row["text"] for row in rows], truncation=True, max_length=4)["input_ids"]
    assert [sample.input_ids.tolist() for sample in made] == expected
    assert (made.counts.cut_records, made.counts.split_records) == (1, 0)


def test_tokenizing_does_not_switch_truncation_on_in_the_tokenizer(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer("good")
    load(write(tmp_path / "d.jsonl", rows_of(0, 1, 0, 1)), tokenizer, max_length=3)
    assert tokenizer.backend_tokenizer.truncation is None


def test_names_are_numbered_in_sorted_order(tmp_path: Path, tokenizer: Any) -> None:
    made = load(write(tmp_path / "d.jsonl", rows_of("positive", "negative", "mixed")), tokenizer)
    assert made.class_names == ("mixed", "negative", "positive")
    assert labels(made) == [[2], [1], [0]]


def test_a_text_of_nothing_is_left_out_and_counted(tmp_path: Path, tokenizer: Any) -> None:
    made = load(write(tmp_path / "d.jsonl", [{"text": " ", "label": 0}, *rows_of(1, 0)]), tokenizer)
    assert labels(made) == [[1], [0]]
    assert made.counts.empty_records == 1


def test_the_id_of_a_sample_covers_its_text_and_its_label_and_nothing_else(tmp_path: Path, tokenizer: Any) -> None:
    def ids(*rows: dict[str, object]) -> list[int]:
        return [int(sample.id) for sample in load(write(tmp_path / "d.jsonl", rows), tokenizer)]

    good: dict[str, object] = {"text": "good film", "label": "yes"}
    (first,) = ids(good)
    assert ids({"text": "bad", "label": "no"}, good)[1] == first, "which classes others have must not matter"
    assert ids({**good, "label": "no"}) != [first]
    assert ids({**good, "text": "bad film"}) != [first]
    numbered = [ids({**good, "label": label}) for label in (1, "1")]
    assert numbered[0] != numbered[1]


def test_a_cached_data_set_keeps_its_classes(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "d.jsonl", rows_of("b", "a", "b"))
    first = load(path, tokenizer, tmp_path / "cache")
    again = load(path, tokenizer, tmp_path / "cache")
    assert not isinstance(first.table.input_ids, np.memmap)
    assert isinstance(again.table.input_ids, np.memmap), "it must come from the cache"
    assert (again.class_names, labels(again)) == (first.class_names, labels(first))


def test_held_out_samples_keep_their_classes(tmp_path: Path, tokenizer: Any) -> None:
    whole = load(write(tmp_path / "d.jsonl", rows_of(*"abcabcabc")), tokenizer)
    by_id = {sample.id: sample.labels.tolist() for sample in whole}
    for part in hold_out(whole, 4, seed=0):
        assert part.class_names == ("a", "b", "c")
        assert [by_id[sample.id] for sample in part] == labels(part)


@pytest.mark.parametrize(
    ("second", "complaint"),
    [
        ({"text": "bad"}, "no column 'label'; the columns there are: 'text'. Set data.label_column"),
        ({"text": "bad", "label": None}, "column 'label' is a null; a label is a class number from 0 or the name of a class"),
        ({"text": "bad", "label": 1.0}, "column 'label' is a number with a fraction; a label is a class number"),
        ({"text": "bad", "label": True}, "column 'label' is a boolean"),
        ({"text": "bad", "label": ""}, "column 'label' is an empty string"),
        ({"text": "bad", "label": -1}, "label -1; class numbers begin at 0"),
        ({"text": "bad", "label": "1"}, "label '1' is a string, but line 1 has a number"),
        ({"label": 1}, "no column 'text'"),
    ],
)
def test_a_bad_label_is_named_with_file_and_line(
    tmp_path: Path, tokenizer: Any, second: dict[str, object], complaint: str
) -> None:
    path = write(tmp_path / "d.jsonl", [{"text": "good", "label": 0}, second])
    with pytest.raises(ConfigError) as refused:
        load(path, tokenizer)
    assert f"{path}, line 2: {complaint}" in str(refused.value)


def test_plain_text_has_no_labels(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "d.txt").write_text("good film")
    with pytest.raises(ConfigError, match=r"d.txt is plain text, which has no labels: .*\.jsonl"):
        load(tmp_path / "d.txt", tokenizer)


# ---------------------------------------------------------------- classes


def choose(dataset: Dataset, *own: str, is_trained: bool = False) -> tuple[str, ...]:
    return choose_classes(dataset, own or ("LABEL_0", "LABEL_1"), is_trained=is_trained, source="d.jsonl")


def test_there_are_as_many_classes_as_the_training_file_has(tmp_path: Path, tokenizer: Any) -> None:
    numbers = load(write(tmp_path / "n.jsonl", rows_of(2, 0, 1)), tokenizer)
    names = load(write(tmp_path / "s.jsonl", rows_of("c", "a", "b")), tokenizer)
    assert choose(numbers) == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert choose(numbers, "no", "maybe", "yes") == ("no", "maybe", "yes")
    assert choose(names) == ("a", "b", "c")


def test_a_trained_classifier_keeps_its_classes_and_their_order(tmp_path: Path, tokenizer: Any) -> None:
    names = load(write(tmp_path / "s.jsonl", rows_of("a", "c", "a")), tokenizer)
    assert choose(names, "c", "b", "a", is_trained=True) == ("c", "b", "a")
    assert labels(number_classes(names, ("c", "b", "a"), "s.jsonl")) == [[2], [0], [2]]


def test_samples_keep_their_ids_when_classes_are_numbered_anew(tmp_path: Path, tokenizer: Any) -> None:
    names = load(write(tmp_path / "s.jsonl", rows_of("a", "c")), tokenizer)
    renumbered = number_classes(names, ("c", "a"), "s.jsonl")
    assert [sample.id for sample in renumbered] == [sample.id for sample in names]


def test_classes_that_make_no_sense_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="the largest label is 3, but no record has label 1; number the classes from 0"):
        choose(load(write(tmp_path / "gap.jsonl", rows_of(0, 2, 3)), tokenizer))
    for one in (("a", "a"), (0, 0)):
        with pytest.raises(ConfigError, match="all records have the same label; a classifier needs at least two classes"):
            choose(load(write(tmp_path / "one.jsonl", rows_of(*one)), tokenizer))
    with pytest.raises(ConfigError, match=r"e.jsonl: label 'z' is none of the model's classes: a, b"):
        number_classes(load(write(tmp_path / "e.jsonl", rows_of("a", "z")), tokenizer), ("a", "b"), "e.jsonl")
    with pytest.raises(ConfigError, match=r"e.jsonl: label 2, but there are 2 classes, 0 to 1"):
        number_classes(load(write(tmp_path / "e.jsonl", rows_of(0, 2)), tokenizer), ("a", "b"), "e.jsonl")


def test_packing_is_refused_since_each_sample_has_a_class_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"data.packing = true joins samples.*leave packing out"):
        parse_run_config(
            {"model": {"name": "m", "task": "sequence-classification"}, "data": {"train": "d.jsonl", "packing": True}}
        )
