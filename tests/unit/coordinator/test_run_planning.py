"""`pipecomp plan` on real files with machines of given speed, so that every figure is the same on every machine."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from coordinator.plan_text import explain, format_plan
from coordinator.planning import Plan, Source, as_tree, make_plan
from coordinator.process import CoordinatorOptions, read_prediction
from pipecomp.config import RunConfig, config_hash, parse_run_config
from pipecomp.errors import ConfigError
from pipecomp.models import open_model
from pipecomp.planning import Host, LinkCost, StageCost, even_setting, simulate_step
from pipecomp.planning.machines import parse_figures
from pipecomp.runtime.probe import deferred_nbytes, kept_nbytes, probe_machine
from pipecomp.schedules.gpipe import GPipe

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
BLOCK = {"forward_s": 0.01, "backward_s": 0.02}


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
        "cluster": {"num_stages": 2},
    }  # fmt: skip
    return {name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}}


def config(**sections: dict[str, Any]) -> RunConfig:
    return parse_run_config(tree(**sections))


def plan(folder: Path, *workers: dict[str, Any], **sections: dict[str, Any]) -> Plan:
    figures = folder / "figures.json"
    figures.write_text(json.dumps({"workers": [{"block": BLOCK, **worker} for worker in workers or ({}, {})]}))
    return make_plan(config(**sections), Source(figures=str(figures)), cache_folder=None)


def test_slow_links_make_few_bits_pay_and_fast_ones_none(tmp_path):
    slow = plan(tmp_path, {"up": "20kbit"}, {"up": "20kbit"})
    assert [each.width.label for each in slow.forecasts] == ["4/8 bits, as written", "fp32", "3/6 bits", "2/4 bits"]
    steps = {each.width.label: each.step_s for each in slow.forecasts}
    assert steps["2/4 bits"] < steps["3/6 bits"] < steps["4/8 bits, as written"] < steps["fp32"]
    assert slow.advice.forecast.width.label == "2/4 bits"
    assert plan(tmp_path).advice.forecast.width.label == "fp32"


def test_bits_count_scales_and_headers(tmp_path):
    as_written = plan(tmp_path).forecasts[0].width
    assert as_written.forward_bits == pytest.approx(4.25 + 8 * 300 / as_written.num_values, abs=1.0)
    assert as_written.num_values == 2 * 32 * 32  # two samples of 32 tokens, 32 wide


def test_the_text_names_the_link_that_rules_and_what_to_write(tmp_path):
    made = plan(tmp_path, {"name": "attic", "up": "20kbit"}, {"name": "cellar", "up": "1gbit"})
    text = format_plan(made)
    assert "the link from attic to cellar rules: activations keep it busy for" in text
    assert "attic: 20kbit up, unlimited down, 0 ms\ncellar: 1gbit up" in text
    snippet = tomllib.loads(text.partition("recommended:\n\n")[2].partition("\n\nplanned: ")[0])
    assert snippet["compression"] == {"forward": {"codec": "delta", "bits": 2}, "backward": {"codec": "uniform", "bits": 4}}
    parse_run_config(tree(**snippet))


def test_unequal_machines_get_layers_by_their_speed(tmp_path):
    made = plan(tmp_path, {}, {"block": {"forward_s": 0.0025, "backward_s": 0.005}})
    assert made.advice.layers is not None
    first, second = made.advice.layers
    assert (first + second, first) == (6, 2)  # embedding and one block; three blocks and the head
    assert "layers = [2, 4]" in format_plan(made)


def test_a_depth_that_should_go_is_named_in_the_snippet(tmp_path):
    # Transfers as long as compute: the textbook's depth of two lets each worker wait for the other.
    few = {"num_stages": 2, "num_in_flight": 1}
    slow = {"up": "20kbit", "block": {"forward_s": 0.2, "backward_s": 0.4}}
    made = plan(tmp_path, slow, slow, cluster=few, train={"batch_size": 8, "num_microbatches": 8})
    assert made.advice.schedule == "1f1b"
    assert made.advice.forecast.step_s < made.forecasts[0].step_s
    text = format_plan(made)
    depth = made.advice.num_in_flight
    assert ("# without num_in_flight" if depth is None else f"num_in_flight = {depth}") in text


def test_messages_beyond_the_budget_are_told_with_what_to_do(tmp_path):
    made = plan(tmp_path, messages={"memory_budget": "20kB"})
    assert made.forecasts[0].shares[0].message_nbytes == 16 * 32 * 32 * 4
    assert made.forecasts[0].shares[0].kept_nbytes == 20_000
    assert "Not all messages fit" in format_plan(made)


def test_too_little_memory_is_told_by_name(tmp_path):
    made = plan(tmp_path, {"name": "phone", "memory": "10kB"}, {"name": "tablet", "memory": "10kB"})
    text = format_plan(made)
    assert "phone has too little memory for its layers." in text
    assert "No split was found that fits tablet" in text


def test_the_json_of_a_plan_is_figures_for_another(tmp_path):
    made = plan(tmp_path, {"name": "attic", "up": "1mbit"}, {"name": "cellar"})
    written = tmp_path / "plan.json"
    written.write_text(json.dumps(as_tree(made)))
    assert parse_figures(json.loads(written.read_text()), 2, "plan.json") == made.cluster.machines
    again = make_plan(made.config, Source(figures=str(written)), cache_folder=None)
    assert as_tree(again) == as_tree(made)


def test_a_plan_of_one_worker_has_no_links(tmp_path):
    made = plan(tmp_path, {}, cluster={"num_stages": 1})
    assert made.forecasts[0].traffic[next(iter(made.forecasts[0].traffic))] == 0
    assert made.advice.forecast.width.label == "fp32"
    assert format_plan(made)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("f.toml", "workers = 3", "no workers; write a table"),
        ("f.toml", "workers [", r"f\.toml is not valid TOML"),
        ("f.json", "{", r"f\.json is not valid JSON"),
        ("nowhere.toml", None, r"cannot read --figures .*nowhere\.toml: No such file"),
    ],
)
def test_a_file_of_figures_that_cannot_be_used_is_told_before_anything_is_read(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    missing = config(data={"train": "nowhere.txt"})
    with pytest.raises(ConfigError, match=message):
        make_plan(missing, Source(figures=str(tmp_path / name)), cache_folder=None)


# ---------------------------------------------------------------------------------------------------------- what rules


@pytest.mark.parametrize(
    ("link", "host", "num_microbatches", "expected"),
    [
        (LinkCost(0, 0), Host(), 9, "the computing of a rules: busy for 27.0 s of 30.0 s."),
        (LinkCost(60, 0), Host(10), 9, "the link from a to b rules: activations keep it busy for 54.0 s"),
        (LinkCost(0, 60), Host(10), 9, "the link from b to a rules: gradients keep it busy for 54.0 s"),
        (LinkCost(0, 0), Host(), 1, "the computing of a rules: busy for 3.000 s of 6.000 s."),
        (LinkCost(0, 0, 1.0, 1.0), Host(), 1, "waiting rules: no machine or link is busy for half of 8.000 s"),
    ],
)
def test_what_rules_is_said_in_words(link, host, num_microbatches, expected):
    setting = even_setting(2, StageCost(1, 2), link, host)
    step = simulate_step(GPipe().actions(setting.ranks, num_microbatches), setting)
    assert explain(step, ["a", "b"]).startswith(expected)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        (Host(uplink_nbytes_per_s=10), "what b can send rules: activations and gradients share it"),
        (Host(downlink_nbytes_per_s=10), "what b can receive rules: activations and gradients share it"),
    ],
)
def test_a_shared_rate_is_said_in_words(host, expected):
    setting = even_setting(3, StageCost(1, 2), LinkCost(60, 60), host)
    assert explain(simulate_step(GPipe().actions(setting.ranks, 9), setting), ["a", "b", "c"]).startswith(expected)


# ------------------------------------------------------------------------------------------------------ beside the outcome


def options(folder: Path, content: str | None) -> CoordinatorOptions:
    path = folder / "plan.json"
    if content is not None:
        path.write_text(content)
    return CoordinatorOptions(config=config(), plan=str(path))


def test_a_plan_of_the_same_run_goes_into_its_summary(tmp_path):
    content = {"config_hash": config_hash(config()), "prediction": {"step_time_s": 1.0}}
    assert read_prediction(options(tmp_path, json.dumps(content))) == {"step_time_s": 1.0}
    assert read_prediction(CoordinatorOptions(config=config())) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"config_hash": "0", "prediction": {}}', "was made for another configuration: make it again with: pipecomp plan"),
        ("{}", "is no plan: make it again"),
        ("[]", "is no plan"),
        ("words", "is no plan"),
        (None, "cannot read --plan"),
    ],
)
def test_another_runs_plan_is_refused(tmp_path, content, message):
    with pytest.raises(ConfigError, match=message):
        read_prediction(options(tmp_path, content))


# ------------------------------------------------------------------------------------------------------------ the probe


def test_the_probe_measures_every_kind_of_layer_and_leaves_torch_as_it_was():
    run = config()
    before = torch.get_num_threads()
    probe = probe_machine(run, open_model(run.model), (8, 5), num_threads=1)
    assert set(probe.layers) == {"embedding", "block", "head"}
    assert all(layer.forward_s > 0 and layer.backward_s > 0 for layer in probe.layers.values())
    assert 0 < probe.layers["block"].weights_s < probe.layers["block"].backward_s
    assert probe.layers["head"].weights_s < 0.2 * probe.layers["head"].backward_s  # nothing waits there
    assert probe.updates_per_s > 0
    assert probe.coded_values_per_s > 0
    assert torch.get_num_threads() == before


def test_a_block_that_is_computed_again_keeps_its_input_alone():
    whole, recomputed = config(), config(train={"batch_size": 8, "gradient_checkpointing": True})
    model = open_model(whole.model)
    inputs = 2 * 8 * 32 * 4  # (2, 8, 32) fp32
    assert kept_nbytes(recomputed, model, (8, 5))["block"] == inputs
    assert kept_nbytes(whole, model, (8, 5))["block"] > 5 * inputs


def test_gradients_of_weights_that_wait_hold_inputs_and_gradients_of_linear_maps():
    run = config()
    per_token = 32 + 96 + 32 + 32 + 32 + 128 + 128 + 32
    held = deferred_nbytes(run, open_model(run.model), (8, 5))
    assert held == {"embedding": 0.0, "block": 2 * 8 * 4 * per_token, "head": 0.0}


def test_a_plan_says_how_many_may_wait(tmp_path):
    halves = {"block": {"forward_s": 0.01, "backward_s": 0.02, "weights_s": 0.01}}
    made = plan(tmp_path, halves, halves)
    assert made.advice.num_deferred == 2
    text = format_plan(made)
    snippet = tomllib.loads(text.partition("recommended:\n\n")[2].partition("\n\nplanned: ")[0])
    assert snippet["cluster"]["num_deferred"] == 2
    assert as_tree(made)["advice"]["cluster"]["num_deferred"] == 2
    again = plan(tmp_path, halves, halves, cluster={"num_stages": 2, "num_deferred": 2})
    assert again.forecasts[0].step_s < made.forecasts[0].step_s
    without = plan(tmp_path, cluster={"num_stages": 2, "num_deferred": 3})
    assert "# without num_deferred" in format_plan(without)


def test_a_machine_that_is_probed_can_be_written_down(tmp_path):
    made = make_plan(config(cluster={"num_stages": 2, "link_rate": "1mbit"}), Source(apart=True), cache_folder=None)
    assert parse_figures({"workers": as_tree(made)["workers"]}, 2, "plan") == made.cluster.machines
    assert {machine.up for machine in made.cluster.machines} == {"1mbit"}
    assert not made.cluster.is_one
    assert msgspec.json.encode(as_tree(made))
