"""Shows each configuration's effect on recorded steps, without training: one line for each.

Contract: every number comes from training's own ``compute_correction``, step by step, and totals are of all steps. If a
rule needs advantages or turns and a step lacks them, the line says so and has no numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from mock_scheduler.correction.config.presets import PRESETS
from mock_scheduler.correction.config.rules import CorrectionSpec
from mock_scheduler.correction.config.section import RolloutCorrectionConfig
from mock_scheduler.correction.engine.compute import compute_correction
from mock_scheduler.correction.engine.inputs import CorrectionResult
from mock_scheduler.correction.engine.states import CorrectionStates
from mock_scheduler.correction.report.scored_step import ScoredStep
from mock_scheduler.correction.report.view import AppliedWeights, Outcome
from mock_scheduler.errors import ConfigError, CorrectionError

CONFIGURED = "configured"
#: The guide's basic configuration, for advice where none is configured.
BASIC = "decoupled_token_is"
_NO_ADVANTAGES = "asks for advantages; a group of one trajectory has no mean to compare its reward with"
_NO_TURNS = "asks for turns, and the response mask shows another number of them than the recording says"
_WITH_ADVANTAGES = "advantages: reward less its group's mean"
#: The fields of a specification that decide the numbers; the others are about the loss.
_COMPUTED = ("weight", "rules", "weight_bounds", "batch_normalize", "nan_policy", "release", "release_arguments")


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """Holds a configuration with its name and its source."""

    name: str
    spec: CorrectionSpec
    source: str = ""


def list_presets(names: Sequence[str]) -> list[Candidate]:
    """Lists these presets, or all; raises ``ConfigError`` that lists the unknown names."""
    wrong = [name for name in names if name not in PRESETS]
    if wrong:
        nearest = [get_close_matches(name, PRESETS, n=1) for name in wrong]
        hints = [f"{name}{f' (nearest: {near[0]})' if near else ''}" for name, near in zip(wrong, nearest, strict=True)]
        raise ConfigError(f"--preset: there is no {', '.join(hints)}; there are: {', '.join(sorted(PRESETS))}")
    return [preset_candidate(name) for name in dict.fromkeys(names or PRESETS)]


def preset_candidate(name: str) -> Candidate:
    """Makes a candidate of a preset."""
    section = RolloutCorrectionConfig.model_validate({"preset": name})
    remark = PRESETS[name].remark
    return Candidate(name=name, spec=section.spec, source=PRESETS[name].source + (f" ({remark})" if remark else ""))


class PresetTable:
    """Adds up the effects of candidates over steps; candidates with the same computation are computed once."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._candidates = candidates
        self._totals: list[_Total] = []
        self._groups = [self._find(candidate.spec) for candidate in candidates]

    def _find(self, spec: CorrectionSpec) -> int:
        for group, total in enumerate(self._totals):
            if all(getattr(total.spec, name) == getattr(spec, name) for name in _COMPUTED):
                return group
        self._totals.append(_Total(spec))
        return len(self._totals) - 1

    def add(self, step: ScoredStep) -> None:
        """Adds one step."""
        for total in self._totals:
            total.add(step)

    def outcomes(self) -> list[Outcome]:
        """Returns one line per candidate, in their order."""
        pairs = zip(self._candidates, self._groups, strict=True)
        return [self._totals[group].outcome(candidate, group) for candidate, group in pairs]


#: The sums that are kept of a step. They are plain numbers: a small array that outlives a step's large ones would keep
#: the memory around it from being given back.
_SUMS = ("known", "every", "kept", "raw", "applied", "applied_squared", "sequences", "rejected_sequences")


class _Total:
    """Sums the effect of one computation on all steps so far."""

    def __init__(self, spec: CorrectionSpec) -> None:
        self.spec = spec
        self.problem = ""
        self._sums = dict.fromkeys(_SUMS, 0.0)
        self._largest = 0.0

    def add(self, step: ScoredStep) -> None:
        self.problem = self.problem or missing_for(self.spec, step)
        if self.problem:
            return
        try:
            states = correct_step(step, self.spec).states
        except CorrectionError as error:
            self.problem = str(error)
            return
        for name, value in _step_sums(states).items():
            self._sums[name] += value
        if self.spec.weight is not None:
            self._largest = max(self._largest, states.largest("applied"))

    def outcome(self, candidate: Candidate, group: int) -> Outcome:
        spec = candidate.spec
        line = Outcome(
            name=candidate.name,
            group=group,
            computation=spec.describe_computation(),
            description=spec.describe(),
            source=candidate.source,
            is_bypass=spec.bypass,
        )
        if self.problem or not self._sums["every"]:
            return replace(line, note=self.problem or "no response tokens")
        return replace(
            line,
            weights=self._weights(),
            kept_fraction=self._sums["kept"] / self._sums["every"],
            rejected_sequences=self._sums["rejected_sequences"] / self._sums["sequences"],
            note=_WITH_ADVANTAGES if spec.needs_advantages else "",
        )

    def _weights(self) -> AppliedWeights | None:
        """``None`` where no ratio is known."""
        known = self._sums["known"]
        if self.spec.weight is None or not known:
            return None
        mean, square = self._sums["applied"] / known, self._sums["applied_squared"] / known
        return AppliedWeights(
            raw_mean=self._sums["raw"] / known,
            mean=mean,
            std=math.sqrt(max(square - mean * mean, 0.0)),
            largest=self._largest,
            effective_sample_size=min(mean * mean / square, 1.0) if square > 0.0 else 0.0,
        )


def _step_sums(states: CorrectionStates) -> dict[str, float]:
    """Sums by the names of ``_SUMS``, without those of weights where there are none."""
    every = states.sums["tokens"] + states.sums["unknown"]
    weights = [name for name in ("raw", "applied", "applied_squared") if name in states.sums]
    return {
        "known": states.total("tokens"),
        "every": float(every.sum()),
        "kept": states.total("kept"),
        "sequences": float((every > 0).sum()),
        "rejected_sequences": float((states.sums["kept"][every > 0] == 0).sum()),
        **{name: states.total(name) for name in weights},
    }


def missing_for(spec: CorrectionSpec, step: ScoredStep) -> str:
    """Says what the specification asks for and the step lacks; empty where nothing."""
    if spec.needs_advantages and step.advantages is None:
        return _NO_ADVANTAGES
    return _NO_TURNS if spec.needs_turns and step.tokens.turns is None else ""


def correct_step(step: ScoredStep, spec: CorrectionSpec) -> CorrectionResult:
    """Corrects a step; rejecting too much is no error here.

    Raises:
        CorrectionError: As ``compute_correction`` does, and in the place of a verl release's own exceptions.
    """
    try:
        return compute_correction(step.inputs(spec), replace(spec, max_rejected_fraction=None))
    except (ValueError, ArithmeticError) as error:
        if spec.release is None or isinstance(error, CorrectionError):
            raise
        raise CorrectionError(f"verl {spec.release} raises {type(error).__name__}: {error}") from error
