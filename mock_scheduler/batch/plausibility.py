"""Finds data that cannot be true, and data that may be but seldom are, in a batch that keeps every rule of ``checks``.

Contract: findings are data; ``Finding.describe`` says each in one line. The same findings stand in a run's log, in its
errors, in ``inspect`` and ``verify`` and in the report of rollout correction. No value is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from mock_scheduler.batch.columns import TensorColumn
from mock_scheduler.batch.offsets import count_before
from mock_scheduler.batch.rollout_batch import RolloutBatch
from mock_scheduler.batch.trajectory import SampleIdentity
from mock_scheduler.batch.versions import stated_versions, trajectory_index
from mock_scheduler.support.text import count_of

#: A ragged bool column: whether the engine gave each response token's log-probability.
VALID_COLUMN = "rollout_logprobs_valid"
#: A log-probability above 0 by no more than this is rounding: ``logit - logsumexp`` of float32 logits below 128 is off
#: by half a unit in the last place of each, 4e-6, and by as much for the sum.
ROUNDING = 1e-5
#: Equal log-probabilities in a row are chance where they come about more often than this: at a million rows of a run
#: one is expected to be taken for made-up.
LEAST_CHANCE = 1e-6
#: Fewer equal log-probabilities than this, other than 0.0, are chance: bfloat16 has 128 values in an octave.
FEWEST_EQUAL = 4
#: The choices among which an even choice is recognised by its log-probability: beyond, ``log(n)`` and ``log(n + 1)``
#: are less than a few float32 apart.
_MOST_CHOICES = 100_000


class FindingKind(Enum):
    """What was found; the first three cannot be true."""

    VERSION_AHEAD = "policy versions ahead of the policy"
    VERSION_NEGATIVE = "negative policy versions"
    POSITIVE_LOGPROB = "log-probabilities above 0"
    VERSION_FALLS = "policy versions that fall"
    MADE_UP = "made-up log-probabilities"
    OTHER_HISTORY = "turns with another history"


_IMPOSSIBLE = frozenset({FindingKind.VERSION_AHEAD, FindingKind.VERSION_NEGATIVE, FindingKind.POSITIVE_LOGPROB})


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Holds one kind of finding in a batch.

    count, total: of turns, tokens, rows or trajectories; unit: of which, where either may be. first: the first row
    found. position: of the first token in its row, or of its turn. found, expected: the values there; ``None`` where
    there is none, as after a row's end.
    """

    kind: FindingKind
    count: int
    total: int
    first: SampleIdentity
    position: int | None = None
    found: float | None = None
    expected: float | None = None
    unit: str = ""

    @property
    def is_impossible(self) -> bool:
        """Whether it cannot be true."""
        return self.kind in _IMPOSSIBLE

    def describe(self) -> str:
        """Returns one line with the numbers, the first place and its values."""
        return _DESCRIPTIONS[self.kind](self)

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return _REMEDIES[self.kind]


def find_impossible(batch: RolloutBatch, *, latest_version: int) -> list[Finding]:
    """Finds data that cannot be true. ``latest_version``: of the newest policy that may have sampled."""
    return [*_impossible_versions(batch, latest_version), *_positive_logprobs(batch)]


def find_unlikely(batch: RolloutBatch) -> list[Finding]:
    """Finds data that may be true, but are seldom meant."""
    return [*_falling_versions(batch), *_made_up(batch), *_other_histories(batch)]


# --- Policy versions --------------------------------------------------------------------------------------------------


def _impossible_versions(batch: RolloutBatch, latest: int) -> Iterator[Finding]:
    arrays, stated = batch.arrays, stated_versions(batch)
    versions, offsets = arrays["policy_versions"], arrays["turn_offsets"]
    if stated is not None:  # a turn has the oldest of its tokens
        versions, offsets = stated, arrays["response_offsets"]
    for kind, flags, expected in (
        (FindingKind.VERSION_AHEAD, versions > latest, latest),
        (FindingKind.VERSION_NEGATIVE, versions < 0, 0),
    ):
        places = np.flatnonzero(flags)
        if len(places):
            row = int(np.searchsorted(offsets, places[0], side="right")) - 1
            yield Finding(
                kind=kind,
                count=len(places),
                total=len(versions),
                first=batch.identities[row],
                found=int(versions[places[0]]),
                expected=expected,
                unit="turn" if stated is None else "response token",
            )


