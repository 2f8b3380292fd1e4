"""How a run is described: frozen sections read from one TOML file. Knows names, types and ranges; opens nothing but that file.

Paths in a run file are relative to the run file's own folder; paths given by `--set` or by a flag are relative to the
current folder, and so is `train.output_dir`. Unknown keys are errors, so that a typo never trains something else.
"""

from __future__ import annotations

import difflib
import re
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import xxhash

from pipecomp.errors import ConfigError
from pipecomp.units import HOW_TO_WRITE_A_RATE, HOW_TO_WRITE_A_SIZE, parse_rate, parse_size

_LARGEST = 2**63 - 1  # what a message can carry
Positive = Annotated[int, msgspec.Meta(ge=1, le=_LARGEST)]
Count = Annotated[int, msgspec.Meta(ge=0, le=_LARGEST)]
_FINITE = sys.float_info.max
AboveZero = Annotated[float, msgspec.Meta(gt=0, le=_FINITE)]
NonNegative = Annotated[float, msgspec.Meta(ge=0, le=_FINITE)]
Fraction = Annotated[float, msgspec.Meta(ge=0, lt=1)]
CodecOptions = dict[str, Any]
"""`{codec = NAME, ...}`; the codec named checks the rest."""


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class ModelConfig(_Section, frozen=True, kw_only=True):
    """Which model, and what of it is trained."""

    name: str = ""
    """A local folder, or a name that `from_pretrained` takes."""
    config: dict[str, Any] | None = None
    """A bare transformers configuration (`{model_type = "gpt2", n_layer = 8, ...}`) in place of `name`; weights are random."""
    weights: Literal["pretrained", "random"] = "pretrained"
    revision: str | None = None
    task: Literal["causal-lm", "sequence-classification"] = "causal-lm"
    freeze: tuple[str, ...] = ()
    """fnmatch patterns of Hugging Face parameter names that are not trained."""
    dropout: Fraction | None = None
    """Overrides every dropout of the model's own configuration."""


class DataConfig(_Section, frozen=True, kw_only=True):
    """Which text, and how it becomes samples."""

    train: str = ""
    eval: str | None = None
    """A file of its own; without it `max_eval_samples` samples are held out of `train`."""
    format: Literal["auto", "text", "jsonl"] = "auto"
    text_column: str = "text"
    label_column: str = "label"
    """Of a `.jsonl` file, for sequence classification only: class numbers from 0, or names of classes."""
    tokenizer: str | None = None
    """A folder or name; the model's own when left out."""
    max_length: Positive = 256
    packing: bool = False
    max_train_samples: Positive | None = None
    max_eval_samples: Count | None = None
    """Default: all of `eval`, or a twentieth of `train` (at most 256 samples) held out."""


class TrainConfig(_Section, frozen=True, kw_only=True):
    """The optimizer and its loop; names follow the Hugging Face trainer."""

    num_train_epochs: Positive = 1
    max_steps: Positive | None = None
    batch_size: Positive = 8
    """Samples in one optimizer step, over all microbatches."""
    num_microbatches: Positive = 4
    learning_rate: AboveZero = 5e-5
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = "linear"
    warmup_steps: Count = 0
    warmup_ratio: Fraction = 0.0
    weight_decay: NonNegative = 0.0
    adam_beta1: Fraction = 0.9
    adam_beta2: Fraction = 0.999
    adam_epsilon: AboveZero = 1e-8
    optim: Literal["adamw", "quantized_adam"] = "adamw"
    """`quantized_adam`: after a warm-up Adam's second moment stays as it is, and replicas exchange momenta."""
    optim_warmup_steps: Positive | None = None
    """Of `quantized_adam`: steps of plain AdamW before that; None: until the second moment is steady."""
    max_grad_norm: NonNegative = 1.0
    """0 turns clipping off."""
    gradient_checkpointing: bool = False
    """Keep only each stage's input and recompute the rest in the backward pass."""
    eval_steps: Positive | None = None
    """Evaluate every so many steps besides the end; None: at the end only."""
    logging_steps: Positive = 1
    max_aborted_steps: Count = 3
    """End the run when more steps than this in a row had to be aborted (loss or gradients not finite)."""
    seed: Count = 0
    output_dir: str = "outputs"
    save_model: bool = True


