"""A hub name works as `from_pretrained` takes it: through HF_ENDPOINT, with a token and a revision, and offline afterwards.

The hub is a server on the loopback interface; what opens the model is a process of its own with an empty home.
"""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

_COMMIT = "0123456789abcdef0123456789abcdef01234567"
_OPENER = """
import json, sys
from pipecomp.config import ModelConfig
from pipecomp.errors import ConfigError
from pipecomp.models import open_model, tokenizer_files
from pipecomp.types import Shard

source = ModelConfig(name=sys.argv[1], revision=sys.argv[2] or None)
try:
    model = open_model(source)
    stage = model.build(Shard(1, 2))
    model.initialize(stage, model.weights, seed=0)
except ConfigError as e:
    print(json.dumps({"error": str(e)}))
else:
    total = sum(float(p.detach().double().sum()) for p in stage.parameters())
    print(json.dumps({"hash": model.hash, "sum": total, "tokenizer": [p.name for p in tokenizer_files(source)]}))
"""


class Hub(NamedTuple):
    """A running hub."""

    endpoint: str
    asked: list[tuple[str, str, str]]  # method, path, token


class _Handler(http.server.BaseHTTPRequestHandler):
    files: dict[str, bytes]
    asked: list[tuple[str, str, str]]

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        self.asked.append((self.command, self.path, self.headers.get("Authorization", "")))
        body = self.files.get(self.path)
        self.send_response(200 if body is not None else 404)
        self.send_header("X-Repo-Commit", _COMMIT)
        if body is None:
            known = any(path.startswith("/".join(self.path.split("/")[:3]) + "/") for path in self.files)
            self.send_header("X-Error-Code", "EntryNotFound" if known else "RepoNotFound")
            body = b""
        self.send_header("ETag", f'"{len(body)}-{hash(body) & 0xFFFF}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded model, as its owner uploaded it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from pipecomp.models.llama import PLUGIN

    folder = tmp_path_factory.mktemp("upload")
    values = PLUGIN.tiny_config()
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="20KB")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.fixture
def hub(repository: Path) -> Iterator[Hub]:
    """Serves the repository as `someone/tiny`, and a pickled one as `someone/pickled`."""
    files = {f"/someone/tiny/resolve/v1/{f.name}": f.read_bytes() for f in repository.iterdir()}
    files |= {f"/someone/tiny/resolve/{_COMMIT}/{f.name}": f.read_bytes() for f in repository.iterdir()}
    files["/someone/pickled/resolve/main/config.json"] = (repository / "config.json").read_bytes()
    files["/someone/pickled/resolve/main/pytorch_model.bin"] = b"not read"
    asked: list[tuple[str, str, str]] = []
    handler = type("Handler", (_Handler,), {"files": files, "asked": asked})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield Hub(f"http://127.0.0.1:{server.server_address[1]}", asked)
    server.shutdown()
    thread.join()
    server.server_close()


def open_elsewhere(name: str, revision: str, home: Path, **environment: str) -> dict[str, Any]:
    """What a process with an empty home finds under a name."""
    plain = {"HOME": str(home), "HF_HOME": str(home / "hf"), "PATH": "/usr/bin:/bin", "NO_PROXY": "*"}
    done = subprocess.run(
        [sys.executable, "-c", _OPENER, name, revision],
        env={**plain, "HF_HUB_DISABLE_PROGRESS_BARS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def in_this_process(repository: Path) -> dict[str, Any]:
    from pipecomp.config import ModelConfig
    from pipecomp.models import open_model
    from pipecomp.types import Shard

    model = open_model(ModelConfig(name=str(repository)))
    stage = model.build(Shard(1, 2))
    model.initialize(stage, model.weights, seed=0)
    total = sum(float(p.detach().double().sum()) for p in stage.parameters())
    return {"hash": model.hash, "sum": total}


def test_a_hub_name_gives_the_uploaded_model_and_works_offline_afterwards(
    hub: Hub, repository: Path, tmp_path: Path
) -> None:
    online = open_elsewhere("someone/tiny", "v1", tmp_path, HF_ENDPOINT=hub.endpoint, HF_TOKEN="hf_secret")
    assert online.get("error") is None
    assert online.pop("tokenizer") == ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    assert online == in_this_process(repository)
    assert {token for _, path, token in hub.asked if path.startswith("/someone/")} == {"Bearer hf_secret"}

    index = json.loads((repository / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {file for name, file in index.items() if name.startswith("model.layers.0.")}
    fetched = {p.rpartition("/")[2] for method, p, _ in hub.asked if method == "GET" and p.endswith(".safetensors")}
    assert fetched == needed, "a shard fetches the files that hold it and no others"

    num_asked = len(hub.asked)
    offline = open_elsewhere("someone/tiny", "v1", tmp_path, HF_ENDPOINT=hub.endpoint, HF_HUB_OFFLINE="1")
    assert offline.pop("tokenizer") == ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    assert offline == online
    assert len(hub.asked) == num_asked, "HF_HUB_OFFLINE asks nobody"


@pytest.mark.parametrize(
    ("name", "said"),
    [("someone/pickled", "weights in pytorch_model.bin"), ("someone/nothing", "neither a folder here nor reachable")],
)
def test_what_the_hub_cannot_give_is_refused_by_name(hub: Hub, name: str, said: str, tmp_path: Path) -> None:
    error = open_elsewhere(name, "", tmp_path, HF_ENDPOINT=hub.endpoint)["error"]
    assert f"model.name = '{name}'" in error
    assert said in error


def test_a_hub_that_cannot_be_reached_is_not_taken_for_a_model_without_files(tmp_path: Path) -> None:
    error = open_elsewhere("someone/tiny", "", tmp_path, HF_HUB_OFFLINE="1")["error"]
    assert "model.name = 'someone/tiny': cannot get config.json" in error
    assert "HF_HUB_OFFLINE must be unset" in error
