"""Renders a report as one HTML page out of templates, and writes it whole or not at all.

Contract: every page is a template that extends ``base.html`` or, where plotly draws figures in it, ``figures.html``;
Python gives it plain values alone. Jinja escapes every value, and refuses an unknown name. A page
opens offline: style, scripts and figures lie in it, and its Content-Security-Policy forbids every request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs

from mock_scheduler.display.figures import end_of_name
from mock_scheduler.errors import MockSchedulerError
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.files import written_aside
from mock_scheduler.support.text import count_of

_SHARED = "mock_scheduler.display"


def render_page(package: str, template: str, /, *, figures: Sequence[JSON] = (), **values: object) -> str:
    """Render a page; one with plotly's script has 5 MB.

    Args:
        package: Whose folder ``templates`` holds the template.
        template: The template's name, such as ``comparison.html``.
        figures: Plotly's JSON, drawn in the elements of their ``id``; their texts are plain.
        values: Values of the template; every page needs ``title``, ``heading`` and ``footer``.
    """
    page = _environment(package).get_template(template)
    # Plotly reads some HTML in the texts of its figures, and Jinja cannot see into them.
    return page.render(figures=_escape_texts(list(figures)), plotly=Markup(get_plotlyjs()), **values)


def render_fragment(package: str, template: str, /, **values: object) -> str:
    """Render a template that is no whole page, such as a table for a notebook."""
    return _environment(package).get_template(template).render(**values)


def write_page(page: str, path: Path, error_type: type[MockSchedulerError]) -> None:
    """Write a page to ``path``, whole or not at all; folders are made. Raises ``error_type`` where it cannot be."""
    try:
        with written_aside(path) as aside:
            aside.write_text(page, encoding="utf-8")
    except OSError as error:
        raise error_type(f"{path} cannot be written: {error.strerror}") from error


@cache
def _environment(package: str) -> Environment:
    """The environment of all pages; a package's own templates stand before the shared ones."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader(_SHARED)]),
        autoescape=True,
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
    """The colours of light and of dark pages, by name; apart for colour-blind eyes (Okabe and Ito, 2008)."""
    loader = environment.loader
    assert loader is not None
    palette: Mapping[str, Mapping[str, str]] = json.loads(loader.get_source(environment, "palette.json")[0])
    return palette


def _escape_texts(value: JSON) -> JSON:
    if isinstance(value, str):
        return str(escape(value))
    if isinstance(value, list):
        return [_escape_texts(item) for item in value]
    if isinstance(value, dict):
        return {key: _escape_texts(item) for key, item in value.items()}
    return value
