"""Every golden case of verl's releases in the default mode, which is right where they are wrong.

What a case expects is expected here, weights, mask and every metric, but for what ``DIFFERENT`` names with the reason.
There our value must be that of the plain reference, and really differ from the release's. ``verl_compat`` and the
releases' own values are in ``test_verl_releases``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from mock_scheduler.correction import CorrectionResult, compute_correction, correction_metrics
from mock_scheduler.correction.config.algorithm import AlgorithmConfig
from mock_scheduler.correction.config.rules import CorrectionSpec
from mock_scheduler.correction.config.section import RolloutCorrectionConfig
from mock_scheduler.errors import CorrectionError
from tests.correction.engine.plain import PlainBatch, PlainResult, correct_plainly
from tests.correction.golden_cases import CASES, golden_inputs, numbers, tensor

MASK = "response mask"
WEIGHTS = "weights"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where our values differ deliberately: metrics without their prefix, ``MASK`` and ``WEIGHTS``."""

    reason: str
    names: frozenset[str]


def _differs(reason: str, *texts: str) -> Difference:
    return Difference(reason=reason, names=frozenset(name for text in texts for name in text.split(",")))


def _of(prefix: str, names: str) -> str:
    return ",".join(f"{prefix}_{name}" for name in names.split(","))


_INVERTED = "bounds of k1 are those of the ratio, not of its inverse (verl#6377)"
_EMPTY = "rows without a response token are in no mean over rows"
_RAW = "the release measured raw weights: ours are rollout_is_raw_*, and these are of weights as they act"
_CUT = "the release counted weights that it had already cut at the threshold, so that none was above it"
_NARROW = "log ratios are not rounded to the narrow dtype, in which {} lies at the bound"
_POLICIES = "training_ppl,training_log_ppl,rollout_ppl,rollout_log_ppl,log_ppl_diff,log_ppl_abs_diff,ppl_ratio,chi2_seq"
_SEQ = "seq_mean,seq_std,seq_min,seq_max_deviation"

