"""Which modules `launch` imports before it forks: those with the model's layers too, wherever the model comes from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipecomp import launching
from pipecomp.config import DataConfig, ModelConfig, RunConfig
from pipecomp.runtime import preloading
from pipecomp.runtime.preloading import import_all, modules_of

LLAMA = ("transformers.models.llama.modeling_llama",)


def folder(path: Path, config: object) -> ModelConfig:
    (path / "config.json").write_text(json.dumps(config))
    return ModelConfig(name=str(path))


def test_a_configuration_names_its_family(tmp_path: Path) -> None:
    assert modules_of(ModelConfig(config={"model_type": "llama"})) == LLAMA


def test_so_does_a_folder(tmp_path: Path) -> None:
    assert modules_of(folder(tmp_path, {"model_type": "llama"})) == LLAMA


@pytest.mark.parametrize("config", [{"model_type": "nonesuch"}, {"model_type": ["llama"]}, {}, [], "llama"])
def test_what_names_no_family_is_left_to_those_who_open_the_model(config: object, tmp_path: Path) -> None:
    assert modules_of(folder(tmp_path, config)) == ()


def test_a_hub_name_is_not_looked_up() -> None:
    assert modules_of(ModelConfig(name="org/name")) == modules_of(ModelConfig(config={"model_type": "nonesuch"})) == ()


def test_a_family_whose_layers_are_elsewhere_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preloading, "_SLOW", ())
    import_all("json.nonesuch", "nonesuch")


def test_launch_imports_what_the_folder_names_before_it_forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    monkeypatch.setattr(preloading, "import_all", lambda *names: imported.extend(names))
    monkeypatch.setattr("pipecomp.runtime.rehearsal.rehearse_codecs", lambda *_: None)
    launching.preload(RunConfig(model=folder(tmp_path, {"model_type": "llama"}), data=DataConfig()))
    assert set(LLAMA) < set(imported)
