"""Load a tokenizer, hash it and list its files. Knows transformers' tokenizer classes, loaded on use; knows no text."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from pipecomp.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>")
"""What the end-of-text token is called, for a folder that holds tokenizer.json and nothing that says so."""


def load_tokenizer(name_or_folder: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """A tokenizer by hub name or local folder. A folder that holds `tokenizer.json` alone will do.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    folder = Path(name_or_folder).expanduser()
    if folder.is_dir() and not any((folder / name).exists() for name in ("tokenizer_config.json", "config.json")):
        return _from_file(folder)
    return _by_name(str(folder) if folder.is_dir() else name_or_folder, revision)


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hexadecimal hash of all that decides which tokens a text becomes: vocabulary, rules, special tokens, chat template."""
    described = {
        "rules": _rules(tokenizer),
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "chat_template": tokenizer.chat_template,
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(described, sort_keys=True).encode())


def tokenizer_files(tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    """File name -> content of all that `from_pretrained` needs to load this tokenizer again."""
    with tempfile.TemporaryDirectory(prefix="pipecomp-tokenizer-") as folder:
        tokenizer.save_pretrained(folder)
        found = sorted(p for p in Path(folder).rglob("*") if p.is_file())
        return {p.relative_to(folder).as_posix(): p.read_bytes() for p in found}


def _by_name(name: str, revision: str | None) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, revision=revision)
    except Exception as e:  # missing files, bad JSON, no network and unknown classes each raise another type
        raise ConfigError(
            f"cannot load a tokenizer from {name!r}: {_first_line(e)}; set data.tokenizer to a hub name or to a folder that "
            "holds tokenizer.json"
        ) from e
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):  # what is made where the files are missing
        raise ConfigError(f"{name!r} holds no tokenizer: set data.tokenizer to a hub name or to a folder that has tokenizer.json")
    return tokenizer


def _from_file(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import PreTrainedTokenizerFast

    path = folder / "tokenizer.json"
    try:
        special = [
            t["content"] for t in json.loads(path.read_text(encoding="utf-8")).get("added_tokens", []) if t["special"]
        ]
        end = next((name for name in _END_OF_TEXT if name in special), None)
        tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token=end)
    except Exception as e:  # the tokenizers library raises plain Exception for a file it cannot read
        raise ConfigError(f"cannot load a tokenizer from {str(path)!r}: {_first_line(e)}") from e
    return tokenizer


def _rules(tokenizer: PreTrainedTokenizerBase) -> Any:  # noqa: ANN401 - a JSON tree
    if not tokenizer.is_fast:
        added = {str(token_id): str(token) for token_id, token in tokenizer.added_tokens_decoder.items()}
        return [type(tokenizer).__name__, tokenizer.get_vocab(), added]
    tree = json.loads(tokenizer.backend_tokenizer.to_str())
    # Both are set by each call that pads or truncates: state of the object, not of the tokenizer.
    return {key: value for key, value in tree.items() if key not in ("padding", "truncation")}


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
