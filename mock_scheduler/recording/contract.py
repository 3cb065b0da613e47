"""The contract: what must be the same in the run that records and the run that replays.

Contract of this module: values are compared as canonical JSON, so 1 is not 1.0 and not true; every difference is
reported, never only the first. Where both runs know a field, the rule of the current one counts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from mock_scheduler.digests import JSON, canonical_json
from mock_scheduler.errors import ContractError

logger = logging.getLogger("mock_scheduler.rollout_mock")


class Rule(StrEnum):
    """How a field of the replaying run must relate to the recorded one."""

    MUST_MATCH = "must_match"
    MAY_DIFFER = "may_differ"
    MUST_DIFFER = "must_differ"


@dataclass(frozen=True, kw_only=True, slots=True)
class ContractField:
    """One named value; ``advice`` is the sentence that says what to do where its rule is broken."""

    name: str
    value: JSON
    rule: Rule
    advice: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A field that breaks its rule (``is_blocking``) or, under ``MAY_DIFFER``, only differs.

    ``recorded`` and ``current`` are canonical JSON; ``None`` where that side has no such field.
    """

    name: str
    rule: Rule
    recorded: str | None
    current: str | None
    advice: str

    @property
    def is_blocking(self) -> bool:
        """Whether the rule is broken."""
        return self.rule is not Rule.MAY_DIFFER

    def describe(self) -> str:
        """One line with both values and, where the rule is broken, the advice."""
        recorded = "missing" if self.recorded is None else self.recorded
        current = "missing" if self.current is None else self.current
        must_differ = " (must differ)" if self.rule is Rule.MUST_DIFFER else ""
        values = f"{self.name}: recorded {recorded}, current {current}{must_differ}"
        return f"{values}. {self.advice}" if self.is_blocking else values


class Contract:
    """Named fields in a fixed order; raises ``ContractError`` where a name occurs twice or a value is no JSON."""

    def __init__(self, fields: Sequence[ContractField]) -> None:
        self.fields = tuple(fields)
        self._by_name = {field.name: field for field in self.fields}
        if len(self._by_name) != len(self.fields):
            names = [field.name for field in self.fields]
            raise ContractError(f"contract: fields named twice: {sorted({n for n in names if names.count(n) > 1})}")
        for field in self.fields:
            try:
                canonical_json(field.value)
            except (TypeError, ValueError) as error:
                raise ContractError(f"contract: value of {field.name!r} is no JSON: {error}") from error

    def differences(self, recorded: Contract) -> list[Difference]:
        """Every field whose rule is broken or that only differs, in the order of this contract, then the recorded.

        A field that one side lacks is a difference unless its rule is ``MUST_DIFFER``.
        """
        names = dict.fromkeys([*self._by_name, *recorded._by_name])
        found = [_compare_field(self._by_name.get(name), recorded._by_name.get(name)) for name in names]
        return [difference for difference in found if difference is not None]

    def as_json(self) -> list[JSON]:
        """The fields as JSON; ``Contract.from_json`` is the inverse."""
        return [
            {"name": field.name, "value": field.value, "rule": field.rule.value, "advice": field.advice}
            for field in self.fields
        ]

    @classmethod
    def from_json(cls, value: Sequence[dict[str, JSON]]) -> Contract:
        """The contract from ``as_json``; raises ``KeyError`` or ``ValueError`` where it is none."""
        return cls(
            [
                ContractField(
                    name=str(item["name"]),
                    value=item["value"],
                    rule=Rule(str(item["rule"])),
                    advice=str(item["advice"]),
                )
                for item in value
            ]
        )


def check_contract(
    recorded: Contract, current: Contract, on_mismatch: Literal["error", "warn"], *, source: str = "the recording"
) -> tuple[Difference, ...]:
    """Compare the two contracts and return the differences that do not stop the run.

    Raises ``ContractError`` listing all fields that break their rule, one per line, with both values and the advice;
    with ``on_mismatch`` ``warn`` the same text is logged as a warning instead. ``source`` names the recording.
    """
    differences = current.differences(recorded)
    blocking = [difference for difference in differences if difference.is_blocking]
    if blocking:
        lines = "".join(f"\n  {difference.describe()}" for difference in blocking)
        count = f"{len(blocking)} field{'s'[: len(blocking) > 1]}"
        message = f"[Rollout Mock] This run breaks the contract of {source} in {count}:{lines}"
        if on_mismatch == "error":
            raise ContractError(message)
        logger.warning("%s", message)
    return tuple(differences)


def _compare_field(current: ContractField | None, recorded: ContractField | None) -> Difference | None:
    present = current or recorded
    if present is None:
        return None
    current_text = canonical_json(current.value) if current is not None else None
    recorded_text = canonical_json(recorded.value) if recorded is not None else None
    is_equal = current_text == recorded_text
    is_missing = current is None or recorded is None
    is_fine = is_equal if present.rule is not Rule.MUST_DIFFER else (is_missing or not is_equal)
    if is_fine:
        return None
    return Difference(
        name=present.name, rule=present.rule, recorded=recorded_text, current=current_text, advice=present.advice
    )
