"""`pipecomp bench quality` on models of one layer: real processes, real files."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from pipecomp.errors import ConfigError, PipecompError
from pipecomp.experiments import quality
from pipecomp.experiments.quality_cells import (
    ACSGD,
    FP32,
    Cell,
    Workload,
    cells,
    described_codecs,
    run_config,
    settings_hash,
)
from pipecomp.experiments.quality_training import train_cell

EXAMPLES = Path(__file__).parents[2] / "examples"
RUN: dict[str, Any] = {
    "model": {
        "config": {"model_type": "gpt2", "vocab_size": 1024, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2,
                   "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False},
        "weights": "random",
    },
    "data": {"train": str(EXAMPLES / "state-of-the-union.jsonl"), "tokenizer": str(EXAMPLES / "demo-gpt2"), "max_length": 8,
             "packing": True, "max_train_samples": 6, "max_eval_samples": 3},
    "train": {"batch_size": 2, "num_microbatches": 2, "learning_rate": 1e-3},
    "cluster": {"num_stages": 2},
}  # fmt: skip


TRAFFIC = {"evaluation": {"values": 8, "payload_nbytes": 16, "header_nbytes": 4}}
FAILED = r"2 of 4 runs failed; the figures of the others are kept\n\(b\) untrained(.|\n)*some must be left to train"


def tiny(run: dict[str, Any] = RUN, key: str = "a", grid: tuple[tuple[int, int], ...] = ((1, 1),)) -> Workload:
    return Workload(key, "tiny", run, grid, ("fw2bw4",), 1.0)


def changed(section: str, key: str, value: Any) -> dict[str, Any]:
    run = copy.deepcopy(RUN)
    run[section][key] = value
    return run


def figures(path: Path) -> dict[Cell, dict[str, Any]]:
    return {Cell(*(row[f] for f in Cell._fields)): row for row in json.loads(path.read_text())["rows"]}


class Trained:
    """Stands in for the processes: which cells were asked for, and what they come to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stop_at: int | None = None) -> None:
        self.cells: list[Cell] = []
        self._stop_at = stop_at
        monkeypatch.setattr(quality, "_train_one", self._train)

    async def _train(self, order: quality.Order) -> dict[str, Any]:
        if len(self.cells) == self._stop_at:
            signal.raise_signal(signal.SIGINT)
            await asyncio.Event().wait()
        self.cells.append(order.cell)
        return {"held_out_loss": 2.0 + len(self.cells), "accuracy": None, "bits_per_value": {}, "traffic": TRAFFIC}


def test_every_cell_of_a_tiny_workload_is_trained_in_a_process_and_kept(tmp_path: Path) -> None:
    path, workload = tmp_path / "quality.json", tiny()._replace(bits=())
    result = quality.run(path=path, workloads=[workload], jobs=2)
    rows = figures(path)
    assert list(rows) == list(cells(workload))
    assert json.loads(path.read_text())["rows"] == result["rows"]
    fp32 = rows[Cell("a", FP32, "", 1, 0)]
    num_values = 6 * 8 * 8  # samples, tokens, features over one link
    assert fp32["traffic"]["forward"]["values"] == fp32["traffic"]["backward"]["values"] == num_values
    assert fp32["traffic"]["forward"]["payload_nbytes"] == 4 * num_values
    assert fp32["traffic"]["evaluation"]["payload_nbytes"] == 2 * 3 * 8 * 8
    assert len(fp32["train_loss"]) == 1


async def test_two_runs_of_a_cell_give_identical_losses() -> None:
    workload = tiny(grid=((2, 1),))
    config = run_config(workload, Cell("a", ACSGD, "fw2bw4", 2, 0))
    one, two = [await train_cell(config) for _ in range(2)]
    assert one["held_out_loss"] == two["held_out_loss"]
    assert one["train_loss"] == two["train_loss"]
    assert one["traffic"]["forward"]["payload_nbytes"] == two["traffic"]["forward"]["payload_nbytes"]