DIFFERENT: dict[str, Difference] = {
    "v091_rs_chain_and": _differs(
        _INVERTED,
        _of("rollout_rs_token_k1", "fraction_high,std,masked_fraction,seq_masked_fraction"),
    ),
    "v091_BUG_token_k1_asymmetric": _differs(
        _INVERTED, MASK, _of("rollout_rs_token_k1", "fraction_high,fraction_low,std")
    ),
    "v091_BUG_seq_sum_k1_asymmetric": _differs(
        _INVERTED,
        MASK,
        _of("rollout_rs_seq_sum_k1", "fraction_high,fraction_low,std,seq_fraction_high,seq_fraction_low"),
    ),
    # The geometric ratios are 1.191, 0.959 and 0.882, within [0.85, 1.2]; the first is beyond [1/1.2, 1/0.85].
    "v091_token_tis_plus_geo_rs": _differs(
        _INVERTED,
        MASK,
        _of("rollout_rs_seq_mean_k1", "fraction_low,std,seq_fraction_low,masked_fraction,seq_masked_fraction"),
        "rollout_rs_masked_fraction,rollout_rs_seq_masked_fraction",
    ),
    "v091_seq_tis_batchnorm_allmasked_row": _differs(
        _EMPTY,
        _POLICIES,
        _of("rollout_is", f"{_SEQ},ratio_fraction_high,seq_fraction_high,seq_fraction_low"),
    ),
    "v091_all_masked_row": _differs(
        f"{_EMPTY}; and {_INVERTED}: the deviation is of values cut at them",
        _POLICIES,
        "log_ppl_diff_max,rollout_rs_seq_masked_fraction,rollout_rs_seq_mean_k1_std",
        _of("rollout_is", f"{_SEQ},seq_fraction_low"),
    ),
    "v061_all_masked_row": _differs(
        f"{_EMPTY}; {_RAW}",
        _POLICIES,
        "log_ppl_diff_max,rollout_is_mean",
        _of("rollout_is", f"{_SEQ},seq_max,min,ratio_fraction_high,seq_fraction_high,seq_fraction_low"),
        _of("rollout_rs", "min,ratio_fraction_high,seq_mean,seq_std,seq_min,seq_fraction_high,seq_fraction_low"),
        "rollout_rs_seq_masked_fraction",
    ),
    "v091_nan_valid_token": _differs(
        "a token whose ratio is not known is in no statistic, and NaN in none",
        WEIGHTS,
        _of("rollout_is", "mean,max,min,std,eff_sample_size,seq_mean,seq_max,seq_min,seq_max_deviation"),
        "rollout_is_batch_norm_factor",
        _of("rollout_rs_token_k1", "mean,max,min,std,seq_mean,seq_max,seq_min,seq_max_deviation"),
        # It is in rollout_nan_fraction, and no rule rejected it.
        _of("rollout_rs_token_k1", "masked_fraction,seq_masked_fraction"),
        "rollout_rs_masked_fraction,rollout_rs_seq_masked_fraction",
        "kl,k3_kl,rollout_ppl,rollout_log_ppl,log_ppl_diff,log_ppl_abs_diff,log_ppl_diff_max,log_ppl_diff_min",
        "ppl_ratio,chi2_token,chi2_seq",
    ),
    "v091_nan_padding_token_is": _differs("weights are 0 wherever there is no response token", WEIGHTS),
    "v091_BUG_fp16_padding_overflow": _differs("weights are 0 wherever there is no response token", WEIGHTS),
    "v091_BUG_ess_above_one": _differs("nothing is added to tiny weights", "rollout_is_eff_sample_size"),
    "v091_bf16": _differs(_NARROW.format("the ratio 2.0043"), "rollout_is_seq_fraction_high"),
    "v061_bf16": _differs(
        f"{_NARROW.format('a geometric ratio')}; the guide's revision counted tokens, and this release rows",
        "rollout_rs_ratio_fraction_high,rollout_rs_ratio_fraction_low",
    ),
    "v071_token_tis_metrics": _differs(_RAW, _of("rollout_is", f"mean,max,std,eff_sample_size,seq_max,{_SEQ}")),
    "v061_extreme_pm50": _differs(_RAW, _of("rollout_is", "mean,seq_mean,seq_std,seq_max,seq_max_deviation")),
    "v060_token_truncate": _differs(_RAW, _of("rollout_is", f"mean,max,seq_max,{_SEQ}")),
    "v060_token_mask": _differs(_RAW, _of("rollout_is", f"mean,max,min,std,eff_sample_size,seq_max,{_SEQ}")),
    "v060_sequence_truncate": _differs(_RAW, _of("rollout_is", "mean,seq_mean,seq_std,seq_max,seq_max_deviation")),
    "v060_token_mask_dual_thresholds": _differs(_RAW, _of("rollout_is", f"mean,min,std,eff_sample_size,{_SEQ}")),
    "seed_ex3_token_is_token_rs": _differs(_CUT, "rollout_is_ratio_fraction_high,rollout_is_seq_fraction_high"),
    "seed_extreme_pm50": _differs(_CUT, "rollout_is_seq_fraction_high"),
    "seed_ex4_geometric_rs_veto": _differs(
        "the deviation of ratios near 1 is lost to cancellation in float32", "rollout_rs_std"
    ),
}

#: Names of raw weights where a release measured those.
_RAW_NAMES = {"rollout_is_mean": "rollout_is_raw_mean", "rollout_is_max": "rollout_is_raw_max"}

