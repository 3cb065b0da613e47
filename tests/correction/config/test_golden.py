"""Golden arguments that verl's releases refuse at the first step: each is refused when the configuration loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pipelines.config.schema import PipelineConfig

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "rollout_correction.json").read_text(encoding="utf-8"))
CASES: dict[str, dict[str, Any]] = {
    case["id"]: case
    for case in GOLDEN["cases"]
    if "raises" in case["expected"] or case["id"].startswith("v091_validation_")
}
#: The arguments are right, and what is wrong is in the tensors.
OF_TENSORS = ("v091_err_all_zero_mask", "v091_err_shape_mismatch_mask")
#: What that release does not know and the default does, and what it is there.
KNOWN_BY_DEFAULT = {
    "v091_validation_00": "a level of weights, of 0.6.0 and AReaL",
    "v091_validation_11": "an option of 0.6.1, seq_mean_k1 of newer releases",
    "v061_err_bad_rs": "an option of newer releases",
}
RELEASES = {"seedrev": "e7cdce1c"}


def section_of(case: dict[str, Any]) -> dict[str, Any]:
    """The arguments as keys of ``rollout_correction``; those of 0.6.0 have other names there."""
    names = {"rollout_is_level": "rollout_is", "rollout_is_veto_threshold": "rollout_token_veto_threshold"}
    return {names.get(name, name): value for name, value in case["params"].items()}


def load(algorithm: dict[str, Any]) -> PipelineConfig:
    return PipelineConfig.model_validate({"exp_name": "x", "algorithm": algorithm})


def refused_keys(algorithm: dict[str, Any]) -> set[str]:
    with pytest.raises(ValidationError) as caught:
        load(algorithm)
    return {str(problem["loc"][-1]) for problem in caught.value.errors()}


def test_golden_cases_of_validation_are_all_here() -> None:
    assert len(CASES) == 26
    assert len([name for name in CASES if name.startswith("v091_validation_")]) == 19
    assert {name for name in CASES if "_err_" in name} == {
        *OF_TENSORS,
        *("v061_err_bad_rs", "v061_err_veto_nonpositive", "seed_err_veto_nonpositive", "v060_err_bad_mode"),
    }


@pytest.mark.parametrize("case_id", [name for name in CASES if name not in OF_TENSORS])
def test_golden_is_refused_with_verl_compat(case_id: str) -> None:
    case = CASES[case_id]
    release = RELEASES.get(case["verl_version"], case["verl_version"])
    section = {**section_of(case), "verl_compat": release}
    keys = refused_keys({"rollout_correction": section})
    assert keys & {*section, "rollout_rs_threshold"}  # which is null where it is missing


@pytest.mark.parametrize("case_id", [name for name in CASES if name not in (*OF_TENSORS, *KNOWN_BY_DEFAULT)])
def test_golden_is_refused_by_default(case_id: str) -> None:
    section = section_of(CASES[case_id])
    keys = refused_keys({"rollout_correction": section})
    assert keys <= {*section, "rollout_rs_threshold"}


@pytest.mark.parametrize("case_id", KNOWN_BY_DEFAULT)
def test_golden_of_another_release_loads_by_default(case_id: str) -> None:
    assert load({"rollout_correction": section_of(CASES[case_id])}).algorithm.rollout_correction is not None


@pytest.mark.parametrize("case_id", OF_TENSORS)
def test_golden_with_wrong_tensors_loads(case_id: str) -> None:
    assert load({"rollout_correction": section_of(CASES[case_id])}).algorithm.rollout_correction is not None


@pytest.mark.parametrize("case_id", ["v060_err_bad_mode"])
def test_golden_of_060_is_refused_as_flat_keys(case_id: str) -> None:
    assert refused_keys({"rollout_is": True, **CASES[case_id]["params"]}) == {"rollout_is_mode"}


def test_golden_null_threshold_of_060_is_off() -> None:
    params = next(case["params"] for case in GOLDEN["cases"] if case["id"] == "v060_threshold_none")
    assert load({"rollout_is": True, **params}).algorithm.rollout_correction is None
