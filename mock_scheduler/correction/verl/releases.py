"""One table of the differences between verl's releases of rollout correction.

Contract: plain values; imports no torch and nothing of this project. The facts are from the helper files of the
releases on PyPI (0.6.0 ``trainer/ppo/mismatch_helper.py``; 0.6.1, 0.7.1 and 0.9.1
``trainer/ppo/rollout_corr_helper.py``) and of git revision e7cdce1c, which lies between 0.6.0 and 0.6.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

VerlRelease = Literal["0.9.1", "0.7.1", "0.6.1", "e7cdce1c", "0.6.0"]
BatchNorm = Literal["absent", "all_rows", "rows_with_tokens"]
RejectionStatistic = Literal["weight", "ratio", "divergence"]

#: A release whose helper is that of another one -> that one.
SAME_HELPER: Mapping[str, VerlRelease] = {"0.9.0": "0.9.1", "0.7.0": "0.6.1"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Behaviour:
    """The switches of one release.

    defaults: every argument by the release's own name, with its default in Python.
    keys: the keys of ``rollout_correction`` in the release.
    levels: the levels of weights in the release.
    prefix: of all metrics. policy_prefix: of metrics that compare the two policies, after ``prefix``.
    has_chi2: whether ``chi2_token`` and ``chi2_seq`` are among them.
    rejects_by: the statistic that rejection compares with bounds. ``weight``: the weights themselves, which become 0
        while the mask stays; ``ratio``: a ratio of its own, with a veto; ``divergence``: options with k1, k2 and k3,
        without a veto.
    default_veto: the threshold of the veto where none is given; ``None`` vetoes nothing then.
    truncates_first: weights are truncated before they are masked and measured, and no metric sees a raw weight.
    measures_applied: metrics are of weights after truncation, while fractions beyond a bound stay of raw ones.
    text_bounds: ``rollout_is_threshold`` may be a text; ``"lower_upper"`` zeroes weights outside (IcePop).
    batch_norm: the rows whose means batch normalisation of sequence weights averages.
    detaches: weights carry no gradient.
    skips_rejection_without_threshold: ``rollout_rs`` with no threshold does nothing, instead of raising.
    geometric_fractions_by_token: fractions beyond a bound weigh rows by length at level ``geometric``.
    refuses_crossed_bounds: bounds of a k1 option with lower > upper raise, instead of rejecting everything.
    """

    defaults: Mapping[str, object]
    keys: tuple[str, ...]
    levels: tuple[str, ...]
    prefix: str
    policy_prefix: str
    has_chi2: bool
    rejects_by: RejectionStatistic
    default_veto: float | None
    truncates_first: bool
    measures_applied: bool
    text_bounds: bool
    batch_norm: BatchNorm
    detaches: bool
    skips_rejection_without_threshold: bool
    geometric_fractions_by_token: bool
    refuses_crossed_bounds: bool

    @property
    def inverts_k1(self) -> bool:
        """Whether options with k1 keep ratios in [1/hi, 1/lo] where [lo, hi] is asked for (verl#6377)."""
        return self.rejects_by == "divergence"

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
    keys=(
        *("rollout_is", "rollout_is_threshold", "rollout_is_threshold_lower", "rollout_is_mode"),
        "rollout_token_veto_threshold",
    ),
    levels=("token", "sequence", "geometric"),
    prefix="mismatch/",
    policy_prefix="mismatch_",
    has_chi2=False,
    rejects_by="weight",
    default_veto=1e-4,
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
    keys=tuple(_RATIO_ARGUMENTS),
    levels=("token", "sequence"),
    rejects_by="ratio",
    default_veto=None,
    truncates_first=True,
    skips_rejection_without_threshold=True,
)
_V061 = replace(
    _V060,
    defaults={**_RATIO_ARGUMENTS, "rollout_is_batch_normalize": False},
    # loss_type is of 0.7.0, which has the helper of 0.6.1.
    keys=(
        *(*_RATIO_ARGUMENTS, "rollout_is_batch_normalize"),
        *("bypass_mode", "use_policy_gradient", "loss_type"),
    ),
    levels=("token", "sequence"),
    prefix="rollout_corr/",
    policy_prefix="",
    has_chi2=True,
    rejects_by="ratio",
    default_veto=None,
    batch_norm="all_rows",
    detaches=True,
    geometric_fractions_by_token=False,
)
_V071 = replace(
    _V061,
    defaults=_DIVERGENCE_ARGUMENTS,
    keys=(*_DIVERGENCE_ARGUMENTS, "bypass_mode", "loss_type"),
    rejects_by="divergence",
    batch_norm="rows_with_tokens",
)
_V091 = replace(_V071, measures_applied=True, text_bounds=True, refuses_crossed_bounds=True)

#: Each release as its changes to an earlier one.
BEHAVIOURS: Mapping[VerlRelease, Behaviour] = {
    "0.6.0": _V060,
    "e7cdce1c": _VE7C,
    "0.6.1": _V061,
    "0.7.1": _V071,
    "0.9.1": _V091,
}

#: A key that some release lacks -> the way to say the same there.
IN_PLACE_OF: Mapping[str, str] = {
    "rollout_token_veto_threshold": "nearest: rollout_rs seq_max_k2, which is two-sided",
    "rollout_is_mode": "it only truncates, and 0.9.1 has rollout_is_threshold 'lo_hi'",
    "rollout_is_threshold_lower": "only 0.6.0 has one; in 0.9.1 rollout_is_threshold 'lo_hi'",
    "rollout_rs_threshold_lower": "give rollout_rs_threshold 'lo_hi'",
    "rollout_rs": "use rollout_is_mode mask",
    "rollout_rs_threshold": "use rollout_is_mode mask",
    "use_policy_gradient": "since 0.7.0 it is loss_type reinforce",
}


def release_arguments(release: VerlRelease, keys: Mapping[str, object]) -> dict[str, object]:
    """Returns the arguments of a release's own function for the values of all keys of ``rollout_correction``."""
    threshold = keys["rollout_is_threshold"]
    values = {**keys, "rollout_is_threshold": float("inf") if threshold == "inf" else threshold}
    behaviour = BEHAVIOURS[release]
    if behaviour.rejects_by != "weight":
        return {name: values[name] for name in behaviour.defaults}
    veto = values["rollout_token_veto_threshold"]
    return {
        "rollout_is_level": values["rollout_is"] or "token",
        "rollout_is_mode": values["rollout_is_mode"] or "truncate",
        "rollout_is_threshold": values["rollout_is_threshold"] if values["rollout_is"] else None,
        "rollout_is_threshold_lower": values["rollout_is_threshold_lower"],
        # Absent it is that release's default.
        **({} if veto is None else {"rollout_is_veto_threshold": veto}),
    }
