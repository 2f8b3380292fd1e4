"""What docs/protocol.md says of bytes, states and limits is what the code does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import numpy as np
import torch

from pipecomp import registry
from pipecomp.protocol import wire
from pipecomp.protocol.link import TRANSITIONS, LinkState
from pipecomp.protocol.messages import PROTOCOL_VERSION, Ack, GradientMessage
from pipecomp.runtime.gradient_row import GradientRow
from pipecomp.types import TensorSpec

TEXT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")


def test_the_table_of_states_is_the_one_in_the_code():
    lines = TEXT.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| state | Connected"))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start : start + 2 + len(LinkState)]]
    events = rows[0][1:]
    written = {
        (LinkState(row[0]), event): LinkState(cell)
        for row in rows[2:]
        for event, cell in zip(events, row[1:], strict=True)
        if cell
    }
    assert written == dict(TRANSITIONS)


def test_the_example_of_a_header_is_what_is_sent():
    assert bytes(wire.encode(Ack(sequence=4))[0]).hex(" ") in TEXT


def table(head: str) -> list[list[str]]:
    """Rows of the table whose head starts so."""
    lines = TEXT[TEXT.index(f"| {head} |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip().replace(",", "") for cell in line.strip("|").split("|")] for line in lines]


def row_of(num_values: int) -> GradientRow:
    return GradientRow([torch.nn.Parameter(torch.empty(num_values))])


def test_the_example_of_a_gradient_message_is_what_is_sent():
    [example] = re.findall(r"```json\n(.*?)```\n\n```\n(.*?)```", TEXT, re.DOTALL)
    message = msgspec.convert(json.loads(example[0]), GradientMessage)
    [written] = re.findall(r"frame 1 is `([0-9a-f ]+)`", TEXT)
    buffer = bytes.fromhex(written)
    assert bytes(wire.encode(message, [buffer])[0]).hex(" ") == " ".join(example[1].split())

    codec, spec = registry.load("pipecomp.codecs", message.codec).from_options({"bits": 4}), TensorSpec(1, message.num_values)
    values = torch.tensor([[1.0, -0.5, 0.25]])
    out = np.empty(codec.encoded_nbytes(spec, first_visit=True), np.uint8)
    codec.encode_with_feedback(values, None, seed=0, out=out)
    assert out.tobytes() == buffer
    assert torch.equal(codec.decode(out, None, spec).values, values)


def test_the_examples_of_rows_are_cut_as_the_code_cuts_them():
    for num_values, *starts in table("values of the row"):
        pieces = [piece for bucket in row_of(int(num_values)).buckets(2) for piece in bucket.pieces]
        assert [(place % 2, int(start)) for place, start in enumerate(starts) if start] == [(p.owner, p.start) for p in pieces]


def test_the_examples_of_messages_are_those_of_two_replicas():
    [bucket] = row_of(259).buckets(2)
    expected = []
    for piece in bucket.pieces:
        other, size = 1 - piece.owner, str(piece.num_values)
        expected.append([f"{other} {piece.owner}", "reduce", str(piece.start), size])
        expected.append([f"{piece.owner} {other}", "gather", str(259 + piece.start), size])
    assert sorted(table("from, to")) == sorted(expected)


def test_the_limits_are_those_of_the_code():
    assert f"`PROTOCOL_VERSION` is {PROTOCOL_VERSION}." in TEXT
    assert f"Headers up to {wire.MAX_HEADER_NBYTES // 2**20} MiB, {wire.MAX_DEPTH} levels of nesting" in TEXT
    assert wire.MAX_BUFFERS == 2**16
