"""Codecs still write the bytes that earlier versions wrote, and read them alike."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from pipecomp import registry
from pipecomp.testing.codec_checks import same_bits
from pipecomp.types import TensorSpec

FILE = Path(__file__).parents[1] / "golden" / "encodings.json"
STORED = json.loads(FILE.read_text())


@pytest.fixture(scope="module")
def golden() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_encodings", FILE.with_suffix(".py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def words(entry: dict[str, object]) -> str:
    return "-".join(str(value) for value in entry["options"].values())


@pytest.mark.parametrize("entry", STORED, ids=words)
def test_a_codec_writes_the_stored_bytes(entry: dict[str, object], golden: ModuleType) -> None:
    assert golden.encodings(entry["options"]) == entry["payloads"]


@pytest.mark.parametrize("entry", STORED, ids=words)
def test_a_codec_reads_the_stored_bytes(entry: dict[str, object], golden: ModuleType) -> None:
    options = {key: value for key, value in entry["options"].items() if key != "codec"}
    codec = registry.load("pipecomp.codecs", entry["options"]["codec"]).from_options(options)
    spec = TensorSpec(golden.ROWS, golden.COLUMNS)
    message = None
    for visit, payload in enumerate(entry["payloads"]):
        values = golden.sample(visit)
        out = np.zeros(len(payload) // 2, np.uint8)
        message_out = codec.encode(values, message, seed=golden.SEED + visit, out=out)
        decoded = codec.decode(np.frombuffer(bytes.fromhex(payload), np.uint8), message, spec)
        assert message_out is None or same_bits(decoded.values, message_out)
        assert (decoded.values - values).abs().max() <= 2.1  # the samples are in [-2, 2], and one bit is coarse
        message = message_out


def test_every_codec_has_stored_encodings() -> None:
    assert {entry["options"]["codec"] for entry in STORED} >= set(registry.names("pipecomp.codecs"))
