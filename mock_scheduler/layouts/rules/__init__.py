"""Finds out, before the model is built, whether a configuration of Megatron can train repeatably and rightly.

Contract: imports neither torch nor Megatron, and reads a plain mapping. Megatron's own validation sits in
``megatron.training`` and covers few of the rules; they are data, in ``conflicts``, ``layouts`` and ``facts``.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from mock_scheduler.determinism.settings import is_deterministic_mode
from mock_scheduler.errors import DeterminismError
from mock_scheduler.layouts.rules.conflicts import CONFLICT_RULES
from mock_scheduler.layouts.rules.facts import FACT_RULES
from mock_scheduler.layouts.rules.known_wrong import MEGATRON, check_allowed_names
from mock_scheduler.layouts.rules.layouts import LAYOUT_RULES
from mock_scheduler.layouts.rules.rule import Conflict, Effect, MegatronRule, Setup, apply_rules
from mock_scheduler.support.text import bullet_list

logger = logging.getLogger(__name__)

RULES: tuple[MegatronRule, ...] = (*LAYOUT_RULES, *CONFLICT_RULES, *FACT_RULES)

# Wrong values and refusals hold in any mode; repeatability is promised under DETERMINISTIC_MODE alone.
_ALWAYS_REFUSED = frozenset({Effect.WRONG, Effect.REFUSED})


def find_conflicts(setup: Setup) -> list[Conflict]:
    """Returns every rule that holds for the installed version and applies, in the table's order."""
    return apply_rules(RULES, setup)


def check_conflicts(conflicts: Sequence[Conflict], setup: Setup, *, allowed: Collection[str] = ()) -> None:
    """Refuses a setup that cannot train; to be called before the model is built.

    Under ``DETERMINISTIC_MODE=1`` conflicts with repeatability are refused as well. It does not communicate, and warns
    on every rank that logs warnings.

    Args:
        conflicts: As ``find_conflicts`` found them in ``setup``.
        setup: The configuration and its surroundings.
        allowed: The rules of ``parallel.allow_known_wrong``: their wrong values get a warning and no refusal.

    Raises:
        DeterminismError: all conflicts, each with the values found, why it matters and the remedy.
        ConfigError: an allowed name is no rule about known wrong layouts.
    """
    check_allowed_names(allowed)
    deterministic = is_deterministic_mode(setup.environ)
    refused = [
        conflict
        for conflict in conflicts
        if _is_refused(conflict.rule.effect, deterministic=deterministic) and conflict.rule.name not in allowed
    ]
    core = f"{MEGATRON} {setup.versions.get(MEGATRON, 'unknown')}"
    if refused:
        mode = "DETERMINISTIC_MODE=1" if deterministic else "no DETERMINISTIC_MODE"
        raise DeterminismError(
            f"the model's configuration cannot be trained ({core}, {mode}):"
            f"{bullet_list([conflict.describe() for conflict in refused], limit=None)}"
        )
    if allowed:
        logger.warning("parallel.allow_known_wrong (%s):%s", core, bullet_list(_warnings(conflicts, allowed), None))


def _is_refused(effect: Effect, *, deterministic: bool) -> bool:
    return effect in _ALWAYS_REFUSED or (deterministic and effect is Effect.NOT_REPEATABLE)


def _warnings(conflicts: Sequence[Conflict], allowed: Collection[str]) -> list[str]:
    """Writes a line for each allowed rule, in the given order: how it breaks this run, or its lack of effect."""
    found = {conflict.rule.name: conflict for conflict in conflicts}
    return [
        f"this run {found[name].rule.effect}, as is allowed: {found[name].describe()}"
        if name in found
        else f"{name} is allowed but does not apply"
        for name in allowed
    ]
