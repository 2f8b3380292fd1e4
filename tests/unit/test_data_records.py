from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipecomp.data.records import ChatRecord, DataSettings, PromptRecord, TextRecord, read_records
from pipecomp.errors import ConfigError


def read(path: Path, content: str | bytes, settings: DataSettings | None = None) -> list[tuple[object, ...]]:
    """The records as (kind, line, fields...)."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    records = list(read_records(path, settings or DataSettings()))
    assert all(record.place.path == path for record in records)
    return [(type(record), record.place.line, *record[1:]) for record in records]


def refusal(path: Path, content: str | bytes, settings: DataSettings | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        read(path, content, settings)
    return str(caught.value)


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    return tmp_path / "corpus.txt"


@pytest.fixture
def jsonl_file(tmp_path: Path) -> Path:
    return tmp_path / "corpus.jsonl"


def test_blank_lines_separate_the_documents_of_a_text_file(text_file: Path) -> None:
    records = read(text_file, "\none\ntwo\n\n \n\nthree\r\n\r\nfour")
    assert records == [(TextRecord, 2, "one\ntwo"), (TextRecord, 7, "three"), (TextRecord, 9, "four")]


def test_a_text_file_without_blank_lines_is_one_document(text_file: Path) -> None:
    assert read(text_file, "one\ntwo\n") == [(TextRecord, 1, "one\ntwo")]


def test_a_jsonl_file_gives_the_text_of_each_line(jsonl_file: Path) -> None:
    records = read(jsonl_file, '{"text": "one", "n": 1}\n\n{"text": ""}\n')
    assert records == [(TextRecord, 1, "one"), (TextRecord, 3, "")]


def test_the_text_column_can_be_named(jsonl_file: Path) -> None:
    assert read(jsonl_file, '{"abstract": "one"}', DataSettings(text_column="abstract")) == [(TextRecord, 1, "one")]


def test_prompts_and_completions_are_recognized(jsonl_file: Path) -> None:
    assert read(jsonl_file, '{"prompt": "2+2=", "completion": "4"}') == [(PromptRecord, 1, "2+2=", "4")]


def test_conversations_are_recognized(jsonl_file: Path) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    assert read(jsonl_file, json.dumps({"messages": messages})) == [(ChatRecord, 1, messages)]


def test_line_separators_inside_a_json_string_do_not_end_the_record(jsonl_file: Path) -> None:
    assert read(jsonl_file, '{"text": "a\u2028b\u0085c"}\n') == [(TextRecord, 1, "a\u2028b\u0085c")]


def test_a_byte_order_mark_is_not_text(jsonl_file: Path, text_file: Path) -> None:
    assert read(jsonl_file, b'\xef\xbb\xbf{"text": "a"}') == [(TextRecord, 1, "a")]
    assert read(text_file, b"\xef\xbb\xbfa") == [(TextRecord, 1, "a")]


def test_the_format_can_be_said_where_the_suffix_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "corpus.dat"
    assert read(path, '{"text": "a"}', DataSettings(format="jsonl")) == [(TextRecord, 1, "a")]
    assert read(path, '{"text": "a"}', DataSettings(format="text")) == [(TextRecord, 1, '{"text": "a"}')]


def test_an_unknown_suffix_is_refused_with_what_to_do(tmp_path: Path) -> None:
    assert "'.csv' says nothing about the file's format" in (text := refusal(tmp_path / "a.csv", "a"))
    assert "set data.format" in text


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the data file .*nowhere.txt: No such file or directory"):
        list(read_records(tmp_path / "nowhere.txt", DataSettings()))


def test_a_missing_column_names_the_line_and_the_columns_there_are(jsonl_file: Path) -> None:
    text = refusal(jsonl_file, '{"abstract": "a", "title": "b"}')
    assert "line 1: no column 'text'; the columns there are: 'abstract', 'title'" in text
    assert "Set data.text_column" in text


def test_a_column_missing_further_down_names_that_line(jsonl_file: Path) -> None:
    assert "line 2: no column 'text'" in refusal(jsonl_file, '{"text": "a"}\n{"prompt": "a", "completion": "b"}')
    assert "line 2: no column 'completion'" in refusal(jsonl_file, '{"prompt": "", "completion": ""}\n{"prompt": ""}')
    assert "line 2: no column 'messages'" in refusal(jsonl_file, '{"messages": []}\n{}')


def test_bad_json_names_the_line(jsonl_file: Path) -> None:
    assert "line 2: not valid JSON" in refusal(jsonl_file, '{"text": "a"}\n{"text": ')


def test_json_nested_without_end_is_an_error_like_any_other(jsonl_file: Path) -> None:
    assert "line 1: not valid JSON" in refusal(jsonl_file, "[" * 200_000)


@pytest.mark.parametrize("line", [r'{"text": "a \ud800 b"}', r'{"text": "a", "x": [{"\udc00": 1}]}'])
def test_half_a_character_is_refused(jsonl_file: Path, line: str) -> None:
    assert "line 1: half of a surrogate pair" in refusal(jsonl_file, line)


def test_a_character_in_two_escapes_is_text(jsonl_file: Path) -> None:
    assert read(jsonl_file, r'{"text": "\ud83d\ude00"}') == [(TextRecord, 1, "\U0001f600")]


def test_a_line_that_is_no_object_is_refused(jsonl_file: Path) -> None:
    assert "line 1: a list, not a JSON object" in refusal(jsonl_file, '["a"]')


def test_bytes_that_are_not_utf8_name_the_line(text_file: Path) -> None:
    assert "line 2: byte 3 is not valid UTF-8" in refusal(text_file, b"a\nab\xff\n")


@pytest.mark.parametrize(("value", "kind"), [("3", "number"), ("null", "null"), ('["a"]', "list"), ("true", "boolean")])
def test_a_column_of_the_wrong_type_says_which_type(jsonl_file: Path, value: str, kind: str) -> None:
    assert f"line 1: column 'text' is a {kind}; it must be a string" in refusal(jsonl_file, f'{{"text": {value}}}')


@pytest.mark.parametrize("message", ['"hi"', '{"role": "user"}', '{"role": "user", "content": null}', '{"content": "a"}'])
def test_a_message_needs_a_role_and_a_content(jsonl_file: Path, message: str) -> None:
    text = refusal(jsonl_file, f'{{"messages": [{{"role": "user", "content": "a"}}, {message}]}}')
    assert "line 1: messages[1] must be an object whose 'role' and 'content' are strings" in text


def test_messages_must_be_a_list(jsonl_file: Path) -> None:
    assert "line 1: 'messages' is a string; it must be a list" in refusal(jsonl_file, '{"messages": "hi"}')


def test_a_length_without_room_for_a_prediction_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.max_length is 1"):
        DataSettings(max_length=1)
