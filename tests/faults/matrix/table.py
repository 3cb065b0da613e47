"""The detection matrix as text: for the terminal, as JSON, and as the page of the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from tests.faults.campaign import CLEAN
from tests.faults.catalogue import FAULTS, find_fault
from tests.faults.matrix.evidence import PROOFS, Finding
from tests.faults.matrix.judging import Judgement

_WORDS = {"found": "found", "silent": "-", "not available": "n/a"}


def matrix_rows(judgements: Sequence[Judgement]) -> list[list[str]]:
    """One row for each fault and precision, in the catalogue's order, and the clean layouts before them."""
    order = {fault.id: place for place, fault in enumerate(FAULTS)}
    ordered = sorted(judgements, key=lambda item: (order.get(item.fault, -1), item.fault, item.precision))
    return [_row(item) for item in ordered]


def matrix_header() -> list[str]:
    """The names of the columns."""
    return ["fault", "no.", "run", "precision", *PROOFS, "loss equal", "silent", "place", "word", "score"]


def _row(item: Judgement) -> list[str]:
    is_clean = item.fault.startswith(CLEAN)
    fault = None if is_clean else find_fault(item.fault)
    findings = [_word(item.findings.get(name)) for name in PROOFS]
    return [
        item.fault,
        "" if fault is None else fault.number,
        "" if fault is None else fault.shows.label,
        item.precision,
        *findings,
        _yes(item.is_loss_equal),
        "" if is_clean else _yes(item.is_silent),
        "" if is_clean else _yes(item.is_placed),
        "" if is_clean else _yes(item.is_called),
        ("false alarm" if item.is_found else "passed") if is_clean and not item.error else item.error or item.score,
    ]


def summarise(judgements: Sequence[Judgement]) -> str:
    """What was found, where, and how many false alarms there were, in a few sentences."""
    faults = [item for item in judgements if not item.fault.startswith(CLEAN)]
    clean = [item for item in judgements if item.fault.startswith(CLEAN)]
    lines = []
    for precision in dict.fromkeys(item.precision for item in judgements):
        own = [item for item in faults if item.precision == precision]
        others = [item for item in clean if item.precision == precision]
        lines.append(
            f"{precision}: {sum(item.is_found for item in own)} of {len(own)} faults found, "
            f"{sum(item.score == 'whole' for item in own)} at the right place, "
            f"{sum(item.is_called for item in own)} by the right word, "
            f"{sum(item.is_silent is True for item in own)} silent where they must be; "
            f"{sum(item.is_found for item in others)} false alarms in {len(others)} clean layouts; "
            f"{sum(bool(item.error) for item in judgements if item.precision == precision)} errors."
        )
    return "\n".join(lines)


def to_markdown(judgements: Sequence[Judgement]) -> str:
    """A table."""
    rows = [matrix_header(), ["---"] * len(matrix_header()), *matrix_rows(judgements)]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |\n" for row in rows)


def to_json(judgements: Sequence[Judgement]) -> list[dict[str, Any]]:
    """Everything that is known of each."""
    return [{**asdict(item), "score": item.score, "is_found": item.is_found} for item in judgements]


def from_json(items: Sequence[dict[str, Any]]) -> list[Judgement]:
    """What ``to_json`` gave."""
    return [
        Judgement(
            **{
                **{field.name: item[field.name] for field in fields(Judgement)},
                "findings": {name: Finding(**finding) for name, finding in item["findings"].items()},
            }
        )
        for item in items
    ]


def _word(finding: Finding | None) -> str:
    return "" if finding is None else _WORDS[finding.outcome]


def _yes(value: bool | None) -> str:
    return "" if value is None else "yes" if value else "no"
