"""`pipecomp plan` of several replicas, on real files with machines of given speed."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.plan_text import format_plan
from coordinator.planning import Plan, Source, as_tree, make_plan
from coordinator.work import gradients_of
from pipecomp.config import RunConfig, parse_run_config
from pipecomp.errors import ConfigError
from pipecomp.models import open_model
from pipecomp.runtime.gradient_row import PIECE, GradientRow
from pipecomp.runtime.rehearsal import make_codec
from pipecomp.runtime.replicas import planned_nbytes
from pipecomp.types import Kind

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
BLOCK = {"forward_s": 0.01, "backward_s": 0.02}
NAMES = ("attic", "cellar", "hall", "roof")


def tree(**sections: dict[str, Any]) -> dict[str, Any]:
    base: dict[str, dict[str, Any]] = {
        "model": {
            "config": {
                "model_type": "gpt2", "n_layer": 4, "n_embd": 32, "n_head": 2, "n_positions": 32, "vocab_size": 1024,
                "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False,
            }
        },
        "data": {
            "train": str(EXAMPLES / "state-of-the-union.jsonl"),
            "tokenizer": str(EXAMPLES / "demo-gpt2"),
            "max_length": 32,
            "packing": True,
            "max_train_samples": 16,
            "max_eval_samples": 4,
        },
        "train": {"batch_size": 8, "num_microbatches": 4, "num_train_epochs": 3, "save_model": False},
        "cluster": {"num_stages": 2, "num_replicas": 2},
    }  # fmt: skip
    return {name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}}


def config(**sections: dict[str, Any]) -> RunConfig:
    return parse_run_config(tree(**sections))


def plan(folder: Path, worker: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Plan:
    figures = folder / "figures.json"
    figures.write_text(json.dumps({"workers": [{"block": BLOCK, "name": name, **(worker or {})} for name in NAMES]}))
    return make_plan(config(**sections), Source(figures=str(figures)), cache_folder=None)


def test_a_replica_trains_its_share_of_a_batch(tmp_path):
    two, one = plan(tmp_path), plan(tmp_path, cluster={"num_stages": 4, "num_replicas": 1})
    assert (two.work.num_microbatches, two.work.num_replicas) == (4, 2)
    # One sample of a microbatch in place of two; of all samples each replica keeps half.
    assert 2 * two.forecasts[0].width.num_values == one.forecasts[0].width.num_values
    assert 2 * two.forecasts[0].width.message_nbytes == one.forecasts[0].width.message_nbytes
    assert 2 * two.work.num_tokens == one.work.num_tokens


def test_a_replica_that_has_few_samples_cuts_fewer_microbatches(tmp_path):
    made = plan(tmp_path, data={"max_train_samples": 5})
    assert made.work.num_microbatches == 3


def test_gradients_are_compressed_where_links_are_slow_and_told_among_what_to_write(tmp_path):
    slow, fast = plan(tmp_path, {"up": "400kbit"}), plan(tmp_path)
    bits = {each.width.label: each.width.gradient_bits for each in slow.forecasts}
    assert bits["fp32"] == pytest.approx(32, rel=0.01)
    assert [bits[label] for label in ("4/8 bits, as written", "3/6 bits", "2/4 bits")] == [pytest.approx(4.25, rel=0.02)] * 3
    for made, codec in ((slow, {"codec": "uniform", "bits": 4}), (fast, {"codec": "identity"})):
        text = format_plan(made)
        snippet = tomllib.loads(text.partition("recommended:\n\n")[2].partition("\n\nplanned: ")[0])
        assert snippet["compression"]["gradients"] == as_tree(made)["advice"]["compression"]["gradients"] == codec
        parse_run_config(tree(**snippet))


def test_with_one_replica_nothing_is_said_of_gradients(tmp_path):
    made = plan(tmp_path, cluster={"num_stages": 4, "num_replicas": 1}, compression={"gradients": {"codec": "cast"}})
    assert [each.width.label for each in made.forecasts] == ["4/8 bits, as written", "fp32", "3/6 bits", "2/4 bits"]
    assert made.prediction["traffic"]["gradients"] == 0
    written = json.dumps(as_tree(made)["advice"]) + format_plan(made)
    assert '"gradients": {' not in written and "gradients =" not in written and "replica" not in written


def test_another_codec_of_gradients_is_another_setting(tmp_path):
    made = plan(tmp_path, compression={"gradients": {"codec": "uniform", "bits": 2}})
    labels = [each.width.label for each in made.forecasts]
    assert labels == ["as written", "fp32", "4/8 bits", "3/6 bits", "2/4 bits"]
    assert made.forecasts[0].width.gradient_bits == pytest.approx(2.25, rel=0.02)


def test_the_text_tells_replicas_their_workers_and_what_they_exchange(tmp_path):
    made = plan(tmp_path, {"up": "400kbit"})
    text = format_plan(made)
    assert "6 steps of 8 samples in 4 microbatches of each replica\n4 workers on machines of their own: 2 replicas of 2\n" in text
    assert "setting               bits forward  backward  gradients" in text
    rules = (
        r"the exchange of gradients between replicas rules: it keeps what (attic|cellar) sends and receives busy for .* s\. "
        r"Fewer bits in compression\.gradients, larger batches or fewer replicas help\."
    )
    assert len(re.findall(rules, text)) == 1
    rows = [words[:2] for line in text.splitlines() if (words := line.split()) and words[0] in NAMES]
    assert rows == [["attic", "0"], ["cellar", "0"], ["hall", "1"], ["roof", "1"]]
    assert "memory: layers, optimizer, activations, messages, errors of gradients;" in text
    num_values = sum(layer.num_trainable for layer in made.work.layers)
    sent = made.prediction["traffic"]["gradients"]
    assert sent == pytest.approx(6 * 2 * num_values * 4.25 / 8, rel=0.02)  # six steps, parts and sums
    assert f", gradients {sent / 1000:.1f} kB" in text.partition("sent in the whole run")[2]


def test_the_slower_replica_is_told_by_the_names_of_its_workers(tmp_path):
    figures = tmp_path / "figures.json"
    slow = {"forward_s": 0.05, "backward_s": 0.1}
    workers = [{"block": slow if name == "roof" else BLOCK, "name": name} for name in NAMES]
    figures.write_text(json.dumps({"workers": workers}))
    made = make_plan(config(), Source(figures=str(figures)), cache_folder=None)
    assert made.prediction["bound"] == "compute of rank 1 of replica 1"
    assert "as written: the computing of roof rules" in format_plan(made)
    rows = as_tree(made)["settings"][0]["workers"]
    assert [(row["name"], row["replica"]) for row in rows] == [("attic", 0), ("cellar", 0), ("hall", 1), ("roof", 1)]


def test_the_json_of_a_plan_is_figures_for_another(tmp_path):
    made = plan(tmp_path, {"up": "1mbit"})
    written = tmp_path / "plan.json"
    written.write_text(json.dumps(as_tree(made)))
    again = make_plan(made.config, Source(figures=str(written)), cache_folder=None)
    assert as_tree(again) == as_tree(made)
    with pytest.raises(ConfigError, match=r"has 4 workers, the run file cluster\.num_stages = 2 in each of .* = 3"):
        make_plan(config(train={"batch_size": 12}, cluster={"num_replicas": 3}), Source(figures=str(written)), cache_folder=None)


def test_a_machine_that_is_probed_stands_for_all_workers_of_all_replicas():
    run = config(cluster={"num_stages": 1, "num_replicas": 2, "link_rate": "1mbit"})
    apart = make_plan(run, Source(apart=True), cache_folder=None)
    assert [machine.name for machine in apart.cluster.machines] == ["worker-0", "worker-1"]
    together = make_plan(run, Source(), cache_folder=None)
    assert "2 workers on this machine, as `pipecomp launch` starts them: 2 replicas of 1" in format_plan(together)
    assert together.cluster.machines[0].memory_nbytes == pytest.approx(apart.cluster.machines[0].memory_nbytes / 2)


@pytest.mark.parametrize("num_values", [0, 1, 255, 257, 100_000, 3 * PIECE + 12_345])
@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize(
    "codec", [{"codec": "uniform", "bits": 4}, {"codec": "identity"}, {"codec": "sparse", "bits": 4, "top": 0.1}], ids=str
)
def test_an_exchange_is_of_the_bytes_that_workers_send(num_values: int, num_replicas: int, codec: dict[str, Any]):
    run = config(compression={"gradients": codec}, train={"batch_size": 12}, cluster={"num_replicas": num_replicas})
    gradients = gradients_of(run, open_model(run.model))
    found = gradients.exchange(num_values)
    row = GradientRow([torch.nn.Parameter(torch.empty(num_values, device="meta"))])
    buckets = list(row.buckets(num_replicas))
    assert (found.num_values, found.num_rounds) == (num_values, len(buckets))
    for replica in range(num_replicas):
        payload = planned_nbytes(buckets, make_codec(run, Kind.GRADIENTS), replica, num_replicas)
        messages = sum(
            num_replicas - 1 if piece.owner == replica else 1 for bucket in buckets for piece in bucket.pieces
        )
        assert payload + 150 * messages <= found.nbytes[replica] <= payload + 250 * messages
    assert gradients.keeps_errors == (codec["codec"] != "identity")
    without = config(compression={"gradients": codec}, replicas={"error_feedback": False})
    assert not gradients_of(without, open_model(run.model)).keeps_errors
