from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from coordinator.preparation import read_run
from pipecomp.config import load_run_config
from pipecomp.data.loading import load_dataset
from pipecomp.data.records import DataSettings
from pipecomp.data.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
DEMO = EXAMPLES / "demo-gpt2"
MESSAGES = EXAMPLES / "state-of-the-union.jsonl"


def texts() -> list[str]:
    return [json.loads(line)["text"] for line in MESSAGES.read_text(encoding="utf-8").splitlines()]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(DEMO))


def test_the_tokenizer_gives_the_shipped_text_back(tokenizer: Any) -> None:
    for text in texts():
        assert tokenizer.decode(tokenizer(text, verbose=False)["input_ids"]) == text


def test_the_tokenizer_gives_any_text_back(tokenizer: Any) -> None:
    text = "naïve 数据 \t\n 🙂 don 't , ."
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_tokenizer_file_is_what_its_script_makes(tmp_path: Path) -> None:
    maker = script("make_demo_tokenizer")
    maker.write(maker.train(MESSAGES), tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (DEMO / name).read_bytes()


def test_the_tokenizer_file_is_small() -> None:
    assert (DEMO / "tokenizer.json").stat().st_size < 60_000


def test_the_demos_model_fits_its_tokenizer_and_four_workers(tokenizer: Any) -> None:
    config = json.loads((DEMO / "config.json").read_text())
    assert config["vocab_size"] == len(tokenizer)
    assert config["eos_token_id"] == tokenizer.eos_token_id
    assert config["n_positions"] == tokenizer.model_max_length
    assert config["n_layer"] % 4 == 0
    assert config["n_embd"] % config["n_head"] == 0


def test_the_shipped_text_makes_a_thousand_samples(tokenizer: Any) -> None:
    made = load_dataset(MESSAGES, tokenizer, DataSettings(max_length=128, packing=True), cache_folder=None)
    assert made.counts.records == 28
    assert len(made) == -(-made.num_tokens // 128)
    assert len(made) > 1000


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_a_run_file_parses(path: Path) -> None:
    config = load_run_config(path)
    assert Path(config.data.train).parent in (EXAMPLES, EXAMPLES / "cache")


def test_the_run_of_smollm2_is_as_large_as_it_says() -> None:
    config = load_run_config(EXAMPLES / "smollm2-pubmed.toml")
    assert config.cluster.num_stages == 4
    assert config.train.num_train_epochs == 2
    assert config.data.max_length == 128
    assert config.data.max_eval_samples == 128
    assert (config.data.max_train_samples or 0) >= 256
    assert (config.compression.forward["bits"], config.compression.backward["bits"]) == (4, 8)


def test_the_run_of_replicas_is_the_demos_by_as_many_workers_cut_otherwise() -> None:
    demo, replicas = (load_run_config(EXAMPLES / name) for name in ("demo.toml", "replicas.toml"))
    assert (replicas.cluster.num_replicas, replicas.cluster.num_stages, demo.cluster.num_stages) == (2, 2, 4)
    assert replicas.compression.gradients == {"codec": "uniform", "bits": 4}
    same = {"num_microbatches": demo.train.num_microbatches, "output_dir": demo.train.output_dir}
    assert msgspec.structs.replace(replicas.train, **same) == demo.train
    assert (replicas.model, replicas.data) == (demo.model, demo.data)
    assert replicas.compression == demo.compression
    assert msgspec.structs.replace(replicas.cluster, num_replicas=1, num_stages=4) == demo.cluster


def test_each_of_two_replicas_has_half_of_the_demos_samples_and_of_each_batch() -> None:
    run = read_run(load_run_config(EXAMPLES / "replicas.toml"), None)
    assert run.batches.replica_sizes == (96, 96)
    assert run.batches.total_steps == 48
    assert {run.batches.num_microbatches(step) for step in range(1, 49)} == {(4, 4)}
    assert len(run.stage_plan.shards) == 2
