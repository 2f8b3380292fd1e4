"""What the figures of `pipecomp bench quality` come to, on made-up figures; its document is made from its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from pipecomp.experiments import quality_bars, quality_tables, tables
from pipecomp.experiments.quality_cells import BITS, WORKLOADS, Cell, Workload, cells, cost, run_config
from pipecomp.experiments.quality_plot import draw_quality

ROOT = Path(__file__).parents[2]
A = Workload("a", "made up", {}, ((1, 3), (3, 3), (10, 1)), tuple(BITS), 1.0)
C = Workload("c", "made up", {}, ((3, 1),), ("fw3bw6",), 1.0)
LOSS = {"untrained": 9.0, "fp32": 4.0, "direct": 6.0, "acsgd-whole": 4.2, "acsgd": 4.4}
NBYTES = {"untrained": 0, "fp32": 990, "direct": 90, "acsgd-whole": 500, "acsgd": 190}


def row(cell: Cell, **figures: Any) -> dict[str, Any]:
    nbytes = NBYTES[cell.method]
    return {
        **cell._asdict(),
        "held_out_loss": LOSS[cell.method],
        "accuracy": None,
        "bits_per_value": {"forward": 2.0, "backward": 4.0},
        "traffic": {
            "forward": {"values": 1, "payload_nbytes": nbytes, "header_nbytes": 5},
            "evaluation": {"values": 1, "payload_nbytes": 4, "header_nbytes": 1},
            "control": {"values": 0, "payload_nbytes": 0, "header_nbytes": 10**6},
        },
        **figures,
    }


def rows(*workloads: Workload, **losses: float) -> list[dict[str, Any]]:
    """`losses` by method and bits: `acsgd_fw2bw4=4.5`."""
    made = [row(cell) for workload in workloads for cell in cells(workload)]
    for each in made:
        name = f"{each['method']}_{each['bits']}".strip("_")
        each["held_out_loss"] = losses.get(name, each["held_out_loss"])
    return made


def bar(name: str, made: list[dict[str, Any]], *workloads: Workload) -> tuple[float, float, bool]:
    (found,) = [bar for bar in quality_bars.bars(made, workloads or (A,)) if bar["name"] == name]
    return found["value"], found["bar"], found["holds"]


@pytest.mark.parametrize(("loss", "value", "holds"), [(4.04, 1.0, True), (4.044, 1.1, False), (3.9, -2.5, True)])
@pytest.mark.parametrize("epochs", ["1 epoch", "3 epochs", "10 epochs"])
def test_four_bits_may_cost_one_percent(epochs: str, loss: float, value: float, holds: bool) -> None:
    found = bar(f"(a), {epochs}, fw4bw8: held-out loss above fp32's, percent", rows(A, acsgd_fw4bw8=loss))
    assert found == (value, 1.0, holds)


def test_other_bits_and_workloads_have_bars_of_their_own() -> None:
    made = rows(A, C, acsgd_fw3bw6=4.02)
    assert bar("(a), 3 epochs, fw3bw6: held-out loss above fp32's, percent", made, A, C) == (0.5, 3.0, True)
    assert bar("(c), 3 epochs, fw3bw6: held-out loss above fp32's, percent", made, A, C) == (0.5, 0.6, True)
    b = A._replace(key="b", grid=((3, 3),))
    made = rows(b, acsgd_fw3bw6=4.1)
    assert bar("(b), 3 epochs, fw3bw6: held-out loss above fp32's, percent", made, b) == (2.5, 2.0, False)
    assert [each["name"] for each in quality_bars.bars(made, [b]) if "fw2bw4" in each["name"]] == []


@pytest.mark.parametrize(("loss", "value", "holds"), [(4.5, 0.75, True), (4.52, 0.74, False), (3.8, 1.1, True)])
def test_two_bits_win_back_three_quarters_of_what_direct_quantization_loses(loss: float, value: float, holds: bool) -> None:
    for epochs in (3, 10):
        name = f"(a), {epochs} epochs, fw2bw4: part of direct quantization's loss that is won back"
        assert bar(name, rows(A, acsgd_fw2bw4=loss)) == (value, 0.75, holds)


def test_one_epoch_is_not_asked_what_it_wins_back() -> None:
    assert [each for each in quality_bars.bars(rows(A), [A]) if "1 epoch," in each["name"] and "won back" in each["name"]] == []


@pytest.mark.parametrize(("loss", "value", "holds"), [(4.4, 0.1, True), (4.42, 0.11, False), (4.0, -0.1, True)])
@pytest.mark.parametrize("epochs", ["1 epoch", "3 epochs", "10 epochs"])
def test_a_compressed_first_visit_may_cost_a_tenth(epochs: str, loss: float, value: float, holds: bool) -> None:
    name = f"(a), {epochs}, fw2bw4: what a compressed first visit costs, as part of direct quantization's loss"
    assert bar(name, rows(A, acsgd_fw2bw4=loss)) == (value, 0.1, holds)


def test_bytes_of_all_kinds_but_control_are_counted_in_one_epoch() -> None:
    name = "(a), 1 epoch, fw3bw6: times fewer bytes than fp32, all kinds of traffic"
    assert bar(name, rows(A)) == (5.0, 5.0, True)  # (990 + 10) / (190 + 10)


def test_medians_are_over_seeds() -> None:
    made = rows(A)
    for each in made:
        each["held_out_loss"] += {0: -0.5, 1: 0.0, 2: 5.0}[each["seed"]]
    found = bar("(a), 3 epochs, fw4bw8: held-out loss above fp32's, percent", made)
    assert found[0] == 10.0


def test_a_seed_is_compared_with_itself() -> None:
    """Losses of seeds are far apart; medians of two methods may be of two seeds, and their difference of nothing."""
    made = rows(A)
    wanted = {"fp32": (4.0, 5.0, 6.0), "direct": (6.0, 9.0, 6.5), "acsgd": (4.2, 6.0, 6.4), "acsgd-whole": (4.0, 5.0, 6.0)}
    for each in made:
        if each["epochs"] == 3 and each["bits"] in ("", "fw2bw4") and each["method"] in wanted:
            each["held_out_loss"] = wanted[each["method"]][each["seed"]]
    name = "(a), 3 epochs, fw2bw4: part of direct quantization's loss that is won back"
    assert bar(name, made) == (0.75, 0.75, True)  # of 0.9, 0.75, 0.2


def test_a_bar_waits_for_all_of_its_runs() -> None:
    made = [each for each in rows(A) if not (each["method"] == "direct" and each["seed"] == 2 and each["epochs"] == 3)]
    names = [each["name"] for each in quality_bars.bars(made, [A])]
    assert [name for name in names if "3 epochs, fw2bw4" in name] == []
    assert len([name for name in names if "10 epochs, fw2bw4" in name]) == 2


def test_nothing_is_won_back_where_direct_quantization_loses_nothing() -> None:
    names = [each["name"] for each in quality_bars.bars(rows(A, direct_fw2bw4=3.9), [A])]
    assert [name for name in names if "direct quantization" in name] == []


def test_the_report_has_a_line_a_group_and_says_what_is_missing() -> None:
    made = rows(A)[:-1]
    text = quality_bars.report({"rows": made, "bars": quality_bars.bars(made, [A])}, [A])
    assert "1 runs have no figures yet" in text
    line = next(line for line in text.splitlines() if line.startswith("3 ") and "acsgd " in line and "fw2bw4" in line)
    assert " ".join(line.split()) == "3 acsgd fw2bw4 4.4000 (4.4000 to 4.4000) +10.00 % 80 % 2.00, 4.00 200"


def test_accuracy_is_shown_with_its_spread_where_there_is_one() -> None:
    made = [row(cell, accuracy=0.7 + 0.01 * cell.seed) for cell in cells(A)]
    text = quality_bars.report({"rows": made, "bars": []}, [A])
    assert "accuracy" in text
    assert "71.0 % (70.0 % to 72.0 %)" in text


# ------------------------------------------------------------------------------------------------------------ the grid


def test_every_workload_can_be_configured_and_methods_differ_in_compression_only() -> None:
    for workload in WORKLOADS:
        configs = {cell: run_config(workload, cell) for cell in cells(workload)}
        for cell, config in configs.items():
            fp32 = configs[cell._replace(method="fp32", bits="", epochs=max(cell.epochs, workload.grid[0][0]))]
            assert (config.model, config.data, config.cluster) == (fp32.model, fp32.data, fp32.cluster)
            if cell.epochs:
                assert config.train == fp32.train
            assert config.compression.evaluation == {"codec": "cast", "dtype": "bf16"}
            assert cost(workload, cell) > 0


def test_the_small_gpt2_is_trained_for_420_epochs() -> None:
    (a,) = [workload for workload in WORKLOADS if workload.key == "a"]
    assert sum(cell.epochs for cell in cells(a)) == 420


def test_runs_are_ordered_by_epochs_and_none_comes_twice() -> None:
    (a,) = [workload for workload in WORKLOADS if workload.key == "a"]
    order = list(cells(a))
    assert len(set(order)) == len(order)
    assert [cell.epochs for cell in order] == sorted(cell.epochs for cell in order)


# ---------------------------------------------------------------------------------------------------- document and plot


def test_the_document_is_the_results() -> None:
    text = (ROOT / quality_tables.DOCUMENT).read_text(encoding="utf-8")
    assert quality_tables.filled(text, tables.read(ROOT / quality_tables.RESULTS)) == text
    for name in [*(workload.key for workload in WORKLOADS), "bars"]:
        assert text.count(f"<!-- quality: {name} -->\n") == 1


def test_blocks_of_the_document_are_made_anew_and_the_rest_stays() -> None:
    sized = A._replace(
        run={
            "data": {"max_train_samples": 1000, "max_length": 8, "max_eval_samples": 5},
            "train": {"learning_rate": 1e-3, "batch_size": 4},
        }
    )
    made = rows(A)
    outcome = {"rows": made, "bars": quality_bars.bars(made, [A])}
    text = "Before\n<!-- quality: a -->\nstale\n<!-- end -->\nbetween\n<!-- quality: bars -->\n<!-- end -->\nafter\n"
    new = quality_tables.filled(text, outcome, [sized])
    assert "stale" not in new
    assert "1,000 samples of 8 tokens at most, 5 held out; AdamW 0.001, batches of 4; 1 epoch with 3 seeds, " in new
    assert "\n| 3 | acsgd | fw2bw4 | 4.4000 (4.4000 to 4.4000) | +10.00 % | 80 % | 2.00, 4.00 | 200 |\n" in new
    assert "\n| (a), 1 epoch, fw3bw6: times fewer bytes than fp32, all kinds of traffic | 5 | 5 | yes |\n" in new
    assert "| 10 | 1 | **no** |\n" in new
    assert new.startswith("Before\n")
    assert new.endswith("<!-- end -->\nafter\n")
    assert quality_tables.filled(new, outcome, [sized]) == new


@pytest.mark.parametrize("count", [0, None])
def test_the_plot_has_a_panel_for_each_number_of_epochs_that_is_there(count: int | None) -> None:
    figure = Figure()
    draw_quality({"rows": rows(A, acsgd_fw4bw8=4.04)[:count]}, figure, [A])
    if count == 0:
        assert figure.axes == []
        return
    assert [axes.get_title() for axes in figure.axes] == ["(a) 1 ep.", "(a) 3 ep.", "(a) 10 ep."]
    direct, _, acsgd, _ = figure.axes[1].lines
    assert list(direct.get_ydata()) == [50.0, 50.0, 50.0]
    assert list(acsgd.get_ydata()) == pytest.approx([10.0, 10.0, 1.0])
