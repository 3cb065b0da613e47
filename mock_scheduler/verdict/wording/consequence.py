"""Puts a consequence into words: a few sentences for a trainer, and rows of its figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mock_scheduler.support.text import count_of, list_some
from mock_scheduler.verdict.consequence.figures import (
    CONSEQUENCE_KINDS,
    UPDATE_KINDS,
    Consequence,
    KlTarget,
    RolloutGap,
)

_NUM_NAMED = 3
_NUM_UPDATES = 6


#: What the KL is called.
KL_NAMES: Mapping[KlTarget, str] = {
    "reference": "KL to the reference policy",
    "rollout": "KL from the rollout policy",
}
_SIDES = ("baseline:", "candidate:")


def describe_consequence(found: Consequence) -> str:
    """Returns the consequence in a few sentences, with the trace to take for missing figures."""
    policy = [_describe_clip(found), _describe_kl(found), _describe_advantages(found)]
    rest = [_describe_update(found), _describe_gaps(found)]
    sentences = [_sentence(policy), _sentence(rest)]
    missing = _list_missing(found)
    if missing:
        kinds = ",".join(CONSEQUENCE_KINDS if found.has_policy else UPDATE_KINDS)
        sentences.append(f"Not computed: {', '.join(missing)}; run both with trace.level=full trace.kinds=[{kinds}].")
    if found.left_out:
        names = list_some(found.left_out, _NUM_NAMED, ", ")
        sentences.append(f"The update is without {names}, which are not traced whole in both runs.")
    return " ".join(filter(None, sentences))


def consequence_rows(found: Consequence | None, *, limit: int) -> tuple[tuple[str, str], ...]:
    """Clipping, KL, advantages and the update, as label and text; at most ``limit`` ways of changing a clip state."""
    if found is None:
        return ()
    rows: list[tuple[str, str]] = []
    if found.num_tokens is not None and found.num_clip_flips is not None:
        share = found.num_clip_flips / max(found.num_tokens, 1)
        clipped = "" if found.num_clipped is None else f"; {found.num_clipped:,} are clipped in the baseline"
        tokens = count_of(found.num_tokens, "response token")
        rows.append(("clipping", f"{found.num_clip_flips:,} of {tokens} ({share:.2%}) change their state{clipped}"))
    rows += [
        ("", f"{count_of(flip.num_tokens, 'token')}: {flip.baseline} in the baseline, {flip.candidate} here")
        for flip in found.clip_flips[:limit]
    ]
    if found.kl_to is not None and found.kl_baseline is not None and found.kl_candidate is not None:
        rows.append((KL_NAMES[found.kl_to], f"{found.kl_baseline:.6g} in the baseline, {found.kl_candidate:.6g} here"))
    if found.max_advantage_change is not None and found.max_advantage is not None:
        moved, largest = found.max_advantage_change, found.max_advantage
        rows.append(("advantages", f"move by {moved:.3g} at most; the largest is {largest:.3g}"))
    if found.gaps is not None:
        gaps = (f"median {gap.median:.2e}, 99 % below {gap.p99:.2e}, largest {gap.largest:.2e}" for gap in found.gaps)
        rows.append(("|train - rollout| log-probability", "; ".join(map(" ".join, zip(_SIDES, gaps, strict=True)))))
    if found.update_cosine:
        rows.append(("cosine of the update", list_some(_list_updates(found), _NUM_UPDATES, "; ")))
    return tuple(rows)


def _list_updates(found: Consequence) -> list[str]:
    places = found.updates or tuple((step, 0) for step in range(len(found.update_cosine)))
    ratios = found.update_ratio or (None,) * len(found.update_cosine)
    return [
        f"{cosine:.9g} at step {step}, update {update}"
        + ("" if ratio is None else f" ({_describe_length(ratio, digits=6)})")
        for (step, update), cosine, ratio in zip(places, found.update_cosine, ratios, strict=True)
    ]


def _sentence(parts: Sequence[str]) -> str:
    text = "; ".join(filter(None, parts))
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _describe_clip(found: Consequence) -> str:
    if not found.has_policy:
        return ""
    if not found.has_clip:
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
    if found.kl_to is None or found.kl_baseline is None or found.kl_candidate is None:
        return ""
    name = KL_NAMES[found.kl_to]
    if found.kl_baseline == found.kl_candidate:
        return f"the {name} stays {found.kl_baseline:.4g}"
    change = found.kl_candidate - found.kl_baseline
    return f"the {name} goes from {found.kl_baseline:.4g} to {found.kl_candidate:.4g} ({change:+.2g})"


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
    whose = "policy's" if found.has_policy else "model's"
    if not known:
        return f"of the {whose} updates, {still}" if still else ""
    cosine, (step, update), ratio = min(known)
    first = known[0]
    text = (
        f"the {whose} updates point where the baseline's do to a cosine of {_cosine(first[0])} in the first and "
        f"{_cosine(cosine)} at worst (step {step}, update {update}, {_describe_length(ratio)})"
    )
    if len(known) == 1:
        text = (
            f"the {whose} one update points where the baseline's does to a cosine of {_cosine(cosine)} "
            f"({_describe_length(ratio)})"
        )
    return f"{text}; {still}" if still else text


def _describe_length(ratio: float, *, digits: int = 4) -> str:
    """``0.5 times as long``; ``just as long`` where so many digits do not tell them apart."""
    text = f"{ratio:.{digits}g}"
    return "just as long" if text == "1" else f"{text} times as long"


def _cosine(value: float) -> str:
    """Writes it with as many digits as tell it from 1."""
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


def _list_missing(found: Consequence) -> list[str]:
    if not found.has_policy:
        return [] if found.update_cosine else ["the update's direction"]
    checks = {
        "clip states": found.has_clip and found.num_clip_flips is None,
        "KL": found.kl_baseline is None,
        "advantages": found.max_advantage is None,
        "the update's direction": not found.update_cosine,
        "the gap to the rollout's log-probabilities": found.gaps is None,
    }
    return [name for name, is_missing in checks.items() if is_missing]
