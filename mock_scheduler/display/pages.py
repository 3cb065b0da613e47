"""Renders a report as one HTML page out of templates, and writes it whole or not at all; its figures share one look.

Contract: every page is a template on top of ``base.html`` or, with figures of plotly in it, of ``figures.html``; Python
gives it plain values alone. Jinja escapes every value, writes out each character that turns or hides a text, and
refuses an unknown name. A page opens offline: style, scripts and figures lie in it, and its Content-Security-Policy
forbids every request. A figure is plotly's JSON with the ``id`` of its element. A colour is the name of one of the
page's palette, as ``theme:ink``. Texts are plain; of several lines, the first is bold. No value is NaN or infinite.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs

from mock_scheduler.errors import MockSchedulerError
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.files import written_aside
from mock_scheduler.support.text import count_of, printable_lines

_Item = TypeVar("_Item")

#: Of more steps than this, some are left out, evenly.
MAX_STEPS = 2000

_FONT: JSON = {"family": "system-ui, sans-serif", "size": 12, "color": "theme:ink"}


def plain_layout(*, height: int) -> dict[str, JSON]:
    """Lay out any figure: its height in pixels, no background of its own, and the page's font."""
    return {
        "height": height,
        "font": _FONT,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hoverlabel": {"align": "left", "bgcolor": "theme:card", "bordercolor": "theme:line", "font": _FONT},
        "hovermode": "closest",
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "theme:soft", "activecolor": "theme:ink"},
    }


def axis_title(text: str) -> JSON:
    """Write the title of an axis."""
    return {"text": text, "font": soft_font(12)}


def soft_font(size: int) -> JSON:
    """Choose the font of texts beside a figure; ``size`` in pixels."""
    return {"size": size, "color": "theme:soft"}


def thin_out(items: Sequence[_Item]) -> Sequence[_Item]:
    """Keep every n-th of the items, ``MAX_STEPS`` at most."""
    return items[:: max(-(-len(items) // MAX_STEPS), 1)]


def finite_or_none(value: float | None) -> float | None:
    """Return the value, or ``None`` in place of NaN and infinities: JSON has neither."""
    return value if value is not None and math.isfinite(value) else None


def end_of_name(text: str, width: int) -> str:
    """Shorten a name to its end of ``width`` characters, since the end tells it from others."""
    return text if len(text) <= width else f"…{text[-width + 1 :]}"


_SHARED = "mock_scheduler.display"


def render_page(package: str, template: str, /, *, figures: Sequence[JSON] = (), **values: object) -> str:
    """Render a page; one with plotly's script has 5 MB.

    Args:
        package: Whose folder ``templates`` holds the template.
        template: The template's name, such as ``comparison.html``.
        figures: Plotly's JSON, drawn in the elements of their ``id``; their texts are plain.
        values: Values of the template; every page needs ``title``, ``heading`` and ``footer``. ``origin``: labels
            and texts of date, revision and command.
    """
    page = _environment(package).get_template(template)
    # Plotly reads some HTML in the texts of its figures, and Jinja cannot see into them.
    values.setdefault("origin", ())
    return page.render(figures=_escape_texts(list(figures)), plotly=Markup(get_plotlyjs()), **values)


def render_fragment(package: str, template: str, /, **values: object) -> str:
    """Render a template that is no whole page, such as a table for a notebook."""
    return _environment(package).get_template(template).render(**values)


def write_page(page: str, path: Path, error_type: type[MockSchedulerError]) -> None:
    """Write a page to ``path``, whole or not at all; folders are made. Raises ``error_type`` where it cannot be."""
    try:
        with written_aside(path) as aside:
            aside.write_text(page, encoding="utf-8", errors="backslashreplace")  # a lone surrogate has no UTF-8
    except OSError as error:
        raise error_type(f"{path} cannot be written: {error.strerror}") from error


@cache
def _environment(package: str) -> Environment:
    """Builds the environment of all pages; a package's own templates stand before the shared ones."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader(_SHARED)]),
        autoescape=True,
        finalize=_write_out,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Strict JSON: a NaN would end the page's script.
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters["end_of_name"] = end_of_name
    environment.filters["thousands"] = "{:,}".format
    environment.globals["count_of"] = count_of
    environment.globals["palette"] = _load_palette(environment)
    return environment


def _load_palette(environment: Environment) -> Mapping[str, Mapping[str, str]]:
    """Loads the colours of light and of dark pages, by name; apart for colour-blind eyes (Okabe and Ito, 2008)."""
    loader = environment.loader
    assert loader is not None
    palette: Mapping[str, Mapping[str, str]] = json.loads(loader.get_source(environment, "palette.json")[0])
    return palette


def _write_out(value: object) -> object:
    """Writes out the characters that turn or hide a text; what Jinja made itself stays."""
    return printable_lines(value) if type(value) is str else value


def _escape_texts(value: JSON) -> JSON:
    if isinstance(value, str):
        return str(escape(printable_lines(value)))
    if isinstance(value, list):
        return [_escape_texts(item) for item in value]
    if isinstance(value, dict):
        return {key: _escape_texts(item) for key, item in value.items()}
    return value


def render_summary(
    title: str,
    rows: Sequence[tuple[str, str]],
    *,
    tone: str = "",
    columns: Sequence[str] = (),
    table: Sequence[Sequence[str]] = (),
) -> str:
    """Render labels and texts, and a table beneath them, as HTML; every text is escaped.

    Args:
        tone: ``good``, ``warn`` or ``bad``, which colours the title; empty for none.
        columns: Titles of the table's columns.
        table: Its rows.
    """
    return render_fragment(_SHARED, "summary.html", title=title, rows=rows, tone=tone, columns=columns, table=table)
