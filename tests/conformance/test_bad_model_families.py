"""The public model suite fails for families that break the contract, and says how."""

from __future__ import annotations

import pytest
import torch

from pipecomp.models import gpt2
from pipecomp.models._family import BlockContext, Layer
from pipecomp.testing.model_checks import check_model


class WithoutPositions(gpt2.Gpt2):
    def embed(self, layer: Layer, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return super().embed(layer, input_ids, torch.zeros_like(position_ids))


class WithoutMask(gpt2.Gpt2):
    def block(self, layer: Layer, hidden: torch.Tensor, context: BlockContext) -> torch.Tensor:
        everything = torch.ones(1, 1, hidden.shape[1], hidden.shape[1], dtype=torch.bool)
        return super().block(layer, hidden, context._replace(attention_mask=everything))


class WithoutNorm(gpt2.Gpt2):
    def head(self, layer: Layer, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = layer[1](hidden)
        return logits


class WithNoiseOfItsOwn(gpt2.Gpt2):
    def embed(self, layer: Layer, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        hidden = super().embed(layer, input_ids, position_ids)
        return hidden + torch.rand((), generator=_NOISE) * layer[2].p


_NOISE = torch.Generator()


@pytest.mark.parametrize(
    ("family", "said"),
    [
        (WithoutPositions, r"1 stages, lengths \(5, 9, 1, 12\): logits differ"),
        (WithoutMask, "logits differ"),
        (WithoutNorm, "logits differ"),
        (WithNoiseOfItsOwn, "1 stages, same seeds: logits differ"),
    ],
)
def test_the_suite_fails_for(family: type[gpt2.Gpt2], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt2, "PLUGIN", family())
    with pytest.raises(AssertionError, match=said):
        check_model(family().tiny_config())


def test_the_suite_passes_for_the_family_itself() -> None:
    check_model(gpt2.PLUGIN.tiny_config())
