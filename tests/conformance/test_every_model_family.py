"""Every family that the registry knows keeps the model contract, tied and untied."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipecomp import registry
from pipecomp.models._family import ModelFamily
from pipecomp.models.base import ModelMaker
from pipecomp.testing import model_checks


@pytest.mark.parametrize("check", model_checks.ALL_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", model_checks.plugins(ModelFamily))
def test_a_family_keeps_the_contract(family: str, tied: bool, check: Callable[[model_checks.Config], None]) -> None:
    config = registry.load("pipecomp.models", family).tiny_config()
    check({**config, "tie_word_embeddings": tied})


@pytest.mark.parametrize("check", model_checks.ALL_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("maker", model_checks.plugins(ModelMaker))
def test_a_model_of_its_own_keeps_the_contract(maker: str, check: Callable[[model_checks.Config], None]) -> None:
    check(registry.load("pipecomp.models", maker).tiny_config())


def test_below_its_sliding_window_a_model_has_the_whole_models_bits() -> None:
    config = registry.load("pipecomp.models", "mistral").tiny_config()
    model_checks.check_any_split_has_the_whole_models_bits({**config, "sliding_window": 13})
