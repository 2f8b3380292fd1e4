from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipecomp.data import loading
from pipecomp.data.loading import load_dataset
from pipecomp.data.records import DataSettings
from pipecomp.data.samples import Dataset
from pipecomp.data.tokenizer import load_tokenizer
from pipecomp.errors import ConfigError

DEMO = Path(__file__).parents[2] / "examples" / "demo-gpt2"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(DEMO))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "records.jsonl"


def write(path: Path, texts: Sequence[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def load(path: Path, tokenizer: Any, cache_folder: Path | None = None, **options: Any) -> Dataset:
    return load_dataset(path, tokenizer, DataSettings(**options), cache_folder=cache_folder)


def all_tokens(dataset: Dataset) -> list[int]:
    return [token for sample in dataset for token in sample.input_ids.tolist()]


def same(first: Dataset, second: Dataset) -> bool:
    return first.counts == second.counts and all(
        np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(first.table, second.table, strict=True)
    )


def expected_tokens(texts: Sequence[str], tokenizer: Any) -> list[int]:
    filled = [text for text in texts if text.strip()]
    return [token for text in filled for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]


texts = st.lists(st.text(alphabet="ab .\n", max_size=30), min_size=1, max_size=12).filter(lambda t: "a" in "".join(t))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=texts, max_length=st.integers(2, 9), packing=st.booleans())
def test_no_token_is_dropped_and_none_is_added(
    drawn: list[str], max_length: int, packing: bool, tokenizer: Any, path: Path
) -> None:
    write(path, drawn)
    made = load(path, tokenizer, max_length=max_length, packing=packing)
    assert all_tokens(made) == expected_tokens(drawn, tokenizer)
    assert made.max_sample_length <= max_length
    assert made.counts.records == len(drawn)
    assert made.counts.empty_records == sum(not text.strip() for text in drawn)


def test_a_long_record_becomes_consecutive_samples_and_is_counted(tokenizer: Any, path: Path) -> None:
    write(path, ["a b c d e f", "a"])
    made = load(path, tokenizer, max_length=3)
    assert [len(sample.input_ids) for sample in made] == [3, 3, 1, 2]
    assert made.counts.split_records == 1
    assert made.counts.without_targets == 1


def test_packing_fills_every_sample_but_the_last(tokenizer: Any, path: Path) -> None:
    write(path, ["a b c", "a", "a b", "a b c d"])
    made = load(path, tokenizer, max_length=5, packing=True)
    assert [len(sample.input_ids) for sample in made] == [5, 5, 4]


def test_packing_keeps_the_order_of_the_file(tokenizer: Any, path: Path) -> None:
    write(path, ["one", "two", "three"])
    made = load(path, tokenizer, max_length=100, packing=True)
    assert tokenizer.decode(all_tokens(made)) == "one<|endoftext|>two<|endoftext|>three<|endoftext|>"


def test_packing_keeps_what_is_masked(tokenizer: Any, path: Path) -> None:
    rows = [{"prompt": "a b", "completion": " c"}, {"prompt": "d", "completion": " e"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    (sample,) = load(path, tokenizer, max_length=100, packing=True)
    assert tokenizer.decode(sample.labels[sample.labels >= 0]) == " c<|endoftext|> e<|endoftext|>"


def test_ids_survive_a_restart_and_a_longer_file(tokenizer: Any, path: Path) -> None:
    write(path, ["one", "two", "one"])
    before = [sample.id for sample in load(path, tokenizer)]
    write(path, ["one", "two", "one", "three"])
    assert [sample.id for sample in load(path, tokenizer)][:3] == before


@pytest.mark.parametrize("options", [{"max_length": 128}, {"packing": True}])
def test_ids_depend_on_the_settings(options: dict[str, Any], tokenizer: Any, path: Path) -> None:
    write(path, ["one"])
    assert load(path, tokenizer)[0].id != load(path, tokenizer, **options)[0].id


def test_ids_depend_on_the_tokenizer(tokenizer: Any, path: Path) -> None:
    write(path, ["one"])
    other = load_tokenizer(str(DEMO))
    other.chat_template = "{{ messages }}"
    assert load(path, tokenizer)[0].id != load(path, other)[0].id


def test_a_data_set_is_found_again_in_the_cache(
    tokenizer: Any, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(path, ["one", "", "two " * 300])
    made = load(path, tokenizer, tmp_path / "cache")
    monkeypatch.setattr(loading, "tokenize_records", lambda *_: pytest.fail("tokenized again"))
    kept = load(path, tokenizer, tmp_path / "cache")
    assert isinstance(kept.table.input_ids, np.memmap)
    assert same(kept, made)
    assert [sample.labels.tolist() for sample in kept] == [sample.labels.tolist() for sample in made]


def test_a_sample_from_the_cache_can_be_written_to(tokenizer: Any, path: Path, tmp_path: Path) -> None:
    write(path, ["one"])
    load(path, tokenizer, tmp_path / "cache")
    sample = load(path, tokenizer, tmp_path / "cache")[0]
    assert sample.input_ids.flags.writeable
    assert sample.labels.flags.writeable


def test_another_content_or_setting_has_another_place_in_the_cache(tokenizer: Any, path: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    write(path, ["one two three"])
    load(path, tokenizer, cache)
    load(path, tokenizer, cache, max_length=2)
    write(path, ["one two four"])
    load(path, tokenizer, cache)
    assert len(list(cache.iterdir())) == 3


ARRAYS = ("input_ids", "trained", "starts", "lengths", "targets", "ids")


@pytest.mark.parametrize("name", [*(f"{array}.npy" for array in ARRAYS), "counts.json"])
@pytest.mark.parametrize("damage", ["shortened", "changed", "removed", "emptied"])
def test_a_damaged_cache_is_rebuilt(
    name: str, damage: str, tokenizer: Any, path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    write(path, ["one two", "three"])
    made = load(path, tokenizer, cache)
    (entry,) = cache.iterdir()
    file, content = entry / name, (entry / name).read_bytes()
    if damage == "removed":
        file.unlink()
    else:
        file.write_bytes({"shortened": content[:-1], "changed": content[:-2] + b"\x7f" + content[-1:], "emptied": b""}[damage])
    assert same(load(path, tokenizer, cache), made)
    assert "is damaged" in caplog.text
    caplog.clear()
    assert same(load(path, tokenizer, cache), made)
    assert caplog.text == ""
    assert [p.name for p in cache.iterdir()] == [entry.name]


def test_a_cache_that_cannot_be_written_costs_only_time(
    tokenizer: Any, path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")
    write(path, ["one"])
    assert len(load(path, tokenizer, blocked)) == 1
    assert "cannot keep the tokenized data set" in caplog.text


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n{"text": " "}\n'])
def test_a_file_without_text_is_refused(content: str, tokenizer: Any, path: Path) -> None:
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"records\.jsonl has no text: \d records, all of them empty"):
        load(path, tokenizer)


def test_a_file_without_anything_to_train_on_is_refused(tokenizer: Any, path: Path) -> None:
    chat_tokenizer = load_tokenizer(str(DEMO))
    chat_tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    path.write_text('{"messages": [{"role": "user", "content": "hello"}]}')
    with pytest.raises(ConfigError, match="has nothing to train on"):
        load(path, chat_tokenizer)


@pytest.mark.parametrize("cached", [False, True])
def test_a_missing_data_file_is_named(cached: bool, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the data file .*nowhere\.jsonl: No such file"):
        load(tmp_path / "nowhere.jsonl", tokenizer, tmp_path / "cache" if cached else None)
