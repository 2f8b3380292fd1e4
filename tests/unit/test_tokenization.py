"""Which tokens a record becomes and which of them are trained, with the shipped byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipecomp.data.records import ChatRecord, Place, PromptRecord, Record, TextRecord
from pipecomp.data.samples import Tokenized
from pipecomp.data.tokenization import tokenize_records
from pipecomp.data.tokenizer import load_tokenizer
from pipecomp.errors import ConfigError

DEMO = Path(__file__).parents[2] / "examples" / "demo-gpt2"
EOS = "<|endoftext|>"
PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
MARKED = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content }}[end]{% endgeneration %}"
    "{% else %}{{ m.content }}[end]{% endif %}{% endfor %}"
)
FORGETFUL = "{% for m in messages %}{% if loop.last %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
REFUSING = "{{ raise_exception('roles must alternate') }}"
CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "Me."},
    {"role": "user", "content": "Who else?"},
    {"role": "assistant", "content": "You."},
]


@pytest.fixture
def tokenizer() -> Any:
    return load_tokenizer(str(DEMO))


def at(line: int) -> Place:
    return Place(Path("records.jsonl"), line)


def one(record: Record, tokenizer: Any) -> Tokenized:
    (made,) = tokenize_records([record], tokenizer, max_length=64)
    return made


def text_of(made: Tokenized, tokenizer: Any) -> str:
    return str(tokenizer.decode(made.input_ids))


def trained_text(made: Tokenized, tokenizer: Any) -> str:
    return str(tokenizer.decode(made.input_ids[made.trained]))


def test_a_text_is_trained_whole_and_ends_with_the_end_of_text_token(tokenizer: Any) -> None:
    made = one(TextRecord(at(1), "Of the people."), tokenizer)
    assert text_of(made, tokenizer) == "Of the people." + EOS
    assert made.trained.all()


def test_an_end_of_text_token_that_is_there_is_not_doubled(tokenizer: Any) -> None:
    assert text_of(one(TextRecord(at(1), "The end." + EOS), tokenizer), tokenizer) == "The end." + EOS


def test_a_tokenizer_without_an_end_of_text_token_adds_none(tokenizer: Any) -> None:
    tokenizer.eos_token = None
    assert text_of(one(TextRecord(at(1), "Go on"), tokenizer), tokenizer) == "Go on"


def test_only_the_completion_and_its_end_are_trained(tokenizer: Any) -> None:
    made = one(PromptRecord(at(1), "Two and two is", " four"), tokenizer)
    assert text_of(made, tokenizer) == "Two and two is four" + EOS
    assert trained_text(made, tokenizer) == " four" + EOS


def test_a_prompts_tokens_do_not_depend_on_its_completion(tokenizer: Any) -> None:
    first = one(PromptRecord(at(1), "Congr", "ess"), tokenizer)
    second = one(PromptRecord(at(1), "Congr", "atulations"), tokenizer)
    length = int((~first.trained).sum())
    assert first.input_ids[:length].tolist() == second.input_ids[:length].tolist()


@pytest.mark.parametrize(
    "record",
    [
        TextRecord(at(1), ""),
        TextRecord(at(1), " \n"),
        PromptRecord(at(1), "", " "),
        ChatRecord(at(1), []),
        ChatRecord(at(1), [{"role": "user", "content": " "}]),
    ],
)
def test_a_record_without_text_gives_an_empty_sequence(record: Record, tokenizer: Any) -> None:
    assert len(one(record, tokenizer).input_ids) == 0


def test_an_empty_prompt_leaves_the_completion(tokenizer: Any) -> None:
    assert trained_text(one(PromptRecord(at(1), "", "four"), tokenizer), tokenizer) == "four" + EOS


def test_order_is_kept_over_many_records(tokenizer: Any) -> None:
    records = [TextRecord(at(i), f"number {i}") for i in range(1, 1200)]
    made = [text_of(sequence, tokenizer) for sequence in tokenize_records(records, tokenizer, max_length=64)]
    assert made == [f"number {i}{EOS}" for i in range(1, 1200)]


def test_only_the_assistants_turns_are_trained(tokenizer: Any) -> None:
    tokenizer.chat_template = PLAIN
    made = one(ChatRecord(at(1), CHAT), tokenizer)
    assert text_of(made, tokenizer) == tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert trained_text(made, tokenizer) == "Me.[end]\nYou.[end]\n"


def test_a_template_that_marks_generated_text_is_believed(tokenizer: Any) -> None:
    tokenizer.chat_template = MARKED
    assert trained_text(one(ChatRecord(at(1), CHAT), tokenizer), tokenizer) == "Me.[end]You.[end]"


def test_an_assistant_who_speaks_first_is_trained_from_its_first_word(tokenizer: Any) -> None:
    tokenizer.chat_template = PLAIN
    made = one(ChatRecord(at(1), [{"role": "assistant", "content": "Welcome!"}]), tokenizer)
    assert trained_text(made, tokenizer) == "Welcome![end]\n"


def test_a_conversation_without_an_assistant_trains_nothing(tokenizer: Any) -> None:
    tokenizer.chat_template = PLAIN
    assert not one(ChatRecord(at(1), CHAT[:2]), tokenizer).trained.any()


def test_messages_without_a_chat_template_say_what_to_do(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"the tokenizer has no chat template; set data\.tokenizer"):
        one(ChatRecord(at(1), CHAT), tokenizer)


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = FORGETFUL
    with pytest.raises(ConfigError, match=r"records\.jsonl, line 7: the chat template renders earlier turns differently"):
        one(ChatRecord(at(7), CHAT), tokenizer)


def test_a_template_that_refuses_a_conversation_is_quoted(tokenizer: Any) -> None:
    tokenizer.chat_template = REFUSING
    with pytest.raises(ConfigError, match=r"line 7: .*chat template refuses this conversation: roles must alternate"):
        one(ChatRecord(at(7), CHAT), tokenizer)
