"""Has the keys of ``algorithm.rollout_correction``, each read by itself.

Contract: values and their types; ``checks`` compares keys with one another, and ``section`` compiles them to rules.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field

from mock_scheduler.config.base import ConfigSection, JoinedTexts
from mock_scheduler.correction.config.rules import Denominator, Level, LoneSurvivor, LossType, NanPolicy, Rule
from mock_scheduler.correction.config.thresholds import NonNegativeNumber, PositiveNumber, read_number, read_scalar
from mock_scheduler.correction.verl.releases import SAME_HELPER, VerlRelease


def _read_level(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError(
            f"is {str(value).lower()}, the switch that verl 0.6.0 has flat in `algorithm`; name the level here: token, "
            "segment, sequence or geometric, or null for no weights"
        )
    return value


def _read_release(value: object) -> object:
    if value is None or value in get_args(VerlRelease):
        return value
    if isinstance(value, str) and value in SAME_HELPER:
        return SAME_HELPER[value]
    known = ", ".join(
        release + "".join(f" (also as {alias})" for alias, same in SAME_HELPER.items() if same == release)
        for release in get_args(VerlRelease)
    )
    raise ValueError(f"unknown release {value!r}; known releases: {known}")


def _read_nan_policy(value: object) -> object:
    return "reject" if value == "mask" else value


ThresholdValue = Annotated[float | str | None, BeforeValidator(read_scalar)]


class CorrectionKeys(ConfigSection):
    """Holds values of the keys, verl's and our own; ``CorrectionSpec`` computes by them."""

    preset: str | None = None
    """Values of another system by name; keys beside it count in their place; ``rollout_is: null`` and ``rollout_rs:
    null`` take their thresholds along.
    """
    verl_compat: Annotated[VerlRelease | None, BeforeValidator(_read_release)] = None
    """The computation of that release of verl, with its bugs; keys that it lacks are refused. ``0.9.0`` is read as
    ``0.9.1``, ``0.7.0`` as ``0.6.1``.
    """

    rollout_is: Annotated[Level | None, BeforeValidator(_read_level)] = None
    """The level of importance weights; ``segment`` is one turn, ``null`` has none."""
    rollout_is_threshold: ThresholdValue = 2.0
    """``u`` truncates weights at u; ``'lo_hi'`` makes those outside 0 (IcePop); ``inf`` leaves them."""
    rollout_is_threshold_lower: PositiveNumber | None = None
    """Makes a pair of the number above, like ``lo`` in ``'lo_hi'``; in mode ``truncate`` for metrics alone."""
    rollout_is_mode: Literal["truncate", "mask"] | None = None
    """As in 0.6.0; ``mask``: a number u is the pair [1/u, u]."""
    rollout_is_batch_normalize: bool = False
    """Weights are divided by their mean."""
    rollout_rs: JoinedTexts | None = None
    """Options of rejection, one or several with commas or as a list: ``token``, ``sequence``, ``geometric``, or
    ``token_k1`` … ``seq_max_k3``; what any rejects is rejected.
    """
    rollout_rs_threshold: ThresholdValue = None
    """One for all options, or one for each with commas: ``u`` is [1/u, u] of a ratio and the largest k2 or k3,
    ``'lo_hi'`` both bounds.
    """
    rollout_rs_threshold_lower: PositiveNumber | None = None
    """The lower bound of ``token``, ``sequence``, ``geometric``; ``null``: 1/u."""
    rollout_token_veto_threshold: PositiveNumber | None = None
    """A token whose ratio is below it rejects its sequence; below 1."""
    bypass_mode: bool = False
    """Two policies: the ratio is to the rollout policy itself."""
    loss_type: LossType = "ppo_clip"
    """Others than ``ppo_clip`` with ``bypass_mode`` alone."""
    use_policy_gradient: bool | None = None
    """0.6.1's name of ``loss_type: reinforce``; refused beside another ``loss_type``."""

    rules: list[Rule] = Field(default=[])
    """Further rules, behind those of the keys above."""
    rollout_kl_coef: NonNegativeNumber = 0.0
    """τ of τ·ℓ² per response token in the loss, ℓ = log π_θ − log μ."""
    rollout_kl_in_advantage: NonNegativeNumber = 0.0
    """τ of A − τ·ℓ, at each update; with ``reinforce`` alone."""
    nan_policy: Annotated[NanPolicy, BeforeValidator(_read_nan_policy)] = "reject"
    """Of a log-probability that is absent or not finite; ``mask`` is read as ``reject``."""
    rs_denominator: Denominator = "original"
    """``kept``: the loss is divided by the number of tokens that are kept."""
    exclude_rejected_from_baseline: bool = True
    """Rejected trajectories are in no mean or deviation of rewards; with three policies alone."""
    lone_survivor: LoneSurvivor = "reward"
    """What the only trajectory left of a group gets: its reward, or 0; with three policies alone."""
    max_rejected_fraction: Annotated[float, Field(ge=0.0, le=1.0), BeforeValidator(read_number)] | None = None
    """More rejected response tokens than this, in bypass of an update, are an error; below 1."""

    @property
    def rejection_options(self) -> list[str]:
        """Returns the options in ``rollout_rs``, in its order."""
        return [option.strip() for option in (self.rollout_rs or "").split(",") if option.strip()]
