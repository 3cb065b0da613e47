"""Megatron's own configuration objects reach the rules with the values that the rules understand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig

from mock_scheduler.errors import DeterminismError
from mock_scheduler.layouts.rules import check_conflicts, find_conflicts
from mock_scheduler.layouts.rules.rule import Effect
from pipelines.config.loading import load_config
from pipelines.megatron.transformer_config import build_transformer_config, megatron_values, read_setup

# Megatron-core 0.16.1 warns of its own default.
pytestmark = pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning")

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    enabled = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(enabled)


def test_the_pipelines_model_trains_and_its_facts_are_known() -> None:
    config = load_config("quickstart", config_path=CONFIGS, overrides=())
    setup = read_setup(
        build_transformer_config(config),
        DistributedDataParallelConfig(grad_reduce_in_fp32=True),
        model=config.model,
        environ=config.system_envs,
    )
    facts = find_conflicts(setup)
    check_conflicts(facts, setup)
    assert {fact.rule.effect for fact in facts} == {Effect.CHANGES_BITS}
    assert "grad_reduce_in_fp32 is True" in [fact.found for fact in facts]


def test_enums_and_dtypes_become_names_and_functions_are_left_out() -> None:
    config = load_config("quickstart", config_path=CONFIGS, overrides=())
    values = megatron_values(build_transformer_config(config))
    assert (values["attention_backend"], values["params_dtype"]) == ("auto", "float32")
    assert values["torch.deterministic_algorithms"] is True
    assert values["num_layers"] == 2
    assert "activation_func" not in values


def test_a_conflict_in_megatrons_object_is_refused_before_the_model() -> None:
    config = load_config("quickstart", config_path=CONFIGS, overrides=())
    transformer_config = build_transformer_config(config)
    transformer_config.cross_entropy_loss_fusion = True
    torch.use_deterministic_algorithms(False)
    setup = read_setup(transformer_config, model=config.model, environ=config.system_envs)
    with pytest.raises(DeterminismError) as caught:
        check_conflicts(find_conflicts(setup), setup)
    found = [line.partition(":")[0] for line in str(caught.value).splitlines()[1:]]
    assert found == [
        "  - cross_entropy_loss_fusion is True",
        "  - deterministic_mode is True, torch.deterministic_algorithms is False",
    ]
