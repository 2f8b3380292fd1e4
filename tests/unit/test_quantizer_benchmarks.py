"""What the benchmarks of quantizers write: figures beside their bound, bars, and what could not be measured."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pipecomp.codecs import _recorded, bench_errors, bench_kernels
from pipecomp.experiments import quantizers
from pipecomp.native import ops, reference
from pipecomp.native.ops import Layout


@pytest.fixture
def without_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_recorded, "CACHE", tmp_path)


@pytest.mark.usefixtures("without_weights")
def test_errors_stand_beside_their_bound_and_what_is_missing_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_errors, "NUM_ROWS", 16)
    path = tmp_path / "errors.json"
    outcome = bench_errors.run(json=True, path=path, bits=(2,))
    assert json.loads(path.read_text())["rows"] == outcome["rows"]
    for row in outcome["rows"]:
        assert row["bound"] == pytest.approx(2.0 ** -row["bits_per_value"], rel=1e-3)
        assert row["times_bound"] == pytest.approx(row["c_q"] / row["bound"], rel=1e-2)
    assert {row["bits_per_value"] for row in outcome["rows"] if row["form"] == "g64 bf16"} == {2.25}
    assert len(outcome["bars"]) == 4
    printed = capsys.readouterr().out
    assert "nothing recorded from SmolLM2-135M" in printed
    assert "nothing recorded from MiniLM" in printed


def test_a_figure_above_its_bar_fails() -> None:
    rows = [
        {"data": f"{kind} {width}", "bits": 2, "form": bench_errors.ROBUST, "bits_per_value": 2.1, "c_q": c_q, "times_bound": 1.7}
        for width in bench_errors.WIDTHS
        for kind, c_q in (("normal", 0.3), ("outliers", 0.3))
    ]
    assert [(bar["value"], bar["holds"]) for bar in bench_errors._bars(rows)] == [(1.7, False), (1.0, True)] * 2


def test_errors_are_those_of_the_kernels() -> None:
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    layout = Layout(2, 32, "e4m3", fit="least_error", rotation="hadamard", levels="either")
    payload, message_out = np.zeros(ops.payload_nbytes(1000, layout), np.uint8), np.zeros_like(values)
    assert reference.encode(values, layout, payload, None, message_out, 0)
    assert np.array_equal(reference.seen(values, layout), message_out)


def test_the_defaults_and_the_first_visit_are_among_the_timed_kernels() -> None:
    roles = {(case.role, case.layout.bits, case.has_message) for case in bench_kernels.CASES}
    assert {("default", bits, message) for bits in (2, 3, 4, 6, 8) for message in (True, False)} <= roles
    first = [case.layout for case in bench_kernels.CASES if case.role == "first visit"]
    assert first == [Layout(4, 32, "e4m3")]


def test_each_bar_judges_the_rows_that_it_is_for() -> None:
    rows = [
        {"op": "encode", "role": role, "bits": bits, "group": group, "shape": "64 MiB", "ratio_to_torch": torch}
        for role, bits, group, torch in (("", 4, 64, 9.0), ("", 4, 64, None), ("default", 4, 32, None), ("default", 2, 32, None))
    ]
    judged = [[bar.least for bar in bench_kernels.BARS if bench_kernels._is_judged(row, bar)] for row in rows]
    assert judged == [[0.35, 5.0], [], [0.3], []]


@pytest.mark.slow
def test_a_quantizer_is_tried_with_the_same_seeds_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantizers, "NUM_TRAIN", 32)
    monkeypatch.setattr(quantizers, "NUM_HELD", 16)
    case, path = quantizers.Case("delta", 2, "groups of 32, e4m3"), tmp_path / "quantizers.json"
    outcome = quantizers.run(path=path, cases=[case], seeds=(0, 1), epochs=2)
    plain, tried = outcome["rows"]
    above = [loss - other for loss, other in zip(tried["losses"], plain["losses"], strict=True)]
    assert tried["above_fp32"] == round(sum(above) / 2, 4)
    assert tried["bits_per_value"] == pytest.approx(2.25, abs=0.01)
    monkeypatch.setattr(quantizers, "_train", None)  # what is there is not run again
    assert quantizers.run(path=path, cases=[case], seeds=(0, 1), epochs=2, resume=True)["rows"] == outcome["rows"]
    assert quantizers.run(path=path, cases=[], seeds=(0, 1), epochs=2, resume=True)["rows"] == outcome["rows"]  # nor lost
