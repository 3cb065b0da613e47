"""Writes the settings table and the rules for Megatron as Markdown, for the documentation.

``python -m mock_scheduler.layouts.rules.table docs/determinism.md`` writes them between the page's markers; a test
fails where the page is out of date. Contract: imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from mock_scheduler.determinism.settings import AREAS, FAMILIES, Between, Kind, Setting
from mock_scheduler.errors import ConfigError
from mock_scheduler.layouts.rules import RULES
from mock_scheduler.layouts.rules.rule import MegatronRule

_BEGIN, _END = "<!-- begin {name} -->", "<!-- end {name} -->"
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


def update_page(text: str) -> str:
    """Returns the page with both tables replaced by current ones.

    Raises:
        ConfigError: a marker is missing.
    """
    for name, table in (("settings", render_settings()), ("rules", render_rules())):
        begin, end = _BEGIN.format(name=name), _END.format(name=name)
        before, found_begin, rest = text.partition(begin)
        _, found_end, after = rest.partition(end)
        if not found_begin or not found_end:
            raise ConfigError(f"the page has no {begin} followed by {end}; write both markers where the table goes")
        text = f"{before}{begin}\n{table}\n{end}{after}"
    return text


def main(arguments: Sequence[str]) -> int:
    """Rewrite the tables of the page named by the only argument."""
    path = Path(arguments[0])
    path.write_text(update_page(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
