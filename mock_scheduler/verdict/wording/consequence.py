"""A consequence in one or two sentences that a trainer understands, and what to trace for the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from mock_scheduler.support.text import count_of, list_some
from mock_scheduler.verdict.proofs import Consequence, RolloutGap

_NUM_NAMED = 3


def describe_consequence(
    found: Consequence, *, has_clip: bool, kinds: Sequence[str], left_out: Sequence[str]
) -> Consequence:
    """The consequence with its ``text``.

    ``has_clip``: whether either loss clips. ``kinds``: what all figures need. ``left_out``: parameters that were not
    compared.
    """
    policy = [_describe_clip(found, has_clip=has_clip), _describe_kl(found), _describe_advantages(found)]
    rest = [_describe_update(found), _describe_gaps(found)]
    sentences = [_sentence(policy), _sentence(rest)]
    missing = _list_missing(found, has_clip=has_clip)
    if missing:
        sentences.append(
            f"Not computed: {', '.join(missing)}; run both with trace.level=full trace.kinds=[{','.join(kinds)}]."
        )
    if left_out:
        names = list_some(left_out, _NUM_NAMED, ", ")
        sentences.append(f"The update is without {names}, which are not traced whole in both runs.")
    return replace(found, text=" ".join(filter(None, sentences)))


def _sentence(parts: Sequence[str]) -> str:
    text = "; ".join(filter(None, parts))
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _describe_clip(found: Consequence, *, has_clip: bool) -> str:
    if not has_clip:
        return "neither loss clips"
    if found.num_clip_flips is None or not found.num_tokens:
        return ""
    tokens = f"{count_of(found.num_tokens, 'response token')} (each counted in every update)"
    clipped = f"the baseline clips {found.num_clipped:,} of {tokens}"
    if not found.num_clip_flips:
        return f"{clipped}, and the candidate the same ones"
    share = 100.0 * found.num_clip_flips / found.num_tokens
    ways = ", ".join(f"{flip.num_tokens:,} from {flip.baseline} to {flip.candidate}" for flip in found.clip_flips)
    verb = "changes its" if found.num_clip_flips == 1 else "change their"
    return f"{clipped}; {found.num_clip_flips:,} ({share:.3g} %) {verb} clip state: {ways}"


def _describe_kl(found: Consequence) -> str:
    if found.kl_name is None or found.kl_baseline is None or found.kl_candidate is None:
        return ""
    if found.kl_baseline == found.kl_candidate:
        return f"the {found.kl_name} stays {found.kl_baseline:.4g}"
    change = found.kl_candidate - found.kl_baseline
    return f"the {found.kl_name} goes from {found.kl_baseline:.4g} to {found.kl_candidate:.4g} ({change:+.2g})"


def _describe_advantages(found: Consequence) -> str:
    if found.max_advantage_change is None or found.max_advantage is None:
        return ""
    if not found.max_advantage_change:
        return "advantages are equal"
    signs = f", {count_of(found.num_sign_flips, 'sign')} changed" if found.num_sign_flips else ""
    change, largest = found.max_advantage_change, found.max_advantage
    return f"advantages move by up to {change:.3g} where the largest is {largest:.3g}{signs}"


def _describe_update(found: Consequence) -> str:
    updates = list(zip(found.update_cosine, found.updates, found.update_ratio, strict=True))
    known = [item for item in updates if not math.isnan(item[0])]
    num_still = len(found.update_cosine) - len(known)
    still = f"{count_of(num_still, 'update')} did not move both" if num_still else ""
    if not known:
        return f"of the policy's updates, {still}" if still else ""
    cosine, (step, update), ratio = min(known)
    first = known[0]
    text = (
        f"the policy's updates point where the baseline's do to a cosine of {_cosine(first[0])} in the first and "
        f"{_cosine(cosine)} at worst (step {step}, update {update}, {describe_length(ratio)})"
    )
    if len(known) == 1:
        text = (
            f"the policy's one update points where the baseline's does to a cosine of {_cosine(cosine)} "
            f"({describe_length(ratio)})"
        )
    return f"{text}; {still}" if still else text


def describe_length(ratio: float, *, digits: int = 4) -> str:
    """``0.5 times as long``; ``just as long`` where so many digits do not tell them apart."""
    text = f"{ratio:.{digits}g}"
    return "just as long" if text == "1" else f"{text} times as long"


def _cosine(value: float) -> str:
    """With as many digits as tell it from 1."""
    if value == 1.0:
        return "1"
    digits = max(4, 1 - math.floor(math.log10(1.0 - value)))
    return f"{value:.{digits}f}" if digits <= 15 else f"1 - {1.0 - value:.1e}"


def _describe_gaps(found: Consequence) -> str:
    if found.gaps is None:
        return ""
    ours, theirs = found.gaps
    if ours == theirs:
        return f"log-probabilities of trainer and rollout stay as far apart as they were ({_gap(ours)})"
    return (
        f"log-probabilities of trainer and rollout are apart by {_gap(theirs)} where the baseline's are by {_gap(ours)}"
    )


def _gap(gap: RolloutGap) -> str:
    return (
        f"{gap.median:.2g} in the median, {gap.p99:.2g} in 99 % and {gap.largest:.2g} at most, "
        f"token_mult_prob_error {gap.mult_prob_error:.6g}"
    )


def _list_missing(found: Consequence, *, has_clip: bool) -> list[str]:
    checks = {
        "clip states": has_clip and found.num_clip_flips is None,
        "KL": found.kl_baseline is None,
        "advantages": found.max_advantage is None,
        "the update's direction": not found.update_cosine,
        "the gap to the rollout's log-probabilities": found.gaps is None,
    }
    return [name for name, is_missing in checks.items() if is_missing]