class CompressionConfig(_Section, frozen=True, kw_only=True):
    """What travels how. Each value is `{codec = NAME, ...}`."""

    forward: CodecOptions = msgspec.field(default_factory=lambda: {"codec": "delta", "bits": 4})
    backward: CodecOptions = msgspec.field(default_factory=lambda: {"codec": "uniform", "bits": 8})
    evaluation: CodecOptions = msgspec.field(default_factory=lambda: {"codec": "cast", "dtype": "bf16"})
    tied: CodecOptions = msgspec.field(default_factory=lambda: {"codec": "identity"})
    gradients: CodecOptions = msgspec.field(default_factory=lambda: {"codec": "uniform", "bits": 4})
    """Between replicas; nothing of it crosses with one."""


class MessagesConfig(_Section, frozen=True, kw_only=True):
    """Where each sample's message of AC-SGD is kept, at both ends of every link."""

    store: Literal["memory", "disk", "tiered"] = "memory"
    """`tiered`: in memory while its budget lasts, on disk beyond it."""
    dtype: Literal["fp32", "bf16", "int8", "int4"] = "fp32"
    """How a message is kept between two visits; both ends round alike."""
    memory_budget: str = "4GB"
    """Of each worker, for all its links, such as `500MB` or `16GB`; used by `memory` and `tiered`."""
    disk_budget: str = "64GB"
    """The same on disk; used by `disk` and `tiered`."""
    direct_io: bool = False
    """Read from the disk itself, past the operating system's cache."""

    @property
    def is_on_disk(self) -> bool:
        """Whether a folder is of any use."""
        return self.store != "memory"


class ClusterConfig(_Section, frozen=True, kw_only=True):
    """How many machines, what each holds, and how long silence is patience."""

    num_stages: Positive = 2
    """Workers in one pipeline."""
    num_replicas: Positive = 1
    """Pipelines that train side by side, each on samples of its own; `num_stages` workers each."""
    schedule: str = "1f1b"
    num_in_flight: Positive | None = None
    """Microbatches a stage may have between forward and backward in `1f1b`; None: deep enough for slow links."""
    num_deferred: Count = 0
    """Of so many microbatches a stage may leave gradients of weights for a time when it would wait; 0: of none."""
    layers: tuple[Positive, ...] | None = None
    """Layers of each worker by hand (embedding and head count as one each)."""
    tied_weights: Literal["auto", "colocate", "exchange"] = "auto"
    """Where embedding and output head share a weight: both on the first worker, or their gradients exchanged."""
    link_rate: str | None = None
    """Throttle every worker's sending in user space, for example `20mbit`."""
    link_latency_ms: NonNegative = 0.0
    link_credit_nbytes: Positive = 64 * 2**20
    """Bytes that may be under way on one link before its sender waits."""
    heartbeat_interval_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = 0.5
    heartbeat_timeout_s: AboveZero = 5.0
    join_timeout_s: AboveZero = 600.0
    """How long to wait for all workers."""


class ReplicasConfig(_Section, frozen=True, kw_only=True):
    """How several pipelines come to one model; nothing of it matters with one replica."""

    error_feedback: bool = True
    """What a gradient's codec has lost is added to the next step's."""
    check_steps: Count = 20
    """Every so many steps all replicas' parameters must have the same hash; 0: never."""
    overlap: bool = False
    """Exchange a step's gradients beside the next step: each is applied one step late."""
    local_steps: Count = 0
    """Each replica trains on its own and exchanges the change of its parameters every so many steps; 0: gradients, each step."""
    outer_learning_rate: AboveZero = 0.7
    """Of local steps: of the mean change of parameters."""
    outer_momentum: Fraction = 0.9
    """Of local steps: Nesterov's."""


class RunConfig(_Section, frozen=True, kw_only=True):
    """One run, whole."""

    model: ModelConfig
    data: DataConfig
    train: TrainConfig = TrainConfig()
    compression: CompressionConfig = CompressionConfig()
    messages: MessagesConfig = MessagesConfig()
    cluster: ClusterConfig = ClusterConfig()
    replicas: ReplicasConfig = ReplicasConfig()


