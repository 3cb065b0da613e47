"""Puts a user's own code and options into words: whether they acted, and whether anything came of it."""

from __future__ import annotations

from collections.abc import Mapping

from mock_scheduler.support.text import count_of, list_some
from mock_scheduler.verdict.results import AlignmentResult, CandidateResult
from mock_scheduler.verdict.verdict import VerdictKind
from mock_scheduler.verdict.wording.tensors import join_and

_NUM_NAMED = 4


def describe_own_code(candidate: CandidateResult) -> str:
    """How often the code that its module put into packages was called; empty without a module, or without a run.

    A verdict on code that never ran says nothing about the code.
    """
    if not candidate.module or candidate.run is None:
        return ""
    text = _describe_calls(candidate.module, candidate.run.own_calls)
    is_equal = candidate.verdict.kind is VerdictKind.IDENTICAL
    if candidate.entry and is_equal and any(candidate.run.own_calls.values()):
        text += "; it acted, and every bit is equal to the baseline's"
    return text


def describe_baseline_code(result: AlignmentResult) -> str:
    """Returns the same of the baseline's module, which runs candidates without another too; empty without one."""
    return "" if not result.module else f"{result.module}: {_describe_calls('it', result.baseline.own_calls)}"


def remark_on_changes(candidate: CandidateResult) -> str:
    """What a verdict of equal bits must say beside it of code and options that did nothing; empty else."""
    if candidate.run is None or candidate.verdict.kind is not VerdictKind.IDENTICAL:
        return ""
    if not candidate.module:
        return f"although it changes {list_some(candidate.options, _NUM_NAMED, ', ')}" if candidate.options else ""
    calls = candidate.run.own_calls
    if calls and not any(calls.values()):
        return "but its own code was never called"
    # Both sides have a shared entry, so equal bits are what they should have.
    if not candidate.entry:
        return ""
    return "although its own code was called" if calls else f"although it has an entry, {candidate.entry}"


def describe_outside(candidate: CandidateResult) -> str:
    """What of its layout no verdict on its run can speak of; empty where there is nothing."""
    idle = () if candidate.run is None else candidate.run.idle_vocabulary
    if not idle:
        return ""
    whose = "its part" if len(idle) == 1 else "their parts"
    return (
        f"no token of {join_and(idle)}'s part of the vocabulary may be chosen, so that an error in {whose} of the "
        "softmax could not show"
    )


def _describe_calls(module: str, calls: Mapping[str, int]) -> str:
    if not calls:
        return (
            f"{module} put no function and no class of its own into a package before the run, so nothing shows that it "
            "changed anything"
        )
    acted = [f"{name} ({count_of(count, 'call')})" for name, count in calls.items() if count]
    silent = [name for name, count in calls.items() if not count]
    if not acted:
        return f"never called, so the verdict says nothing about it: {list_some(silent, _NUM_NAMED, ', ')}"
    parts = [f"called: {list_some(acted, _NUM_NAMED, ', ')}"]
    if silent:
        parts.append(f"never called: {list_some(silent, _NUM_NAMED, ', ')}")
    return "; ".join(parts)
