"""What the figures of `pipecomp bench gradients` come to, on made-up figures; its documents are made from its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipecomp.errors import ConfigError
from pipecomp.experiments import gradients, gradients_ddp, gradients_quality, gradients_replay, tables
from pipecomp.experiments.gradients_ddp import HOOK, OURS, PEER
from pipecomp.experiments.gradients_part import Keep, Part, Table
from pipecomp.experiments.gradients_quality import FOUR_BITS, MORE_SEEDS, SEEDS, TWO_BITS, TWO_BITS_ALONE
from pipecomp.testing.hosts import why_not

ROOT = Path(__file__).parents[2]
NOT_YET = [f"replay, fp32, {rate}: part of the ideal" for rate in ("100mbit", "30mbit")]
"""docs/performance.md says why."""


@pytest.mark.parametrize("name", ["convergence.md", "performance.md"])
def test_documents_show_what_the_file_has(name: str) -> None:
    document = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert "<!-- gradients: " in document
    outcome = tables.read(ROOT / gradients.RESULTS)
    again = "run python -m pipecomp.experiments.gradients in the folder of the source tree"
    assert gradients.filled(document, outcome) == document, again


def test_every_bar_in_the_file_follows_from_its_rows_and_all_but_two_hold() -> None:
    outcome = tables.read(ROOT / gradients.RESULTS)
    bars = [bar for part in gradients.PARTS for bar in part.bars([row for row in outcome["rows"] if row["part"] == part.key])]
    assert outcome["bars"] == bars
    assert [bar["name"] for bar in bars if not bar["holds"]] == NOT_YET


# ------------------------------------------------------------------------------------------------------------------ quality


def losses(method: str, *values: float, workload: str = "a", seeds: tuple[int, ...] = SEEDS) -> list[dict[str, Any]]:
    return [
        {"workload": workload, "method": method, "seed": seed, "held_out_loss": loss, "accuracy": None}
        for seed, loss in zip(seeds, values, strict=True)
    ]


@pytest.mark.parametrize(("loss", "value", "holds"), [(4.04, 1.0, True), (4.044, 1.1, False)])
def test_four_bits_may_cost_one_percent_of_compressed_activations(loss: float, value: float, holds: bool) -> None:
    rows = losses("fw3bw6", 4.0, 4.0, 4.0) + losses(FOUR_BITS, 9.0, 3.0, loss)
    (bar,) = gradients_quality.part().bars(rows)
    assert (bar["value"], bar["bar"], bar["holds"]) == (value, 1.0, holds)


@pytest.mark.parametrize(("loss", "value", "holds"), [(4.08, 2.0, True), (4.084, 2.1, False)])
def test_four_bits_may_cost_two_percent_of_fp32_where_a_model_is_tuned(loss: float, value: float, holds: bool) -> None:
    rows = losses("fp32", 4.0, 4.0, 4.0, workload="b") + losses(FOUR_BITS, 9.0, 3.0, loss, workload="b")
    (bar,) = gradients_quality.part().bars(rows)
    assert (bar["value"], bar["bar"], bar["holds"]) == (value, 2.0, holds)


@pytest.mark.parametrize(("alone", "value", "holds"), [(4.1, 0.1, True), (4.0, 0.0, False), (3.9, -0.1, False)])
def test_without_feedback_two_bits_have_to_be_worse(alone: float, value: float, holds: bool) -> None:
    rows = losses(TWO_BITS, 4.0, 3.0, 5.0) + losses(TWO_BITS_ALONE, alone, 3.5, 4.8)
    (bar,) = gradients_quality.part().bars(rows)
    assert (bar["value"], bar["holds"]) == (value, holds)


def test_feedback_is_judged_over_all_seeds_too_once_they_are_there() -> None:
    more: dict[str, Any] = {"seeds": MORE_SEEDS}
    rows = losses(TWO_BITS, 4.0, 4.0, 4.0) + losses(TWO_BITS_ALONE, 4.1, 4.1, 3.9)
    rows += losses(TWO_BITS, *[4.0] * 6, **more) + losses(TWO_BITS_ALONE, *[3.8] * 6, **more)
    three, nine = gradients_quality.part().bars(rows)
    assert (three["value"], three["holds"], "2 of them higher" in three["name"]) == (0.1, True, True)
    assert (nine["value"], nine["holds"], "2 of them higher" in nine["name"]) == (-0.2, False, True)


# ------------------------------------------------------------------------------------------------------------- replay, ddp


def replayed(method: str, rate: str, step_s: float, ratio: float = 0.95, differ: int = 0) -> dict[str, Any]:
    return {"method": method, "rate": rate, "step_s": step_s, "ratio": ratio, "gradients_differ_nbytes": differ}


def test_a_replay_is_asked_for_its_ideal_its_speedup_and_its_bytes() -> None:
    rows = [replayed("fp32", "30mbit", 63.0), replayed("fw3bw6 g4", "30mbit", 10.0, 0.9), replayed("fw2bw4 g2", "30mbit", 7.5)]
    bars = {bar["name"]: (bar["value"], bar["bar"], bar["holds"]) for bar in gradients_replay.bars(rows)}
    assert bars["replay, fw3bw6 g4, 30mbit: part of the ideal"] == (0.9, 0.9, True)
    assert bars["replay, fw3bw6 g4, 30mbit: times the throughput of fp32"] == (6.3, 6.3, True)
    assert bars["replay, fw2bw4 g2, 30mbit: times the throughput of fp32"] == (8.4, 8.5, False)
    assert bars["replay: bytes of gradients that differ from what the codec says, all cells"] == (0, 0, True)
    (late, *_, differing) = gradients_replay.bars([replayed("fp32", "1gbit", 1.0, 0.899, differ=-1)])
    assert (late["holds"], differing["value"], differing["holds"]) == (False, 1, False)


def turns(system: str, together_s: float, alone_s: float, num: int = 3) -> list[dict[str, Any]]:
    return [
        {"system": system, "num_replicas": replicas, "turn": turn, "step_s": step_s, "sent_nbytes_per_step": 1}
        for turn in range(num)
        for replicas, step_s in ((4, together_s), (1, alone_s))
    ]


@pytest.mark.parametrize(("own_s", "value", "holds"), [(4.0, 0.15, True), (4.4, 0.17, False)])
def test_the_exchange_takes_a_sixth_of_the_peers_time_of_communication(own_s: float, value: float, holds: bool) -> None:
    rows = turns(PEER, 21.0, 1.0) + turns(HOOK, 30.0, 1.0) + turns(OURS, own_s, 1.0)
    (bar,) = gradients_ddp.part().bars(rows)
    assert (bar["value"], bar["bar"], bar["holds"]) == (value, 0.1667, holds)
    assert gradients_ddp.part().bars(turns(PEER, 21.0, 1.0) + turns(OURS, own_s, 1.0, num=2)) == []


# -------------------------------------------------------------------------------------------------------------- the command


def a_part(key: str, measured: list[str]) -> Part:
    def measure(cells: Any, keep: Keep) -> list[str]:
        for cell in cells:
            if cell == "fails":
                return ["it failed"]
            measured.append(cell)
            keep(cell, {"figure": len(measured)})
        return []

    return Part(
        key,
        ["one", "two", "fails"] if key == "bad" else ["one", "two"],
        settings=lambda: {"one": "1", "two": "2"} | ({"fails": "3"} if key == "bad" else {}),
        measure=measure,
        tables=lambda rows: {key: Table("", ("cell",), [[row["cell"]] for row in rows])},
        bars=lambda rows: [{"name": key, "value": len(rows), "bar": 2, "holds": len(rows) == 2}],
    )


def test_what_is_there_is_not_measured_again_and_other_parts_rows_stay(tmp_path: Path) -> None:
    path, measured = tmp_path / "gradients.json", []
    parts: list[Part] = [a_part("x", measured), a_part("y", measured)]
    gradients.run(json=True, parts="x", path=path, available=parts)
    outcome = gradients.run(json=True, parts="y", path=path, available=parts)
    assert [(row["part"], row["cell"], row["figure"]) for row in outcome["rows"]] == [
        *(("x", "one", 1), ("x", "two", 2)),
        *(("y", "one", 3), ("y", "two", 4)),
    ]
    gradients.run(json=True, path=path, available=parts)
    assert len(measured) == 4


def test_a_cell_that_fails_is_told_after_the_others_are_kept(tmp_path: Path) -> None:
    path, measured = tmp_path / "gradients.json", []
    with pytest.raises(Exception, match="1 cells failed") as failed:
        gradients.run(json=True, path=path, available=[a_part("bad", measured)])
    assert "it failed" in str(failed.value)
    assert [row["cell"] for row in tables.read(path)["rows"]] == ["one", "two"]


def test_a_part_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="--parts: there is no 'speed'; there are: quality, replay, ddp"):
        gradients.run(parts="quality, speed")


@pytest.mark.skipif(bool(why_not()), reason="hosts are network namespaces")
def test_settings_of_all_cells_are_known_before_any_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for part in gradients.PARTS[1:]:
        assert list(part.settings()) == list(part.cells)
        assert len(set(part.settings().values())) == len(part.cells)
