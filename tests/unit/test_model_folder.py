"""A saved model is an ordinary Hugging Face folder: plain transformers opens it and computes the same logits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipecomp import registry
from pipecomp.config import ModelConfig
from pipecomp.errors import ConfigError
from pipecomp.models import ModelFolderWriter, auto_class, model_from_config, open_model, save_folder
from pipecomp.models._family import ModelFamily
from pipecomp.models.base import Batch
from pipecomp.testing import model_checks
from pipecomp.types import Shard

FAMILIES = model_checks.plugins(ModelFamily)


def tiny_model(family: str = "gpt2", *, tied: bool = True) -> Any:
    return model_from_config({**registry.load("pipecomp.models", family).tiny_config(), "tie_word_embeddings": tied})


def built(model: Any, *cuts: int) -> list[Any]:
    stages = []
    for start, end in zip((0, *cuts), (*cuts, len(model.plan.layers)), strict=True):
        stage = model.build(Shard(start, end))
        model.initialize(stage, None, seed=9)
        stages.append(stage)
    return stages


def tensors(stages: list[Any]) -> Iterator[dict[str, torch.Tensor]]:
    for stage in stages:
        yield {name: parameter.detach() for name, parameter in stage.named_checkpoint_parameters()}


def save(folder: Path, model: Any, *cuts: int, extra_files: tuple[Path, ...] = ()) -> None:
    stages = built(model, *cuts)
    save_folder(folder, model.plan, model.config, tensors(stages), num_stages=len(stages), extra_files=extra_files)


@pytest.mark.parametrize("cuts", [(), (2,), (1, 2, 4)], ids=["one file", "two files", "head alone"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_plain_transformers_opens_it_with_equal_logits(
    family: str, tied: bool, cuts: tuple[int, ...], tmp_path: Path
) -> None:
    model = tiny_model(family, tied=tied)
    save(tmp_path / "saved", model, *cuts)
    opened = auto_class(model.plan.task).from_pretrained(tmp_path / "saved").eval()
    for parameter in opened.parameters():  # out of the mapped file: a product with one row has other bits where it is not aligned
        parameter.data = parameter.data.clone()
    ids = torch.arange(12).reshape(1, 12)
    (stage,) = built(model)
    with torch.no_grad():
        assert torch.equal(opened(ids).logits, stage.forward_layers(None, Batch((12,), ids, None), seeds=None))
    assert opened.dtype == torch.float32


def test_it_is_opened_here_again_with_the_same_hash_and_weights(tmp_path: Path) -> None:
    model = tiny_model("llama")
    save(tmp_path / "saved", model, 2)
    again = open_model(ModelConfig(name=str(tmp_path / "saved")))
    stage = again.build(Shard(0, 5))
    again.initialize(stage, again.weights, seed=0)
    assert again.hash == model.hash
    ours = dict(built(model)[0].named_checkpoint_parameters())
    assert all(torch.equal(parameter, ours[name]) for name, parameter in stage.named_checkpoint_parameters())


def test_a_tied_weight_is_written_once(tmp_path: Path) -> None:
    model = tiny_model()
    save(tmp_path / "saved", model, 2)
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == sorted(p.name for p in model.plan.parameters)
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in built(model)[0].parameters()) - 67 * 32 * 4


def test_extra_files_are_copied(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    save(tmp_path / "saved", tiny_model(), extra_files=(tmp_path / "tokenizer.json",))
    assert (tmp_path / "saved" / "tokenizer.json").read_text() == "{}"


def test_an_older_model_is_replaced_whole(tmp_path: Path) -> None:
    save(tmp_path / "saved", tiny_model(), 1, 2, 4)
    save(tmp_path / "saved", tiny_model("llama"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["saved"]
    assert sorted(p.name for p in (tmp_path / "saved").iterdir()) == ["config.json", "model.safetensors"]


def test_a_folder_with_other_things_in_it_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="exists and is not a model folder"):
        save(tmp_path, tiny_model())
    assert (tmp_path / "thesis.tex").exists()


def test_a_run_that_ends_half_way_leaves_the_older_model(tmp_path: Path) -> None:
    model = tiny_model()
    save(tmp_path / "saved", model)
    before = (tmp_path / "saved" / "model.safetensors").read_bytes()
    stages = built(model, 2)
    with ModelFolderWriter(tmp_path / "saved", model.plan, model.config, num_files=2) as writer:
        writer.add(next(tensors(stages)))
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]
    assert (tmp_path / "saved" / "model.safetensors").read_bytes() == before


def test_nothing_is_named_before_everything_is_there(tmp_path: Path) -> None:
    model = tiny_model()
    with ModelFolderWriter(tmp_path / "saved", model.plan, model.config, num_files=2) as writer:
        writer.add(next(tensors(built(model, 2))))
        with pytest.raises(ValueError, match=r"tensors were not added, transformer\.h\.1\.ln_1\.weight first"):
            writer.finish()
        assert not (tmp_path / "saved").exists()


def test_a_full_disk_is_an_error_that_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch

    def full(*_: object, **__: object) -> None:
        raise safetensors.SafetensorError("No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    model = tiny_model()
    writer = ModelFolderWriter(tmp_path / "saved", model.plan, model.config, num_files=1)
    with writer, pytest.raises(ConfigError, match=r"of the model for .*saved: No space left on device"):
        writer.add(next(tensors(built(model))))


def test_a_tensor_from_two_stages_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    stages = built(model, 2)
    with ModelFolderWriter(tmp_path / "saved", model.plan, model.config, num_files=2) as writer:
        writer.add(next(tensors(stages)))
        with pytest.raises(ValueError, match="comes from two stages"):
            writer.add(next(tensors(stages)))


def test_a_tensor_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    with (
        ModelFolderWriter(tmp_path / "saved", model.plan, model.config, num_files=1) as writer,
        pytest.raises(ValueError, match=r"spare has shape \(2,\), the model has None"),
    ):
        writer.add({"spare": torch.zeros(2)})


def test_stages_are_asked_for_one_at_a_time(tmp_path: Path) -> None:
    model = tiny_model()
    stages = built(model, 1, 3)
    written = []

    def one_by_one() -> Iterator[dict[str, torch.Tensor]]:
        for stage in tensors(stages):
            written.append(len(list(tmp_path.glob(".saved.tmp-*/*.safetensors"))))
            yield stage

    save_folder(tmp_path / "saved", model.plan, model.config, one_by_one(), num_stages=3)
    assert written == [0, 1, 2]
