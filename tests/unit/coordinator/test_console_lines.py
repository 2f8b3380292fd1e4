"""What a person sees: plain lines where there is no terminal, a bar where there is one."""

from __future__ import annotations

import io
import os
import sys

import pytest

from coordinator import events as e
from coordinator.console import BarConsole, PlainConsole, QuietConsole, open_console, record_line
from coordinator.ledger import Ledger


def committed(step: int) -> e.StepCommitted:
    return e.StepCommitted(step, 0, 2.5, 1e-3, 0.75, 1.0, e.BatchSize(4, 40, 30), 0.5, {})


def shown(*records: e.Record, total_steps: int = 10, logging_steps: int = 1) -> str:
    stream = io.StringIO()
    console, ledger = PlainConsole(stream), Ledger()
    console.begin(total_steps, logging_steps)
    for record in records:
        ledger.take(record)
        console.show(record, ledger)
    console.close()
    return stream.getvalue()


def test_a_step_is_one_line_with_loss_rate_norm_speed_bytes_and_time_left():
    assert shown(committed(1)) == (
        "step 1/10  loss 2.5000  lr 1.00e-03  norm 0.750  80 tokens/s  0 B/step  ETA 0:04\n"
    )


def test_only_every_nth_step_and_the_last_are_shown():
    text = shown(*(committed(step) for step in range(1, 11)), logging_steps=4)
    assert [line.split()[1] for line in text.splitlines()] == ["4/10", "8/10", "10/10"]


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (e.WorkerJoined("w0", "h", 1, 2), "w0 joined from h (1 of 2)"),
        (e.WorkerTurnedAway("w0", "too old"), "refused: too old"),
        (e.StepAborted(3, "NaN"), "step 3 aborted: NaN"),
        (e.EvaluationEnded(5, 1.25, e.BatchSize(8, 80, 70), 0.1), "held-out loss 1.2500 after 5 steps (8 samples)"),
        (
            e.EvaluationEnded(5, 1.25, e.BatchSize(8, 80, 8), 0.1, accuracy=0.625),
            "held-out loss 1.2500, accuracy 0.6250, after 5 steps (8 samples)",
        ),
        (e.ModelStored("out"), "model saved to out"),
        (e.PhaseEntered("training"), ""),
        (e.StopNoted(), "stopping after the step under way; Ctrl-C again stops at once and saves nothing"),
    ],
)
def test_other_records_have_a_line_or_none(record, text):
    assert record_line(record) == text


def test_where_there_is_no_terminal_lines_are_plain(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert isinstance(open_console(quiet=False), PlainConsole)


def test_on_a_terminal_there_is_a_bar(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", terminal)
    console, ledger = open_console(quiet=False), Ledger()
    assert isinstance(console, BarConsole)
    console.begin(10, 1)
    ledger.take(committed(3))
    console.show(committed(3), ledger)
    console.show(e.StepAborted(4, "NaN"), ledger)
    console.close()
    assert "step 4 aborted: NaN" in terminal.getvalue()


def test_a_quiet_console_says_nothing(capsys):
    console = open_console(quiet=True)
    assert isinstance(console, QuietConsole)
    console.say("hello")
    console.show(committed(1), Ledger())
    assert capsys.readouterr().out == ""


def test_lines_that_nobody_reads_any_more_end_no_run():
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        console = PlainConsole(stream)
        console.say("one")
        console.say("two")
        console.close()
