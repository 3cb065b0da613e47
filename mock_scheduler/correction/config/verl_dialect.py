"""Reads verl's keys in ``actor_rollout_ref``; ``config/dialects/verl.py`` reads the others there.

- ``rollout.calculate_log_probs``: verl corrects nothing without it. Recordings always have log-probabilities, so
  true changes nothing, and false beside a correction is refused.
- ``actor.tis_imp_ratio_cap``: the key before 0.6.0. It becomes ``algorithm.rollout_correction``.
- ``actor.policy_loss.loss_mode: bypass_mode`` (0.6.1: ``rollout_correction``): refused where ``algorithm`` asks for
  three policies, as the run would train another loss than it says.
- ``actor.policy_loss.rollout_correction``: not read. verl fills it from ``algorithm.rollout_correction``.

Sources: verl 0.9.1, ``workers/config/actor.py`` and ``trainer/ppo/rollout_corr_helper.py``; before 0.6.0
``workers/config/actor.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from mock_scheduler.config.problems import Problem, validation_problems
from mock_scheduler.correction.config.algorithm import AlgorithmConfig, is_cap_off

_ACTOR = "actor_rollout_ref.actor"
_LOG_PROBS_KEY = "actor_rollout_ref.rollout.calculate_log_probs"
_CAP_KEY = f"{_ACTOR}.tis_imp_ratio_cap"
_LOSS_MODE_KEY = f"{_ACTOR}.policy_loss.loss_mode"
_SECTION_KEY = f"{_ACTOR}.policy_loss.rollout_correction"
_BYPASS_MODES = ("bypass_mode", "rollout_correction")


@dataclass(frozen=True, kw_only=True, slots=True)
class VerlCorrection:
    """Holds the keys as read; ``values``: the configuration without them, and with the section made of them."""

    values: Mapping[str, object]
    calculates_log_probs: bool | None = None
    bypass_loss_mode: str | None = None
    unread: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()

    def conflicts(self, algorithm: AlgorithmConfig) -> list[Problem]:
        """Finds contradictions between these keys and the checked section."""
        section = algorithm.rollout_correction
        problems: list[Problem] = []
        if self.calculates_log_probs is False and section is not None:
            text = (
                "is false, and algorithm.rollout_correction compares the log-probabilities of the rollout with the "
                "trainer's; set it to true, or leave it out (recordings always have them)"
            )
            problems.append((_LOG_PROBS_KEY, text))
        if self.bypass_loss_mode is not None and not (section is not None and section.bypass_mode):
            text = (
                f"is {self.bypass_loss_mode}, the loss of two policies, which is read from "
                "algorithm.rollout_correction.bypass_mode here; set that to true, or leave loss_mode out"
            )
            problems.append((_LOSS_MODE_KEY, text))
        return problems


def read_verl_correction(values: Mapping[str, object]) -> VerlCorrection:
    """Takes the keys above out of a composed configuration; malformed sections stay, for others to refuse."""
    outer = values.get("actor_rollout_ref")
    if not isinstance(outer, Mapping):
        return VerlCorrection(values=values)
    found: dict[str, object] = {}
    rest = _without(outer, "actor_rollout_ref", found)
    problems: list[Problem] = []
    log_probs, mode = found.get(_LOG_PROBS_KEY), found.get(_LOSS_MODE_KEY)
    if log_probs not in (None, True, False):
        problems.append((_LOG_PROBS_KEY, f"is {log_probs!r}; expected true or false"))
    algorithm = values.get("algorithm")
    if not is_cap_off(found.get(_CAP_KEY)):
        algorithm = _with_cap(algorithm, found[_CAP_KEY], problems)
    added = {} if algorithm is values.get("algorithm") else {"algorithm": algorithm}
    return VerlCorrection(
        values={**values, "actor_rollout_ref": rest, **added},
        calculates_log_probs=None if log_probs is None else bool(log_probs),
        bypass_loss_mode=None if mode is None else str(mode),
        unread=(_SECTION_KEY,) if found.get(_SECTION_KEY) else (),
        problems=tuple(problems),
    )


def _without(section: Mapping[str, object], key: str, found: dict[str, object]) -> dict[str, object]:
    """The section without these keys, which go to ``found``; sections left empty are dropped."""
    rest: dict[str, object] = {}
    for name, value in section.items():
        inner = f"{key}.{name}"
        is_read = inner in (_LOG_PROBS_KEY, _CAP_KEY, _SECTION_KEY)
        if is_read or (inner == _LOSS_MODE_KEY and value in _BYPASS_MODES):
            found[inner] = value
        elif inner in ("actor_rollout_ref.rollout", _ACTOR, f"{_ACTOR}.policy_loss") and isinstance(value, Mapping):
            kept = _without(value, inner, found)
            if kept or not value:
                rest[name] = kept
        else:
            rest[name] = value
    return rest


def _with_cap(algorithm: object, cap: object, problems: list[Problem]) -> object:
    """``algorithm`` with the cap as a section; problems are added under the cap's own key."""
    if algorithm is not None and not isinstance(algorithm, Mapping):
        return algorithm
    others = {} if algorithm is None else dict(algorithm)
    given = [name for name, value in others.items() if value is not None and name != "flat_keys"]
    if given:
        listed = ", ".join(f"algorithm.{name}" for name in given)
        problems.append((_CAP_KEY, f"is older than {listed} beside it, which says the same; leave it out"))
        return algorithm
    try:
        read = AlgorithmConfig.model_validate({"tis_imp_ratio_cap": cap})
    except ValidationError as error:
        problems += [(_CAP_KEY, text) for _, text in validation_problems(error, AlgorithmConfig)]
        return algorithm
    flat_keys = read.flat_keys.replace("algorithm.tis_imp_ratio_cap", _CAP_KEY, 1)
    return {**read.model_dump(mode="json"), "flat_keys": flat_keys}
