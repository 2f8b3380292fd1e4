"""Where a model comes from: a folder, a hub name or a bare configuration. Knows files and names; builds no layer itself.

Hub names go through transformers' own cache, so HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE and HF_TOKEN mean what they mean there.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from pipecomp import registry
from pipecomp.config import ModelConfig
from pipecomp.errors import ConfigError
from pipecomp.models._checkpoint import INDEX_FILE, PICKLED_FILES, SINGLE_FILE, CheckpointReader, read_index
from pipecomp.models._family import ModelFamily, TransformersConfig
from pipecomp.models._transformers import TransformersModel
from pipecomp.models.base import Model, ModelMaker

CONFIG_FILE = "config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)
_NOT_CONTENT = ("transformers_version", "_name_or_path", "torch_dtype", "architectures")


def open_model(source: ModelConfig) -> Model:
    """The model that a run file's [model] section describes; its weights are found, not read.

    Raises:
        ConfigError: no such folder or hub name, an unsupported family, no weights, or weights that only pickle reads.
    """
    if source.config is not None:
        _refuse_unknown_keys(source.config)
        return model_from_config(source.config, freeze=source.freeze, dropout=source.dropout)
    locate = _locator(source.name, source.revision)
    path = locate(CONFIG_FILE)
    if path is None:
        raise ConfigError(f"model.name = {source.name!r} has no config.json: name a Hugging Face model folder or hub name")
    try:
        config = msgspec.convert(json.loads(path.read_text(encoding="utf-8")), dict[str, Any])
    except (OSError, ValueError, msgspec.ValidationError) as e:
        raise ConfigError(f"{path} is not a model configuration: {e}") from e
    plugin = _plugin(config)
    prefix, aliases = ("", {}) if isinstance(plugin, ModelMaker) else (plugin.prefix, plugin.stored_aliases(config))
    reader = None if source.weights == "random" else _find_weights(source.name, source.revision, locate, prefix, aliases)
    return _make_model(plugin, config, source.freeze, source.dropout, reader)


def model_from_config(
    config: Mapping[str, object], *, freeze: Sequence[str] = (), dropout: float | None = None
) -> Model:
    """The model of a configuration; needs no file.

    Args:
        config: transformers' configuration (or a `ModelMaker`'s own) as plain values, `model_type` included.
        freeze: fnmatch patterns over Hugging Face parameter names.
        dropout: replaces every dropout of the configuration.

    Raises:
        ConfigError: an unsupported family, values that transformers refuses, or a pattern that matches nothing.
    """
    return _make_model(_plugin(config), config, freeze, dropout, None)


def with_classes(model: Model, source: ModelConfig, names: Sequence[str]) -> Model:
    """The same model for these classes, in this order; its configuration names them as transformers does.

    Args:
        source: what `model` was opened from; its `freeze` and `dropout` hold again.
    """
    assert isinstance(model, TransformersModel), "only families of transformers have classifiers"
    classes = {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}
    return _make_model(model.family, {**model.config, **classes}, source.freeze, source.dropout, model.weights)


def tokenizer_files(source: ModelConfig) -> tuple[Path, ...]:
    """The tokenizer's and generation's files of a folder or hub name, those there are; none for a bare configuration."""
    if source.config is not None:
        return ()
    locate = _locator(source.name, source.revision)
    return tuple(path for path in map(locate, TOKENIZER_FILES) if path is not None)


def _make_model(
    plugin: ModelFamily | ModelMaker,
    config: Mapping[str, object],
    freeze: Sequence[str],
    dropout: float | None,
    reader: CheckpointReader | None,
) -> Model:
    if isinstance(plugin, ModelMaker):
        return plugin.make(config, freeze=freeze, dropout=dropout, weights=reader)
    plain = _canonical(config)
    parsed = _parse(plain)
    if dropout is not None:
        for key in plugin.dropout_keys:
            setattr(parsed, key, dropout)
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return TransformersModel(plugin, parsed, plain, xxhash.xxh3_64_hexdigest(text.encode()), freeze, reader)


def _plugin(config: Mapping[str, object]) -> ModelFamily | ModelMaker:
    model_type = config.get("model_type")
    known = registry.names("pipecomp.models")
    if model_type not in known:
        given = "the configuration has no model_type" if model_type is None else f"model_type {model_type!r} is not supported"
        raise ConfigError(f"{given}; supported: {', '.join(known)}. Choose a model of these families, or add a plugin for it")
    if config.get("quantization_config") is not None:
        raise ConfigError("the model's weights are quantized (quantization_config): name the unquantized model")
    plugin: ModelFamily | ModelMaker = registry.load("pipecomp.models", str(model_type))
    return plugin


def _parse(config: Mapping[str, object]) -> TransformersConfig:
    from transformers import AutoConfig

    values = dict(config)
    model_type = values.pop("model_type")
    try:
        return type(AutoConfig.for_model(model_type)).from_dict(values)
    except Exception as e:  # transformers raises many kinds for a bad value
        raise ConfigError(f"transformers refuses this {model_type} configuration: {' '.join(str(e).split())}") from e


def _canonical(config: Mapping[str, object]) -> dict[str, Any]:
    """Every value of the configuration, defaults included, as JSON: equal models have equal text."""
    values = _parse(config).to_dict()
    values.update(dtype="float32")
    plain: dict[str, Any] = json.loads(json.dumps({k: v for k, v in values.items() if k not in _NOT_CONTENT}, default=str))
    return plain


def _refuse_unknown_keys(config: Mapping[str, object]) -> None:
    """A typo in a hand-written configuration would silently train another model."""
    if isinstance(_plugin(config), ModelMaker):
        return  # it checks its own keys
    default = _parse({"model_type": config["model_type"]})
    known = sorted({*default.to_dict(), *default.attribute_map, "rope_theta", "rope_scaling", "num_labels"})
    for key in config:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=3)
            hint = f"; did you mean {' or '.join(close)}?" if close else f"; there are: {', '.join(known)}"
            raise ConfigError(f"model.config: {config['model_type']} has no {key!r}{hint}")


def _locator(name: str, revision: str | None) -> Callable[[str], Path | None]:
    """A function from file name to path, None where there is no such file."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return lambda file: folder / file if (folder / file).is_file() else None
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(f"model.name = {name!r}: there is no such folder")
    return lambda file: _from_hub(name, revision, file)