def _falling_versions(batch: RolloutBatch) -> Iterator[Finding]:
    versions = batch.arrays["policy_versions"]
    row_of_turn = np.repeat(np.arange(len(batch)), batch.arrays["num_turns"])
    trajectory = trajectory_index(batch)[row_of_turn]
    is_fall = (versions[1:] < versions[:-1]) & (trajectory[1:] == trajectory[:-1])
    places = np.flatnonzero(is_fall)
    if len(places):
        turn = int(places[0]) + 1
        yield Finding(
            kind=FindingKind.VERSION_FALLS,
            count=len(np.unique(trajectory[1:][is_fall])),
            total=batch.num_trajectories,
            first=batch.identities[int(row_of_turn[turn])],
            position=turn - int(np.searchsorted(trajectory, trajectory[turn])),
            found=int(versions[turn]),
            expected=int(versions[turn - 1]),
        )


# --- Log-probabilities ------------------------------------------------------------------------------------------------


def valid_logprobs(batch: RolloutBatch) -> npt.NDArray[np.bool_] | None:
    """Reads bool ``[M]`` of the M response tokens, False where the engine gave no log-probability.

    ``None`` where the batch does not say, or not for each response token.
    """
    column = batch.extras.get(VALID_COLUMN)
    if not isinstance(column, TensorColumn):
        return None
    values, bounds = column.raw.array(), column.bounds
    if values is None or values.ndim != 1 or values.dtype != np.bool_ or bounds is None:
        return None
    return values if np.array_equal(bounds, batch.arrays["response_offsets"]) else None


def _positive_logprobs(batch: RolloutBatch) -> Iterator[Finding]:
    values = batch.arrays["rollout_logprobs"]
    if not len(values) or values.max() <= ROUNDING:
        return
    is_positive, valid = values > ROUNDING, valid_logprobs(batch)
    if valid is not None:
        is_positive &= valid
    places = np.flatnonzero(is_positive)
    if len(places):
        offsets = batch.arrays["response_offsets"]
        row = int(np.searchsorted(offsets, places[0], side="right")) - 1
        yield Finding(
            kind=FindingKind.POSITIVE_LOGPROB,
            count=len(places),
            total=len(values),
            first=batch.identities[row],
            position=int(places[0] - offsets[row]),
            found=float(values[places[0]]),
            expected=0.0,
        )


def made_up_rows(batch: RolloutBatch) -> dict[int, float]:
    """Finds rows whose log-probabilities are all one value, where chance does not explain it; with the value.

    A certain token has exactly 0.0, and of a coarse type many values are equal. With q the share of the value among the
    tokens of all other rows, chance explains n such tokens in a row where q^n ≥ 1e-6; it always explains a single 0.0
    and fewer than four others, of which q counts one more token than was seen. An even choice among n, log(1/n), is a
    policy's own; so is 0.0 where the likeliest token is always taken.
    """
    offsets, values = batch.arrays["response_offsets"], batch.arrays["rollout_logprobs"]
    lengths = batch.arrays["response_lengths"]
    is_new = np.ones(len(values), dtype=np.bool_)
    is_new[1:] = values[1:] != values[:-1]
    starts = offsets[:-1][lengths > 0]
    is_new[starts] = False
    changes = np.diff(count_before(is_new)[offsets])
    candidates = np.flatnonzero((changes == 0) & (lengths > 1))
    found: dict[int, float] = {}
    for value in np.unique(values[offsets[candidates]]).tolist():
        rows = candidates[values[offsets[candidates]] == value]
        if value == 0.0:
            is_meant = batch.sampling.temperature == 0 or batch.sampling.top_k == 1
        else:
            rows = rows[lengths[rows] >= FEWEST_EQUAL]
            is_meant = _is_even_choice(value)
        if is_meant or not len(rows):
            continue
        others = len(values) - int(lengths[rows].sum())
        seen = int((values == value).sum()) - int(lengths[rows].sum())
        share = (seen / others if others else 0.0) if value == 0.0 else (seen + 1) / (others + 1) if others else 0.0
        is_made_up = share ** lengths[rows].astype(np.float64) < LEAST_CHANCE
        found |= dict.fromkeys(rows[is_made_up].tolist(), value)
    return dict(sorted(found.items()))


def _is_even_choice(logprob: float) -> bool:
    if logprob >= 0:
        return False
    choices = float(np.exp(-np.float64(logprob)))
    slack = 4 * np.finfo(np.float32).eps * abs(logprob) * choices
    return bool(choices < _MOST_CHOICES and abs(choices - round(choices)) <= slack)


