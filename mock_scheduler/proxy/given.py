"""Checks what a trainer gives to the proxy's builders and methods, before anything is built, read or written.

Contract: each error names what was given and what was expected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mock_scheduler.errors import ConfigError, SchedulerError
from mock_scheduler.recording import Contract
from mock_scheduler.scheduler import RolloutRequest, shown
from mock_scheduler.support.digests import JSON

_MAX_RUN_ID = 128


def check_make_real(make_real: object) -> None:
    """Raise ``ConfigError`` unless it can be called."""
    if not callable(make_real):
        name = type(make_real).__name__
        advice = (
            f"pass {name} or lambda: scheduler" if hasattr(make_real, "get_batch") else "pass a class or a function"
        )
        raise ConfigError(f"make_real must be a callable that builds the scheduler, found {_a(name)} {name}; {advice}")


def as_contract(contract: object) -> Contract:
    """The contract of a run from what was given; raises ``ConfigError`` where it is none."""
    if isinstance(contract, Contract):
        return contract
    if not isinstance(contract, Mapping):
        raise ConfigError(
            f"contract must be a Contract, or a mapping of names to values that must match, found {shown(contract)}"
        )
    values: Mapping[str, JSON] = contract
    return Contract.of(values)


def as_plan(plan: object) -> tuple[RolloutRequest, ...]:
    """The requests that will come; raises ``SchedulerError`` for anything else."""
    if not isinstance(plan, Sequence) or isinstance(plan, str | bytes):
        raise SchedulerError(f"plan is {shown(plan)}; expected a list of RolloutRequest")
    for index, request in enumerate(plan):
        check_request(request, f"plan[{index}]")
    return tuple(plan)


def check_request(request: object, what: str) -> None:
    """Raise ``SchedulerError`` unless it is a ``RolloutRequest``."""
    if not isinstance(request, RolloutRequest):
        raise SchedulerError(f"{what} is {shown(request)}; expected a RolloutRequest")


def check_run_id(run_id: object) -> None:
    """Raise ``SchedulerError`` unless it can name a run in every file of it; None: the run gets a new one."""
    if run_id is None:
        return
    expected = f"expected a text of 1 to {_MAX_RUN_ID} printable characters"
    if isinstance(run_id, int) and not isinstance(run_id, bool):
        raise SchedulerError(f"run_id is {run_id}; {expected}: give it as text, {str(run_id)!r}")
    if not isinstance(run_id, str) or not 0 < len(run_id) <= _MAX_RUN_ID or not run_id.isprintable():
        raise SchedulerError(f"run_id is {shown(run_id)}; {expected}")


def _a(noun: str) -> str:
    return "an" if noun[0] in "aeiouAEIOU" else "a"