def _from_hub(name: str, revision: str | None, file: str) -> Path | None:
    from transformers.utils import cached_file

    try:
        # Every model has a config.json; asking for it as one that must be there tells an unreachable hub from a missing file.
        path = cached_file(name, file, revision=revision, _raise_exceptions_for_missing_entries=file == CONFIG_FILE)
    except (OSError, ValueError) as e:
        raise ConfigError(
            f"model.name = {name!r}: cannot get {file}: {e}\nIt is neither a folder here nor reachable on the hub. Check the "
            "name and revision; HF_TOKEN for a private or gated model; HF_ENDPOINT for a mirror; HF_HUB_OFFLINE must be unset"
        ) from e
    return None if path is None else Path(path)


def _find_weights(
    name: str, revision: str | None, locate: Callable[[str], Path | None], prefix: str, aliases: Mapping[str, str]
) -> CheckpointReader:
    def need(file: str) -> Path:
        path = locate(file)
        if path is None:
            raise ConfigError(f"model.name = {name!r}: the weight file {file} is missing")
        return path

    if _has_file(name, revision, SINGLE_FILE):
        return CheckpointReader(SINGLE_FILE, need, prefix=prefix, aliases=aliases)
    index = locate(INDEX_FILE)
    if index is not None:
        return CheckpointReader(read_index(index), need, prefix=prefix, aliases=aliases)
    for file in PICKLED_FILES:
        if _has_file(name, revision, file):
            raise ConfigError(
                f"model.name = {name!r} has its weights in {file}, which can run code when it is read. Convert it once where "
                "you trust it: AutoModelForCausalLM.from_pretrained(...).save_pretrained(FOLDER), and name that folder"
            )
    raise ConfigError(
        f"model.name = {name!r} has no weights ({SINGLE_FILE} or {INDEX_FILE}). To start from random ones: "
        'model.weights = "random"'
    )


def _has_file(name: str, revision: str | None, file: str) -> bool:
    from transformers.utils import has_file

    folder = Path(name).expanduser()
    if folder.is_dir():
        return (folder / file).is_file()
    try:
        return bool(has_file(name, file, revision=revision))
    except OSError as e:
        raise ConfigError(f"model.name = {name!r}: cannot look for {file} on the hub: {e}") from e