_HOW_TO_NAME_A_CODEC = 'name a codec, for example {codec = "uniform", bits = 8}'
_HINTS = {
    **{f"compression.{kind}": _HOW_TO_NAME_A_CODEC for kind in ("forward", "backward", "evaluation", "tied", "gradients")},
    **{f"messages.{key}": HOW_TO_WRITE_A_SIZE for key in ("memory_budget", "disk_budget")},
    "cluster.link_rate": HOW_TO_WRITE_A_RATE,
}
"""What to write where the type alone says too little."""
_PATHS = (("model", "name"), ("data", "train"), ("data", "eval"), ("data", "tokenizer"))


def load_run_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file and apply `section.key=value` overrides.

    Raises:
        ConfigError: the file is missing or not TOML, or a key or value is not allowed; the text says which and what is.
    """
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"cannot read the run file {path}: {e.strerror or e}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path} is not valid TOML: {e}") from e
    _make_absolute(tree, path.parent)
    for override in overrides:
        _apply(tree, override)
    return parse_run_config(tree, str(path))


def parse_run_config(tree: dict[str, Any], source: str = "the run file") -> RunConfig:
    """Check a parsed tree. Raises ConfigError as `load_run_config` does."""
    try:
        config = msgspec.convert(tree, RunConfig)
    except msgspec.ValidationError as e:
        raise ConfigError(f"{source}: {_explain(str(e), tree)}") from e
    _check(config, source)
    return config


def resolved_toml(config: RunConfig) -> str:
    """The whole configuration as TOML, defaults included, None left out."""
    lines: list[str] = []
    for section, values in msgspec.to_builtins(config).items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {toml_value(value)}" for key, value in values.items() if value is not None]
        lines.append("")
    return "\n".join(lines)


def config_hash(config: RunConfig) -> str:
    """Two coordinators with equal hashes train the same: of every key, in order, defaults included."""
    return xxhash.xxh3_64_hexdigest(resolved_toml(config).encode())


def messages_hash(config: RunConfig) -> str:
    """Runs with equal hashes can use each other's messages of samples: the same model, cut alike, the same text and seed. How
    long, in how many bits and by how many replicas is no matter, for both ends of a link compare the messages themselves."""
    cluster = ClusterConfig(
        num_stages=config.cluster.num_stages, layers=config.cluster.layers, tied_weights=config.cluster.tied_weights
    )
    data = msgspec.structs.replace(config.data, max_train_samples=None, max_eval_samples=None)
    same = RunConfig(model=config.model, data=data, train=TrainConfig(seed=config.train.seed), cluster=cluster)
    return config_hash(same)


def toml_value(value: object) -> str:
    """A plain value as a run file has it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        inner = ", ".join(f"{msgspec.json.encode(k).decode()} = {toml_value(v)}" for k, v in value.items() if v is not None)
        return "{" + inner + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    if isinstance(value, float):
        return repr(value)
    return msgspec.json.encode(value).decode()


def _make_absolute(tree: dict[str, Any], folder: Path) -> None:
    for section, key in _PATHS:
        values = tree.get(section)
        if isinstance(values, dict) and isinstance(values.get(key), str):
            values[key] = _absolute(key, values[key], folder)


def _absolute(key: str, value: str, folder: Path) -> str:
    """A data file always; a model or tokenizer only where the folder is there, since `org/name` may mean the hub."""
    path = folder / Path(value).expanduser()
    explicit = value.startswith((".", "/", "~"))
    return str(path.resolve()) if value and (key in ("train", "eval") or explicit or path.exists()) else value


