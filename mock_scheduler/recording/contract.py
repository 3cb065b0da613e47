"""The contract: values that must be the same in the recording and the replaying run.

Contract of this module: values are compared as canonical JSON, so 1 is not 1.0 and not true, while a tuple is a list;
every difference is reported, never only the first. Where both runs know a field, rule and match of the current one
count. The program chooses the fields and their rules, by what each of its keys ``Decides`` (``config.base``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from mock_scheduler.errors import ContractError
from mock_scheduler.recording.matching import Comparison, check_value, compare_values, show
from mock_scheduler.recording.matching import Match as Match
from mock_scheduler.support.digests import JSON, canonical_json, check_json
from mock_scheduler.support.text import count_of

logger = logging.getLogger("mock_scheduler.rollout_mock")


class Rule(StrEnum):
    """How a field of the replaying run must relate to the recorded one."""

    MUST_MATCH = "must_match"
    MAY_DIFFER = "may_differ"
    MUST_DIFFER = "must_differ"


@dataclass(frozen=True, kw_only=True, slots=True)
class ContractField:
    """One named value; ``advice`` is the sentence that tells the remedy where its rule is broken.

    ``match``: when the value counts as the recorded one.
    """

    name: str
    value: JSON
    rule: Rule
    advice: str
    match: Match = Match.EQUAL


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A field whose two values are not the same JSON, or that breaks its rule (``is_blocking``).

    ``recorded`` and ``current`` are the values as they are printed; ``None`` where that side has no such field.
    ``reason`` tells the difference; it is empty where the values show it themselves.
    """

    name: str
    rule: Rule
    recorded: str | None
    current: str | None
    reason: str
    advice: str
    is_blocking: bool

    def describe(self) -> str:
        """One line: ``name: recorded X, current Y (reason). advice``, the advice only where the rule is broken."""
        recorded = "missing" if self.recorded is None else self.recorded
        current = "missing" if self.current is None else self.current
        reason = f" ({self.reason})" if self.reason else ""
        values = f"{self.name}: recorded {recorded}, current {current}{reason}"
        return f"{values}. {self.advice}" if self.is_blocking else values


class Contract:
    """Named fields in a fixed order.

    Raises ``ContractError`` listing every name that occurs twice and every value that is no JSON or not comparable by
    its ``match``.
    """

    def __init__(self, fields: Sequence[ContractField]) -> None:
        self.fields = tuple(fields)
        self._by_name = {field.name: field for field in self.fields}
        if len(self._by_name) != len(self.fields):
            names = [field.name for field in self.fields]
            raise ContractError(f"contract: fields named twice: {sorted({n for n in names if names.count(n) > 1})}")
        problems = [problem for field in self.fields if (problem := _value_problem(field)) is not None]
        if problems:
            raise ContractError(f"contract: {'; '.join(problems)}")

    @classmethod
    def of(cls, values: Mapping[str, JSON]) -> Contract:
        """A contract of plain names and values that must all match."""
        return cls(
            [
                ContractField(
                    name=name, value=value, rule=Rule.MUST_MATCH, advice=f"Set {name} as in the recording run."
                )
                for name, value in values.items()
            ]
        )

    def differences(self, recorded: Contract) -> list[Difference]:
        """Returns all fields with a broken rule or other values, in this contract's order, then the recorded.

        A field one side lacks is a difference unless its rule is ``MUST_DIFFER``.
        """
        names = dict.fromkeys([*self._by_name, *recorded._by_name])
        found = [_compare_field(self._by_name.get(name), recorded._by_name.get(name)) for name in names]
        return [difference for difference in found if difference is not None]


def check_contract(
    recorded: Contract, current: Contract, on_mismatch: Literal["error", "warn"], *, source: str = "the recording"
) -> tuple[Difference, ...]:
    """Compare the two contracts and return the differences without consequence.

    Raises ``ContractError`` listing all fields that break their rule, one per line, with both values and the advice;
    with ``on_mismatch`` ``warn`` the same text is logged as a warning instead. ``source`` names the recording.
    """
    differences = current.differences(recorded)
    # All of them at once: whoever corrects one field should not meet the next a start later.
    blocking = [difference for difference in differences if difference.is_blocking]
    if blocking:
        lines = "".join(f"\n  {difference.describe()}" for difference in blocking)
        count = count_of(len(blocking), "field")
        message = f"[Rollout Mock] This run breaks the contract of {source} in {count}:{lines}"
        if on_mismatch == "error":
            raise ContractError(message)
        logger.warning("%s", message)
    return tuple(differences)


def _value_problem(field: ContractField) -> str | None:
    what = f"value of {field.name!r}"
    try:
        check_json(field.value, what, is_exact=False)  # values are only compared: nothing gets them back
    except ValueError as error:
        return str(error)
    try:
        check_value(field.match, field.value)
    except ValueError as error:
        return f"{what} {error}"
    return None


def _compare_field(current: ContractField | None, recorded: ContractField | None) -> Difference | None:
    if current is None or recorded is None:
        return _one_sided(current, recorded)
    is_same = canonical_json(current.value) == canonical_json(recorded.value)
    if is_same and current.rule is not Rule.MUST_DIFFER:
        return None
    # Two values that differ as they must are nothing to report.
    if current.rule is Rule.MUST_DIFFER and not is_same:
        return None
    comparison = (
        Comparison(is_match=True, reason="must differ")
        if is_same
        else compare_values(current.match, recorded.value, current.value)
    )
    return Difference(
        name=current.name,
        rule=current.rule,
        recorded=show(recorded.value, current.match),
        current=show(current.value, current.match),
        reason=comparison.reason,
        advice=current.advice,
        is_blocking=current.rule is Rule.MUST_DIFFER or (current.rule is Rule.MUST_MATCH and not comparison.is_match),
    )


def _one_sided(current: ContractField | None, recorded: ContractField | None) -> Difference | None:
    """A field one side lacks: a difference, unless the two must differ anyway."""
    present = current or recorded
    if present is None or present.rule is Rule.MUST_DIFFER:
        return None
    return Difference(
        name=present.name,
        rule=present.rule,
        recorded=None if recorded is None else show(recorded.value, present.match),
        current=None if current is None else show(current.value, present.match),
        reason="",
        advice=present.advice,
        is_blocking=present.rule is Rule.MUST_MATCH,
    )