#: What a release raises and the default does not.
ACCEPTED = {
    "v091_err_all_zero_mask": "a batch without response tokens is an ordinary one",
    "v091_validation_00": "0.6.0 had geometric weights, and so has the default mode",
    "v091_validation_11": "options of older releases are read beside the newest ones",
    "v061_err_bad_rs": "options of newer releases are read beside the older ones",
}
#: What the default alone refuses: a part of the message, and what says the same; ``None`` where nothing can.
REFUSED: dict[str, tuple[str, dict[str, object] | None]] = {
    "v091_validation_09": ("rollout_is_threshold\n  'nan' is no finite number above 0", None),
    # Beside a configuration file, where the key is null, that revision rejected nothing; its default in Python is 2.0.
    "seed_rs_default_threshold": (
        "rollout_rs_threshold\n  is null, and rollout_rs 'token' rejects nothing without it",
        {"rollout_rs": "token", "rollout_rs_threshold": 2.0},
    ),
}
#: A part of the message, which names the key, of what both refuse.
BOTH_REFUSE = {
    "v091_validation_02": "rollout_is_threshold\n  -1.0 is no finite number above 0",
    "v091_validation_03": "rollout_is_threshold\n  ",
    "v091_validation_04": "rollout_is_threshold\n  '' is no number",
    "v091_validation_05": "rollout_is_threshold\n  '2.0_0.5' has its lower bound above the upper one",
    "v091_validation_07": "rollout_is_threshold\n  'a' is no number",
    "v091_validation_08": "rollout_is_threshold\n  ",
    "v091_validation_10": "rollout_rs_threshold\n  is null",
    "v091_validation_12": "rollout_rs\n  is empty",
    "v091_validation_13": "rollout_rs\n  unknown option seq_max_k1",
    "v091_validation_14": "rollout_rs_threshold\n  '1,2' has 2 thresholds, and rollout_rs 1 options",
    "v091_validation_16": "rollout_rs_threshold\n  0.0 is no finite number above 0",
    "v091_validation_17": "rollout_rs_threshold\n  0.0 is no finite number above 0",
    "v091_validation_18": "rollout_rs_threshold\n  token_k2 is never negative and has an upper bound alone",
    "v091_validation_19": "rollout_rs_threshold\n  '2.0_0.5' has its lower bound above the upper one",
    "v091_validation_21": "rollout_rs_threshold\n  'x' is no number",
    "v091_validation_22": "rollout_rs_threshold\n  ",
    "v061_rs_without_threshold": "rollout_rs_threshold\n  is null",
    "v061_err_veto_nonpositive": "rollout_token_veto_threshold\n  ",
    "seed_err_veto_nonpositive": "rollout_token_veto_threshold\n  ",
    "v060_err_bad_mode": "rollout_is_mode\n  ",
}
#: What is refused with the batch, not with the configuration.
BATCH_REFUSED = "v091_err_shape_mismatch_mask"


def _spec(case: dict[str, Any], params: dict[str, object] | None = None) -> CorrectionSpec:
    """The case's parameters as a configuration file has them: 0.6.0 had its keys flat, and a switch beside them."""
    params = case["params"] if params is None else params
    values = {"rollout_correction": params} if case["verl_version"] != "0.6.0" else {"rollout_is": True, **params}
    section = AlgorithmConfig.model_validate(values).rollout_correction
    # Flat keys that switch correction off leave no section; this measures then, as an empty one does.
    return (section or RolloutCorrectionConfig()).spec


def _plain(case: dict[str, Any], spec: CorrectionSpec) -> PlainResult:
    inputs = golden_inputs(case)
    return correct_plainly(
        PlainBatch(
            train=inputs.train_logprobs.tolist(),
            rollout=inputs.rollout_logprobs.tolist(),
            mask=inputs.response_mask.tolist(),
        ),
        spec,
    )


def _near(found: float, expected: float, case: dict[str, Any]) -> bool:
    if not math.isfinite(expected):
        return found == expected or (math.isnan(found) and math.isnan(expected))
    return math.isclose(found, expected, rel_tol=case["tolerance"]["rtol"], abs_tol=case["tolerance"]["atol"])


def _assert_weights(result: CorrectionResult, case: dict[str, Any], different: frozenset[str]) -> None:
    expected = case["expected"]["rollout_is_weights"]
    better = case.get("recommended_expected", {}).get("rollout_is_weights")
    if expected is None:
        assert result.weights is None
        return
    assert result.weights is not None
    assert result.weights.dtype == torch.float32
    release = tensor(expected, torch.float64)
    if WEIGHTS in different:
        assert not torch.allclose(result.weights.double(), release, **case["tolerance"])
    wanted = release if better is None else tensor(better, torch.float64)
    if case["id"] == "v091_nan_valid_token":
        # The mean of 1 and exp(0.2) is 1.1107, and the third token has no weight.
        wanted = torch.tensor([[1.0, math.exp(0.2), 0.0]], dtype=torch.float64) / ((1.0 + math.exp(0.2)) / 2.0)
    torch.testing.assert_close(result.weights.double(), wanted, **case["tolerance"])


def _assert_mask(result: CorrectionResult, case: dict[str, Any], different: frozenset[str]) -> None:
    mask = golden_inputs(case).response_mask
    assert result.mask.dtype == mask.dtype
    release = case["expected"].get("modified_response_mask")
    release = mask.double() if release is None else tensor(release, torch.float64)
    better = case.get("recommended_expected", {}).get("modified_response_mask")
    wanted = release if better is None else tensor(better, torch.float64)
    if case["id"] == "v091_token_tis_plus_geo_rs":
        wanted = mask.double()
    assert torch.equal(result.mask.double(), wanted)
    assert torch.equal(result.mask.double(), release) == (MASK not in different)


