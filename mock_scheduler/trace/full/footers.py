"""The footer of a rank's step as JSON, and back.

``footer_as_json`` and ``parse_footer`` are inverses. A ledger repeats few calls many times: each is listed once, under
``calls``, and ``order`` gives its position there for every time that it was made. Parsing raises ``AttributeError``,
``IndexError``, ``KeyError``, ``TypeError`` or ``ValueError`` for anything but what was written, which the readers of
files turn into a ``TraceError`` with the path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mock_scheduler.support.digests import JSON
from mock_scheduler.trace.entries import LedgerCall, RowTable, StepFooter, Unobserved
from mock_scheduler.trace.kinds import LEDGER_KINDS, TRACE_KINDS

#: What a damaged or forged header may make a reader go through.
_MAX_WORLD_SIZE = 1 << 20
#: Tokens of a step's batch; a token tensor of more has more than 1 TB in int64.
_MAX_TOKENS = 1 << 37


def footer_as_json(footer: StepFooter) -> dict[str, JSON]:
    """Everything that the footer says."""
    return {
        "rows": {"identities": list(footer.rows.identities), "lengths": list(footer.rows.lengths)},
        "update_rows": [list(rows) for rows in footer.update_rows],
        "ranks": list(footer.ranks),
        "kinds": list(footer.kinds),
        "patterns": list(footer.patterns),
        "exclude": list(footer.exclude),
        "unobserved": [[item.kind, item.name, item.reason] for item in footer.unobserved],
        "ledgers": {kind: _ledger_as_json(calls) for kind, calls in footer.ledgers.items()},
    }


def _ledger_as_json(calls: Sequence[LedgerCall]) -> dict[str, JSON]:
    positions: dict[LedgerCall, int] = {}
    order: list[JSON] = [positions.setdefault(call, len(positions)) for call in calls]
    distinct: list[JSON] = [[call.operation, list(call.group), call.dtype, call.num_elements] for call in positions]
    return {"calls": distinct, "order": order}


def parse_footer(content: Mapping[str, Any]) -> StepFooter:
    """The footer that was written."""
    rows = content["rows"]
    table = RowTable(identities=_texts(rows["identities"]), lengths=as_counts(rows["lengths"]))
    if len(table.identities) != len(table.lengths):
        raise ValueError(f"{len(table.identities)} rows have {len(table.lengths)} lengths")
    if table.num_tokens > _MAX_TOKENS:
        raise ValueError(f"rows of {table.num_tokens} tokens; expected at most {_MAX_TOKENS}")
    update_rows = tuple(as_counts(update) for update in content["update_rows"])
    if any(row >= len(table.lengths) for update in update_rows for row in update):
        raise ValueError(f"an update has a row beyond the {len(table.lengths)} of the batch")
    return StepFooter(
        rows=table,
        update_rows=update_rows,
        ranks=as_counts(content["ranks"]),
        kinds=_texts(content["kinds"]),
        patterns=_texts(content["patterns"]),
        exclude=_texts(content["exclude"]),
        unobserved=tuple(_parse_unobserved(*item) for item in content["unobserved"]),
        ledgers={
            _known(kind, LEDGER_KINDS): _parse_ledger(ledger["calls"], ledger["order"])
            for kind, ledger in content["ledgers"].items()
        },
    )


def as_count(value: object) -> int:
    """A number from 0 on; raises ``ValueError`` for anything else."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def as_world_size(value: object) -> int:
    """A number of ranks; raises ``ValueError`` for anything else, and beyond what a reader can list."""
    size = as_count(value)
    if not 1 <= size <= _MAX_WORLD_SIZE:
        raise ValueError(f"a run of {size} ranks; expected 1 to {_MAX_WORLD_SIZE}")
    return size


def shared_statements(footer: StepFooter) -> dict[str, object]:
    """What all ranks say alike of a step, by name; the rest of a footer is each rank's own."""
    return {
        "rows": footer.rows,
        "update_rows": footer.update_rows,
        "ranks": footer.ranks,
        "kinds": footer.kinds,
        "patterns": footer.patterns,
        "exclude": footer.exclude,
    }


def as_counts(values: Sequence[object]) -> tuple[int, ...]:
    """Numbers from 0 on; raises ``ValueError`` for anything else."""
    return tuple(as_count(value) for value in values)


def _parse_unobserved(kind: str, name: str, reason: str) -> Unobserved:
    return Unobserved(kind=_known(kind, TRACE_KINDS), name=_text(name), reason=_text(reason))


def _parse_ledger(calls: Sequence[Sequence[Any]], order: Sequence[object]) -> tuple[LedgerCall, ...]:
    distinct = [_parse_call(*call) for call in calls]
    return tuple(distinct[as_count(position)] for position in order)


def _parse_call(operation: str, group: Sequence[object], dtype: str, num_elements: int) -> LedgerCall:
    return LedgerCall(
        operation=_text(operation), group=as_counts(group), dtype=_text(dtype), num_elements=as_count(num_elements)
    )


def _known(kind: str, kinds: Sequence[Any]) -> Any:  # noqa: ANN401 - one of the literal's values
    if kind not in kinds:
        raise ValueError(f"unknown kind {kind!r}")
    return kind


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def _texts(values: Sequence[object]) -> tuple[str, ...]:
    return tuple(_text(value) for value in values)
