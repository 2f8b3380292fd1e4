"""The plugins that the documents show are found through their entry points and pass the suites."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from pipecomp import registry
from pipecomp.config import parse_run_config
from pipecomp.errors import ConfigError, CorruptPayload
from pipecomp.testing.codec_checks import Visit, check_codec, encode
from pipecomp.testing.model_checks import check_model
from pipecomp.types import TensorSpec

DOCS = Path(__file__).parents[2] / "docs"


def code_blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / document).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def install(document: str, folder: Path) -> tuple[str, str]:
    """Put a document's plugin where an installed package would be; the group and name of its entry point."""
    declared = tomllib.loads(code_blocks(document, "toml")[0])["project"]["entry-points"]
    [(group, [(name, place)])] = [(group, list(points.items())) for group, points in declared.items()]
    module = folder / (place.partition(":")[0].replace(".", "/") + ".py")
    module.parent.mkdir()
    module.write_text(code_blocks(document, "python")[0], encoding="utf-8")
    record = folder / "acme-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n", encoding="utf-8")
    (record / "entry_points.txt").write_text(f"[{group}]\n{name} = {place}\n", encoding="utf-8")
    return group, name


@pytest.fixture
def package_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name == "acme" or name.startswith("acme.")]:
        del sys.modules[name]
    importlib.invalidate_caches()


def run_trial(document: str, plugin: object) -> None:
    """Run what a document says under `Try it`, with the names of the example's module."""
    module = sys.modules[f"acme.{document}"]
    assert isinstance(module, ModuleType)
    assert module.PLUGIN is plugin
    exec(code_blocks(f"adding-a-{'codec' if document == 'row8' else 'model'}.md", "python")[1], dict(vars(module)))


def test_the_documented_codec_passes_the_suite(package_folder: Path) -> None:
    group, name = install("adding-a-codec.md", package_folder)
    plugin = registry.load(group, name)
    run_trial("row8", plugin)
    with pytest.raises(ConfigError, match="no option 'bits'"):
        plugin.from_options({"bits": 3})


def test_the_documented_codec_has_the_error_it_says(package_folder: Path) -> None:
    codec = registry.load(*install("adding-a-codec.md", package_folder)).from_options({})
    values = torch.linspace(-3, 5, 60).reshape(6, 10)
    payload, _ = encode(codec, Visit(values, None))
    decoded = codec.decode(payload, None, TensorSpec(6, 10)).values
    assert bool(((decoded - values).abs() <= values.abs().amax(dim=1, keepdim=True) / 254 + 1e-6).all())
    payload[:4] = 0xFF  # a scale that is not a number
    with pytest.raises(CorruptPayload):
        codec.decode(payload, None, TensorSpec(6, 10))


def test_the_documented_compression_can_be_configured(package_folder: Path) -> None:
    install("adding-a-codec.md", package_folder)
    compression = tomllib.loads(code_blocks("adding-a-codec.md", "toml")[1])
    config = parse_run_config({"model": {"name": "m"}, "data": {"train": "t.txt"}, **compression})
    for options in (config.compression.forward, config.compression.backward):
        rest = {key: value for key, value in options.items() if key != "codec"}
        check_codec(registry.load("pipecomp.codecs", options["codec"]).from_options(rest))


def test_the_documented_model_family_passes_the_suite(package_folder: Path) -> None:
    group, name = install("adding-a-model.md", package_folder)
    run_trial("phi", registry.load(group, name))


def test_the_documented_family_breaks_the_suite_without_its_dropout(package_folder: Path) -> None:
    group, name = install("adding-a-model.md", package_folder)
    plugin = registry.load(group, name)
    plugin.embed = lambda layer, input_ids, position_ids: 2 * layer[0](input_ids)
    with pytest.raises(AssertionError, match="logits differ"):
        check_model(plugin.tiny_config())
