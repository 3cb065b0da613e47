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
    """Holds values of the keys, verl's and our own.

    ``preset``: named values; any other given key counts in their place. ``verl_compat``: reproduces this
    release of verl, with its bugs. ``rollout_is``, ``rollout_rs`` and their thresholds: verl's, of every release.
    ``rules``: further rules. ``bypass_mode`` and ``loss_type``: two policies in the place of three. The others: see
    ``CorrectionSpec``.
    """

    preset: str | None = None
    verl_compat: Annotated[VerlRelease | None, BeforeValidator(_read_release)] = None

    rollout_is: Annotated[Level | None, BeforeValidator(_read_level)] = None
    rollout_is_threshold: ThresholdValue = 2.0
    rollout_is_threshold_lower: PositiveNumber | None = None
    rollout_is_mode: Literal["truncate", "mask"] | None = None
    rollout_is_batch_normalize: bool = False
    rollout_rs: JoinedTexts | None = None
    rollout_rs_threshold: ThresholdValue = None
    rollout_rs_threshold_lower: PositiveNumber | None = None
    rollout_token_veto_threshold: PositiveNumber | None = None
    bypass_mode: bool = False
    loss_type: LossType = "ppo_clip"
    use_policy_gradient: bool | None = None

    rules: list[Rule] = Field(default=[])
    rollout_kl_coef: NonNegativeNumber = 0.0
    rollout_kl_in_advantage: NonNegativeNumber = 0.0
    nan_policy: Annotated[NanPolicy, BeforeValidator(_read_nan_policy)] = "reject"
    rs_denominator: Denominator = "original"
    exclude_rejected_from_baseline: bool = True
    lone_survivor: LoneSurvivor = "reward"
    max_rejected_fraction: Annotated[float, Field(ge=0.0, le=1.0), BeforeValidator(read_number)] | None = None

    @property
    def rejection_options(self) -> list[str]:
        """Returns the options in ``rollout_rs``, in its order."""
        return [option.strip() for option in (self.rollout_rs or "").split(",") if option.strip()]
