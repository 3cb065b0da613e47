"""The effect of a candidate's difference on the training itself, as figures; ``wording.consequence`` says them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mock_scheduler.config.instruments import TraceKind

#: The kinds of tensors that the figures are made of: ``trace.kinds`` of both runs, at level ``full``.
CONSEQUENCE_KINDS: tuple[TraceKind, ...] = (
    "initial",
    "input",
    "score",
    "advantage",
    "output",
    "loss",
    "parameter",
)

#: Those of the update alone, which every training has.
UPDATE_KINDS: tuple[TraceKind, ...] = ("initial", "parameter")

ClipState = Literal["not clipped", "clipped low", "clipped high", "dual clipped"]
"""``clipped low``: ratio below 1 - pg_clip, advantage negative. ``clipped high``: ratio above 1 + pg_clip_high,
advantage positive. ``dual clipped``: ratio above dual_clip, advantage negative."""

KlTarget = Literal["reference", "rollout"]
"""The KL of the policy to the reference policy, or from the rollout policy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutGap:
    """How far the trainer's own log-probabilities are from the sampling engine's, in one run.

    Over all response tokens before each step's first update, |train - rollout| in nats: ``median``, ``p99`` (NumPy's
    linear quantiles) and ``largest``. ``mult_prob_error``: the mean of exp(|train - rollout|), NeMo-RL's
    metric ``token_mult_prob_error``: 1 where both agree.
    """

    median: float
    p99: float
    largest: float
    mult_prob_error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipFlip:
    """Holds response tokens in one clip state in the baseline and in another in the candidate."""

    baseline: ClipState
    candidate: ClipState
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Consequence:
    """Holds the effect of a candidate's difference on the training itself, over all compared steps.

    A figure is ``None`` (``update_cosine``: empty) where the traces lack its tensors.

    Args:
        num_tokens: Response tokens, counted once in each of their updates.
        num_clipped: Clipped tokens of the baseline; ``None`` also where neither loss has a clip.
        num_clip_flips: Tokens in another clip state in the candidate; ``None`` likewise.
        kl_to: The other policy of the KL.
        kl_baseline: Mean over all tokens, in nats, by the estimator k3.
        kl_candidate: Likewise.
        max_advantage_change: Largest |a - b|.
        max_advantage: Largest |a|.
        update_cosine: Between the two whole changes of the policy's parameters, for each of ``updates``; nan where
            either did not move.
        has_clip: Whether either loss clips.
        clip_flips: By states, the most frequent first.
        num_sign_flips: Response tokens whose advantage has another sign.
        gaps: Baseline and candidate.
        updates: (step, update), in order.
        update_ratio: ‖candidate's change‖ / ‖baseline's change‖, for each of ``updates``.
        left_out: Parameters without a whole trace in both runs.
        has_policy: Whether the training has a policy loss: else there is nothing to clip, and no advantage.
    """

    num_tokens: int | None
    num_clipped: int | None
    num_clip_flips: int | None
    kl_to: KlTarget | None
    kl_baseline: float | None
    kl_candidate: float | None
    max_advantage_change: float | None
    max_advantage: float | None
    update_cosine: tuple[float, ...]
    has_clip: bool = True
    clip_flips: tuple[ClipFlip, ...] = ()
    num_sign_flips: int | None = None
    gaps: tuple[RolloutGap, RolloutGap] | None = None
    updates: tuple[tuple[int, int], ...] = ()
    update_ratio: tuple[float, ...] = ()
    left_out: tuple[str, ...] = ()
    has_policy: bool = True