@pytest.mark.parametrize("case_id", [name for name in CASES if "raises" not in CASES[name]["expected"]])
def test_golden_default(case_id: str) -> None:
    case = CASES[case_id]
    params = None
    if case_id in REFUSED:
        message, params = REFUSED[case_id]
        with pytest.raises(ValidationError) as raised:
            _spec(case)
        assert message in str(raised.value)
        if params is None:
            return
    spec = _spec(case, params)
    different = DIFFERENT[case_id].names if case_id in DIFFERENT else frozenset[str]()
    result = compute_correction(golden_inputs(case), spec)
    _assert_weights(result, case, different)
    _assert_mask(result, case, different)
    metrics = correction_metrics(result.states, spec)
    plain = _plain(case, spec)
    for name, expected in case["expected"]["metrics"].items():
        prefix, short = name.split("/")
        # 0.6.1 and 0.7.1 had the guide's names of rejection under the newer prefix.
        found = metrics[name] if name in metrics else metrics[f"mismatch/{short}"]
        if short in different:
            assert not _near(found, float(expected), case), f"{name} does not differ"
            own = plain.metrics.get(name, plain.metrics.get(f"mismatch/{short}"))
            assert own is not None
            assert math.isclose(found, own, rel_tol=1e-6, abs_tol=1e-7), name
            if _RAW in DIFFERENT[case_id].reason and short in _RAW_NAMES:
                raw = metrics[f"rollout_corr/{_RAW_NAMES[short]}"]
                assert _near(raw, float(expected), case), name
        else:
            assert _near(found, float(expected), case), f"{name}: {found}, and {prefix} has {expected}"


@pytest.mark.parametrize("case_id", [name for name in CASES if "raises" in CASES[name]["expected"]])
def test_golden_default_errors(case_id: str) -> None:
    case = CASES[case_id]
    if case_id in BOTH_REFUSE:
        with pytest.raises(ValidationError) as raised:
            _spec(case)
        assert BOTH_REFUSE[case_id] in str(raised.value)
        return
    spec = _spec(case)
    if case_id == BATCH_REFUSED:
        with pytest.raises(CorrectionError, match="response_mask is"):
            compute_correction(golden_inputs(case), spec)
        return
    assert case_id in ACCEPTED
    result, plain = compute_correction(golden_inputs(case), spec), _plain(case, spec)
    assert torch.equal(result.mask != 0, torch.tensor(plain.kept))
    if plain.weights is None:
        assert result.weights is None
    else:
        assert result.weights is not None
        torch.testing.assert_close(result.weights, torch.tensor(plain.weights), rtol=1e-6, atol=0.0)


def test_golden_cases_are_all_here() -> None:
    """88 cases, and no table names one that is not there or would not be read."""
    assert len(CASES) == 88
    raising = {name for name, case in CASES.items() if "raises" in case["expected"]}
    assert raising == {*ACCEPTED, *BOTH_REFUSE, BATCH_REFUSED}
    assert (DIFFERENT.keys() | REFUSED.keys()) <= CASES.keys() - raising


def test_golden_tables_are_not_stale() -> None:
    """Every difference of a table is one of a metric that its case has."""
    for name, difference in DIFFERENT.items():
        expected = {metric.split("/")[1] for metric in CASES[name]["expected"]["metrics"]}
        assert difference.names - {MASK, WEIGHTS} <= expected, name


def test_plain_reference_agrees_with_the_releases() -> None:
    """So that what it says where they are wrong counts: its metrics are theirs wherever no table says otherwise."""
    compared = 0
    for name, case in CASES.items():
        if "raises" in case["expected"] or name in REFUSED or case["inputs"]["log_prob_dtype"] != "float32":
            continue
        if name == "v091_boundary_inclusive":
            # ln 2 is above the bound in float64, and at it in float32.
            continue
        plain = _plain(case, _spec(case))
        assert numbers(case["inputs"]["response_mask"])
        for metric, value in case["expected"]["metrics"].items():
            if name in DIFFERENT and metric.split("/")[1] in DIFFERENT[name].names:
                continue
            own = plain.metrics.get(metric, plain.metrics.get(f"mismatch/{metric.split('/')[1]}"))
            assert own is not None, metric
            assert _near(own, float(value), case), (name, metric)
            compared += 1
    assert compared > 1000
