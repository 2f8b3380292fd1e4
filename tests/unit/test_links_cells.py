"""`pipecomp bench links`: its cells, the ideal, the bars, what is kept, and its document."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from coordinator.preparation import read_run
from pipecomp.errors import ConfigError
from pipecomp.experiments import links, links_tables, tables
from pipecomp.experiments.kept import KeptRows
from pipecomp.experiments.links_bars import bars, curves, delay_table, report, run_table, table
from pipecomp.experiments.links_cells import (
    METHODS,
    RATES,
    SETTINGS,
    STEPS_PER_EPOCH,
    Cell,
    Order,
    Setting,
    cells_of,
    expected_payload,
    find_setting,
    make_order,
    on_paper,
    rate_nbits_per_s,
)
from pipecomp.planning import Candidate
from pipecomp.testing.hosts import LocalHosts, NamespaceHosts

ROOT = Path(__file__).parents[2]
GPT2_XL, DEBERTA = SETTINGS


@pytest.fixture(autouse=True)
def in_the_source_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_the_text_is_long_enough_for_whole_runs() -> None:
    run = order_of(Cell("gpt2-xl", "fw3bw6", "100mbit", num_epochs=10))
    read = read_run(run.config, None)
    assert (read.batches.steps_per_epoch, read.batches.total_steps) == (STEPS_PER_EPOCH, 10 * STEPS_PER_EPOCH)
    assert all(read.batches.size(step).samples == GPT2_XL.batch_size for step in range(1, STEPS_PER_EPOCH + 1))
    assert run.num_warm_up + run.num_measured == 10 * STEPS_PER_EPOCH


def order(method: str = "fw3bw6", rate: str = "100mbit", **changes: Any) -> Order:
    return order_of(Cell("gpt2-xl", method, rate), GPT2_XL._replace(**changes))


def ideal(*args: Any, **options: Any) -> Candidate:
    return on_paper(*args, **options)[0]


def order_of(cell: Cell, setting: Setting = GPT2_XL, hosts: str = "namespaces", **cluster: Any) -> Order:
    return make_order(setting, cell, hosts=hosts, cluster=cluster)


def row(method: str = "fw3bw6", rate: str = "100mbit", **figures: Any) -> dict[str, Any]:
    return {
        "setting": "gpt2-xl", "method": method, "rate": rate, "delay_ms": 0.0, "num_epochs": 0, "settings": "s",
        "emulation": "one machine",
        "bound": "compute of rank 0", "goodput_nbits_per_s": 95_500_000, "sequences_per_s": 3.4, "ideal_sequences_per_s": 3.5,
        "ratio": 0.97, "cores_used": 0.5, "cores_used_by_others": 0.0, "num_cores": 2, "payload_differs_nbytes": 0,
        "synthetic_ns_per_value": {"forward": 0.02, "backward": 0.04}, "time": {"coding": 0.012, "other": 0.02}, **figures,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------------- cells


@pytest.mark.parametrize(("text", "nbits"), [("unshaped", None), ("1gbit", 1e9), ("30mbit", 3e7), ("2.5mbit", 2.5e6)])
def test_a_rate_is_read(text: str, nbits: float | None) -> None:
    assert rate_nbits_per_s(text) == nbits


@pytest.mark.parametrize("text", ["fast", "0mbit", "100", "-1mbit"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--rates = '{text}': write a rate above zero such as '500kbit', '20mbit' or '1gbit'"):
        rate_nbits_per_s(text)


def test_names_that_are_not_known_are_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match="there is no 'gpt3'; there are: gpt2-xl, deberta-xxl"):
        find_setting("gpt3")
    with pytest.raises(ConfigError, match="there is no 'fw1bw1'; there are: fp32, fw4bw8, fw3bw6, fw2bw4"):
        order("fw1bw1")
    with pytest.raises(ConfigError, match="--parts: there is no 'all'; there are: grid, delays, runs"):
        links.run(json=False, parts="all")
    with pytest.raises(ConfigError, match="there is no 'clouds'; there are: namespaces, local"):
        links.open_hosts("clouds", GPT2_XL, "100mbit")


def test_outside_the_source_tree_the_missing_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"needs examples/state-of-the-union\.jsonl: run it in the folder of the source tree"):
        order()


def test_hosts_are_one_for_each_stage_and_one_for_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "why_not", lambda: "")
    hosts = links.open_hosts("namespaces", GPT2_XL, "100mbit")
    assert isinstance(hosts, NamespaceHosts)
    assert (hosts.num_hosts, hosts.shape.rate_nbits_per_s) == (9, 1e8)
    local = links.open_hosts("local", GPT2_XL, "100mbit")
    assert isinstance(local, LocalHosts)
    assert local.cluster_settings() == {"link_rate": "100000kbit"}


def test_each_kind_of_hosts_has_a_file_of_its_own() -> None:
    assert [path.name for path in map(links.results_of, links.HOSTS)] == ["links.json", "links-local.json"]


def test_where_namespaces_cannot_be_had_the_other_way_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "why_not", lambda: "network namespaces need root")
    with pytest.raises(ConfigError, match=r"--hosts namespaces: network namespaces need root\. Anywhere works --hosts local"):
        links.open_hosts("namespaces", GPT2_XL, "100mbit")


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.key)
def test_every_step_is_an_epoch_so_that_each_visit_but_the_first_has_a_message(setting: Any) -> None:
    made = order_of(Cell(setting.key, "fw3bw6", "100mbit"), setting)
    assert made.config.data.max_train_samples == made.config.train.batch_size == 32
    assert made.config.train.num_train_epochs == made.num_warm_up + made.num_measured
    assert made.num_warm_up == 4


def test_fewer_steps_are_measured_where_they_take_long() -> None:
    assert [order("fp32", rate).num_measured for rate in ("unshaped", "100mbit", "30mbit")] == [5, 2, 2]


def test_a_cell_runs_the_schedule_that_is_the_fastest_on_paper_and_the_default_where_that_is_as_fast() -> None:
    usual, slow = order(), order(rate="30mbit")
    assert usual.schedule == "1f1b, 8 deferred"
    cluster = usual.config.cluster
    assert (cluster.schedule, cluster.num_in_flight, cluster.num_deferred) == ("1f1b", None, 8)
    assert (slow.schedule, slow.config.cluster.schedule, slow.config.cluster.num_deferred) == ("gpipe, 8 deferred", "gpipe", 8)
    assert slow.nominal_s == pytest.approx(ideal(GPT2_XL, slow.config, 0.99 * 30e6 / 8).step.duration_s)


def test_settings_that_change_figures_change_the_hash_and_the_folder_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = order()
    others = [order("fw2bw4"), order(rate="50mbit"), order(forward_s=0.1), order(num_columns=800)]
    others.append(order_of(Cell("gpt2-xl", "fw3bw6", "100mbit"), hosts="local", link_rate="100mbit"))
    others += [order_of(Cell("gpt2-xl", "fw3bw6", "100mbit", delay_ms)) for delay_ms in (10.0, 50.0)]
    others += [order_of(Cell("gpt2-xl", "fw3bw6", "100mbit", 0.0, num_epochs)) for num_epochs in (5, 10)]
    assert len({first.settings, *(other.settings for other in others)}) == 10
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    assert order().settings == first.settings


# ------------------------------------------------------------------------------------------------------------ expectations


def test_expected_bytes_of_fp32_are_four_a_value() -> None:
    made = order("fp32")
    num_values = 7 * 32 * 1024 * 1600 * (made.num_warm_up + made.num_measured)
    assert expected_payload(made, [1024] * 32) == {"forward": 4 * num_values, "backward": 4 * num_values}


def test_first_visits_are_expected_once_and_changes_after_it() -> None:
    made = order(num_rows=64, num_columns=128)
    values = 7 * 32 * 64 * 128
    per_step = {kind: 8 * nbytes / values for kind, nbytes in expected_payload(made, [64] * 32).items()}
    num_steps = made.num_warm_up + made.num_measured
    assert 3.1 < (per_step["forward"] - 4.5) / (num_steps - 1) < 3.6  # bits a value; a first visit takes more, but once
    assert 6 * num_steps < per_step["backward"] < 6.5 * num_steps


def test_the_ideal_without_links_is_every_stage_once_for_each_microbatch_and_a_fill_without_gradients_of_weights() -> None:
    usual = ideal(GPT2_XL._replace(weights_s=0.0), order().config, math.inf)
    assert usual.step.duration_s == pytest.approx((32 + 7) * 0.205)
    best = ideal(GPT2_XL, order().config, math.inf)
    assert best.num_deferred == 8
    assert 32 * 0.205 < best.step.duration_s < (32 + 7) * 0.205 - 7 * 0.051


def test_the_ideal_at_100_mbit_loses_an_eighth_with_three_bits_and_most_with_fp32() -> None:
    shaped = [32 / ideal(GPT2_XL, order(method).config, 0.955e8 / 8).step.duration_s for method in ("fw3bw6", "fp32")]
    assert shaped == pytest.approx([3.82, 0.75], abs=0.02)


# -------------------------------------------------------------------------------------------------------------------- bars


def test_every_cell_is_held_to_its_part_of_the_ideal() -> None:
    rows = [row(), row("fp32", "unshaped", ratio=0.86), row("fp32", "500mbit", ratio=0.84), row("fp32", "300mbit", ratio=0.92)]
    asked = {bar["name"]: (bar["bar"], bar["holds"]) for bar in bars(rows) if "part of the ideal" in bar["name"]}
    assert list(asked.values()) == [(0.93, True), (0.85, True), (0.85, False), (0.93, False)]


def test_the_headline_is_asked_where_its_cells_are_there() -> None:
    slow, fast = row(sequences_per_s=3.3), row(rate="unshaped", sequences_per_s=4.0)
    named = {bar["name"]: bar for bar in bars([slow, fast])}
    assert named["gpt2-xl, fw3bw6, 100mbit: sequences a second"]["holds"]
    share = named["gpt2-xl, fw3bw6, 100mbit: part of its unshaped rate"]
    assert (share["value"], share["bar"], share["holds"]) == (0.825, 0.81, True)
    assert not any("unshaped rate" in bar["name"] for bar in bars([slow]))


def test_bytes_that_differ_and_dear_tensors_are_told() -> None:
    wrong = row(payload_differs_nbytes=4, synthetic_ns_per_value={"forward": 0.1, "backward": 0.6})
    assert [(bar["value"], bar["holds"]) for bar in bars([wrong])[-2:]] == [(4, False), (0.6, False)]
    assert bars([]) == []


def test_a_table_compares_with_fp32_at_the_same_rate() -> None:
    rows = [row("fp32", sequences_per_s=0.68), row(cores_used_by_others=0.5)]
    first, second = table(rows, GPT2_XL)
    assert first[1:7] == ["95.5 Mbit/s", "fp32", "0.680", "3.500", "97.0 %", "–"]
    assert second[6:] == ["5.00", "compute of rank 0", "1.2 %, 2.0 %", "0.50 of 2, 0.5 by others"]
    assert "FAILS" not in report({"rows": rows, "bars": bars([row()])}, SETTINGS)


def test_a_plot_has_a_curve_for_each_method_from_the_slowest_link_on() -> None:
    rows = [row(goodput_nbits_per_s=5e9), row(sequences_per_s=2.0, goodput_nbits_per_s=3e7), row("fp32")]
    assert curves(rows, "gpt2-xl") == {"fp32": [(95.5, 3.4)], "fw3bw6": [(30.0, 2.0), (5000.0, 3.4)]}


# -------------------------------------------------------------------------------------------------------------------- kept


def kept(path: Path | None, wanted: dict[Cell, str]) -> KeptRows[Cell]:
    return KeptRows(
        path,
        "a command",
        key_of=lambda row: Cell.of_row(row) if row["method"] in METHODS else None,
        order=lambda cell: cell.rate,
        wanted=wanted,
        bars=bars,
    )


def test_a_row_is_on_disk_as_soon_as_it_is_there_and_in_its_place(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    rows = kept(path, {})
    for rate in ("50mbit", "30mbit"):
        rows.add(Cell("gpt2-xl", "fw3bw6", rate), row(rate=rate))
        assert json.loads(path.read_text()) == rows.result() | {"date": json.loads(path.read_text())["date"]}
    assert [each["rate"] for each in json.loads(path.read_text())["rows"]] == ["30mbit", "50mbit"]


def test_rows_stay_unless_they_are_wanted_with_other_settings_or_are_of_nothing(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    rows = kept(path, {})
    for rate in ("1mbit", "2mbit", "3mbit"):
        rows.add(Cell("gpt2-xl", "fw3bw6", rate), row(rate=rate))
    rows.add(Cell("gpt2-xl", "old", "4mbit"), row("old", "4mbit"))
    again = kept(path, {Cell("gpt2-xl", "fw3bw6", "1mbit"): "s", Cell("gpt2-xl", "fw3bw6", "2mbit"): "other"})
    assert [cell.rate for cell in again.rows] == ["1mbit", "3mbit"]


@pytest.mark.parametrize("text", ["{", "[]", '{"rows": []}'])
def test_a_file_that_is_no_result_is_named_and_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "links.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(f"{path} is not a result of a command")):
        kept(path, {})
    assert path.read_text() == text


def test_bars_that_have_changed_are_written_without_any_new_row(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    kept(path, {}).add(Cell("gpt2-xl", "fw3bw6", "100mbit"), row())
    stored = json.loads(path.read_text())
    path.write_text(json.dumps(stored | {"bars": []}))
    kept(path, {}).finish()
    assert json.loads(path.read_text())["bars"] == stored["bars"]


# ---------------------------------------------------------------------------------------------------------------- document


def test_the_documents_tables_are_those_of_the_result() -> None:
    text = (ROOT / links_tables.DOCUMENT).read_text(encoding="utf-8")
    assert links_tables.filled(text, tables.read(ROOT / links.RESULTS)) == text


def test_tables_are_filled_and_filled_again() -> None:
    text = (ROOT / links_tables.DOCUMENT).read_text(encoding="utf-8")
    outcome = {"rows": [row()], "bars": bars([row()]), "machine": {"cores": 2, "cpu": "a processor", "memory_nbytes": 24e9}}
    new = links_tables.filled(text, outcome)
    assert "| 100mbit | 95.5 Mbit/s | fw3bw6 | 3.400 | 3.500 | 97.0 % |" in new
    assert "- One machine: 2 cores (a processor), 24 GB of memory." in new
    assert links_tables.filled(new, outcome) == new


# -------------------------------------------------------------------------------------------------- delays and whole runs

HEADLINE = Cell("gpt2-xl", "fw3bw6", "100mbit")


def whole_run(method: str = "fw3bw6", num_epochs: int = 10, first: float = 9.9, last: float = 9.0) -> dict[str, Any]:
    times = [first] * STEPS_PER_EPOCH + [last] * (STEPS_PER_EPOCH * (num_epochs - 1))
    ends = [sum(times[: STEPS_PER_EPOCH * epoch]) for epoch in range(1, num_epochs + 1)]
    steps = {"warm_up_times_s": times[:STEPS_PER_EPOCH], "times_s": times[STEPS_PER_EPOCH:]}
    return row(method, num_epochs=num_epochs, epoch_ends_s=ends, **steps)


def test_cells_are_the_grid_and_at_the_headline_delays_and_whole_runs() -> None:
    cells = cells_of(GPT2_XL, RATES, tuple(METHODS))
    assert len(cells) == len(set(cells)) == len(RATES) * len(METHODS) + 4
    assert [cell for cell in cells if cell.part != "grid"] == [
        HEADLINE._replace(delay_ms=10.0),
        HEADLINE._replace(delay_ms=50.0),
        Cell("gpt2-xl", "fp32", "100mbit", 0.0, 1),
        HEADLINE._replace(num_epochs=10),
    ]
    assert len(cells_of(DEBERTA, RATES, tuple(METHODS))) == len(RATES) * len(METHODS)
    assert cells_of(GPT2_XL, ["50mbit"], ["fw3bw6"]) == [Cell("gpt2-xl", "fw3bw6", "50mbit")]
    assert [str(cell) for cell in cells_of(GPT2_XL, ["100mbit"], ["fw3bw6"])] == [
        "gpt2-xl fw3bw6 100mbit",
        "gpt2-xl fw3bw6 100mbit 10ms",
        "gpt2-xl fw3bw6 100mbit 50ms",
        "gpt2-xl fw3bw6 100mbit 10 epochs",
    ]


def test_a_delay_is_in_the_links_and_in_the_ideal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "why_not", lambda: "")
    assert links.open_hosts("namespaces", GPT2_XL, "100mbit", 50.0).shape.delay_s == 0.05
    assert links.open_hosts("local", GPT2_XL, "100mbit", 50.0).cluster_settings()["link_latency_ms"] == 50.0
    steps = [ideal(GPT2_XL, order().config, 0.955e8 / 8, delay_ms=delay).step.duration_s for delay in (0.0, 10.0, 50.0)]
    there_and_back = 2 * 7
    assert steps[1] - steps[0] == pytest.approx(there_and_back * 0.01, rel=0.3)
    assert steps[2] - steps[0] == pytest.approx(there_and_back * 0.05, rel=0.3)


def test_a_delay_that_cannot_be_had_fails_its_cells_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def undelayed(_kind: str, setting: Setting, _rate: str, _delay_ms: float) -> LocalHosts:
        hosts = LocalHosts(setting.num_stages + 1)
        hosts.missing = ("delay: this kernel has no netem, and iptables is not installed, which would delay packets too",)
        return hosts

    monkeypatch.setattr(links, "open_hosts", undelayed)
    monkeypatch.setattr(links, "run_cell", None)
    wanted = [order_of(HEADLINE._replace(delay_ms=10.0))]
    failures = links._run_all(wanted, "local", kept(tmp_path / "links.json", {}))
    assert len(failures) == 1
    assert re.match("gpt2-xl fw3bw6 100mbit 10ms: .*iptables is not installed", failures[0])


def test_a_delayed_cell_is_held_to_its_own_ideal_and_not_to_the_grids() -> None:
    outcome = bars([row(delay_ms=10.0, ratio=0.975), row(delay_ms=50.0, ratio=0.96)])
    held = [(bar["name"], bar["bar"], bar["holds"]) for bar in outcome if "of the ideal" in bar["name"]]
    assert held == [
        ("gpt2-xl fw3bw6 100mbit 10ms: part of the ideal with that delay", 0.97, True),
        ("gpt2-xl fw3bw6 100mbit 50ms: part of the ideal with that delay", 0.97, False),
    ]


def test_delays_stand_below_the_same_cell_without_one() -> None:
    rows = [row(), row("fp32"), row(delay_ms=10.0), row(delay_ms=50.0, ratio=0.96)]
    assert [line[0] for line in delay_table(rows)] == ["none", "10 ms", "50 ms"]
    assert [line[4] for line in delay_table(rows)] == ["97.0 %", "97.0 %", "96.0 %"]
    assert delay_table([row()]) == []
    assert len(table(rows, GPT2_XL)) == 2
    assert curves(rows, "gpt2-xl") == {"fp32": [(95.5, 3.4)], "fw3bw6": [(95.5, 3.4)]}


def test_a_whole_run_keeps_messages_on_disk_and_visits_samples_once_an_epoch() -> None:
    packed, whole = order_of(HEADLINE._replace(num_epochs=10)), order_of(Cell("gpt2-xl", "fp32", "100mbit", 0.0, 1))
    assert (packed.config.messages.store, packed.config.messages.dtype) == ("disk", "bf16")
    assert packed.config.data.max_train_samples == STEPS_PER_EPOCH * 32
    assert packed.config.train.num_train_epochs == 10
    assert (packed.num_warm_up, packed.num_measured) == (STEPS_PER_EPOCH, 9 * STEPS_PER_EPOCH)
    assert (whole.num_warm_up, whole.num_measured) == (1, STEPS_PER_EPOCH - 1)


def per_epoch(nbits: float) -> int:
    """Bytes of all links."""
    return 7 * STEPS_PER_EPOCH * 32 * (int(1024 * 1600 * nbits / 8) + 1)  # a byte says which codec a sample has


def test_a_whole_runs_first_visits_are_those_of_one_epoch() -> None:
    lengths = [1024] * 32 * STEPS_PER_EPOCH
    once, again = (expected_payload(order_of(HEADLINE._replace(num_epochs=num)), lengths)["forward"] for num in (2, 3))
    first, later = 4.25, 3.25  # bits a value, scales of groups of 64 included
    assert (again - once, once) == (per_epoch(later), per_epoch(first) + per_epoch(later))


def test_a_short_last_sample_is_expected_to_take_what_it_needs() -> None:
    made = order_of(HEADLINE._replace(method="fp32", num_epochs=2))
    full, short = (expected_payload(made, [1024] * 127 + [last])["backward"] for last in (1024, 258))
    assert full - short == 7 * 2 * 4 * 1600 * (1024 - 258)


def test_a_first_epoch_is_held_to_the_last_one() -> None:
    outcome = bars([whole_run(first=9.8), whole_run(first=9.95), whole_run("fp32", 1)])
    assert [(bar["value"], bar["holds"]) for bar in outcome if "first epoch" in bar["name"]] == [(1.0889, True), (1.1056, False)]


def test_times_of_runs_that_were_not_waited_for_stand_in_brackets() -> None:
    fp32, packed, published = run_table([row(), whole_run("fp32", 1, first=60.0), whole_run()], GPT2_XL)
    assert fp32 == ["fp32", "240.0 s", "(720 s)", "(2400 s)", "60.00 s", "60.00 s"]
    assert packed == ["fw3bw6", "39.6 s", "111.6 s", "363.6 s", "9.90 s", "9.00 s"]
    assert published == ["fp32, as published", "(256 s)", "(768 s)", "(2560 s)", "(64.0 s)", "(64.0 s)"]
    assert run_table([row()], GPT2_XL) == []
