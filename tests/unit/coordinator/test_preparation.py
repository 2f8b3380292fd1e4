"""Everything that is read before workers are let in, from real files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from coordinator.batches import Wanted
from coordinator.preparation import prepare_run
from coordinator.saving import check_folder
from pipecomp.config import RunConfig, parse_run_config
from pipecomp.errors import ConfigError
from pipecomp.models import open_model
from pipecomp.protocol import messages as m

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
GPT2 = {
    "model_type": "gpt2", "n_layer": 3, "n_embd": 8, "n_head": 2, "n_positions": 32, "vocab_size": 1024,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def make_config(**sections: dict[str, object]) -> RunConfig:
    tree = {
        "model": {"config": GPT2},
        "data": {
            "train": str(EXAMPLES / "state-of-the-union.jsonl"),
            "tokenizer": str(EXAMPLES / "demo-gpt2"),
            "max_length": 32,
            "max_train_samples": 10,
            "max_eval_samples": 4,
        },
        "train": {"batch_size": 4, "num_microbatches": 2},
        "cluster": {"num_stages": 2},
    }
    merged = {name: {**tree.get(name, {}), **sections.get(name, {})} for name in {*tree, *sections}}
    return parse_run_config(merged)


def joins(count: int) -> list[m.Join]:
    return [
        m.Join(
            protocol_version=1, version="1", worker=f"w{i}", host="h", process_id=i, data_address=f"memory://{i}",
            device="cpu", num_cores=1, memory_nbytes=1,
        )
        for i in range(count)
    ]  # fmt: skip


def test_terms_say_how_many_steps_there_are(tmp_path):
    terms = prepare_run(make_config(train={"batch_size": 4, "num_train_epochs": 2}), tmp_path).terms
    assert (terms.steps_per_epoch, terms.total_steps) == (3, 6)
    assert sum(size.samples for size in terms.evaluation_sizes) == 4


@pytest.mark.parametrize("max_steps", [2, 50])
def test_max_steps_overrides_the_epochs_in_both_directions(tmp_path, max_steps):
    run = prepare_run(make_config(train={"batch_size": 4, "max_steps": max_steps}), tmp_path)
    assert run.terms.total_steps == max_steps
    assert run.terms.batch_size(max_steps).samples in (2, 4)


def test_no_sample_is_both_trained_and_held_out(tmp_path):
    run = prepare_run(make_config(data={"max_train_samples": None}), tmp_path)
    assert run.num_held_out == 4
    assert run.num_samples > 100


def test_an_assignment_names_every_stage_and_its_own_rank(tmp_path):
    run = prepare_run(make_config(cluster={"num_stages": 2, "tied_weights": "colocate"}), tmp_path)
    assignment = run.assignment("r", 1, 1, joins(2), num_threads=3)
    assert [(stage.rank, stage.first_layer, stage.end_layer) for stage in assignment.stages][-1] == (0, 4, 5)
    assert assignment.stages[1].data_address == "memory://1"
    assert (assignment.rank, assignment.tied, assignment.random_weights, assignment.tensors) == (1, "local", True, ())
    assert assignment.config["train"]["batch_size"] == 4


def test_only_stages_behind_something_trainable_send_gradients_back(tmp_path):
    frozen = {"freeze": ["transformer.wte.*", "transformer.wpe.*", "transformer.h.0.*", "transformer.h.1.*"]}
    run = prepare_run(make_config(model=frozen, cluster={"num_stages": 5}), tmp_path)
    stages = run.assignment("r", 1, 0, joins(5), num_threads=0).stages
    assert [stage.needs_input_gradient for stage in stages] == [False, False, False, False, True]


def test_a_tied_weight_that_is_frozen_needs_no_exchange(tmp_path):
    run = prepare_run(make_config(model={"freeze": ["transformer.wte.*"]}), tmp_path)
    assert run.stage_plan.tied == "none"


def test_a_worker_sends_back_what_it_holds_and_no_alias(tmp_path):
    run = prepare_run(make_config(cluster={"num_stages": 2, "tied_weights": "exchange"}), tmp_path)
    names = [set(run.shapes(rank)) for rank in range(2)]
    assert names[0].isdisjoint(names[1])
    assert names[0] | names[1] == {p.name for p in run.model.plan.parameters}
    assert "lm_head.weight" not in names[0] | names[1]


def test_pretrained_weights_are_listed_with_their_hashes(tmp_path):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**GPT2))
    model.save_pretrained(tmp_path / "model")
    config = make_config(model={"name": str(tmp_path / "model"), "config": None}, cluster={"tied_weights": "exchange"})
    run = prepare_run(config, tmp_path)
    tensors = [run.assignment("r", 1, rank, joins(2), 0).tensors for rank in range(2)]
    assert all(len(entry.content_hash) == 16 for part in tensors for entry in part)
    assert {entry.name for part in tensors for entry in part} == {p.name for p in run.model.plan.parameters}
    assert "transformer.wte.weight" in {entry.name for entry in tensors[1]}, "the head reads the tied weight too"


def test_weights_of_another_shape_than_the_configuration_are_refused_at_once(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.for_model(**GPT2)).save_pretrained(tmp_path / "model")
    AutoConfig.for_model(**{**GPT2, "n_positions": 64}).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"transformer.wpe.weight is \(32, 8\), the model needs \(64, 8\)"):
        prepare_run(make_config(model={"name": str(tmp_path / "model"), "config": None}), tmp_path)


BERT = {
    "model_type": "bert", "num_hidden_layers": 3, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2,
    "max_position_embeddings": 32, "vocab_size": 1024,
}  # fmt: skip


def make_classifier(folder: Path, labels: str | list[int], **sections: dict[str, object]) -> RunConfig:
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"text {n}", "label": label}) + "\n" for n, label in enumerate(labels)))
    model = {"config": BERT, "task": "sequence-classification", **sections.pop("model", {})}
    data = {"train": str(path), "max_train_samples": None, **sections.pop("data", {})}
    return make_config(model=model, data=data, **sections)


def save_encoder(folder: Path, *, classes: tuple[str, ...] = ()) -> dict[str, object]:
    """A checkpoint of the encoder alone, or with a classifier; what a run file says of it."""
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

    names = {"id2label": dict(enumerate(classes)), "label2id": {c: n for n, c in enumerate(classes)}} if classes else {}
    make = AutoModelForSequenceClassification if classes else AutoModel
    make.from_config(AutoConfig.for_model(**BERT, **names)).save_pretrained(folder)
    return {"name": str(folder), "config": None}


def test_a_classifier_gets_the_classes_of_its_data(tmp_path):
    run = prepare_run(make_classifier(tmp_path, "bacabcabca"), None)
    assert run.model.config["id2label"] == {"0": "a", "1": "b", "2": "c"}
    assert {p.name: p.shape for p in run.model.plan.parameters}["classifier.weight"] == (3, 8)
    assert (run.num_samples, run.num_held_out) == (6, 4)
    assert run.terms.batch_size(1).targets == run.terms.batch_size(1).samples == 4
    assert run.notes == ("classes: a, b, c",)


def test_a_classifier_that_the_weights_lack_is_told_and_not_sent(tmp_path):
    model = save_encoder(tmp_path / "encoder")
    config = make_classifier(tmp_path, "abababab", model=model)
    run = prepare_run(config, None)
    assert run.notes[0] == f"not in the weights of {model['name']}, so random from train.seed: classifier.weight, classifier.bias"
    sent = [entry.name for rank in range(2) for entry in run.assignment("r", 1, rank, joins(2), 0).tensors]
    assert {p.name for p in run.model.plan.parameters} - set(sent) == {"classifier.weight", "classifier.bias"}
    assert run.terms.model_hash == open_model(config.model).hash, "a worker's own folder knows no classes of the data"
    with pytest.raises(ConfigError, match=r"model.freeze keeps classifier.bias as it is, but the weights lack it"):
        prepare_run(make_classifier(tmp_path, "abababab", model={**model, "freeze": ["classifier.bias"]}), None)


def test_a_trained_classifier_keeps_its_order_of_classes(tmp_path):
    model = save_encoder(tmp_path / "trained", classes=("b", "c", "a"))
    run = prepare_run(make_classifier(tmp_path, "abababab", model=model), None)
    assert list(run.model.config["id2label"].values()) == ["b", "c", "a"]
    plan, buffers = run.batches.step_plan(epoch=1, step=1, learning_rate=1.0, wanted=Wanted(input_ids=False, labels=True))
    assert set(np.frombuffer(buffers[0], "<i4").tolist()) <= {0, 2}
    assert len(buffers[0]) == 4 * sum(map(len, plan.microbatches))
    assert "classifier.weight" in run.entries


@pytest.mark.parametrize(
    ("labels", "sections", "complaint"),
    [
        ("abab", {"model": {"task": "causal-lm"}}, "model.task = 'causal-lm': bert models are trained for sequence"),
        ("abab", {"model": {"config": GPT2}}, "'sequence-classification': gpt2 models are trained for causal-lm only; set"),
        ("aaab", {"data": {"max_train_samples": 2, "max_eval_samples": 0}}, "the first samples of .* are all of one class"),
        ("aaaa", {}, "all records have the same label"),
    ],
)
def test_a_classifier_that_could_not_learn_is_refused(tmp_path, labels, sections, complaint):
    with pytest.raises(ConfigError, match=complaint):
        prepare_run(make_classifier(tmp_path, labels, **sections), None)


def test_a_disk_without_room_for_the_model_is_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10_000))
    run = prepare_run(make_config(train={"output_dir": str(tmp_path / "out")}), tmp_path)
    with pytest.raises(ConfigError, match=r"output_dir = .*out: the trained model needs 44.3 kB, the disk has 10.0 kB left"):
        check_folder(run)
    assert list(tmp_path.glob("*out*")) == []


@pytest.mark.parametrize(
    ("sections", "complaint"),
    [
        ({"data": {"max_length": 33}}, "data.max_length = 33"),
        ({"model": {"config": {**GPT2, "vocab_size": 100}}}, "the model's vocabulary ends at 99"),
        ({"data": {"max_eval_samples": 10**6}}, "data.max_eval_samples = 1000000"),
        ({"cluster": {"num_stages": 9}}, "9"),
        ({"compression": {"backward": {"codec": "uniform", "bitz": 8}}}, "bitz"),
        ({"compression": {"forward": {"codec": "nonesuch"}}}, "nonesuch"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path, sections, complaint):
    with pytest.raises(ConfigError, match=complaint):
        prepare_run(make_config(**sections), tmp_path)


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"cluster": {"schedule": "zigzag"}}, "cluster.schedule = 'zigzag': .*there are: 1f1b, gpipe"),
        ({"cluster": {"schedule": "gpipe", "num_in_flight": 2}}, "cluster.schedule = 'gpipe': .*num_in_flight"),
        ({"compression": {"forward": {"codec": "zip"}}}, "forward: .*there are: cast, delta, identity, sparse, uniform"),
        ({"compression": {"tied": {"codec": "uniform", "bits": 9}}}, "compression.tied: .*bits = 9"),
        ({"model": {"freeze": ["*"]}}, r"model.freeze = \['\*'\] leaves no parameter to train"),
        ({"model": {"config": {**GPT2, "n_embd": 7}}}, "transformers cannot build this gpt2 model: ValueError: .*divisible"),
        ({"model": {"config": {**GPT2, "activation_function": "foo"}}}, "cannot build this gpt2 model: KeyError: 'foo'"),
    ],
)
def test_what_no_worker_could_run_is_refused_before_workers_are_let_in(sections, text):
    with pytest.raises(ConfigError, match=text):
        prepare_run(make_config(**sections), None)