async def test_first_and_later_visits_are_told_apart() -> None:
    config = run_config(tiny(grid=((3, 1),)), Cell("a", "acsgd-whole", "fw2bw4", 3, 0))
    bits = (await train_cell(config))["bits_per_value"]
    assert bits["forward, first visits"] == 32
    assert 3 * bits["forward"] == pytest.approx(32 + 2 * bits["forward, later visits"], abs=1e-3)


async def test_a_classifier_has_an_accuracy_over_all_held_out_samples(tmp_path: Path) -> None:
    texts = tmp_path / "reviews.jsonl"
    texts.write_text("".join(json.dumps({"text": f"number {i}", "label": i % 2}) + "\n" for i in range(12)))
    bert = {"model_type": "bert", "vocab_size": 1024, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
            "intermediate_size": 16, "max_position_embeddings": 8}  # fmt: skip
    run = {
        **RUN,
        "model": {"config": bert, "weights": "random", "task": "sequence-classification"},
        "data": {**RUN["data"], "train": str(texts), "packing": False, "max_eval_samples": 5},
    }
    config = run_config(tiny(run), Cell("a", ACSGD, "fw2bw4", 1, 0))
    figures = await train_cell(config)
    assert figures["num_held_out"] == 5
    assert figures["accuracy"] in [count / 5 for count in range(6)]
    assert 0.5 < figures["held_out_loss"] < 1.0


def test_cells_that_are_there_are_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "quality.json"
    first = Trained(monkeypatch, stop_at=3)
    with pytest.raises(KeyboardInterrupt):
        quality.run(path=path, workloads=[tiny()], jobs=1)
    assert list(figures(path)) == first.cells == list(cells(tiny()))[:3]
    second = Trained(monkeypatch)
    quality.run(path=path, workloads=[tiny()], jobs=1)
    assert second.cells == list(cells(tiny()))[3:]
    third = Trained(monkeypatch)
    quality.run(path=path, workloads=[tiny()], jobs=1)
    assert third.cells == []


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("train", "learning_rate", 2e-3), ("data", "max_train_samples", 5), ("data", "max_eval_samples", 2)],
)
def test_changed_settings_train_every_cell_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, key: str, value: Any
) -> None:
    path = tmp_path / "quality.json"
    Trained(monkeypatch)
    quality.run(path=path, workloads=[tiny()], jobs=1)
    again = Trained(monkeypatch)
    quality.run(path=path, workloads=[tiny(changed(section, key, value))], jobs=1)
    assert again.cells == list(cells(tiny()))


def test_only_the_runs_of_a_codec_that_changed_are_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "quality.json"
    Trained(monkeypatch)
    quality.run(path=path, workloads=[tiny()], jobs=1)
    from pipecomp.codecs import delta

    monkeypatch.setattr(delta, "DEFAULT_FIRST_VISIT", {"codec": "uniform", "bits": 5})
    again = Trained(monkeypatch)
    quality.run(path=path, workloads=[tiny()], jobs=1)
    assert again.cells == [Cell("a", ACSGD, "fw2bw4", 1, 0)]


def test_a_codec_that_does_something_else_under_the_same_name_has_other_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(tiny(), Cell("a", ACSGD, "fw2bw4", 1, 0))
    before = settings_hash(config, described_codecs(config))
    assert settings_hash(config, described_codecs(config)) == before
    from pipecomp.codecs.uniform import Uniform

    encode = Uniform.encode
    monkeypatch.setattr(Uniform, "encode", lambda self, values, *a, **k: encode(self, 0.99 * values, *a, **k))
    assert settings_hash(config, described_codecs(config)) != before


def test_what_cannot_change_a_figure_changes_no_settings() -> None:
    def hashed(**keys: Any) -> str:
        workload = tiny({**RUN, "cluster": {"num_stages": 2, **keys}})
        return settings_hash(run_config(workload, Cell("a", FP32, "", 1, 0)), {})

    assert hashed(heartbeat_timeout_s=9.0) == hashed(link_rate="1mbit") == hashed()
    assert hashed(num_stages=3) != hashed()
    assert hashed(layers=(1, 2)) != hashed()


