"""A candidate's own code in words: whether it acted, and whether anything came of it."""

from __future__ import annotations

from mock_scheduler.support.text import count_of, list_some
from mock_scheduler.verdict.results import CandidateResult
from mock_scheduler.verdict.verdict import VerdictKind

_NUM_NAMED = 4


def describe_own_code(candidate: CandidateResult) -> str:
    """How often the code that an entry put into packages was called; empty without an entry, or without a run.

    A verdict on code that never ran says nothing about the code.
    """
    if not candidate.entry or candidate.run is None:
        return ""
    calls = candidate.run.own_calls
    if not calls:
        return (
            f"{candidate.entry} put no function and no class of its own into a package before the run, so nothing "
            "shows that it changed anything"
        )
    acted = [f"{name} ({count_of(count, 'call')})" for name, count in calls.items() if count]
    silent = [name for name, count in calls.items() if not count]
    if not acted:
        return f"never called, so the verdict says nothing about it: {list_some(silent, _NUM_NAMED, ', ')}"
    parts = [f"called: {list_some(acted, _NUM_NAMED, ', ')}"]
    if silent:
        parts.append(f"never called: {list_some(silent, _NUM_NAMED, ', ')}")
    if candidate.verdict.kind is VerdictKind.IDENTICAL:
        parts.append("it acted, and every bit is equal to the baseline's")
    return "; ".join(parts)


def remark_on_own_code(candidate: CandidateResult) -> str:
    """What a verdict of equal bits must say beside it of code that never ran, or ran for nothing; empty else."""
    if not candidate.entry or candidate.run is None or candidate.verdict.kind is not VerdictKind.IDENTICAL:
        return ""
    calls = candidate.run.own_calls.values()
    if not calls:
        return f"although it has an entry, {candidate.entry}"
    return "although its own code was called" if any(calls) else "but its own code was never called"
