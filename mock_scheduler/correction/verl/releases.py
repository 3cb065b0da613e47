"""What differs between verl's releases of rollout correction, in one table.

Contract: plain values; imports no torch. Facts from the helper files of the releases on PyPI (0.6.0
``trainer/ppo/mismatch_helper.py``; 0.6.1, 0.7.1 and 0.9.1 ``trainer/ppo/rollout_corr_helper.py``) and of git revision
e7cdce1c, which lies between 0.6.0 and 0.6.1. 0.9.0 has the helper of 0.9.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from mock_scheduler.correction.config.rules import VerlRelease

BatchNorm = Literal["absent", "all_rows", "rows_with_tokens"]
RejectionStatistic = Literal["weight", "ratio", "divergence"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Behaviour:
    """The switches of one release.

    defaults: every argument by the release's own name, with its default in Python.
    prefix: of all metrics. policy_prefix: of those that compare the two policies, after ``prefix``.
    has_chi2: whether ``chi2_token`` and ``chi2_seq`` are among them.
    rejects_by: what rejection looks at. ``weight``: the weights themselves, which become 0 while the mask stays;
    ``ratio``: a ratio of its own, with a veto; ``divergence``: options with k1, k2 and k3, without a veto.
    truncates_first: weights are truncated before they are masked and measured, so that no metric sees a raw weight.
    measures_applied: metrics are of the weights after truncation, while fractions beyond a bound stay of the raw ones.
    text_bounds: ``rollout_is_threshold`` may be a text, of which ``"lower_upper"`` zeroes weights outside (IcePop).
    batch_norm: which rows' means batch normalisation of sequence weights averages.
    detaches: weights carry no gradient.
    skips_rejection_without_threshold: ``rollout_rs`` with no threshold does nothing, instead of raising.
    geometric_fractions_by_token: fractions beyond a bound weigh rows by length at level ``geometric``.
    refuses_crossed_bounds: bounds of a k1 option with lower > upper raise, instead of rejecting everything.
    """

    defaults: Mapping[str, object]
    prefix: str
    policy_prefix: str
    has_chi2: bool
    rejects_by: RejectionStatistic
    truncates_first: bool
    measures_applied: bool
    text_bounds: bool
    batch_norm: BatchNorm
    detaches: bool
    skips_rejection_without_threshold: bool
    geometric_fractions_by_token: bool
    refuses_crossed_bounds: bool

    def complete(self, arguments: Mapping[str, object]) -> dict[str, object]:
        """The arguments with this release's defaults; an unknown name raises TypeError, as a call with it would."""
        unknown = sorted(arguments.keys() - self.defaults.keys())
        if unknown:
            raise TypeError(f"unexpected arguments {', '.join(unknown)}; this release has {', '.join(self.defaults)}")
        return {**self.defaults, **arguments}


_RATIO_ARGUMENTS: Mapping[str, object] = {
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "rollout_rs": None,
    "rollout_rs_threshold": 2.0,
    "rollout_rs_threshold_lower": None,
    "rollout_token_veto_threshold": None,
}
_DIVERGENCE_ARGUMENTS: Mapping[str, object] = {
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "rollout_is_batch_normalize": False,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
}

_V060 = Behaviour(
    defaults={
        "rollout_is_level": "token",
        "rollout_is_mode": "truncate",
        "rollout_is_threshold": None,
        "rollout_is_threshold_lower": None,
        "rollout_is_veto_threshold": 1e-4,
    },
    prefix="mismatch/",
    policy_prefix="mismatch_",
    has_chi2=False,
    rejects_by="weight",
    truncates_first=False,
    measures_applied=False,
    text_bounds=False,
    batch_norm="absent",
    detaches=False,
    skips_rejection_without_threshold=False,
    geometric_fractions_by_token=True,
    refuses_crossed_bounds=False,
)
_VE7C = replace(
    _V060,
    defaults=_RATIO_ARGUMENTS,
    rejects_by="ratio",
    truncates_first=True,
    skips_rejection_without_threshold=True,
)
_V061 = replace(
    _V060,
    defaults={**_RATIO_ARGUMENTS, "rollout_is_batch_normalize": False},
    prefix="rollout_corr/",
    policy_prefix="",
    has_chi2=True,
    rejects_by="ratio",
    batch_norm="all_rows",
    detaches=True,
    geometric_fractions_by_token=False,
)
_V071 = replace(_V061, defaults=_DIVERGENCE_ARGUMENTS, rejects_by="divergence", batch_norm="rows_with_tokens")
_V091 = replace(_V071, measures_applied=True, text_bounds=True, refuses_crossed_bounds=True)

#: Each release as what it changed of an earlier one.
BEHAVIOURS: Mapping[VerlRelease, Behaviour] = {
    "0.6.0": _V060,
    "e7cdce1c": _VE7C,
    "0.6.1": _V061,
    "0.7.1": _V071,
    "0.9.1": _V091,
}
