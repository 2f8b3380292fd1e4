#!/usr/bin/env python3
"""Train the demo's tokenizer on the shipped text and write it into examples/demo-gpt2, byte for byte the files shipped there.

A byte-level BPE of 1,024 tokens: the end-of-text token, 256 bytes and the 767 most frequent merges.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 1024
MODEL_MAX_LENGTH = 128


def train(text_file: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with text_file.open(encoding="utf-8") as lines:
        tokenizer.train_from_iterator([json.loads(line)["text"] for line in lines], trainer)
    return tokenizer


def write(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "model_max_length": MODEL_MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer.json").write_text(tokenizer.to_str() + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=EXAMPLES / "state-of-the-union.jsonl", help="JSONL with a text column")
    parser.add_argument("--into", type=Path, default=EXAMPLES / "demo-gpt2", help="folder to write into")
    arguments = parser.parse_args()
    write(train(arguments.text), arguments.into)


if __name__ == "__main__":
    main()
