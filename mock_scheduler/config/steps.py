"""Sets of steps as a user writes them: ``"0-19, 40, 100-"``, a number, or a list of these.

Contract: immutable, hashable and canonical: equal sets of steps have one text, which reads back equal.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from mock_scheduler.errors import ConfigError

_RANGE = re.compile(r"\s*(\d{1,12})\s*(-\s*(\d{1,12})?)?\s*")


@dataclass(frozen=True, slots=True)
class StepRanges:
    """Ranges ``(first, last)``, ascending and neither overlapping nor adjacent; ``last`` None has no end."""

    ranges: tuple[tuple[int, int | None], ...]

    @classmethod
    def parse(cls, value: object) -> StepRanges:
        """Reads ``"0-19, 40, 100-"``, ``7`` or ``[0, "5-9"]``; raises ``ValueError`` with the form to write."""
        items = value if isinstance(value, list | tuple) else [value]
        parsed: list[tuple[int, int | None]] = []
        for item in items:
            if isinstance(item, StepRanges):
                parsed += item.ranges
            elif type(item) is int and item >= 0:
                parsed.append((item, item))
            elif isinstance(item, str) and item.strip():
                parsed += [_parse_range(part) for part in item.split(",")]
            else:
                raise ValueError(_expected(item))
        return cls(_merged(parsed))

    @classmethod
    def of(cls, steps: Iterable[int]) -> StepRanges:
        """Returns the set of these steps, in any order."""
        return cls(_merged([(step, step) for step in steps]))

    def __contains__(self, step: object) -> bool:
        return isinstance(step, int) and any(
            first <= step and (last is None or step <= last) for first, last in self.ranges
        )

    def is_within(self, other: StepRanges) -> bool:
        """Says whether every step of this set is in the other; true of an empty set."""
        return all(any(_covers(outer, inner) for outer in other.ranges) for inner in self.ranges)

    def absent_from(self, present: Collection[int]) -> StepRanges:
        """Returns the ends of ranges that are not among ``present``, and a range without an end that has none of them.

        A range between two present steps may have gaps: runs write every tenth step. One beyond them is an error.
        """
        ends = [step for first, last in self.ranges if last is not None for step in (first, last)]
        absent = [(step, step) for step in ends if step not in present]
        open_ones = [(first, last) for first, last in self.ranges if last is None]
        return StepRanges(_merged(absent + [item for item in open_ones if max(present, default=-1) < item[0]]))

    def __str__(self) -> str:
        return ", ".join(
            f"{first}-" if last is None else str(first) if first == last else f"{first}-{last}"
            for first, last in self.ranges
        )


def _covers(outer: tuple[int, int | None], inner: tuple[int, int | None]) -> bool:
    """Says whether one range holds another whole; ranges of a set are never adjacent, so one alone must hold it."""
    return outer[0] <= inner[0] and (outer[1] is None or (inner[1] is not None and inner[1] <= outer[1]))


def _parse_range(text: str) -> tuple[int, int | None]:
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ValueError(_expected(text))
    first = int(match[1])
    last = first if match[2] is None else int(match[3]) if match[3] else None
    if last is not None and last < first:
        raise ValueError(f"range {text.strip()!r} ends before it begins")
    return first, last


def _merged(ranges: list[tuple[int, int | None]]) -> tuple[tuple[int, int | None], ...]:
    merged: list[tuple[int, int | None]] = []
    for first, last in sorted(ranges, key=lambda pair: pair[0]):
        if merged and (merged[-1][1] is None or first <= merged[-1][1] + 1):
            earlier = merged[-1][1]
            merged[-1] = (merged[-1][0], None if earlier is None or last is None else max(earlier, last))
        else:
            merged.append((first, last))
    return tuple(merged)


def _expected(item: object) -> str:
    return f"steps {item!r} cannot be read; write steps and ranges, for example '0-19, 40, 100-' or [0, 5, '10-19']"


def parse_steps(text: str | None) -> StepRanges | None:
    """Read ``--steps`` as a set; ``None`` where it is absent. Raises ``ConfigError``."""
    if text is None:
        return None
    try:
        return StepRanges.parse(text)
    except ValueError as error:
        raise ConfigError(f"--steps: {error}") from error
