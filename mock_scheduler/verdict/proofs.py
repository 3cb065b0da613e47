"""The proofs that a verdict rests on, strongest first, as plain data for reports.

An alignment tries them in this order and stops where one decides: ``replicas`` within the candidate's own run;
``bit-equality`` with the baseline; ``emulation``: bit-equality with a reference that adds in the candidate's order;
``noise``: what a perturbation by one unit roundoff makes of every tensor bounds the candidate's difference, with a test
of the slope, of locality and of drift beside the norm; ``referee``: both sides again in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ProofName = Literal["replicas", "bit-equality", "emulation", "noise", "referee"]

#: Strongest first.
PROOF_NAMES: tuple[ProofName, ...] = ("replicas", "bit-equality", "emulation", "noise", "referee")

Outcome = Literal["proved", "refuted", "open", "not tried"]
"""``proved``: what it asks for holds. ``refuted``: it does not. ``open``: it cannot tell. ``not tried``: see why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """What one proof found of a candidate.

    text: in words, with its figures; why it was not tried or cannot tell. num_compared, num_equal: tensors, where it
    compares any. seconds: that runs and comparisons for it took, beyond those that every candidate needs; runs that
    several candidates share are counted once, in ``AlignmentTimes``.
    """

    name: ProofName
    outcome: Outcome
    text: str
    num_compared: int = 0
    num_equal: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GraftedModule:
    """What grafting showed of one module.

    name: canonical; kind: ``activation`` or ``activation_gradient``. is_cause: with its tensor replaced by the
    reference's, what follows is as the reference has it, up to the next cause. text: in words.
    """

    name: str
    kind: str
    is_cause: bool
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Localisation:
    """Where a divergence begins, as narrowed down by further runs.

    sentence: the one sentence that says it. step, update, phase (``forward``, ``backward``, ``update``), name: of the
    first tensor that differs, in execution order. causes: modules whose graft heals what follows; amplifiers: those
    that only pass on or enlarge it. trace_dirs: reference and candidate, kept on disk. command: opens them.
    seconds: all its runs and comparisons.
    """

    sentence: str
    step: int
    update: int
    phase: str
    name: str
    causes: tuple[GraftedModule, ...]
    amplifiers: tuple[GraftedModule, ...]
    trace_dirs: tuple[Path, Path]
    command: str
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutGap:
    """How far the trainer's own log-probabilities are from those of the engine that sampled, in one run.

    Of all response tokens before each step's first update, |train - rollout| in nats: ``median``, ``p99`` (NumPy's
    linear quantiles) and ``largest``. ``mult_prob_error``: the mean of exp(|train - rollout|), which is NeMo-RL's
    metric ``token_mult_prob_error``: 1 where both agree.
    """

    median: float
    p99: float
    largest: float
    mult_prob_error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipFlip:
    """Response tokens that are in one clip state in the baseline and in another in the candidate.

    States: ``not clipped``, ``clipped low`` (ratio below 1 - pg_clip, advantage negative), ``clipped high`` (ratio
    above 1 + pg_clip_high, advantage positive), ``dual clipped`` (ratio above dual_clip, advantage negative).
    """

    baseline: str
    candidate: str
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Consequence:
    """What a candidate's difference does to the training itself, over all steps compared.

    A figure is ``None`` where the traces do not hold what it is made of; ``text`` then says what to trace.

    num_tokens: response tokens, counted once in every update that trains on them. num_clip_flips: of these, whose clip
    state differs, and ``clip_flips`` by states, the most frequent first; num_clipped: clipped in the baseline; all
    ``None`` where neither loss has a clip. kl_baseline, kl_candidate: mean over these tokens, in nats, by the estimator
    k3, ``kl_name`` says of what: to the reference policy where there is one, else from the rollout policy.
    max_advantage_change: largest |a - b|; max_advantage: largest |a|; num_sign_flips: response tokens whose advantage
    has another sign. gaps: of baseline and candidate. update_cosine: of the whole change of the policy's parameters,
    for each of ``updates``, (step, update) in order; nan where either did not move. update_ratio: ‖candidate's change‖
    / ‖baseline's change‖ likewise. text: the summary in one or two sentences.
    """

    num_tokens: int | None
    num_clipped: int | None
    num_clip_flips: int | None
    kl_name: str | None
    kl_baseline: float | None
    kl_candidate: float | None
    max_advantage_change: float | None
    max_advantage: float | None
    update_cosine: tuple[float, ...]
    text: str
    clip_flips: tuple[ClipFlip, ...] = ()
    num_sign_flips: int | None = None
    gaps: tuple[RolloutGap, RolloutGap] | None = None
    updates: tuple[tuple[int, int], ...] = ()
    update_ratio: tuple[float, ...] = ()
