"""What a run comes to: the ledger's sums, the summary's JSON object, the table for people, the step log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coordinator import events as e
from coordinator.ledger import Ledger
from coordinator.steplog import StepLog
from coordinator.summary import format_duration, format_nbytes, format_summary, make_summary
from pipecomp.protocol import messages as m
from pipecomp.types import Kind


def traffic(kind: Kind, *, values: int, payload: int, header: int, link: str = "0/0-1") -> m.Traffic:
    return m.Traffic(link=link, kind=kind, values=values, payload_nbytes=payload, header_nbytes=header, messages=1)


def meter(**changes: float) -> m.LinkMeter:
    fields = {
        "squared_error": 1.0, "squared_delta": 0.0, "squared_delta_values": 0.0, "squared_values": 4.0,
        "first_visits": 1, "fallbacks": 0, "samples": 2, **changes,
    }  # fmt: skip
    return m.LinkMeter(link="0/0-1", kind=Kind.FORWARD, **fields)  # type: ignore[arg-type]


def report(*parts: m.Traffic, meters: tuple[m.LinkMeter, ...] = (), peak: int = 100) -> m.StepReport:
    return m.StepReport(compute_s=0.1, peak_memory_nbytes=peak, message_nbytes=7, traffic=parts, meters=meters)


def committed(step: int, loss: float = 2.0, time_s: float = 0.5, **reports: m.StepReport) -> e.StepCommitted:
    return e.StepCommitted(step, 0, loss, 1e-3, 1.0, 1.0, e.BatchSize(4, 40, 30), time_s, reports)


def summarize(ledger: Ledger, *own: m.Traffic) -> dict:
    return make_summary(ledger, own, wall_time_s=9.0, stopped_early=False, cause="")


def test_every_kind_of_traffic_is_in_the_summary_even_when_there_was_none():
    assert set(summarize(Ledger())["traffic"]) == {kind.value for kind in Kind}


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.WEIGHTS])
def test_whatever_a_worker_reports_is_in_the_summary_and_in_the_table(kind):
    ledger = Ledger()
    ledger.take(committed(1, w0=report(traffic(kind, values=77_000, payload=5_000, header=321))))
    summary = summarize(ledger)
    row = summary["traffic"][kind.value]
    assert (row["values"], row["payload_bytes"], row["header_bytes"]) == (77_000, 5_000, 321)
    assert any(line.startswith(f"{kind.value} ") and "77,000" in line for line in format_summary(summary).splitlines())


def test_a_workers_later_report_replaces_its_earlier_one():
    ledger = Ledger()
    ledger.take(committed(1, w0=report(traffic(Kind.FORWARD, values=100, payload=50, header=10))))
    ledger.take(committed(2, w0=report(traffic(Kind.FORWARD, values=200, payload=100, header=20))))
    assert summarize(ledger)["traffic"]["forward"] == {
        "values": 200,
        "payload_bytes": 100,
        "header_bytes": 20,
        "bits_per_value": 8 * 120 / 200,
        "ratio_to_fp32": 120 / 800,
    }


def test_two_workers_traffic_adds_up():
    ledger = Ledger()
    one = report(traffic(Kind.BACKWARD, values=10, payload=5, header=1))
    ledger.take(committed(1, w0=one, w1=one))
    assert summarize(ledger)["traffic"]["backward"]["values"] == 20


def test_weights_are_counted_where_they_arrive_and_not_twice():
    ledger = Ledger()
    ledger.take(e.TrafficReported("w0", (traffic(Kind.WEIGHTS, values=10, payload=40, header=2, link="weights/w0"),)))
    row = summarize(ledger, traffic(Kind.WEIGHTS, values=12, payload=48, header=3))["traffic"]["weights"]
    assert (row["values"], row["payload_bytes"], row["header_bytes"]) == (12, 48, 3)


def test_acknowledgements_of_a_weights_link_count_as_control():
    ledger = Ledger()
    ledger.take(e.TrafficReported("w0", (traffic(Kind.CONTROL, values=0, payload=0, header=9, link="weights/w0"),)))
    assert summarize(ledger)["traffic"]["control"]["header_bytes"] == 9


def test_the_error_of_a_link_is_a_ratio_of_norms_over_all_steps():
    ledger = Ledger()
    ledger.take(committed(1, w0=report(meters=(meter(squared_error=1.0, squared_values=8.0),))))
    ledger.take(committed(2, w0=report(meters=(meter(squared_error=3.0, squared_values=8.0),))))
    link = summarize(ledger)["links"]["0/0-1"]["forward"]
    assert link["relative_error"] == 0.5
    assert link["delta_ratio"] is None
    assert (link["first_visits"], link["samples"]) == (2, 4)


def test_the_size_of_changes_is_measured_over_samples_that_had_a_message():
    ledger = Ledger()
    ledger.take(committed(1, w0=report(meters=(meter(squared_delta=1.0, squared_delta_values=16.0),))))
    assert summarize(ledger)["links"]["0/0-1"]["forward"]["delta_ratio"] == 0.25


def test_losses_times_and_speed():
    ledger = Ledger()
    ledger.take(e.EvaluationEnded(0, 5.0, e.BatchSize(3, 30, 20), 0.1))
    for step, time_s in ((1, 4.0), (2, 1.0), (3, 1.0)):
        ledger.take(committed(step, loss=6.0 - step, time_s=time_s))
    ledger.take(e.EvaluationEnded(3, 4.0, e.BatchSize(3, 30, 20), 0.1))
    summary = summarize(ledger)
    assert (summary["initial_eval_loss"], summary["eval_loss"]) == (5.0, 4.0)
    assert (summary["train_loss"], summary["last_train_loss"]) == (4.0, 3.0)
    assert (summary["step_time_s"], summary["tokens_per_s"]) == (1.0, 20.0)
    assert (summary["steps"], summary["samples"], summary["tokens"]) == (3, 12, 120)


def test_a_classifiers_accuracy_stands_beside_its_loss():
    ledger = Ledger()
    ledger.take(e.EvaluationEnded(0, 0.7, e.BatchSize(8, 80, 8), 0.1, accuracy=0.5))
    ledger.take(committed(1))
    ledger.take(e.EvaluationEnded(1, 0.6, e.BatchSize(8, 80, 8), 0.1, accuracy=0.75))
    summary = summarize(ledger)
    assert (summary["initial_eval_accuracy"], summary["eval_accuracy"]) == (0.5, 0.75)
    assert [one["accuracy"] for one in summary["evaluations"]] == [0.5, 0.75]
    assert "accuracy          0.7500 (before training 0.5000)" in format_summary(summary)


def test_without_a_classifier_there_is_no_accuracy():
    ledger = Ledger()
    ledger.take(e.EvaluationEnded(0, 5.0, e.BatchSize(3, 30, 20), 0.1))
    summary = summarize(ledger)
    assert summary["eval_accuracy"] is None
    assert "accuracy" not in format_summary(summary)


def test_a_batch_with_nothing_to_predict_does_not_count_in_the_mean_loss():
    ledger = Ledger()
    ledger.take(committed(1, loss=5.0))
    ledger.take(committed(2, loss=0.0)._replace(size=e.BatchSize(4, 40, 0)))
    assert (summarize(ledger)["train_loss"], summarize(ledger)["steps"]) == (5.0, 2)


def test_peak_memory_is_the_highest_that_a_worker_reported():
    ledger = Ledger()
    ledger.take(e.WorkerLoaded("w0", 11, 10, peak_memory_nbytes=50))
    ledger.take(committed(1, w0=report(peak=90)))
    ledger.take(committed(2, w0=report(peak=70)))
    assert summarize(ledger)["workers"]["w0"]["peak_memory_bytes"] == 90


def test_a_step_is_charged_for_its_own_bytes():
    ledger = Ledger()
    ledger.take(committed(1, w0=report(traffic(Kind.FORWARD, values=1, payload=100, header=0))))
    ledger.take(e.TrafficReported("w0", (traffic(Kind.FORWARD, values=1, payload=150, header=0),)))
    ledger.take(e.EvaluationEnded(1, 1.0, e.BatchSize(1, 1, 1), 0.1))
    ledger.take(committed(2, w0=report(traffic(Kind.FORWARD, values=1, payload=170, header=0))))
    assert ledger.step_nbytes == 20


def test_an_empty_run_has_a_summary_and_a_table():
    summary = summarize(Ledger())
    assert json.loads(json.dumps(summary))["eval_loss"] is None
    assert "not saved" in format_summary(summary)


def test_the_table_shows_every_kind_and_every_link():
    ledger = Ledger()
    ledger.take(e.WorkerLoaded("w0", 11, 10, 50))
    ledger.take(committed(1, w0=report(traffic(Kind.FORWARD, values=100, payload=50, header=0), meters=(meter(),))))
    table = format_summary(summarize(ledger))
    assert all(kind.value in table for kind in Kind)
    assert "forward        100     50 B      0 B        4.00    12.5%" in table
    assert "0/0-1  forward        5.00e-01" in table


@pytest.mark.parametrize(("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e6, "2.5 MB"), (7e9, "7.00 GB")])
def test_sizes_are_short(nbytes, text):
    assert format_nbytes(nbytes) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (61, "1:01"), (3723, "1:02:03"), (-1, "0:00")])
def test_durations_are_short(seconds, text):
    assert format_duration(seconds) == text


def test_the_step_log_holds_one_object_a_line(tmp_path):
    ledger = Ledger()
    with StepLog(tmp_path / "new" / "steps.jsonl") as log:
        for record in (
            e.PhaseEntered("training"),
            e.WorkerLoaded("w0", 1, 1, 1),
            committed(1, w0=report(traffic(Kind.FORWARD, values=1, payload=10, header=5))),
            e.StepAborted(2, "NaN"),
        ):
            ledger.take(record)
            log.write(record, ledger, now=1.5)
    lines = [json.loads(line) for line in (tmp_path / "new" / "steps.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["phase", "step", "aborted"]
    assert (lines[1]["loss"], lines[1]["sent_bytes"], lines[1]["time_s"]) == (2.0, 15, 1.5)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_ends_the_step_log_and_not_the_run(caplog):
    ledger = Ledger()
    with StepLog(Path("/dev/full")) as log:
        log.write(e.PhaseEntered("training"), ledger, 0.0)
        log.write(e.PhaseEntered("collecting"), ledger, 1.0)
    assert caplog.messages == ["the step log /dev/full ends here: No space left on device"]
