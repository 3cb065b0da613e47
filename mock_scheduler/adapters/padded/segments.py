"""Lossless short forms of a stretch of a padded tensor: a rule, its parameters, and the places where it is wrong.

Contract: the rule of a stretch depends on nothing but the stretch and the row's own fields, so equal rows are
written alike whatever batch they are in. Values are compared and kept as bit patterns (unsigned integers of the
tensor's item size, here *lanes*), so NaN, -0.0 and garbage are values like any other.

A stretch is written as integers (the *program*) and lanes (its *values*):

=========  ====================================  ============  ============================
rule       program                               values        stands for
=========  ====================================  ============  ============================
CONSTANT   rule                                  c             c, c, c, …
COUNTING   rule                                  c             c, c + 1, c + 2, …
TOKENS     rule                                                the row's tokens
MASK       rule                                  a, b          b on response tokens, else a
LOGPROBS   rule                                  a             logprobs there, else a
RUNS       rule, number of runs, their lengths   one per run   runs of equal values
RAW        rule                                  all           themselves
ROUTING    rule                                                the row's routed experts, then 0
=========  ====================================  ============  ============================

``rule + PATCHED`` is followed by the number of patches and their positions, its values by theirs. An empty stretch is
written as nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from mock_scheduler.errors import BatchError

Lanes: TypeAlias = "npt.NDArray[Any]"

PATCHED = 16
_POSITION_SIZE = 4  # bytes of one integer of a program


class Rule(IntEnum):
    """The rule of a stretch of values; see the module's table."""

    CONSTANT = 1
    COUNTING = 2
    TOKENS = 3
    MASK = 4
    LOGPROBS = 5
    RUNS = 6
    RAW = 7
    ROUTING = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFields:
    """The batch's own fields, one value per token of all its rows: ``mask`` bool; ``tokens`` and ``rollout_logprobs``
    (0 where the mask is False) as lanes of the tensor's dtype, ``None`` where it is of another kind of number.

    ``routing``: of the tensor of routed experts alone, these as its lanes, several for each token."""

    mask: npt.NDArray[np.bool_]
    tokens: Lanes | None
    rollout_logprobs: Lanes | None
    routing: Lanes | None = None


class _Candidate(NamedTuple):  # many are made for each row, and a data class takes several times as long
    rule: Rule
    values: list[Any]
    expected: Any  # lanes, or the one lane that all have


def write_segment(lanes: Lanes, fields: TokenFields | None = None, start: int = 0) -> tuple[list[int], Lanes]:
    """The program and values of a stretch, by the first rule that is right everywhere, else by the shortest form.

    ``fields``: where the stretch is a row's tokens, from ``start`` on; ``None`` elsewhere.
    """
    if len(lanes) == 0:
        return [], lanes
    if _is_constant(lanes):
        return [int(Rule.CONSTANT)], lanes[:1]
    tried: list[tuple[_Candidate, int]] = []
    for candidate in _candidates(lanes, fields, start):
        num_wrong = int(np.count_nonzero(lanes != candidate.expected))
        if num_wrong == 0:
            return [int(candidate.rule)], np.array(candidate.values, dtype=lanes.dtype)
        tried.append((candidate, num_wrong))
    return _write_inexact(lanes, tried)


