from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from pipecomp.data.tokenizer import load_tokenizer, tokenizer_files, tokenizer_hash
from pipecomp.errors import ConfigError

DEMO = Path(__file__).parents[2] / "examples" / "demo-gpt2"


@pytest.fixture
def tokenizer() -> Any:
    return load_tokenizer(str(DEMO))


def test_a_folder_with_tokenizer_json_alone_will_do(tmp_path: Path, tokenizer: Any) -> None:
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    bare = load_tokenizer(str(tmp_path))
    assert bare("We the people")["input_ids"] == tokenizer("We the people")["input_ids"]
    assert bare.eos_token == "<|endoftext|>"


def test_a_folder_without_a_tokenizer_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot load a tokenizer from"):
        load_tokenizer(str(tmp_path))


def test_a_model_folder_without_tokenizer_files_is_refused(tmp_path: Path) -> None:
    """transformers would make one without words out of the model's configuration."""
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "vocab_size": 1024}')
    with pytest.raises(ConfigError, match=r"holds no tokenizer: set data.tokenizer|cannot load a tokenizer"):
        load_tokenizer(str(tmp_path))


def test_a_folder_with_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cannot load a tokenizer from .*set data\.tokenizer"):
        load_tokenizer(str(tmp_path))


def test_a_damaged_tokenizer_json_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": []}')
    with pytest.raises(ConfigError, match=r"cannot load a tokenizer from .*tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_the_same_tokenizer_has_the_same_hash_wherever_it_lies(tmp_path: Path, tokenizer: Any) -> None:
    shutil.copytree(DEMO, tmp_path / "copy")
    assert tokenizer_hash(load_tokenizer(str(tmp_path / "copy"))) == tokenizer_hash(tokenizer)


def test_calls_that_pad_or_truncate_leave_the_hash_alone(tokenizer: Any) -> None:
    before = tokenizer_hash(tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    with_padding_token = tokenizer_hash(tokenizer)
    tokenizer(["a", "a b c"], padding=True, truncation=True, max_length=2)
    assert tokenizer_hash(tokenizer) == with_padding_token != before


def test_the_hash_covers_tokens_special_tokens_and_chat_template(tokenizer: Any) -> None:
    hashes = {tokenizer_hash(tokenizer)}
    tokenizer.chat_template = "{{ messages }}"
    hashes.add(tokenizer_hash(tokenizer))
    tokenizer.eos_token = "!"
    hashes.add(tokenizer_hash(tokenizer))
    tokenizer.add_tokens(["pipeline"])
    hashes.add(tokenizer_hash(tokenizer))
    assert len(hashes) == 4


def test_the_files_of_a_tokenizer_load_again_as_the_same_one(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for name, content in tokenizer_files(tokenizer).items():
        (tmp_path / name).write_bytes(content)
    again = load_tokenizer(str(tmp_path))
    assert tokenizer_hash(again) == tokenizer_hash(tokenizer)
    assert again.chat_template == tokenizer.chat_template
