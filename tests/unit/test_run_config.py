"""Run files that people get wrong: each mistake is named with its key, its value and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipecomp.config import RunConfig, load_run_config, parse_run_config, resolved_toml
from pipecomp.errors import ConfigError


def parse(**sections: dict[str, Any]) -> RunConfig:
    return parse_run_config({"model": {"name": "m"}, "data": {"train": "t.txt"}, **sections}, "run.toml")


@pytest.mark.parametrize(
    ("section", "key", "value", "text"),
    [
        ("train", "learning_rate", "abc", "train.learning_rate = 'abc': Expected `float`, got `str`"),
        ("train", "learning_rate", float("inf"), "train.learning_rate = inf: Expected `float` <= 1.79"),
        ("train", "learning_rate", float("nan"), "train.learning_rate = nan: Expected `float` > 0.0"),
        ("train", "weight_decay", float("inf"), "train.weight_decay = inf: Expected `float` <= 1.79"),
        ("train", "seed", 10**20, f"train.seed = {10**20}: Expected `int` <= {2**63 - 1}"),
        ("train", "batch_size", 2.5, "train.batch_size = 2.5: Expected `int`, got `float`"),
        ("train", "num_microbatches", 9, "train.num_microbatches = 9 is more than train.batch_size = 8"),
        ("train", "lr_scheduler_type", "poly", "train.lr_scheduler_type = 'poly': allowed: \"linear\", \"cosine\", \"constant\""),
        ("cluster", "num_replicas", 0, "cluster.num_replicas = 0: Expected `int` >= 1"),
        ("cluster", "num_replicas", 3, "train.num_microbatches = 4 in each of 3 replicas is more than train.batch_size = 8"),
        ("compression", "gradients", {"bits": 4}, "compression.gradients = {'bits': 4}: name a codec"),
        ("compression", "gradients", {"codec": "delta"}, "compression.gradients: the delta codec"),
        ("cluster", "tied_weights", 1, "cluster.tied_weights = 1: allowed: \"auto\", \"colocate\", \"exchange\""),
        ("cluster", "layers", [1], "cluster.layers has 1 numbers for cluster.num_stages = 2 workers"),
        ("cluster", "heartbeat_timeout_s", 0.6, "heartbeat_timeout_s must be at least twice"),
        ("compression", "forward", {"bits": 4}, "compression.forward = {'bits': 4}: name a codec"),
        ("compression", "forward", "uniform", "compression.forward = 'uniform': name a codec, for example {codec = "),
        ("messages", "memory_budget", 4, "messages.memory_budget = 4: write a size such as '500MB'"),
        ("messages", "disk_budget", "99999999999999TB", "messages.disk_budget = '99999999999999TB': the largest size is"),
        ("cluster", "link_rate", 20, "cluster.link_rate = 20: write a rate above zero such as '500kbit'"),
        ("compression", "backward", {"codec": "delta"}, "compression.backward: the delta codec"),
    ],
)
def test_a_mistake_is_named_with_its_key_its_value_and_what_is_allowed(
    section: str, key: str, value: object, text: str
) -> None:
    with pytest.raises(ConfigError) as error:
        parse(**{section: {key: value}})
    assert str(error.value).startswith("run.toml: ")
    assert text in str(error.value)


def test_a_section_that_does_not_exist_is_named_with_its_neighbour() -> None:
    with pytest.raises(ConfigError, match="unknown key 'trian'; did you mean 'train'"):
        parse(trian={"seed": 1})


@pytest.mark.parametrize("content", [b"train = ", b"\xff\xfe", b"[model]\nname = 'm'\n[model]\n"])
def test_a_file_that_is_not_toml_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"run\.toml is not valid TOML"):
        load_run_config(tmp_path / "run.toml")


def test_the_resolved_file_says_the_same_again(tmp_path: Path) -> None:
    config = parse(
        model={"config": {"model_type": "gpt2", "layer_norm_epsilon": 1e-5, "summary_use_proj": True, "task_params": None}},
        data={"train": "/a \"quoted\" name\\.txt", "tokenizer": "t"},
        compression={"forward": {"codec": "delta", "bits": 2, "first_visit": {"codec": "uniform", "bits": 4}}},
        cluster={"num_stages": 3, "layers": [1, 2, 3]},
    )
    (tmp_path / "run.toml").write_text(resolved_toml(config), encoding="utf-8")
    again = load_run_config(tmp_path / "run.toml")
    assert resolved_toml(again) == resolved_toml(config)