def _apply(tree: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals or len(keys) < 2 or not all(keys):
        raise ConfigError(f"--set {override}: write section.key=value, for example --set train.learning_rate=1e-4")
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    node = tree
    for key in keys[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise ConfigError(f"--set {override}: {key} is a value, not a section")
    if (keys[0], keys[-1]) in _PATHS and isinstance(value, str):
        value = _absolute(keys[-1], value, Path.cwd())
    node[keys[-1]] = value


def _explain(text: str, tree: dict[str, Any]) -> str:
    """Say which key, which value, what is allowed."""
    unknown = re.search(r"unknown field `([^`]*)`(?: - at `\$\.?([^`]*)`)?", text)
    if unknown:
        key, section = unknown[1], unknown[2] or ""
        hints = get_type_hints(RunConfig)
        known = list(hints) if not section else list(get_type_hints(hints[section])) if section in hints else []
        close = difflib.get_close_matches(key, known, n=1)
        where = f"[{section}] " if section else ""
        hint = f"did you mean {close[0]!r}? " if close else ""
        return f"{where}unknown key {key!r}; {hint}allowed: {', '.join(known)}"
    missing = re.search(r"missing required field `([^`]*)`", text)
    if missing:
        return f"the section [{missing[1]}] is missing; a run file needs [model] and [data]"
    at = re.search(r" - at `\$\.?([^`]*)`", text)
    if at:
        value: Any = tree
        for key in re.sub(r"\[[^\]]*\]", "", at[1]).split("."):
            value = value.get(key) if isinstance(value, dict) else value
        allowed = _allowed(at[1])
        hint = _HINTS.get(at[1], text[: at.start()])
        return f"{at[1]} = {value!r}: " + (f"allowed: {', '.join(allowed)}" if allowed else hint)
    return text


def _allowed(path: str) -> list[str]:
    """The values of a key that takes one of a few; empty for any other key."""
    section, _, key = path.partition(".")
    kind = get_type_hints(get_type_hints(RunConfig).get(section, object)).get(key)
    kinds = [kind, *get_args(kind)]
    return [toml_value(value) for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]


def _check(config: RunConfig, source: str) -> None:
    def refuse(text: str) -> None:
        raise ConfigError(f"{source}: {text}")

    if bool(config.model.name) == (config.model.config is not None):
        refuse("[model] needs either name (a folder or a hub name) or config (a bare configuration)")
    if not config.data.train:
        refuse("[data] train is missing: name a .txt or .jsonl file")
    if config.model.task == "sequence-classification" and config.data.packing:
        refuse("data.packing = true joins samples, but each has a class of its own (model.task): leave packing out")
    if config.model.config is not None and config.data.tokenizer is None:
        refuse("[data] tokenizer is missing: a model given by [model] config has none of its own")
    replicas = config.cluster.num_replicas
    if config.train.num_microbatches * replicas > config.train.batch_size:
        times = f" in each of {replicas} replicas" if replicas > 1 else ""
        refuse(
            f"train.num_microbatches = {config.train.num_microbatches}{times} is more than train.batch_size = "
            f"{config.train.batch_size}: each microbatch needs a sample"
        )
    _check_exchange(config, refuse)
    layers = config.cluster.layers
    if layers is not None and len(layers) != config.cluster.num_stages:
        refuse(f"cluster.layers has {len(layers)} numbers for cluster.num_stages = {config.cluster.num_stages} workers")
    if config.cluster.heartbeat_timeout_s < 2 * config.cluster.heartbeat_interval_s:
        refuse("cluster.heartbeat_timeout_s must be at least twice cluster.heartbeat_interval_s")
    try:
        for key in ("memory_budget", "disk_budget"):
            parse_size(getattr(config.messages, key), f"messages.{key}")
        if config.cluster.link_rate is not None:
            parse_rate(config.cluster.link_rate, "cluster.link_rate")
    except ConfigError as e:
        refuse(str(e))
    for direction in ("forward", "backward", "evaluation", "tied", "gradients"):
        options = getattr(config.compression, direction)
        if not isinstance(options.get("codec"), str):
            refuse(f"compression.{direction} = {options!r}: {_HOW_TO_NAME_A_CODEC}")
        if direction != "forward" and options["codec"] == "delta":
            refuse(f"compression.{direction}: the delta codec remembers forward activations only; choose a stateless codec")


def _check_exchange(config: RunConfig, refuse: Callable[[str], None]) -> None:
    """What replicas exchange, and when, is one of several ways."""
    replicas, train = config.replicas, config.train
    if replicas.overlap and replicas.local_steps:
        refuse("replicas.overlap = true is for gradients, but with replicas.local_steps none are exchanged: leave one out")
    for key, is_set in (("overlap = true", replicas.overlap), (f"local_steps = {replicas.local_steps}", replicas.local_steps)):
        if is_set and train.optim == "quantized_adam":
            refuse(f'replicas.{key} does not go with train.optim = "quantized_adam", which exchanges momenta: leave one out')
    if train.optim_warmup_steps is not None and train.optim != "quantized_adam":
        refuse(f'train.optim_warmup_steps = {train.optim_warmup_steps} is of train.optim = "quantized_adam" only: leave it out')
