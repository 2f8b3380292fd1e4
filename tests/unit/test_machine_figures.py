"""What a person may write of machines, and what becomes of it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pipecomp.errors import ConfigError
from pipecomp.planning import Path
from pipecomp.planning.machines import LayerSeconds, Machine, parse_figures, parse_ways
from pipecomp.planning.work import LayerWork

BLOCK = {"forward_s": 0.5, "backward_s": 1.5}
block = LayerWork("block", 100.0, 0, 0, 0.0)
head = LayerWork("head", 50.0, 0, 0, 0.0)


def test_a_machine_has_the_units_that_people_write():
    [machine] = parse_figures(
        {"workers": [{"block": BLOCK, "memory": "16GB", "up": "20mbit", "down": "100mbit", "latency_ms": 15}]}, 1, "f.toml"
    )
    assert machine.memory_nbytes == 16e9
    assert machine.up_nbytes_per_s == 2.5e6
    assert machine.down_nbytes_per_s == 12.5e6
    assert machine.latency_ms == 15
    assert machine.name == "worker-0"


def test_what_is_left_out_is_not_limited():
    [machine] = parse_figures({"workers": [{"name": "garage", "multiply_adds_per_s": 1e9}]}, 1, "f.toml")
    assert (machine.memory_nbytes, machine.up_nbytes_per_s, machine.down_nbytes_per_s) == (math.inf,) * 3
    assert machine.name == "garage"


def test_a_plans_own_json_is_taken_with_all_that_it_holds_besides():
    assert len(parse_figures({"config_hash": "0", "workers": [{"block": BLOCK}], "advice": {}}, 1, "plan.json")) == 1


def test_a_layer_takes_what_was_measured_of_its_kind():
    machine = Machine(block=LayerSeconds(0.5, 1.5), head=LayerSeconds(7.0, 8.0))
    assert machine.seconds(block, block, num_tokens=10, recompute=False) == LayerSeconds(0.5, 1.5)
    assert machine.seconds(head, block, num_tokens=10, recompute=False) == LayerSeconds(7.0, 8.0)


def test_a_kind_that_was_not_measured_takes_its_multiply_adds_at_the_blocks_speed():
    machine = Machine(block=LayerSeconds(0.5, 1.5))
    assert machine.seconds(head, block, num_tokens=10, recompute=False) == LayerSeconds(0.25, 0.75)


@pytest.mark.parametrize(("recompute", "backward_s"), [(False, 4.0), (True, 6.0)])
def test_a_speed_in_multiply_adds_makes_a_backward_two_or_three_forwards(recompute, backward_s):
    machine = Machine(multiply_adds_per_s=500.0)
    assert machine.seconds(block, block, num_tokens=10, recompute=recompute) == LayerSeconds(2.0, backward_s, 2.0)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({}, r"f\.toml: no workers; write a table \[\[workers\]\]"),
        ({"workers": [{"block": BLOCK}] * 3}, r"has 3 workers, the run file cluster\.num_stages = 2"),
        ({"workers": [{"block": BLOCK}, {"name": "b"}]}, r"worker 1: give either block = .* or multiply_adds_per_s"),
        ({"workers": [{"block": BLOCK, "multiply_adds_per_s": 1.0}]}, r"worker 0: give either block"),
        ({"workers": [{"block": BLOCK, "upp": "1mbit"}]}, r"worker 0: .*`upp`.*; allowed: name, block, .*, up, down"),
        ({"workers": [{"block": BLOCK, "up": "fast"}]}, r"worker 0: up = 'fast': write a rate"),
        ({"workers": [{"block": BLOCK, "memory": "much"}]}, r"worker 0: memory = 'much': write a size"),
        ({"workers": [{"block": BLOCK, "latency_ms": -1}]}, r"worker 0: .*latency_ms"),
        ({"workers": [{"block": {"forward_s": 1.0}}]}, r"worker 0: .*backward_s"),
        ({"workers": [{"multiply_adds_per_s": 0}]}, r"worker 0: .*multiply_adds_per_s"),
        ({"workers": ["fast"]}, r"worker 0: "),
    ],
    ids=str,
)
def test_a_mistake_is_told_with_its_worker_and_what_is_allowed(tree: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        parse_figures(tree, 2, "f.toml")


def test_every_replica_has_machines_of_its_own():
    tree = {"workers": [{"block": BLOCK, "name": name} for name in "abcd"]}
    assert [machine.name for machine in parse_figures(tree, 2, "f.toml", num_replicas=2)] == ["a", "b", "c", "d"]
    message = (
        r"f\.toml has 4 workers, the run file cluster\.num_stages = 4 in each of cluster\.num_replicas = 2: give one "
        r"\[\[workers\]\] for each of the 8, first the 4 of the first replica, then those of the next"
    )
    with pytest.raises(ConfigError, match=message):
        parse_figures(tree, 4, "f.toml", num_replicas=2)


TWO = (Machine(name="attic", block=LayerSeconds(0.5, 1.5)), Machine(name="cellar", block=LayerSeconds(0.5, 1.5)))


def test_a_way_between_two_machines_has_a_rate_and_a_latency_of_its_own():
    tree = {"links": [{"sender": "attic", "receiver": "cellar", "rate": "8mbit", "latency_ms": 20}]}
    ways = parse_ways(tree, TWO, "f.toml")
    assert {pair: way.path for pair, way in ways.items()} == {(0, 1): Path(1e6, 0.02)}
    assert parse_ways({"links": [{"sender": "cellar", "receiver": "attic"}]}, TWO, "f")[1, 0].path == Path(math.inf, 0.0)
    assert parse_ways({}, TWO, "f.toml") == {}


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ({"sender": "attic", "receiver": "roof"}, r"link 0: there is no worker 'roof'; there are: attic, cellar"),
        ({"sender": "attic", "receiver": "cellar", "rate": "slow"}, r"link 0: rate = 'slow': write a rate"),
        ({"sender": "attic", "to": "cellar"}, r"link 0: .*; allowed: sender, receiver, rate, latency_ms"),
        ({"sender": "attic", "receiver": "cellar", "latency_ms": -1}, r"link 0: .*latency_ms"),
    ],
    ids=str,
)
def test_a_mistake_in_a_way_is_told(way: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        parse_ways({"links": [way]}, TWO, "f.toml")


def test_a_way_is_told_once_and_leads_elsewhere_and_stands_in_double_brackets():
    once = {"sender": "attic", "receiver": "cellar"}
    with pytest.raises(ConfigError, match="link 1: the way from attic to cellar is there twice"):
        parse_ways({"links": [once, once]}, TWO, "f.toml")
    with pytest.raises(ConfigError, match="link 0: the way from attic to attic ends where it begins"):
        parse_ways({"links": [{"sender": "attic", "receiver": "attic"}]}, TWO, "f.toml")
    with pytest.raises(ConfigError, match=r"write a table \[\[links\]\], with two brackets"):
        parse_ways({"links": once}, TWO, "f.toml")