def _made_up(batch: RolloutBatch) -> Iterator[Finding]:
    rows, valid = made_up_rows(batch), valid_logprobs(batch)
    if valid is not None:
        missing = np.diff(count_before(~valid)[batch.arrays["response_offsets"]])
        rows = {row: value for row, value in rows.items() if not missing[row]}
    if rows:
        first, value = next(iter(rows.items()))
        yield Finding(
            kind=FindingKind.MADE_UP, count=len(rows), total=len(batch), first=batch.identities[first], found=value
        )


# --- The history of a turn --------------------------------------------------------------------------------------------


def _other_histories(batch: RolloutBatch) -> Iterator[Finding]:
    """Compares each row with the row before it in its trajectory, whose tokens it must begin with."""
    index, arrays = trajectory_index(batch), batch.arrays
    offsets, lengths, tokens = arrays["row_offsets"], arrays["lengths"], arrays["tokens"]
    later = np.flatnonzero(np.diff(index) == 0) + 1
    if not len(later):
        return
    sizes, shared = lengths[later - 1], np.minimum(lengths[later - 1], lengths[later])
    pair = np.repeat(np.arange(len(later)), shared)
    within = np.arange(len(pair)) - np.repeat(shared.cumsum() - shared, shared)
    is_other = tokens[offsets[later - 1][pair] + within] != tokens[offsets[later][pair] + within]
    firsts = shared.copy()
    np.minimum.at(firsts, pair[is_other], within[is_other])
    wrong = np.flatnonzero(firsts < sizes)
    if not len(wrong):
        return
    number, position = int(later[wrong[0]]), int(firsts[wrong[0]])
    yield Finding(
        kind=FindingKind.OTHER_HISTORY,
        count=len(np.unique(index[later[wrong]])),
        total=batch.num_trajectories,
        first=batch.identities[number],
        position=position,
        found=int(tokens[offsets[number] + position]) if position < int(lengths[number]) else None,
        expected=int(tokens[offsets[number - 1] + position]),
    )


# --- Words ------------------------------------------------------------------------------------------------------------


def _describe_history(finding: Finding) -> str:
    then = "its row ends before it" if finding.found is None else f"it is {finding.found} now"
    return (
        f"{_share(finding, 'trajectory', 'trajectories')} with a turn whose tokens do not begin with those of the turn "
        f"before: {finding.first}: token {finding.position} was {finding.expected}, {then}"
    )


def _share(finding: Finding, noun: str, plural: str = "") -> str:
    return f"{count_of(finding.count, noun, plural or f'{noun}s')} of {finding.total}"


_DESCRIPTIONS = {
    FindingKind.VERSION_AHEAD: lambda f: (
        f"{_share(f, f.unit)} with a policy version ahead of the policy: {f.first}: version {f.found}, and the newest "
        f"policy is {f.expected}"
    ),
    FindingKind.VERSION_NEGATIVE: lambda f: (
        f"{_share(f, f.unit)} with a negative policy version: {f.first}: version {f.found}"
    ),
    FindingKind.POSITIVE_LOGPROB: lambda f: (
        f"{_share(f, 'response token')} with a log-probability above 0, of a probability above 1: {f.first}: "
        f"{f.found:.6g} at response token {f.position}"
    ),
    FindingKind.VERSION_FALLS: lambda f: (
        f"{_share(f, 'trajectory', 'trajectories')} with a policy version that falls from one turn to the next: "
        f"{f.first}: version {f.found} in turn {f.position} of the trajectory, after {f.expected}"
    ),
    FindingKind.MADE_UP: lambda f: (
        f"{_share(f, 'row')} with one log-probability for all tokens, more often than chance explains: {f.first}: "
        f"{f.found:.9g} throughout"
    ),
    FindingKind.OTHER_HISTORY: _describe_history,
}

_REMEDIES = {
    FindingKind.VERSION_AHEAD: (
        "stamp each turn with the version of the weights that sampled it, counted as the trainer counts them "
        "(policy_version of the request, and of update_weights)"
    ),
    FindingKind.VERSION_NEGATIVE: "give the version of the weights that sampled the turn, from 0 on",
    FindingKind.POSITIVE_LOGPROB: (
        f"record the engine's log-probabilities of the sampled tokens; where it gave none, say so in a column "
        f"{VALID_COLUMN}"
    ),
    FindingKind.VERSION_FALLS: (
        "so it is where turns go to engines of which some get new weights later; with one engine its counter fell back"
    ),
    FindingKind.MADE_UP: (
        "have the engine return them (verl: actor_rollout_ref.rollout.calculate_log_probs true), or give the column "
        f"{VALID_COLUMN}"
    ),
    FindingKind.OTHER_HISTORY: (
        "give the turn the tokens that were sampled, and not their text encoded again; a history that is cut on "
        "purpose is another trajectory to the trainer"
    ),
}
