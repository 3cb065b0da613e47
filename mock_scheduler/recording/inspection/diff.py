"""Compares two batches row by row: rows matched by identity, values compared bit by bit.

Contract: two batches are identical here exactly where their ``RolloutBatch.digest`` is equal; no tolerance is applied.
Whole tensors are compared first, rows only where those differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mock_scheduler.batch import RolloutBatch, SampleIdentity, sampling_as_json
from mock_scheduler.recording.inspection.diff_fields import (
    ABSENT,
    FieldDifference,
    FieldPair,
    json_difference,
    pair_fields,
)
from mock_scheduler.support.digests import JSON, canonical_json
from mock_scheduler.support.text import count_of, printable

_NUM_SHOWN = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class RowDifference:
    """A row both batches have, and its fields that differ."""

    identity: SampleIdentity
    fields: tuple[FieldDifference, ...]

    def describe(self, names: tuple[str, str]) -> str:
        """Returns one line: the first differing field with its values, and the names of the others."""
        also = ", ".join(difference.field for difference in self.fields[1:])
        return f"{self.identity}: {self.fields[0].describe(names)}{f'; also {also}' if also else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchDifferences:
    """Holds all differences between batches ``a`` and ``b``.

    ``whole``: differences of the whole batch (sampling, group size, meta, kinds of extras); ``only_a`` and ``only_b``:
    rows of one side; ``rows``: rows of both that differ, at most as many as were asked for, of ``num_different_rows``;
    ``field_counts``: field -> number of rows that differ in it, over all rows.
    """

    num_rows: tuple[int, int]
    whole: tuple[FieldDifference, ...]
    only_a: tuple[SampleIdentity, ...]
    only_b: tuple[SampleIdentity, ...]
    rows: tuple[RowDifference, ...]
    num_different_rows: int
    field_counts: Mapping[str, int]

    @property
    def is_identical(self) -> bool:
        """True where every bit of the two batches is equal."""
        return not (self.whole or self.only_a or self.only_b or self.num_different_rows)

    def first(self, names: tuple[str, str] = ("recorded", "played")) -> str:
        """Returns the first difference in one line: of the whole batch, else a row of one side, else a row of both."""
        if self.whole:
            return f"whole batch: {self.whole[0].describe(names)}"
        for name, only in zip(names, (self.only_a, self.only_b), strict=True):
            if only:
                return f"{only[0]}: only in {name}"
        if self.rows:
            return f"{self.rows[0].identity}: {self.rows[0].fields[0].describe(names)}"
        return "in rows that were not asked for" if self.num_different_rows else "none"

    def describe(self, names: tuple[str, str] = ("recorded", "played")) -> str:
        """Lines for a person: how much differs, the first difference in full, then at most 20 more of each kind."""
        if self.is_identical:
            return f"{names[0]} and {names[1]} are identical ({count_of(self.num_rows[0], 'row')})"
        lines = [f"{names[0]} and {names[1]} differ: {self.summarise(names)}", f"first: {self.first(names)}"]
        others, num_others = self.rows, self.num_different_rows
        if self._first_is_row:
            lines += [f"  {difference.describe(names)}" for difference in self.rows[0].fields[1:]]
            others, num_others = self.rows[1:], self.num_different_rows - 1
        if self.field_counts:
            lines.append("rows by field: " + ", ".join(f"{name} {count}" for name, count in self.field_counts.items()))
        lines += _listed("whole batch", [difference.describe(names) for difference in self.whole], len(self.whole))
        for name, only in zip(names, (self.only_a, self.only_b), strict=True):
            lines += _listed(f"only in {name}", [str(identity) for identity in only[:_NUM_SHOWN]], len(only))
        rows = [row.describe(names) for row in others[:_NUM_SHOWN]]
        title = "other rows that differ" if self._first_is_row else "in both, but different"
        return "\n".join(map(printable, lines + _listed(title, rows, num_others)))

    @property
    def _first_is_row(self) -> bool:
        return bool(self.rows) and not (self.whole or self.only_a or self.only_b)

    def summarise(self, names: tuple[str, str] = ("recorded", "played")) -> str:
        """Returns ``2 of 4 rows in both differ; 1 of 5 rows only in recorded``."""
        parts = [f"{self.num_different_rows} of {self.num_rows[0] - len(self.only_a)} rows in both differ"]
        parts += [
            f"{len(only)} of {total} rows only in {name}"
            for name, only, total in zip(names, (self.only_a, self.only_b), self.num_rows, strict=True)
            if only
        ]
        if self.whole:
            parts.append(f"{count_of(len(self.whole), 'difference')} of the whole batch")
        return "; ".join(parts)


def compare_batches(a: RolloutBatch, b: RolloutBatch, *, limit: int | None = None) -> BatchDifferences:
    """Returns all differences between two batches of any number of rows.

    ``limit``: give at most so many differing rows in detail (``None``: all); the counts always cover all rows.
    """
    index_b = {identity: index for index, identity in enumerate(b.identities)}
    identities_a = set(a.identities)
    pairs = [(index, index_b[identity]) for index, identity in enumerate(a.identities) if identity in index_b]
    fields, kinds = pair_fields(a, b)
    differing: dict[tuple[int, int], list[FieldPair]] = {}
    for field in fields:
        # Whole tensors first: of equal batches no row is looked at.
        if a.identities == b.identities and field.is_equal():
            continue
        for pair in pairs:
            if field.differs(*pair):
                differing.setdefault(pair, []).append(field)
    return BatchDifferences(
        num_rows=(len(a), len(b)),
        whole=(*_whole_differences(a, b), *kinds),
        only_a=tuple(identity for identity in a.identities if identity not in index_b),
        only_b=tuple(identity for identity in b.identities if identity not in identities_a),
        rows=tuple(
            RowDifference(
                identity=a.identities[pair[0]], fields=tuple(field.difference(*pair) for field in differing[pair])
            )
            for pair in sorted(differing)[:limit]
        ),
        num_different_rows=len(differing),
        field_counts=_count_fields(fields, differing.values()),
    )


def _count_fields(fields: Sequence[FieldPair], differing: Iterable[Sequence[FieldPair]]) -> dict[str, int]:
    counts = Counter(field.name for row in differing for field in row)
    return {field.name: counts[field.name] for field in fields if field.name in counts}


def _whole_differences(a: RolloutBatch, b: RolloutBatch) -> list[FieldDifference]:
    """Compares the parts of a batch beside its rows, every key of sampling and meta alone."""
    values_a, values_b = _whole_values(a), _whole_values(b)
    found = []
    for name in sorted({*values_a, *values_b}):
        if name not in values_a or name not in values_b:
            text_a, text_b = (canonical_json(side[name]) if name in side else ABSENT for side in (values_a, values_b))
            found.append(FieldDifference(field=name, where="", a=text_a, b=text_b))
        elif canonical_json(values_a[name]) != canonical_json(values_b[name]):
            found.append(json_difference(name, values_a[name], values_b[name]))
    return found


def _whole_values(batch: RolloutBatch) -> dict[str, JSON]:
    return {
        "group_size": batch.group_size,
        **{f"meta.{key}": value for key, value in batch.meta.items()},
        **{f"sampling.{key}": value for key, value in sampling_as_json(batch.sampling).items()},
    }


def _listed(title: str, lines: Sequence[str], total: int) -> list[str]:
    """A titled list of at most 20 lines, and how many there are beside them; nothing where there are none."""
    if not total:
        return []
    shown = [f"  {line}" for line in lines[:_NUM_SHOWN]]
    more = [f"  and {total - len(shown):,} more"] if total > len(shown) else []
    return [f"{title}:", *shown, *more]
