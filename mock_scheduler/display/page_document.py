"""A report as one HTML document that opens offline, and how it is written: whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from plotly.offline import get_plotlyjs

from mock_scheduler.display.page_assets import SCRIPT, STYLE, embed_json
from mock_scheduler.errors import MockSchedulerError
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.files import written_aside


def render_document(title: str, heading: str, sections: Iterable[str], *, footer: str, figures: Sequence[JSON]) -> str:
    """The document's text, of 5 MB, nearly all of which is plotly's script; empty sections are left out.

    Sections are HTML, in which ``figures`` are drawn by their place; title, heading and footer are texts.
    """
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            f"<title>{escape(title)}</title>\n<style>{STYLE}</style></head>\n<body><main>",
            f"<h1>{escape(heading)}</h1>",
            *filter(None, sections),
            f"<footer><p>{escape(footer)}</p></footer></main>",
            f'<script type="application/json" id="figures">{embed_json(figures)}</script>',
            f"<script>{get_plotlyjs()}</script>",
            f"<script>{SCRIPT}</script>\n</body></html>\n",
        ]
    )


def write_document(page: str, path: Path, error_type: type[MockSchedulerError]) -> None:
    """Write a page to ``path``, whole or not at all; folders are made. Raises ``error_type`` where it cannot be."""
    try:
        with written_aside(path) as aside:
            aside.write_text(page, encoding="utf-8")
    except OSError as error:
        raise error_type(f"{path} cannot be written: {error.strerror}") from error
