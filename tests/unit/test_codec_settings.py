"""Which codec a kind of traffic gets: its own, and none with messages but forward (laws 3 and 13)."""

from __future__ import annotations

from typing import Any

import pytest

from pipecomp import registry
from pipecomp.codecs.delta import Delta
from pipecomp.config import RunConfig, parse_run_config
from pipecomp.errors import ConfigError
from pipecomp.runtime.rehearsal import CODED_KINDS, make_codec
from pipecomp.types import Kind


def config(**compression: dict[str, Any]) -> RunConfig:
    return parse_run_config({"model": {"name": "m"}, "data": {"train": "t.txt"}, "compression": compression})


def test_each_kind_of_traffic_has_the_codec_of_its_own_setting() -> None:
    settings = {kind.value: {"codec": "uniform", "bits": bits} for bits, kind in enumerate(CODED_KINDS, start=2)}
    assert [make_codec(config(**settings), kind).describe() for kind in CODED_KINDS] == [
        f"uniform{bits}/g32/e4m3" + "/either" * (bits <= 3) for bits, _ in enumerate(CODED_KINDS, start=2)
    ]


def test_evaluation_crosses_in_bf16_unless_told_otherwise() -> None:
    compressed = config(forward={"codec": "delta", "bits": 2}, backward={"codec": "uniform", "bits": 4})
    assert make_codec(compressed, Kind.EVALUATION).describe() == "bf16"


@pytest.mark.parametrize("kind", ["backward", "evaluation", "tied"])
def test_only_forward_crosses_as_changes(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"compression.{kind}: .*delta"):
        config(**{kind: {"codec": "delta", "bits": 4}})


@pytest.mark.parametrize("kind", [k for k in CODED_KINDS if k is not Kind.FORWARD])
def test_a_plugin_with_messages_is_for_forward_only_too(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(Delta):
        name = "mine"

    load = registry.load
    monkeypatch.setattr(registry, "load", lambda package, name: Mine if name == "mine" else load(package, name))
    settings = config(**{k.value: {"codec": "mine", "bits": 4} for k in CODED_KINDS})
    assert make_codec(settings, Kind.FORWARD).has_messages
    with pytest.raises(ConfigError, match=f"compression.{kind.value}: codec 'mine' remembers messages"):
        make_codec(settings, kind)
