"""Finds the effect of a difference on the training itself: clipping, KL, advantages, and the update's direction.

Contract: reads two finished runs' folders (``config.yaml`` and ``trace``), one tensor at a time. Tokens are matched by
row and position. A figure is left out where the traces do not hold its tensors. Figures are in float64 but for the clip
states, decided as the loss decides them and in its own dtype.
With ℓ = new - old within ± ``LOG_RATIO_BOUND``, r = exp ℓ and A the advantage, a token of the ``ppo`` loss is
clipped where -clip(r, 1 - low, 1 + high)·A > -r·A (arXiv 1707.06347, eq. 7), and dual clipped where
A < 0 and the greater of both is above -dual·A (arXiv 1912.09729); of the ``gmpo`` loss (arXiv 2507.20673) it is
clipped where sgn(A)·clip(ℓ, -low, high) < sgn(A)·ℓ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from mock_scheduler.comparison.pairing.pairs import TracePair
from mock_scheduler.comparison.pairing.sources import StepSource
from mock_scheduler.comparison.pairing.tokens import TokenAlignment, align_tokens
from mock_scheduler.comparison.walk.traces import open_sources, trace_level
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.correction.config.rules import LOG_RATIO_BOUND
from mock_scheduler.errors import TraceError
from mock_scheduler.program import ClipRule
from mock_scheduler.support.run_files import CONFIG_FILE, TRACE_FOLDER
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.full.reader import open_trace
from mock_scheduler.verdict.consequence.figures import ClipFlip, ClipState, Consequence, KlTarget, RolloutGap
from mock_scheduler.verdict.consequence.update import UpdateDirections

#: By their numbers in ``clip_states``.
CLIP_STATES: tuple[ClipState, ...] = get_args(ClipState)

#: Values of a policy, which no other training has.
_POLICY_KINDS: frozenset[TraceKind] = frozenset({"score", "advantage", "output"})

_LOW, _HIGH, _DUAL = range(1, len(CLIP_STATES))


def clip_states(rule: ClipRule, log_ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Decides how the loss clips every token: int8, of the tensors' shape, a number of ``CLIP_STATES`` for each.

    ``log_ratio``: new - old, floating; ``advantages``: of the same dtype. Whoever counts leaves rejected tokens at 0.
    """
    states = torch.zeros(log_ratio.shape, dtype=torch.int8)
    if not rule.has_clip:
        return states
    # The loss bounds the exponent before it takes the exponential; a token there is decided by the bounded ratio.
    log_ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if rule.is_geometric:
        sign = advantages.sign()
        is_clipped = sign * log_ratio.clamp(-rule.low, rule.high) < sign * log_ratio
        return _mark(states, is_clipped, advantages)
    ratio = log_ratio.exp()
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1.0 - rule.low, 1.0 + rule.high) * advantages
    states = _mark(states, clipped > unclipped, advantages)
    if rule.dual is not None:
        limit = -rule.dual * advantages
        states[(advantages < 0) & (torch.maximum(unclipped, clipped) > limit)] = _DUAL
    return states


