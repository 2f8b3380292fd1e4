"""Turn records into token ids and the positions that are trained. Knows a tokenizer; knows no file or sample id."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pipecomp.data.records import ChatRecord, LabelledRecord, PromptRecord, Record, TextRecord
from pipecomp.data.samples import Tokenized
from pipecomp.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEXTS_AT_ONCE = 512
"""Fast tokenizers spread a list of texts over all cores; the limit bounds what they hold in memory."""


def tokenize_records(
    records: Iterable[Record], tokenizer: PreTrainedTokenizerBase, *, max_length: int
) -> Iterator[Tokenized]:
    """One sequence for each record, in order; a record without any text gives an empty one.

    Text and completions end with the tokenizer's end-of-text token where it has one. A chat ends as its template ends it. A text
    with a label has the tokenizer's own special tokens around it and is cut to `max_length` tokens, these included; nothing else
    is cut here.

    Raises:
        ConfigError: chats without a chat template, or with one that hides where the assistant's turns are.
    """
    records = iter(records)
    while chunk := list(itertools.islice(records, _TEXTS_AT_ONCE)):
        first = chunk[0]
        if isinstance(first, TextRecord):
            yield from _texts([r for r in chunk if isinstance(r, TextRecord)], tokenizer)
        elif isinstance(first, PromptRecord):
            yield from _prompts([r for r in chunk if isinstance(r, PromptRecord)], tokenizer)
        elif isinstance(first, LabelledRecord):
            yield from _labelled([r for r in chunk if isinstance(r, LabelledRecord)], tokenizer, max_length)
        else:
            yield from (_chat(r, tokenizer) for r in chunk if isinstance(r, ChatRecord))


def _texts(records: Sequence[TextRecord], tokenizer: PreTrainedTokenizerBase) -> Iterator[Tokenized]:
    for record, tokens in zip(records, _encode([r.text for r in records], tokenizer, special=True), strict=True):
        ids = _ended(tokens, tokenizer) if record.text.strip() else []
        yield _sequence(ids, [True] * len(ids))


def _labelled(
    records: Sequence[LabelledRecord], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> Iterator[Tokenized]:
    encoded = tokenizer([r.text for r in records], return_special_tokens_mask=True, verbose=False)
    for record, ids, special in zip(records, encoded["input_ids"], encoded["special_tokens_mask"], strict=True):
        if not record.text.strip():
            yield _sequence([], [])
            continue
        # What the tokenizer's own truncation gives, without leaving it switched on in the tokenizer that is saved.
        end = len(special)
        while end and special[end - 1]:
            end -= 1
        num_cut = min(max(0, len(ids) - max_length), end)
        kept = (ids[: end - num_cut] + ids[end:])[:max_length]
        yield Tokenized(np.array(kept, np.int32), np.ones(len(kept), np.bool_), record.label, num_cut)


def _prompts(records: Sequence[PromptRecord], tokenizer: PreTrainedTokenizerBase) -> Iterator[Tokenized]:
    """Prompt and completion are tokenized apart, so that the prompt's tokens are those a user's prompt will give later."""
    prompts = _encode([r.prompt for r in records], tokenizer, special=True)
    completions = _encode([r.completion for r in records], tokenizer, special=False)
    for record, prompt, completion in zip(records, prompts, completions, strict=True):
        if not record.prompt.strip() and not record.completion.strip():
            yield _sequence([], [])
            continue
        begun = prompt[:-1] if prompt and prompt[-1] == tokenizer.eos_token_id else prompt
        ended = _ended(completion, tokenizer)
        yield _sequence(begun + ended, [False] * len(begun) + [True] * len(ended))


def _encode(texts: list[str], tokenizer: PreTrainedTokenizerBase, *, special: bool) -> list[list[int]]:
    # verbose=False: a text longer than the model's window is no surprise here, it will be split.
    encoded: list[list[int]] = tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"]
    return encoded


def _ended(tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    end = tokenizer.eos_token_id
    return tokens if end is None or tokens[-1:] == [end] else [*tokens, end]


def _sequence(ids: Sequence[int], trained: Sequence[bool]) -> Tokenized:
    return Tokenized(np.array(ids, dtype=np.int32), np.array(trained, dtype=np.bool_))


def _chat(record: ChatRecord, tokenizer: PreTrainedTokenizerBase) -> Tokenized:
    """Tokenize the whole conversation at once and train on the tokens that begin inside an assistant's turn."""
    if not any(m["content"].strip() for m in record.messages):
        return _sequence([], [])
    template = tokenizer.chat_template
    if not template:
        raise ConfigError(
            f"{record.place}: the record holds 'messages', but the tokenizer has no chat template; set data.tokenizer to one "
            "that has (usually the '-Instruct' variant of the model), add a chat_template to its tokenizer_config.json, or write "
            "the conversations out in a text column"
        )
    if not tokenizer.is_fast:
        raise ConfigError(
            f"{record.place}: the record holds 'messages', which needs a fast tokenizer (a folder with tokenizer.json)"
        )
    if isinstance(template, str) and "{% generation" in template.replace("{%-", "{%"):
        return _marked_chat(record, tokenizer)
    text = _render(record, record.messages, tokenizer)
    spans = list(_assistant_spans(record, text, tokenizer))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts = [start for start, _ in encoded["offset_mapping"]]
    return _sequence(encoded["input_ids"], [any(a <= start < b for a, b in spans) for start in starts])


def _marked_chat(record: ChatRecord, tokenizer: PreTrainedTokenizerBase) -> Tokenized:
    """A template that marks generated text says by itself which tokens are the assistant's."""
    encoded = _apply(
        record, record.messages, tokenizer, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return _sequence(encoded["input_ids"], [bool(m) for m in encoded["assistant_masks"]])


def _assistant_spans(record: ChatRecord, text: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[int, int]]:
    """Where the assistant's turns stand in the rendered conversation, from renderings of its beginnings."""
    for index, message in enumerate(record.messages):
        if message["role"] != "assistant":
            continue
        until = _render(record, record.messages[: index + 1], tokenizer)
        start = _turn_start(record, index, text, tokenizer)
        if start is None or not text.startswith(until):
            raise ConfigError(
                f"{record.place}: the chat template renders earlier turns differently once later ones follow, so the "
                "assistant's tokens cannot be told apart; mark them with {% generation %} in the template, or write the "
                "conversations out in a text column"
            )
        yield start, len(until)


def _turn_start(record: ChatRecord, index: int, text: str, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """End of the header that asks the assistant to speak: what stands there at generation is not trained."""
    if index == 0:
        found = text.find(record.messages[0]["content"].strip())
        return found if found >= 0 else None
    for prompt in (True, False):
        before = _render(record, record.messages[:index], tokenizer, add_generation_prompt=prompt)
        if text.startswith(before):
            return len(before)
    return None


def _render(
    record: ChatRecord,
    messages: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    add_generation_prompt: bool = False,
) -> str:
    return str(_apply(record, messages, tokenizer, tokenize=False, add_generation_prompt=add_generation_prompt))


def _apply(
    record: ChatRecord, messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, **options: bool
) -> Any:  # noqa: ANN401
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except Exception as e:  # a template is a program of the model's author and may raise anything
        raise ConfigError(f"{record.place}: the tokenizer's chat template refuses this conversation: {e}") from e
