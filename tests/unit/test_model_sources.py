"""Models are opened from folders and bare configurations; what cannot be used is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipecomp import registry
from pipecomp.config import ModelConfig
from pipecomp.errors import ConfigError
from pipecomp.models import CheckpointReader, auto_class, model_from_config, open_model, tokenizer_files, with_classes
from pipecomp.models._family import ModelFamily
from pipecomp.testing import model_checks
from pipecomp.types import Shard

FAMILIES = model_checks.plugins(ModelFamily)


def tiny(family: str, **changes: object) -> dict[str, Any]:
    return {**registry.load("pipecomp.models", family).tiny_config(), **changes}


def saved_by_transformers(folder: Path, config: dict[str, Any], **options: Any) -> Any:
    """Plain transformers writes a random model into a folder."""
    from transformers import AutoConfig

    values = {key: value for key, value in config.items() if key != "model_type"}
    torch.manual_seed(0)
    task = registry.load("pipecomp.models", config["model_type"]).task
    model = auto_class(task).from_config(AutoConfig.for_model(config["model_type"], **values))
    model.save_pretrained(folder, **options)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpt2") / "model"
    saved_by_transformers(path, tiny("gpt2", tie_word_embeddings=True))
    return path


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def edit_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def whole(model: Any) -> dict[str, torch.Tensor]:
    stage = model.build(Shard(0, len(model.plan.layers)))
    model.initialize(stage, model.weights, seed=0)
    return {name: parameter.detach() for name, parameter in stage.named_checkpoint_parameters()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_gives_the_weights_that_transformers_saved(family: str, tied: bool, tmp_path: Path) -> None:
    saved = saved_by_transformers(tmp_path, tiny(family, tie_word_embeddings=tied))
    loaded = whole(open_model(ModelConfig(name=str(tmp_path))))
    expected = dict(saved.named_parameters(remove_duplicate=False))
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_weights_in_half_precision_become_fp32(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    saved_by_transformers(tmp_path / "full", tiny("llama"))
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "full", dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    model = open_model(ModelConfig(name=str(tmp_path / "half")))
    loaded = whole(model)
    assert {t.dtype for t in loaded.values()} == {torch.float32}
    assert all(torch.equal(loaded[name], p.float()) for name, p in half.named_parameters())
    assert model.hash == open_model(ModelConfig(name=str(tmp_path / "full"))).hash


@pytest.mark.parametrize("layer", range(5))
def test_a_shard_reads_its_own_tensors_and_no_others(layer: int, folder: Path) -> None:
    model = open_model(ModelConfig(name=str(folder)))
    assert model.weights is not None
    stage = model.build(Shard(layer, layer + 1))
    model.initialize(stage, model.weights, seed=0)
    assert model.weights.num_bytes_read == sum(p.nbytes for p in stage.parameters())


def test_a_shard_opens_only_the_files_that_hold_it(tmp_path: Path) -> None:
    saved_by_transformers(tmp_path, tiny("llama"), max_shard_size="20KB")
    model = open_model(ModelConfig(name=str(tmp_path)))
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    shard = Shard(1, 2)
    needed = {weight_map[name] for name in model.checkpoint_names(shard)}
    assert needed < set(weight_map.values())
    for file in set(weight_map.values()) - needed:
        (tmp_path / file).unlink()
    stage = model.build(shard)
    model.initialize(stage, model.weights, seed=0)
    assert not any(p.is_meta for p in stage.parameters())


def test_a_checkpoint_without_the_base_models_prefix_is_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved = saved_by_transformers(tmp_path, tiny("gpt2", tie_word_embeddings=True))
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(bare, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = whole(open_model(ModelConfig(name=str(tmp_path))))
    assert torch.equal(loaded["transformer.h.2.ln_1.weight"], saved.transformer.h[2].ln_1.weight)


CLASSIFIER = {"classifier.weight", "classifier.bias"}


def test_an_encoders_checkpoint_gives_everything_but_the_classifier_which_the_seed_gives(tmp_path: Path) -> None:
    """As all-MiniLM-L6-v2 is stored: no prefix, no classifier."""
    from transformers import BertConfig, BertModel

    values = {key: value for key, value in tiny("bert", num_labels=4).items() if key != "model_type"}
    encoder = BertModel(BertConfig(**values))
    encoder.save_pretrained(tmp_path)
    model = open_model(ModelConfig(name=str(tmp_path)))
    assert model.weights is not None
    assert {p.name for p in model.plan.parameters if p.name not in model.weights} == CLASSIFIER
    loaded = whole(model)
    assert {name.removeprefix("bert.") for name in loaded.keys() - CLASSIFIER} == set(dict(encoder.named_parameters()))
    for name, tensor in encoder.named_parameters():
        assert torch.equal(loaded[f"bert.{name}"], tensor), name
    drawn = [classifier(model, seed) for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert float(drawn[0].std()) == pytest.approx(0.02, rel=0.3)  # by transformers' rule


def classifier(model: Any, seed: int) -> torch.Tensor:
    """Drawn in a shard of the head alone."""
    stage = model.build(Shard(4, 5))
    model.initialize(stage, model.weights, seed=seed)
    return dict(stage.named_checkpoint_parameters())["classifier.weight"].detach()


def test_a_missing_parameter_outside_the_head_is_still_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved_by_transformers(tmp_path, tiny("bert"))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["bert.encoder.layer.1.output.dense.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"bert.encoder.layer.1.output.dense.weight is missing"):
        whole(open_model(ModelConfig(name=str(tmp_path))))


def test_layer_norms_under_tensorflows_names_are_found(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    saved = saved_by_transformers(tmp_path, tiny("bert"))
    torch.nn.init.normal_(saved.bert.encoder.layer[2].output.LayerNorm.weight)
    changed = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = {}
    for name, tensor in saved.state_dict().items():
        tail = ".".join(name.split(".")[-2:])
        tensors[name.removesuffix(tail) + changed.get(tail, tail)] = tensor
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = whole(open_model(ModelConfig(name=str(tmp_path))))
    assert all(torch.equal(loaded[name], p) for name, p in saved.named_parameters())


def test_classes_change_the_head_and_the_configuration_alone(tmp_path: Path) -> None:
    saved_by_transformers(tmp_path, tiny("bert", num_labels=2))
    source = ModelConfig(name=str(tmp_path), freeze=("bert.embeddings.*",))
    two, three = open_model(source), with_classes(open_model(source), source, ("a", "b", "c"))
    assert three.config["id2label"] == {"0": "a", "1": "b", "2": "c"}
    assert three.config["label2id"] == {"a": 0, "b": 1, "c": 2}
    assert three.hash != two.hash
    changed = [(p, q) for p, q in zip(two.plan.parameters, three.plan.parameters, strict=True) if p != q]
    assert [(p.name, p.shape, q.shape) for p, q in changed] == [
        ("classifier.weight", (2, 32), (3, 32)),
        ("classifier.bias", (2,), (3,)),
    ]


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"is_decoder": True}, "is a decoder"), ({"position_embedding_type": "relative_key"}, "only 'absolute'")],
)
def test_a_bert_of_another_layout_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        model_from_config(tiny("bert", **change))


def test_a_tied_weight_stored_under_the_heads_name_is_found(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved = saved_by_transformers(tmp_path, tiny("gpt2", tie_word_embeddings=True))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = whole(open_model(ModelConfig(name=str(tmp_path))))
    assert torch.equal(loaded["transformer.wte.weight"], saved.transformer.wte.weight)


def test_the_reader_says_what_it_holds_before_reading(folder: Path) -> None:
    reader = open_model(ModelConfig(name=str(folder))).weights
    assert reader is not None
    entry = reader.entry("transformer.wpe.weight")
    assert (entry.shape, entry.dtype, entry.nbytes) == ((32, 32), "F32", 4096)
    assert reader.num_bytes_read == 0


def test_a_changed_weight_has_another_digest(folder: Path, copied: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(copied / "model.safetensors")
    tensors["transformer.wpe.weight"][3, 3] += 1
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    readers = [open_model(ModelConfig(name=str(f))).weights for f in (folder, copied)]
    digests = [[r.digest(f"transformer.{n}.weight") for n in ("wte", "wpe")] for r in readers if r is not None]
    assert digests[0][0] == digests[1][0]
    assert digests[0][1] != digests[1][1]


def test_a_truncated_weight_file_is_refused_by_name(copied: Path) -> None:
    path = copied / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    model = open_model(ModelConfig(name=str(copied)))
    with pytest.raises(ConfigError, match=r"cannot read weights from .*model\.safetensors"):
        whole(model)


def test_an_index_may_not_name_files_elsewhere(tmp_path: Path) -> None:
    saved_by_transformers(tmp_path, tiny("gpt2"), max_shard_size="20KB")
    index = {"weight_map": {"lm_head.weight": "../other/model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"only \.safetensors files beside the index"):
        open_model(ModelConfig(name=str(tmp_path)))


def test_missing_and_misshapen_tensors_are_all_named(copied: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(copied / "model.safetensors")
    del tensors["transformer.ln_f.bias"]
    tensors["transformer.wpe.weight"] = torch.zeros(2, 2)
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"wpe\.weight is torch\.float32 \(2, 2\).*\(32, 32\).*ln_f\.bias is missing"):
        whole(open_model(ModelConfig(name=str(copied))))


def test_pickled_weights_are_refused_with_advice(copied: Path) -> None:
    (copied / "model.safetensors").rename(copied / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin.*save_pretrained"):
        open_model(ModelConfig(name=str(copied)))


def test_a_folder_without_weights_is_refused_unless_random_ones_are_asked_for(copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r'no weights.*model\.weights = "random"'):
        open_model(ModelConfig(name=str(copied)))
    assert open_model(ModelConfig(name=str(copied), weights="random")).weights is None


def test_an_unsupported_family_is_refused_with_those_there_are(copied: Path) -> None:
    edit_config(copied, lambda values: values.update(model_type="bloom"))
    with pytest.raises(ConfigError, match=r"'bloom' is not supported; supported: bert, gpt2, llama, mistral, qwen2, qwen3"):
        open_model(ModelConfig(name=str(copied)))


def test_a_quantized_model_is_refused(copied: Path) -> None:
    edit_config(copied, lambda values: values.update(quantization_config={"quant_method": "bitsandbytes"}))
    with pytest.raises(ConfigError, match="quantized"):
        open_model(ModelConfig(name=str(copied)))


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        open_model(ModelConfig(name=str(tmp_path / "nothing")))


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        open_model(ModelConfig(name=str(tmp_path)))


@pytest.mark.parametrize("text", ["{", "[]", "17"])
def test_a_configuration_that_is_no_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json is not a model configuration"):
        open_model(ModelConfig(name=str(tmp_path)))


def test_a_bare_configuration_has_no_weights_and_no_tokenizer() -> None:
    source = ModelConfig(config=tiny("gpt2", n_layer=4))
    model = open_model(source)
    assert model.weights is None
    assert len(model.plan.layers) == 6
    assert tokenizer_files(source) == ()


def test_a_typo_in_a_bare_configuration_is_refused_with_close_names() -> None:
    with pytest.raises(ConfigError, match=r"gpt2 has no 'n_layers'; did you mean n_layer"):
        open_model(ModelConfig(config={"model_type": "gpt2", "n_layers": 4}))


def test_a_value_that_transformers_refuses_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="transformers refuses this llama configuration"):
        model_from_config(tiny("llama", num_hidden_layers="three"))


def test_tokenizer_files_are_those_there_are(copied: Path) -> None:
    (copied / "tokenizer.json").write_text("{}")
    names = [path.name for path in tokenizer_files(ModelConfig(name=str(copied)))]
    assert names == ["tokenizer.json", "generation_config.json"]


def test_two_configurations_have_two_hashes() -> None:
    hashes = {model_from_config(tiny("gpt2", n_head=heads)).hash for heads in (2, 4)}
    assert len(hashes) == 2


def test_dropout_is_overridden_without_becoming_part_of_the_model() -> None:
    model = model_from_config(tiny("gpt2"), dropout=0.25)
    assert {getattr(model.transformers_config, key) for key in model.family.dropout_keys} == {0.25}
    assert model.hash == model_from_config(tiny("gpt2")).hash


def test_a_freeze_pattern_that_matches_nothing_is_refused_with_close_names() -> None:
    with pytest.raises(ConfigError, match=r"matches 'transformer\.h\.9\.\*'; close names: transformer\.h"):
        model_from_config(tiny("gpt2"), freeze=["transformer.h.9.*"])


@pytest.mark.parametrize("pattern", ["transformer.wte.*", "lm_head.*"])
def test_freezing_either_use_of_a_tied_weight_freezes_both(pattern: str) -> None:
    model = model_from_config(tiny("gpt2", tie_word_embeddings=True), freeze=[pattern])
    stage = model.build(Shard(0, len(model.plan.layers)))
    frozen = {name for name, parameter in stage.named_checkpoint_parameters() if not parameter.requires_grad}
    assert frozen == {"transformer.wte.weight", "lm_head.weight"}
    assert [p.name for p in model.plan.parameters if not p.trainable] == ["transformer.wte.weight"]


def test_a_frozen_shard_stays_frozen_once_it_has_weights() -> None:
    model = model_from_config(tiny("llama"), freeze=["model.layers.0.*"])
    stage = model.build(Shard(1, 2))
    model.initialize(stage, None, seed=0)
    assert not any(p.requires_grad for p in stage.parameters())


def test_random_weights_follow_transformers_rules() -> None:
    model = model_from_config(tiny("gpt2", n_embd=256, n_layer=8, vocab_size=512))
    weights = whole(model)
    assert weights["transformer.h.0.attn.c_attn.weight"].std() == pytest.approx(0.02, rel=0.05)
    assert weights["transformer.h.5.mlp.c_proj.weight"].std() == pytest.approx(0.02 / 16**0.5, rel=0.05)
    assert bool((weights["transformer.ln_f.weight"] == 1).all())
    assert bool((weights["transformer.h.3.mlp.c_fc.bias"] == 0).all())


def test_a_sample_longer_than_the_model_takes_is_refused() -> None:
    from pipecomp.models.base import Batch

    model = model_from_config(tiny("gpt2"))
    stage = model.build(Shard(0, 1))
    model.initialize(stage, None, seed=0)
    with pytest.raises(ConfigError, match=r"33 tokens in a sample, the model takes 32.*max_length"):
        stage.forward_layers(None, Batch((33,), torch.zeros(1, 33, dtype=torch.int64), None), seeds=None)


@pytest.mark.parametrize(("window", "expected"), [(None, 64), (16, 15), (4096, 64)])
def test_samples_stay_below_a_sliding_window(window: int | None, expected: int) -> None:
    assert model_from_config(tiny("mistral", sliding_window=window)).plan.max_positions == expected


def test_a_family_that_forgets_parameters_is_refused_with_their_names() -> None:
    from pipecomp.models._transformers import TransformersModel
    from pipecomp.models.gpt2 import Gpt2

    class Forgetful(Gpt2):
        def layer_paths(self, config: Any) -> tuple[tuple[str, ...], ...]:
            return (*super().layer_paths(config)[:-1], ("lm_head",))

    config = model_from_config(tiny("gpt2")).transformers_config
    with pytest.raises(ConfigError, match=r"parameters that no layer holds: transformer\.ln_f\.bias"):
        TransformersModel(Forgetful(), config, {}, "", (), None)


def test_cross_attention_is_refused() -> None:
    with pytest.raises(ConfigError, match="cross-attention"):
        model_from_config(tiny("gpt2", add_cross_attention=True))


def test_a_name_that_no_file_holds_is_a_key_error(folder: Path) -> None:
    reader = open_model(ModelConfig(name=str(folder))).weights
    assert isinstance(reader, CheckpointReader)
    assert "transformer.nothing" not in reader
    with pytest.raises(KeyError, match="nothing"):
        _ = reader["transformer.nothing"]
