"""Whether a configuration of Megatron can train repeatably and rightly, found out before the model is built.

Contract: imports neither torch nor Megatron, and reads a plain mapping. Megatron's own validation sits in
``megatron.training`` and covers few of these; the rules are data, in ``megatron_conflicts``, ``megatron_layouts`` and
``megatron_facts``.
"""

from __future__ import annotations

from collections.abc import Mapping

from mock_scheduler.determinism.megatron_conflicts import CONFLICT_RULES
from mock_scheduler.determinism.megatron_facts import FACT_RULES
from mock_scheduler.determinism.megatron_layouts import LAYOUT_RULES
from mock_scheduler.determinism.megatron_rule import Conflict, Effect, MegatronRule, Setup
from mock_scheduler.determinism.settings import is_deterministic_mode
from mock_scheduler.errors import DeterminismError

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


def check_megatron_config(
    values: Mapping[str, object],
    *,
    environ: Mapping[str, str],
    versions: Mapping[str, str],
    device: tuple[int, int] | None,
) -> list[Conflict]:
    """Refuse what cannot train; return what is repeatable and changes bits, to be recorded with the run.

    The arguments are those of :class:`Setup`. Under ``DETERMINISTIC_MODE=1`` what is not repeatable is refused; without
    it, it is returned. Must be called before the model is built; it does not communicate.

    Raises:
        DeterminismError: all conflicts, each with the values found, why it matters and what to change.
    """
    deterministic = is_deterministic_mode(environ)
    conflicts = find_conflicts(Setup(values=values, environ=environ, versions=versions, device=device))
    refused = [conflict for conflict in conflicts if _is_refused(conflict.rule.effect, deterministic=deterministic)]
    if refused:
        listed = "".join(f"\n  - {conflict.describe()}" for conflict in refused)
        mode = "DETERMINISTIC_MODE=1" if deterministic else "no DETERMINISTIC_MODE"
        raise DeterminismError(
            f"the model's configuration cannot be trained (megatron-core {versions.get('megatron-core', 'unknown')}, "
            f"{mode}):{listed}"
        )
    return conflicts


def _is_refused(effect: Effect, *, deterministic: bool) -> bool:
    return effect in _ALWAYS_REFUSED or (deterministic and effect is Effect.NOT_REPEATABLE)
