"""Rollouts of an engine beside the trainer are judged as they come: agreement is silent, and a fault has its name."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from pipelines.algorithm.engine_mismatch import EngineMismatch
from pipelines.config.schema import PipelineConfig
from tests.correction.report.policies import Policy, sample, step_of, values

POLICY = Policy.draw(0)
TOKENS = sample(POLICY)
OWN = values(POLICY, TOKENS)


def config(**overrides: Any) -> PipelineConfig:
    engine = {"engine": "openai", "server": {"base_url": "http://127.0.0.1:1"}}
    return PipelineConfig.model_validate({"exp_name": "judged", "actor_infer": engine, **overrides})


def judge(rollout: torch.Tensor, train: torch.Tensor, *, lag: int = 0, **overrides: Any) -> dict[str, float]:
    judged = EngineMismatch.build(config(**overrides))
    assert judged is not None
    return judged.judge(step_of(TOKENS, rollout, train, step=3, lag=lag).batch, train.flatten(), step=3)


def test_rounding_is_measured_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    measured = judge(OWN, OWN.float().double() + 7e-7)
    assert measured["mismatch/engine_tokens"] == OWN.numel()
    assert measured["mismatch/engine_mean"] == pytest.approx(7e-7, rel=0.3)
    assert measured["mismatch/engine_max"] >= measured["mismatch/engine_mean"]
    assert (measured["mismatch/engine_disagrees"], caplog.text) == (0.0, "")


@pytest.mark.parametrize(
    ("rollout", "cause"),
    [
        (values(POLICY.moved(3, 1e-3), TOKENS), "fit the sampled tokens (mean ratio"),
        (torch.cat((OWN[:, 1:], OWN[:, :1]), 1), "that of the next token: they lie one place to the left"),
        (POLICY.logprobs(TOKENS[:, :-1]).amax(dim=-1), "those of the likeliest token"),
        (values(POLICY, TOKENS, 0.7), "those of another temperature, about"),
    ],
    ids=["other weights", "shift", "likeliest", "temperature"],
)
def test_a_fault_is_told_with_the_cause_that_fits_and_training_goes_on(
    rollout: torch.Tensor, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert judge(rollout, OWN)["mismatch/engine_disagrees"] == 1
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message.startswith("[mismatch] Rollout and training disagree at lag 0: ")
    assert cause in record.message
    assert "at step 3 the mean |log ratio| of 384 tokens of lag 0 is" in record.message
    assert "What to do: " in record.message


def test_weights_of_the_step_before_are_named_by_equal_histories(caplog: pytest.LogCaptureFixture) -> None:
    judged = EngineMismatch.build(config())
    assert judged is not None
    trained = POLICY.moved(4, 0.01)
    for step, train in enumerate((OWN, values(trained, TOKENS))):
        judged.judge(step_of(TOKENS, OWN, train, step=step).batch, train.flatten(), step=step)
    (record,) = caplog.records
    assert "those of the weights of step 0 (version 0), by 384 tokens with the same history" in record.message


def test_tokens_of_an_older_policy_are_not_held_to_this_one(caplog: pytest.LogCaptureFixture) -> None:
    assert judge(OWN, values(POLICY.moved(1, 0.3), TOKENS), lag=1) == {"mismatch/engine_tokens": 0.0}
    assert caplog.text == ""


def test_bfloat16_may_differ_by_its_own_rounding(caplog: pytest.LogCaptureFixture) -> None:
    noise = 0.02 * torch.randn(OWN.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rollout = (OWN + noise).clamp(max=0)
    assert judge(rollout, OWN, precision="bfloat16")["mismatch/engine_disagrees"] == 0
    assert judge(rollout, OWN)["mismatch/engine_disagrees"] == 1
    assert "bfloat16" not in caplog.text


def test_the_trainers_own_engine_and_replays_are_not_judged() -> None:
    assert EngineMismatch.build(PipelineConfig(exp_name="own")) is None
    replay = {"enable": True, "mode": "mock", "dump_dir": "dumps"}
    assert EngineMismatch.build(config(rollout_mock=replay)) is None
    mixed = EngineMismatch.build(config(rollout_mock={**replay, "schedule": [{"mode": "real", "steps": "2-"}]}))
    assert mixed is not None
    assert [mixed.is_due(step) for step in (0, 1, 2, 3)] == [False, False, True, True]
