"""Small batches, contracts and recordings for the tests."""

from __future__ import annotations

from typing import Any

from mock_scheduler.recording.contract import Contract, ContractField, Rule
from mock_scheduler.recording.step.step_info import StepInfo
from tests.batches import SAMPLING as SAMPLING
from tests.batches import make_batch as make_batch
from tests.batches import make_identity as make_identity
from tests.batches import make_row as make_row
from tests.batches import make_rows as make_rows


def make_info(step: int = 0, **changes: Any) -> StepInfo:
    values: dict[str, Any] = {
        "step": step,
        "mode": "train",
        "scheduler_id": "default",
        "run_id": "run-1",
        "policy_version": 0,
        "metrics": {"time/rollout_s": 1.5},
    }
    return StepInfo(**{**values, **changes})


def make_contract(**changes: Any) -> Contract:
    values: dict[str, Any] = {"sequence_length": 64, "vocab_size": 16, **changes}
    fields = [
        ContractField(name=name, value=value, rule=Rule.MUST_MATCH, advice=f"Set {name} to the recorded value.")
        for name, value in values.items()
    ]
    return Contract([*fields, ContractField(name="layout", value="tp1", rule=Rule.MAY_DIFFER, advice="")])
