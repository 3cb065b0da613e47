"""Renders the settings table and the rules for Megatron as Markdown, for ``docs/settings.md``; imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mock_scheduler.determinism.settings import AREAS, FAMILIES, Between, Kind, Setting
from mock_scheduler.layouts.rules import RULES
from mock_scheduler.layouts.rules.rule import MegatronRule

_BETWEEN = {Between.MUST_MATCH: "must match", Between.REPORTED: "reported", Between.RECORDED: "recorded"}


def render_settings() -> str:
    """Renders one Markdown table per area of the settings table, and one of the families."""
    tables = [f"### {area}\n\n{_settings_table(settings)}" for area, settings in AREAS.items()]
    return "\n\n".join([*tables, f"### Families\n\n{_families_table()}"])


def render_rules() -> str:
    """Returns the rules about Megatron's configuration as one Markdown table."""
    rows = [
        (
            rule.name,
            _names(rule),
            rule.effect.value,
            rule.describe_versions(),
            f"{_sentence(rule.breaks)} {rule.change}",
        )
        for rule in RULES
    ]
    return _table(("rule", "looks at", "what is found", "megatron-core", "why, and what to change"), rows)


def _settings_table(settings: Iterable[Setting]) -> str:
    rows = [
        (
            f"`{setting.name}`",
            _allowed(setting),
            _BETWEEN[setting.between_runs] + (", per node" if setting.per_node else ""),
            f"{setting.reader}, {setting.read_at}",
            setting.remedy,
            setting.source,
        )
        for setting in settings
    ]
    header = ("setting", "in a deterministic run", "between runs", "read by, and when", "why", "source")
    return _table(header, rows)


def _allowed(setting: Setting) -> str:
    if setting.kind is Kind.VERSION:
        return "any"
    allowed = "any" if setting.pattern is None else f"`{setting.pattern}`"
    if setting.required:
        allowed += ", required"
    # A pattern that is the recommendation itself would say it twice.
    if setting.recommended and (setting.pattern is None or len(setting.pattern) > len(setting.recommended)):
        allowed += f"; write `{setting.recommended}`"
    return allowed + (", exported where not configured" if setting.exported else "")


def _families_table() -> str:
    rows = [
        (
            f"`{family.prefix}*`",
            _BETWEEN[family.between_runs] + (", per node" if family.per_node else ""),
            f"{family.reader}, {family.read_at}",
        )
        for family in FAMILIES
    ]
    return _table(("every other variable", "between runs", "read by, and when"), rows)


def _names(rule: MegatronRule) -> str:
    return ", ".join(f"`{name}`" for name in rule.shows)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(_escaped(cell) for cell in line)} |" for line in lines)


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")
