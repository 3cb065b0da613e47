"""Finds the common tokens of two runs: by the identity of their row and the position in it.

Tensors are compared in the baseline's order. A token without a row in both runs is absent; rows of one run only, or
with another length, are findings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import torch

from mock_scheduler.comparison.findings import (
    SIDES,
    Finding,
    OtherLengths,
    OtherNumUpdates,
    OtherUpdateRows,
    RowLength,
    RowsOnlyIn,
)
from mock_scheduler.comparison.thresholds import NAMED_ROWS
from mock_scheduler.trace.entries import RowTable, StepFooter
from mock_scheduler.trace.full.whole import Values


class TokenAlignment:
    """The tokens of a step's batch in both runs: ``rows`` of the baseline, and those of the candidate.

    Tokens are listed only when a tensor of so many tokens is there: a trace without one may say any number.
    """

    def __init__(self, rows: RowTable, candidate_rows: RowTable) -> None:
        self.rows = rows
        self._candidate_rows = candidate_rows
        self.num_candidate_tokens = candidate_rows.num_tokens
        #: Both have the same tokens in the same order: tensors are compared where they lie.
        self.is_same_order = rows == candidate_rows

    @cached_property
    def index(self) -> torch.Tensor:
        """int64 ``[T]``, for each token of the baseline the candidate's token, -1 where it has none."""
        return _match_tokens(self.rows, self._candidate_rows)

    def covers(self, baseline: Values, candidate: Values) -> bool:
        """Whether the first dimension of two tensors is these tokens."""
        return (
            not self.is_same_order
            and baseline.dim() > 0
            and candidate.dim() == baseline.dim()
            and (baseline.shape[0], candidate.shape[0]) == (self.rows.num_tokens, self.num_candidate_tokens)
        )

    def in_baseline_order(self, candidate: torch.Tensor) -> torch.Tensor:
        """Returns a candidate's tensor with a value for each token of the baseline; 0 where the candidate has none."""
        if not len(candidate):
            return candidate.new_zeros((len(self.index), *candidate.shape[1:]))
        # A missing token takes any row here, and is set to 0 below.
        moved = candidate.index_select(0, self.index.clamp(min=0))
        moved[self.index < 0] = 0
        return moved

    @property
    def is_shared(self) -> torch.Tensor | None:
        """bool ``[T]``: the baseline's tokens the candidate has; ``None`` where it has all."""
        if self.is_same_order or bool((self.index >= 0).all()):
            return None
        return self.index >= 0

    def find(self, token: int) -> tuple[str, int]:
        """Returns identity and position of a token of the baseline.

        Raises:
            IndexError: There is no such token.
        """
        row, position = self.rows.find(token)
        return self.rows.identities[row], position


def align_tokens(baseline: RowTable, candidate: RowTable) -> TokenAlignment:
    """Matches the tokens of two batches; rows present twice are matched in their order."""
    return TokenAlignment(baseline, candidate)


def _match_tokens(baseline: RowTable, candidate: RowTable) -> torch.Tensor:
    starts = candidate.first_places
    theirs = {name: number for number, name in enumerate(_numbered(candidate.identities))}
    index = torch.full((baseline.num_tokens,), -1, dtype=torch.int64)
    offset = 0
    for name, length in zip(_numbered(baseline.identities), baseline.lengths, strict=True):
        row = theirs.get(name)
        if row is not None:
            # A row cut short still has its first tokens in common.
            shared = min(length, candidate.lengths[row])
            index[offset : offset + shared] = torch.arange(starts[row], starts[row] + shared)
        offset += length
    return index


def find_row_differences(
    step: int, baseline: StepFooter, candidate: StepFooter, *, may_lack: tuple[bool, bool] = (False, False)
) -> list[Finding]:
    """Finds rows of one side only, rows with another length, and updates training on other rows; symmetric.

    ``may_lack``: sides that do not list all of their rows, as some of their ranks wrote nothing.
    """
    ours, theirs = (
        dict(zip(_numbered(side.rows.identities), side.rows.lengths, strict=True)) for side in (baseline, candidate)
    )
    facts: list[RowsOnlyIn | OtherLengths | OtherNumUpdates | OtherUpdateRows] = []
    for side, own, other, is_lacking in zip(SIDES, (ours, theirs), (theirs, ours), may_lack[::-1], strict=True):
        only = [name[0] for name in own if name not in other]
        if only and not is_lacking:
            first = tuple(only[:NAMED_ROWS])
            facts.append(RowsOnlyIn(side=side, num_rows=len(only), num_all=len(own), first=first))
    lengths = [
        RowLength(identity=name[0], baseline=length, candidate=theirs[name])
        for name, length in ours.items()
        if name in theirs and theirs[name] != length
    ]
    if lengths:
        facts.append(OtherLengths(num_rows=len(lengths), first=tuple(lengths[:NAMED_ROWS])))
    facts += [] if any(may_lack) else _find_other_updates(baseline, candidate)
    return [Finding(kind="rows", step=step, update=None, name=f"rows of step {step}", fact=fact) for fact in facts]


def _find_other_updates(baseline: StepFooter, candidate: StepFooter) -> list[OtherNumUpdates | OtherUpdateRows]:
    mine, other = len(baseline.update_rows), len(candidate.update_rows)
    if mine != other:
        return [OtherNumUpdates(baseline=mine, candidate=other)]
    found: list[OtherNumUpdates | OtherUpdateRows] = []
    for update in range(mine):
        ours, theirs = (_trained_on(footer, update) for footer in (baseline, candidate))
        if ours != theirs:
            only = (len(ours - theirs), len(theirs - ours))
            first = min(ours ^ theirs)[0]
            found.append(OtherUpdateRows(update=update, num_baseline=only[0], num_candidate=only[1], first=first))
    return found


def _trained_on(footer: StepFooter, update: int) -> set[tuple[str, int]]:
    names = _numbered(footer.rows.identities)
    return {names[row] for row in footer.update_rows[update]}


def _numbered(identities: Sequence[str]) -> list[tuple[str, int]]:
    """Returns each identity with how often it came before."""
    seen: Counter[str] = Counter()
    numbered = []
    for identity in identities:
        # A rollout may stand twice in a batch: its number makes the name unique.
        numbered.append((identity, seen[identity]))
        seen[identity] += 1
    return numbered
