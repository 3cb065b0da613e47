"""Which tokens of two runs are the same: by the identity of their row and the position in it.

The baseline's order is the one that is compared in. What is in no row of both runs is absent, and the rows that only
one run has, or has with another length, are findings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mock_scheduler.compare.findings import Finding
from mock_scheduler.support.text import count_of, list_some
from mock_scheduler.trace.entries import RowTable, StepFooter

_NUM_NAMED = 3


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenAlignment:
    """The tokens of a step's batch in both runs.

    rows: the baseline's. num_candidate_tokens: of the candidate. index: int64 ``[T]``, for each token of the baseline
    the candidate's token, -1 where it has none; ``None`` where both have the same tokens in the same order.
    """

    rows: RowTable
    num_candidate_tokens: int
    index: torch.Tensor | None

    def covers(self, baseline: torch.Tensor, candidate: torch.Tensor) -> bool:
        """Whether the first dimension of two tensors is these tokens."""
        return (
            self.index is not None
            and baseline.dim() > 0
            and candidate.dim() == baseline.dim()
            and (len(baseline), len(candidate)) == (self.rows.num_tokens, self.num_candidate_tokens)
        )

    def in_baseline_order(self, candidate: torch.Tensor) -> torch.Tensor:
        """A candidate's tensor with a value for each token of the baseline; 0 where the candidate has none."""
        assert self.index is not None
        if not len(candidate):
            return candidate.new_zeros((len(self.index), *candidate.shape[1:]))
        moved = candidate.index_select(0, self.index.clamp(min=0))
        moved[self.index < 0] = 0
        return moved

    @property
    def is_shared(self) -> torch.Tensor | None:
        """bool ``[T]``: the baseline's tokens that the candidate has; ``None`` where it has all."""
        if self.index is None or bool((self.index >= 0).all()):
            return None
        return self.index >= 0

    def describe(self, token: int) -> tuple[str, int]:
        """Identity and position of a token of the baseline; raises ``IndexError`` where there is none."""
        row, position = self.rows.find(token)
        return self.rows.identities[row], position


def align_tokens(baseline: RowTable, candidate: RowTable) -> TokenAlignment:
    """Match the tokens of two batches; rows that are there twice are matched in their order."""
    if baseline == candidate:
        return TokenAlignment(rows=baseline, num_candidate_tokens=candidate.num_tokens, index=None)
    starts = _starts(candidate)
    theirs = {name: number for number, name in enumerate(_numbered(candidate.identities))}
    index = torch.full((baseline.num_tokens,), -1, dtype=torch.int64)
    offset = 0
    for name, length in zip(_numbered(baseline.identities), baseline.lengths, strict=True):
        row = theirs.get(name)
        if row is not None:
            shared = min(length, candidate.lengths[row])
            index[offset : offset + shared] = torch.arange(starts[row], starts[row] + shared)
        offset += length
    return TokenAlignment(rows=baseline, num_candidate_tokens=candidate.num_tokens, index=index)


def find_row_differences(step: int, baseline: StepFooter, candidate: StepFooter) -> list[Finding]:
    """Rows of one side only, rows with another length, and updates that train on other rows; symmetric."""
    ours, theirs = (
        dict(zip(_numbered(side.rows.identities), side.rows.lengths, strict=True)) for side in (baseline, candidate)
    )
    messages = []
    for side, own, other in (("baseline", ours, theirs), ("candidate", theirs, ours)):
        only = [name[0] for name in own if name not in other]
        if only:
            messages.append(
                f"{count_of(len(only), 'row')} of {len(own)} of step {step} {'is' if len(only) == 1 else 'are'} in the "
                f"{side} only: {list_some(only, _NUM_NAMED)}"
            )
    lengths = [
        f"{name[0]} has {length} tokens in the baseline and {theirs[name]} in the candidate"
        for name, length in ours.items()
        if name in theirs and theirs[name] != length
    ]
    if lengths:
        messages.append(
            f"{count_of(len(lengths), 'row')} of step {step} {'has' if len(lengths) == 1 else 'have'} another length: "
            f"{list_some(lengths, _NUM_NAMED)}; their first tokens are compared"
        )
    messages += _other_updates(step, baseline, candidate)
    return [
        Finding(kind="rows", step=step, update=None, name=f"rows of step {step}", message=text) for text in messages
    ]


def _other_updates(step: int, baseline: StepFooter, candidate: StepFooter) -> list[str]:
    mine, other = len(baseline.update_rows), len(candidate.update_rows)
    if mine != other:
        return [f"step {step} has {count_of(mine, 'update')} in the baseline and {other} in the candidate"]
    messages = []
    for update in range(mine):
        ours, theirs = (_trained_on(footer, update) for footer in (baseline, candidate))
        if ours != theirs:
            messages.append(
                f"update {update} of step {step} trains on other rows: {len(ours - theirs)} only in the baseline, "
                f"{len(theirs - ours)} only in the candidate"
            )
    return messages


def _trained_on(footer: StepFooter, update: int) -> set[tuple[str, int]]:
    names = _numbered(footer.rows.identities)
    return {names[row] for row in footer.update_rows[update]}


def _numbered(identities: Sequence[str]) -> list[tuple[str, int]]:
    """Each identity with how often it came before."""
    seen: Counter[str] = Counter()
    numbered = []
    for identity in identities:
        numbered.append((identity, seen[identity]))
        seen[identity] += 1
    return numbered


def _starts(rows: RowTable) -> list[int]:
    starts, offset = [], 0
    for length in rows.lengths:
        starts.append(offset)
        offset += length
    return starts
