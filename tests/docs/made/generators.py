"""Names what generators write: whole pages, and regions between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``.

All of it follows from definitions, and no run is needed; ``session`` has what runs print.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from mock_scheduler.api.page import render_page as render_api
from mock_scheduler.layouts.rules.table import render_rules, render_settings
from tests.docs.made.commands import render_commands, render_exit_codes
from tests.docs.made.keys import render_keys
from tests.docs.made.pages import DOCS, list_pages, list_regions, put_regions
from tests.docs.made.presets import render_presets
from tests.docs.made.results import render_results

WHOLE_PAGES: Mapping[Path, Callable[[], str]] = {
    DOCS / "api.md": render_api,
    DOCS / "commands.md": render_commands,
    DOCS / "keys.md": render_keys,
    DOCS / "presets.md": render_presets,
    DOCS / "results.md": render_results,
}
REGIONS: Mapping[str, Callable[[], str]] = {
    "exit-codes": render_exit_codes,
    "rules": render_rules,
    "settings": render_settings,
}


def render_all() -> dict[Path, str]:
    """Returns every page with generated text, as it should be; raises ``KeyError`` for a region that nothing writes."""
    pages = {path: render() for path, render in WHOLE_PAGES.items()}
    for path in list_pages():
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        names = [] if path in pages else list(list_regions(text))
        if names:
            pages[path] = put_regions(text, {name: REGIONS[name]() for name in names})
    return pages
