"""What draws random numbers in a training model is named: keys of Megatron, and dropout of other modules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mock_scheduler.megatron.draws import find_draws


def model_of(*modules: torch.nn.Module, **rates: float | None) -> Any:
    """A model with these modules, as ``adapter0.dropout`` and on."""
    gpt: Any = torch.nn.Module()
    for index, module in enumerate(modules):
        adapter: Any = torch.nn.Module()
        adapter.dropout = module
        gpt.add_module(f"adapter{index}", adapter)
    config = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "moe_input_jitter_eps": None, **rates}
    return SimpleNamespace(config=SimpleNamespace(**config), gpts=lambda: [gpt])


@pytest.mark.parametrize(
    ("rates", "found"),
    [
        ({}, ()),
        ({"hidden_dropout": 0.1}, ("hidden_dropout",)),
        ({"attention_dropout": 0.1, "hidden_dropout": 0.2}, ("hidden_dropout", "attention_dropout")),
        ({"moe_input_jitter_eps": 1e-2}, ("moe_input_jitter_eps",)),
    ],
)
def test_rates_of_the_configuration_are_named(rates: dict[str, float], found: tuple[str, ...]) -> None:
    assert find_draws(model_of(torch.nn.Dropout(0.0), **rates)) == found


def test_modules_with_a_rate_of_their_own_are_named_once() -> None:
    assert find_draws(model_of(torch.nn.Dropout(0.1), torch.nn.Dropout(0.1))) == ("dropout",)
    # Megatron's own modules have a rate of the configuration.
    assert find_draws(model_of(torch.nn.Dropout(0.1), hidden_dropout=0.1)) == ("hidden_dropout",)
    assert find_draws(model_of(torch.nn.Dropout2d(0.3), hidden_dropout=0.1)) == ("hidden_dropout", "dropout")
