"""Judges the distance of rollout and training log-probabilities of one policy version, and names its cause.

Tokens of lag 0 were sampled by the policy that training begins with, so both sides must agree but for the rounding of
the coarser type. Where they do not, each known cause predicts the recorded values from training's; the first that
leaves a part small enough is named.

Contract: of a step no more than its response tokens' hashes and log-probabilities stay in memory, and of two steps at
a time. A step without known lag is not judged.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mock_scheduler.comparison.thresholds import (
    AGREEMENT_BFLOAT16,
    AGREEMENT_FLOAT32,
    FEWEST_AGREEING,
    UNLIKE_OTHER_STEPS,
)
from mock_scheduler.correction.report.mismatch_causes import (
    Cause,
    Flags,
    Floats,
    ScoredTokens,
    find_causes,
    other_step_cause,
    read_tokens,
)
from mock_scheduler.correction.report.scored_step import ScoredStep
from mock_scheduler.correction.report.view import Advice, TrainingSide
from mock_scheduler.support.text import count_of

_NUM_NEIGHBOURS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class _Judged:
    """A step's tokens of lag 0: their number and mean |log ratio|; the worst share of rows, and the cause by tests.

    ``num_rows``, ``num_apart``: rows that were looked at by themselves, and those far from the others.
    """

    step: int
    version: int
    num_tokens: int
    distance: float
    num_rows: int
    num_apart: int
    cause: Cause | None


class MismatchJudge:
    """Takes steps by ``add``, and judges all of them."""

    def __init__(self, training: TrainingSide, *, wide_bound: float = AGREEMENT_FLOAT32) -> None:
        """``wide_bound``: of the mean |log ratio| with float32 on both sides."""
        self._training = training
        types = (training.rollout_precision, training.precision)
        self._is_wide = all(kind in ("float32", "float64") for kind in types)
        self._bound = wide_bound if self._is_wide else AGREEMENT_BFLOAT16
        self._recent: deque[ScoredTokens] = deque(maxlen=_NUM_NEIGHBOURS)
        self._judged: list[_Judged] = []

    def add(self, step: ScoredStep) -> None:
        """Adds one more step with training log-probabilities; steps come in rising order."""
        tokens = read_tokens(step)
        if tokens is None:
            return
        judged = self._judge(tokens)
        if judged is not None:
            self._judged.append(judged)
        for earlier in self._recent:
            self._explain_later(earlier, tokens)
        self._recent.append(tokens)

    def advice(self) -> list[Advice]:
        """A problem for each cause, with its steps; nothing where every step agrees."""
        apart = [judged for judged in self._judged if self._is_apart(judged)]
        by_cause: dict[str, list[_Judged]] = {}
        for judged in apart:
            by_cause.setdefault("" if judged.cause is None else judged.cause.text, []).append(judged)
        return [self._advice_of(found) for found in by_cause.values()]

    def advice_of(self, step: int) -> Advice | None:
        """Returns the problem of one step; ``None`` where it agrees, or was not judged."""
        found = [judged for judged in self._judged if judged.step == step and self._is_apart(judged)]
        return self._advice_of(found) if found else None

    @property
    def has_named(self) -> bool:
        """Whether any step's difference has a named cause."""
        return any(judged.cause is not None and self._is_apart(judged) for judged in self._judged)

    def _is_apart(self, judged: _Judged) -> bool:
        others = [other.distance for other in self._judged if other is not judged]
        usual = float(np.median(others)) if others else math.inf
        is_unlike = judged.distance > max(UNLIKE_OTHER_STEPS * usual, AGREEMENT_FLOAT32)
        return judged.distance > self._bound or judged.num_apart > 0 or is_unlike

    def _judge(self, tokens: ScoredTokens) -> _Judged | None:
        own = tokens.is_own
        if own.sum() < FEWEST_AGREEING:
            return None
        sizes = np.abs(tokens.difference)
        rows, apart = self._rows_apart(tokens, sizes)
        distance = float(sizes[own].mean())
        is_far = distance > min(self._bound, AGREEMENT_FLOAT32) or len(apart) > 0
        return _Judged(
            step=tokens.step,
            version=tokens.version,
            num_tokens=int(own.sum()),
            distance=distance,
            num_rows=rows,
            num_apart=len(apart) if len(apart) < rows else 0,
            cause=self._cause_of(tokens, apart) if is_far else None,
        )

    def _cause_of(self, tokens: ScoredTokens, apart: npt.NDArray[np.int64]) -> Cause | None:
        """Looks for the cause in all tokens of lag 0, and then in the rows that are far from the others."""
        found = self._find_cause(tokens, tokens.is_own)
        of_apart = tokens.is_own & np.isin(tokens.row, apart)
        if (found is not None and found.left is not None) or of_apart.sum() < FEWEST_AGREEING:
            return found
        return self._find_cause(tokens, of_apart) or found

    def _rows_apart(self, tokens: ScoredTokens, sizes: Floats) -> tuple[int, npt.NDArray[np.int64]]:
        """Rows with enough tokens of lag 0 whose mean is beyond the bound and unlike that of the other rows."""
        counts = np.bincount(tokens.row, weights=tokens.is_own)
        sums = np.bincount(tokens.row, weights=np.where(tokens.is_own, sizes, 0.0))
        fewest = 1 if self._is_wide else FEWEST_AGREEING
        rows = np.flatnonzero(counts >= fewest)
        means = sums[rows] / counts[rows]
        usual = float(np.median(means)) if len(means) else 0.0
        return len(rows), rows[(means > self._bound) & (means > UNLIKE_OTHER_STEPS * usual)]

    def _find_cause(self, tokens: ScoredTokens, chosen: Flags) -> Cause | None:
        causes = find_causes(
            tokens, chosen, self._recent, temperature=self._training.temperature, is_wide=self._is_wide
        )
        return next((cause for cause in causes if cause is not None), None)

    def _explain_later(self, earlier: ScoredTokens, tokens: ScoredTokens) -> None:
        """Looks whether an earlier step's rollouts are of the weights of this later one."""
        for place, judged in enumerate(self._judged):
            is_open = judged.cause is None or judged.cause.left is None
            if judged.step == earlier.step and is_open and judged.distance > AGREEMENT_FLOAT32:
                cause = other_step_cause(earlier, earlier.is_own, tokens)
                if cause is not None:
                    self._judged[place] = replace(judged, cause=cause)

    def _advice_of(self, found: list[_Judged]) -> Advice:
        first, cause = found[0], found[0].cause
        steps = ", ".join(str(judged.step) for judged in found)
        rows = f"; {first.num_apart} of {first.num_rows} rows are far from all others" if first.num_apart else ""
        type_text = "float32 on both sides" if self._is_wide else "bfloat16 on a side, or a type that is not told"
        bound = f"rounding explains {self._bound:g} with {type_text}"
        values = (
            f"at step {steps} the mean |log ratio| of {count_of(first.num_tokens, 'token')} of lag 0 is "
            f"{first.distance:.3g}{' (of the first)' if len(found) > 1 else ''}, and {bound}{rows}"
        )
        if cause is None:
            return Advice(
                severity="problem" if self._is_wide else "warning",
                title="Rollout and training disagree at lag 0",
                condition=f"{values}. None of the known causes fits",
                remedies=("compare the engine's model, weights and sampling settings with training's",),
            )
        left = "" if cause.left is None else f", which leaves {cause.left:.3g}"
        return Advice(
            severity="problem",
            title="Rollout and training disagree at lag 0",
            condition=f"{cause.text}{left}: {values}",
            remedies=(cause.remedy,),
        )
