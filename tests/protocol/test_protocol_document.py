"""What docs/protocol.md says of bytes, states and limits is what the code does."""

from __future__ import annotations

from pathlib import Path

from pipecomp.protocol import wire
from pipecomp.protocol.link import TRANSITIONS, LinkState
from pipecomp.protocol.messages import PROTOCOL_VERSION, Ack

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


def test_the_limits_are_those_of_the_code():
    assert f"`PROTOCOL_VERSION` is {PROTOCOL_VERSION}." in TEXT
    assert f"Headers up to {wire.MAX_HEADER_NBYTES // 2**20} MiB, {wire.MAX_DEPTH} levels of nesting" in TEXT
    assert wire.MAX_BUFFERS == 2**16