def _write_inexact(lanes: Lanes, tried: list[tuple[_Candidate, int]]) -> tuple[list[int], Lanes]:
    """``write_segment`` of a stretch without a rule that is right everywhere; ``tried``: each with its number of
    errors, the preferred first."""
    # A guess at the most frequent value, without counting: padding lies at one end, and mostly reaches the middle.
    last = lanes[-1]
    common = last if lanes[len(lanes) // 2] == last else lanes[0]
    tried.insert(0, (_Candidate(Rule.CONSTANT, [common], common), int(np.count_nonzero(lanes != common))))
    best, best_wrong, best_size = None, 0, len(lanes) * lanes.itemsize
    for candidate, num_wrong in tried:
        # A patch costs its position and its value; of two equally short forms the earlier one stays.
        size = len(candidate.values) * lanes.itemsize + num_wrong * (lanes.itemsize + _POSITION_SIZE)
        if size < best_size:
            best, best_wrong, best_size = candidate, num_wrong, size
    starts = (lanes[1:] != lanes[:-1]).nonzero()[0] + 1
    if (len(starts) + 1) * (lanes.itemsize + _POSITION_SIZE) < best_size:
        bounds = np.concatenate([[0], starts, [len(lanes)]])
        lengths = (bounds[1:] - bounds[:-1]).tolist()
        return [int(Rule.RUNS), len(lengths), *lengths], lanes[bounds[:-1]]
    if best is None:
        return [int(Rule.RAW)], lanes
    positions = (lanes != best.expected).nonzero()[0]
    values = np.concatenate([np.array(best.values, dtype=lanes.dtype), lanes[positions]])
    return [best.rule + PATCHED, best_wrong, *positions.tolist()], values


def _is_constant(lanes: Lanes) -> bool:
    """Whether all lanes are equal; by extremes, since most of a padded tensor is read for this alone, and comparing
    would write as many flags."""
    first = lanes[0]
    if lanes[-1] != first or np.maximum.reduce(lanes) != first:
        return False
    return bool(first == 0 or np.minimum.reduce(lanes) == first)  # of unsigned numbers, all are 0 where the largest is


def _candidates(lanes: Lanes, fields: TokenFields | None, start: int) -> Iterator[_Candidate]:
    """The rules that may be right for a stretch that is not constant, in the order of trial."""
    first, last = lanes[0], lanes[-1]
    if int(lanes[1]) - int(first) == 1 or int(last) - int(lanes[-2]) == 1:
        yield _Candidate(Rule.COUNTING, [first], _count_from(first, len(lanes)))
    if fields is None:
        return
    stop = start + len(lanes)
    if fields.routing is not None:
        yield _Candidate(Rule.ROUTING, [], fields.routing[start:stop])
        return
    if fields.tokens is not None:
        yield _Candidate(Rule.TOKENS, [], fields.tokens[start:stop])
    mask = fields.mask[start:stop]
    on_at, off_at = int(mask.argmax()), int(mask.argmin())
    is_mixed = bool(mask[on_at]) and not mask[off_at]
    off = lanes[off_at] if is_mixed else lanes.dtype.type(0)
    if is_mixed:
        yield _Candidate(Rule.MASK, [off, lanes[on_at]], np.where(mask, lanes[on_at], off))
    if fields.rollout_logprobs is not None:
        yield _Candidate(Rule.LOGPROBS, [off], np.where(mask, fields.rollout_logprobs[start:stop], off))


def _count_from(first: Any, length: int) -> Lanes:  # noqa: ANN401 - a NumPy scalar of any of the lane types
    counted: Lanes = np.arange(length).astype(first.dtype)
    counted += first  # wraps around, as arrays of unsigned integers do
    return counted


class SegmentReader:
    """Reads the stretches of one row, of all its tensors, in the order of writing.

    ``values``: the bytes of the values of all stretches, uint8, one after another.
    """

    __slots__ = ("_program", "_taken", "_values", "position")

    def __init__(self, program: list[int], values: npt.NDArray[np.uint8], *, position: int = 0) -> None:
        self._program, self._values, self._taken = program, values, 0
        self.position = position
        """Where the program goes on."""

    def read_into(self, out: Lanes, fields: TokenFields | None = None, start: int = 0) -> None:
        """Fill ``out``, the stretch of the tensor, full of zeros; ``fields`` and ``start`` as for
        ``write_segment``."""
        if len(out) == 0:
            return
        code = self._take_integer()
        if code == Rule.CONSTANT:
            value = self._take_values(out.dtype, 1)[0]
            if value:  # memory that is not written to stays the system's page of zeros, and most of a tensor is padding
                out.fill(value)
            return
        if fields is None or not self._fill_from_row(out, code % PATCHED, fields, start):
            self._fill(out, code % PATCHED)
        if code >= PATCHED:
            positions = self._take_integers(self._take_integer())
            out[positions] = self._take_values(out.dtype, len(positions))

    def _fill(self, out: Lanes, rule: int) -> None:
        if rule == Rule.CONSTANT:
            out[:] = self._take_values(out.dtype, 1)
        elif rule == Rule.COUNTING:
            out[:] = _count_from(self._take_values(out.dtype, 1)[0], len(out))
        elif rule == Rule.RAW:
            out[:] = self._take_values(out.dtype, len(out))
        elif rule == Rule.RUNS:
            lengths = self._take_integers(self._take_integer())
            out[:] = np.repeat(self._take_values(out.dtype, len(lengths)), lengths)
        else:
            raise BatchError(f"padded batch: rule {rule} stands where there is no such field")

    def _fill_from_row(self, out: Lanes, rule: int, fields: TokenFields, start: int) -> bool:
        """Whether the rule is one of the row's own fields, and these are of the tensor's kind."""
        stop = start + len(out)
        if rule == Rule.TOKENS and fields.tokens is not None:
            out[:] = fields.tokens[start:stop]
        elif rule == Rule.ROUTING and fields.routing is not None:
            out[:] = fields.routing[start:stop]
        elif rule == Rule.MASK:
            off, on = self._take_values(out.dtype, 2)
            out[:] = off
            np.copyto(out, on, where=fields.mask[start:stop])
        elif rule == Rule.LOGPROBS and fields.rollout_logprobs is not None:
            out[:] = self._take_values(out.dtype, 1)
            np.copyto(out, fields.rollout_logprobs[start:stop], where=fields.mask[start:stop])
        else:
            return False
        return True

    def _take_integer(self) -> int:
        self.position += 1
        return self._program[self.position - 1]

    def _take_integers(self, count: int) -> list[int]:
        self.position += count
        return self._program[self.position - count : self.position]

    def _take_values(self, dtype: np.dtype[Any], count: int) -> Lanes:
        start = self._taken
        self._taken += count * dtype.itemsize
        return self._values[start : self._taken].view(dtype)
