"""A worker that loads its shard of a model never has much more than that shard in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipecomp.models import model_from_config, save_folder
from pipecomp.types import Shard

_LOADER = """
import json, sys
from pathlib import Path
from pipecomp.config import ModelConfig
from pipecomp.models import open_model
from pipecomp.types import Shard

def resident(kind):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))

model = open_model(ModelConfig(name=sys.argv[1]))
model.initialize(model.build(Shard(1, 2)), model.weights, seed=0)  # what is imported on first use is imported now
Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
before = resident("VmRSS")
stage = model.build(Shard(int(sys.argv[2]), int(sys.argv[3])))
model.initialize(stage, model.weights if sys.argv[4] == "weights" else None, seed=0)
nbytes = sum(p.nbytes for p in stage.parameters())
print(json.dumps({"peak": resident("VmHWM") - before, "shard": nbytes}))
"""
_SIZE = {"num_hidden_layers": 8, "hidden_size": 512, "intermediate_size": 2048, "vocab_size": 8000}
_CONFIG = {"model_type": "llama", **_SIZE, "num_attention_heads": 8, "tie_word_embeddings": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 MB of weights in one file, as most hubs have them."""
    model = model_from_config(_CONFIG)
    stage = model.build(Shard(0, len(model.plan.layers)))
    model.initialize(stage, None, seed=0)
    tensors: dict[str, torch.Tensor] = {name: p.detach() for name, p in stage.named_checkpoint_parameters()}
    return save_folder(tmp_path_factory.mktemp("big") / "model", model.plan, model.config, [tensors], num_stages=1)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel does not tell a process its peak")
@pytest.mark.parametrize(
    ("first", "end", "source"), [(2, 5, "weights"), (9, 10, "weights"), (8, 10, "random")], ids=["blocks", "head", "random"]
)
def test_loading_a_shard_takes_the_shard_and_one_tensor(first: int, end: int, source: str, folder: Path) -> None:
    command = [sys.executable, "-c", _LOADER, str(folder), str(first), str(end), source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    whole = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    largest = 4 * _SIZE["vocab_size"] * _SIZE["hidden_size"]
    allowed = found["shard"] + largest + 12 * 2**20
    assert allowed < whole / 1.8, "the model is too small for this test to mean anything"
    assert found["peak"] < allowed, f"{found['peak']:,} bytes for a shard of {found['shard']:,}"