def _mark(states: torch.Tensor, is_clipped: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """A positive advantage is only clipped above, a negative one only below."""
    states[is_clipped & (advantages > 0)] = _HIGH
    states[is_clipped & (advantages < 0)] = _LOW
    return states


def find_consequence(
    baseline_dir: Path,
    candidate_dir: Path,
    *,
    load_clip_rule: Callable[[Path], ClipRule],
) -> Consequence:
    """What the difference between two finished runs does to the training, over the steps that both traced.

    ``load_clip_rule``: reads out of a run's ``config.yaml`` how its loss clips, as the program has it. Raises
    ``AlignmentError`` where a configuration cannot be read, and ``TraceError`` where a trace is missing or damaged.
    """
    rules = load_clip_rule(baseline_dir / CONFIG_FILE), load_clip_rule(candidate_dir / CONFIG_FILE)
    folders = baseline_dir / TRACE_FOLDER, candidate_dir / TRACE_FOLDER
    if "sketch" in [trace_level(folder) for folder in folders]:
        with open_sources(*folders) as sources:
            return _Collected(rules=rules, has_policy=_has_policy(sources)).result()
    with (
        open_trace(folders[0]) as ours,
        open_trace(folders[1]) as theirs,
        TracePair(ours, theirs) as traces,
    ):
        collected = _Collected(rules=rules, has_policy=_has_policy((ours, theirs)))
        shared = [step for step in ours.steps if step in theirs.steps]
        if not shared:
            raise TraceError(
                f"{folders[0]} and {folders[1]} have no step in common: nothing says what a difference does"
            )
        for step in shared:
            collected.add_step(traces, step)
    return collected.result()


def _has_policy(sources: tuple[StepSource, StepSource]) -> bool:
    """Whether a policy is trained: a program with data of its own that shows no value of one has no policy."""
    steps = [(source, step) for source in sources for step in source.steps]
    return not all(source.is_by_content(step) for source, step in steps) or any(
        key.kind in _POLICY_KINDS for source, step in steps for key in source.keys(step)
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Tokens:
    """One token tensor of a step or update in both runs, ``[T]`` in the baseline's order, and where both have it."""

    values: tuple[torch.Tensor, torch.Tensor]
    present: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Step:
    """Holds the tensors of one step, by token."""

    traces: TracePair
    step: int
    tokens: TokenAlignment

    def updates(self) -> list[int]:
        """Those of which both runs have log-probabilities."""
        shared = self.traces.readers[0].keys(self.step) & self.traces.readers[1].keys(self.step)
        return sorted(key.update for key in shared if (key.kind, key.name) == ("output", "logprobs"))

    def read(self, kind: TraceKind, name: str, *, update: int = 0) -> _Tokens | None:
        """Reads both runs; ``None`` where either lacks it, or has it of another number of tokens."""
        key = TraceKey(step=self.step, update=update, kind=kind, name=name)
        if not all(reader.has(key) for reader in self.traces.readers):
            return None
        merged = self.traces.merge(key)
        values, present = [], []
        for item, is_ours in zip(merged, (True, False), strict=True):
            num_tokens = self.tokens.rows.num_tokens if is_ours else self.tokens.num_candidate_tokens
            if item.tensor.shape != (num_tokens,):
                return None  # of another number of tokens: nothing to match by
            mask = torch.ones(num_tokens, dtype=torch.bool) if item.present is None else item.present
            is_moved = not is_ours and not self.tokens.is_same_order
            values.append(self.tokens.in_baseline_order(item.tensor) if is_moved else item.tensor)
            present.append(self.tokens.in_baseline_order(mask) if is_moved else mask)
        shared = present[0] & present[1]
        return _Tokens(values=(values[0], values[1]), present=shared)


@dataclass(slots=True)
class _Collected:
    """Sums over all steps so far."""

    rules: tuple[ClipRule, ClipRule]
    has_policy: bool = True
    num_tokens: int | None = None
    flips: Counter[tuple[int, int]] | None = None
    kl_to: KlTarget | None = None
    kl_sums: list[float] = field(default_factory=lambda: [0.0, 0.0])
    num_kl_tokens: int = 0
    max_advantage_change: float | None = None
    max_advantage: float | None = None
    num_sign_flips: int | None = None
    differences: tuple[list[torch.Tensor], list[torch.Tensor]] = field(default_factory=lambda: ([], []))
    directions: UpdateDirections = field(default_factory=UpdateDirections)

    def add_step(self, traces: TracePair, step: int) -> None:
        """Adds everything of one step that both runs traced."""
        ours, theirs = (reader.footer(step).rows for reader in traces.readers)
        own = _Step(traces=traces, step=step, tokens=align_tokens(ours, theirs))
        advantages, old = own.read("advantage", "advantages"), own.read("score", "old_logprobs")
        rollout, reference = own.read("input", "rollout_logprobs"), own.read("score", "ref_logprobs")
        kept = own.read("advantage", "kept")
        if advantages is not None:
            self._add_advantages(advantages)
        if old is not None and rollout is not None:
            self._add_gap(old, rollout)
        for update in own.updates():
            new = own.read("output", "logprobs", update=update)
            if new is None:
                continue
            self.num_tokens = (self.num_tokens or 0) + int(new.present.sum())
            self._add_kl(new, reference, rollout)
            # With two policies tokens are rejected update by update.
            own_kept = own.read("loss", "kept", update=update) or kept
            self._add_states(new, old, rollout, advantages, own_kept)
        self.directions.add_step(traces, step)

    def _add_advantages(self, advantages: _Tokens) -> None:
        ours, theirs = (side[advantages.present].double() for side in advantages.values)
        if not len(ours):
            return
        self.max_advantage = max(self.max_advantage or 0.0, float(ours.abs().max()))
        self.max_advantage_change = max(self.max_advantage_change or 0.0, float((ours - theirs).abs().max()))
        self.num_sign_flips = (self.num_sign_flips or 0) + int((ours.sign() != theirs.sign()).sum())

    def _add_gap(self, old: _Tokens, rollout: _Tokens) -> None:
        is_known = [values.isfinite() for values in rollout.values]
        # An engine may leave a token's log-probability out, and then writes NaN; both runs must know it.
        present = old.present & rollout.present & is_known[0] & is_known[1]
        for kept, train, sampled in zip(self.differences, old.values, rollout.values, strict=True):
            kept.append((train[present].double() - sampled[present].double()).abs())

    def _add_kl(self, new: _Tokens, reference: _Tokens | None, rollout: _Tokens | None) -> None:
        other = rollout if reference is None else reference
        target: KlTarget = "rollout" if reference is None else "reference"
        if other is None or self.kl_to not in (None, target):
            return
        present = new.present & other.present & other.values[0].isfinite() & other.values[1].isfinite()
        for side in range(2):
            current, compared = new.values[side][present].double(), other.values[side][present].double()
            # Tokens are samples of the policy for the first, and of the rollout policy for the second.
            log_ratio = current - compared if reference is None else compared - current
            # The estimator k3, e^ℓ - 1 - ℓ: never negative, and exact to the last digits near 0 through expm1.
            self.kl_sums[side] += float((torch.expm1(log_ratio) - log_ratio).sum())
        self.kl_to = target
        self.num_kl_tokens += int(present.sum())

    def _add_states(
        self,
        new: _Tokens,
        old: _Tokens | None,
        rollout: _Tokens | None,
        advantages: _Tokens | None,
        kept: _Tokens | None,
    ) -> None:
        needed = [advantages, *(rollout if rule.is_bypass else old for rule in self.rules)]
        if advantages is None or any(item is None for item in needed):
            return
        present = new.present & advantages.present
        states = []
        for side, rule in enumerate(self.rules):
            before = _old_logprobs(rule, side, old, rollout)
            log_ratio = new.values[side][present] - before[present].to(new.values[side].dtype)
            own = clip_states(rule, log_ratio, advantages.values[side][present].to(log_ratio.dtype))
            if kept is not None:
                own[~kept.values[side][present].bool()] = 0
            states.append(own)
        # A pair of states as one number in base len(CLIP_STATES), so one count finds every way of changing.
        pairs = torch.stack(states, dim=1).long() @ torch.tensor([len(CLIP_STATES), 1])
        counts = torch.bincount(pairs, minlength=len(CLIP_STATES) ** 2).tolist()
        self.flips = self.flips or Counter()
        self.flips.update({divmod(pair, len(CLIP_STATES)): count for pair, count in enumerate(counts) if count})

    def result(self) -> Consequence:
        """Returns all figures."""
        has_clip = any(rule.has_clip for rule in self.rules)
        flips = self.flips if has_clip else None
        changed = [] if flips is None else [(pair, count) for pair, count in flips.most_common() if pair[0] != pair[1]]
        kl = [total / self.num_kl_tokens if self.num_kl_tokens else None for total in self.kl_sums]
        gaps = [_gap(parts) for parts in self.differences]
        return Consequence(
            num_tokens=self.num_tokens,
            num_clipped=None if flips is None else sum(count for pair, count in flips.items() if pair[0]),
            num_clip_flips=None if flips is None else sum(count for _, count in changed),
            has_clip=has_clip,
            clip_flips=tuple(
                ClipFlip(baseline=CLIP_STATES[pair[0]], candidate=CLIP_STATES[pair[1]], num_tokens=count)
                for pair, count in changed
            ),
            kl_to=self.kl_to if self.num_kl_tokens else None,
            kl_baseline=kl[0],
            kl_candidate=kl[1],
            max_advantage_change=self.max_advantage_change,
            max_advantage=self.max_advantage,
            num_sign_flips=self.num_sign_flips,
            gaps=None if gaps[0] is None or gaps[1] is None else (gaps[0], gaps[1]),
            updates=tuple((item.step, item.update) for item in self.directions.found),
            update_cosine=tuple(item.cosine for item in self.directions.found),
            update_ratio=tuple(item.ratio for item in self.directions.found),
            left_out=tuple(sorted(self.directions.left_out)),
            has_policy=self.has_policy,
        )


def _old_logprobs(rule: ClipRule, side: int, old: _Tokens | None, rollout: _Tokens | None) -> torch.Tensor:
    """What the loss holds new log-probabilities against: with two policies, where the engine said nothing, its own."""
    if not rule.is_bypass:
        assert old is not None
        return old.values[side]
    assert rollout is not None
    sampled = rollout.values[side]
    return sampled if old is None else torch.where(sampled.isfinite(), sampled, old.values[side].to(sampled.dtype))


def _gap(parts: Sequence[torch.Tensor]) -> RolloutGap | None:
    differences = np.concatenate([part.numpy() for part in parts]) if parts else np.empty(0)
    if not len(differences):
        return None
    median, p99 = np.quantile(differences, (0.5, 0.99))
    return RolloutGap(
        median=float(median),
        p99=float(p99),
        largest=float(differences.max()),
        mult_prob_error=float(np.exp(differences).mean()),
    )
