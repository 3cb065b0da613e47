"""Whether a configuration of Megatron can train repeatably and rightly, found out before the model is built.

Contract: imports neither torch nor Megatron, and reads a plain mapping. Megatron's own validation sits in
``megatron.training`` and covers few of these; the rules are data, in ``conflicts``, ``layouts`` and ``facts``.
"""

from __future__ import annotations

from collections.abc import Sequence

from mock_scheduler.determinism.megatron.conflicts import CONFLICT_RULES
from mock_scheduler.determinism.megatron.facts import FACT_RULES
from mock_scheduler.determinism.megatron.layouts import LAYOUT_RULES
from mock_scheduler.determinism.megatron.rule import Conflict, Effect, MegatronRule, Setup
from mock_scheduler.determinism.settings import is_deterministic_mode
from mock_scheduler.errors import DeterminismError
from mock_scheduler.text import bullet_list

RULES: tuple[MegatronRule, ...] = (*LAYOUT_RULES, *CONFLICT_RULES, *FACT_RULES)

_ALWAYS_REFUSED = frozenset({Effect.WRONG, Effect.REFUSED})


def find_conflicts(setup: Setup) -> list[Conflict]:
    """Every rule that holds for the installed version and applies, in the table's order."""
    return [
        Conflict(rule=rule, found=", ".join(setup.find(name) for name in rule.shows if _is_known(setup, name)))
        for rule in RULES
        if rule.holds_for(setup.versions) and rule.applies(setup)
    ]


def _is_known(setup: Setup, name: str) -> bool:
    """Whether a message can say something of a name: fields that this version lacks are left out."""
    return name in setup.values or name in setup.versions or name.isupper()


def check_conflicts(conflicts: Sequence[Conflict], setup: Setup) -> None:
    """Refuse what cannot train: ``conflicts`` are those that ``find_conflicts`` found in ``setup``.

    Under ``DETERMINISTIC_MODE=1`` what is not repeatable is refused as well. Must be called before the model is built;
    it does not communicate.

    Raises:
        DeterminismError: all conflicts, each with the values found, why it matters and what to change.
    """
    deterministic = is_deterministic_mode(setup.environ)
    refused = [conflict for conflict in conflicts if _is_refused(conflict.rule.effect, deterministic=deterministic)]
    if refused:
        mode = "DETERMINISTIC_MODE=1" if deterministic else "no DETERMINISTIC_MODE"
        raise DeterminismError(
            f"the model's configuration cannot be trained (megatron-core "
            f"{setup.versions.get('megatron-core', 'unknown')}, {mode}):"
            f"{bullet_list([conflict.describe() for conflict in refused], limit=None)}"
        )


def _is_refused(effect: Effect, *, deterministic: bool) -> bool:
    return effect in _ALWAYS_REFUSED or (deterministic and effect is Effect.NOT_REPEATABLE)