def test_changed_text_has_other_settings(tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    hashes = []
    for content in ("one", "two"):
        text.write_text(json.dumps({"text": content}))
        config = run_config(tiny(changed("data", "train", str(text))), Cell("a", FP32, "", 1, 0))
        hashes.append(settings_hash(config, {}))
    assert hashes[0] != hashes[1]


def test_another_workloads_figures_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "quality.json"
    Trained(monkeypatch)
    both = [tiny(), tiny(key="b")]
    quality.run(path=path, workloads=both, only="b", jobs=1)
    quality.run(path=path, workloads=[tiny(changed("train", "learning_rate", 2e-3)), tiny(key="b")], only="a", jobs=1)
    assert list(figures(path)) == [*cells(both[0]), *cells(both[1])]


def test_a_run_that_fails_is_told_with_its_error_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "quality.json"
    broken = tiny(changed("data", "max_eval_samples", 10**6), key="b", grid=((1, 1),))._replace(bits=())
    whole = tiny()._replace(bits=())
    with pytest.raises(PipecompError, match=FAILED):
        quality.run(path=path, workloads=[broken, whole], jobs=2)
    assert list(figures(path)) == list(cells(whole))
    assert "FAILED  (b) fp32 1 epoch, seed 0: exit code 1\n" in capsys.readouterr().out


def test_runs_that_fail_are_told_in_the_order_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last_has_failed = asyncio.Event()
    workload = tiny()._replace(bits=())
    first, last = cells(workload)

    async def fail(order: quality.Order) -> quality.Failure:
        if order.cell == first:
            await last_has_failed.wait()
        last_has_failed.set()
        return quality.Failure(order.cell, "exit code 1")

    monkeypatch.setattr(quality, "_train_one", fail)
    with pytest.raises(PipecompError, match=re.escape(f"{first}: exit code 1\n{last}: exit code 1")):
        quality.run(path=tmp_path / "quality.json", workloads=[workload], jobs=2)


def test_ctrl_c_ends_the_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`nothing_left_running` sees one that stays."""
    spawn = asyncio.create_subprocess_exec

    async def spawn_and_interrupt(*arguments: str, **options: Any) -> asyncio.subprocess.Process:
        process = await spawn(*arguments, **options)
        signal.raise_signal(signal.SIGINT)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", spawn_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        quality.run(path=tmp_path / "quality.json", workloads=[tiny()._replace(bits=())], jobs=1)


def test_bars_that_have_changed_are_written_though_no_run_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, path, workload = Trained(monkeypatch), tmp_path / "quality.json", tiny()._replace(bits=())
    quality.run(path=path, workloads=[workload], jobs=1)
    written = path.read_text()
    num_trained = len(trained.cells)
    quality.run(path=path, workloads=[workload], jobs=1)
    assert path.read_text() == written
    bar = {"name": "new", "value": 1, "bar": 2, "holds": True}
    monkeypatch.setattr(quality.quality_bars, "bars", lambda *_: [bar])
    quality.run(path=path, workloads=[workload], jobs=1)
    assert json.loads(path.read_text())["bars"] == [bar]
    assert len(trained.cells) == num_trained


def test_a_workload_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--only z: there is no such workload; there are: a, b"):
        quality.run(only="z", workloads=[tiny(), tiny(key="b")], path=tmp_path / "quality.json")


def test_a_workload_without_its_files_is_left_out_unless_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Trained(monkeypatch)
    bare = tiny(changed("data", "train", "nowhere.jsonl"), key="b")._replace(needs="texts")
    result = quality.run(workloads=[tiny(), bare], json=False, path=tmp_path / "quality.json", jobs=1)
    assert {row["workload"] for row in result["rows"]} == {"a"}
    assert "left out: workload (b) needs nowhere.jsonl in the current folder" in capsys.readouterr().out
    assert not (tmp_path / "quality.json").exists()
    with pytest.raises(ConfigError, match=r"needs nowhere\.jsonl.*fetch_examples\.py texts"):
        quality.run(workloads=[tiny(), bare], only="b", path=tmp_path / "quality.json")
