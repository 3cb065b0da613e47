"""Pages out of templates: every text is escaped, a name that is not given is an error, and Python holds no tag."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from jinja2 import UndefinedError

import mock_scheduler
from mock_scheduler.display import pages
from mock_scheduler.display.pages import render_page
from tests.report.pages import figures_of

LIBRARY = Path(mock_scheduler.__file__).parent
TEMPLATES = sorted(LIBRARY.glob("**/templates/*"))
TAG = re.compile(r"</|(?<!\?P)<[a-z]+(?=[\s>/]|$)")
#: Not tags: the file name of frozen modules, and a little-endian float64 of ``struct``.
ALLOWED = {"<frozen", "<d"}
SHARED = "mock_scheduler.display"


@pytest.fixture(autouse=True)
def _small_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "get_plotlyjs", lambda: "/* plotly */")


def find_tags(source: str) -> list[str]:
    """Texts of a module, other than docstrings, in which a tag begins."""
    if not re.search(r"<|\\[xuUN0-7]", source):  # neither written nor escaped: it need not be parsed
        return []
    return [text for text in _texts(ast.parse(source)) if set(TAG.findall(text)) - ALLOWED]


def _texts(tree: ast.AST) -> Iterator[str]:
    scopes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, scopes) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def test_no_python_of_the_library_holds_a_tag() -> None:
    found = {path: find_tags(path.read_text(encoding="utf-8")) for path in LIBRARY.glob("**/*.py")}
    assert {str(path): texts for path, texts in found.items() if texts} == {}


@pytest.mark.parametrize("text", ["<b>{name}</b>", "<tr{tone}>", "%s<br>", "</td>", "<p class=note>"])
def test_a_tag_in_python_is_found(text: str) -> None:
    assert find_tags(f"def render(name, tone):\n    return f{text!r}\n")


def test_style_and_scripts_lie_in_files_of_their_own() -> None:
    names = {path.name for path in TEMPLATES}
    assert {"style.css", "figures.js", "palette.json", "alignment.css", "alignment.js"} <= names
    for path in TEMPLATES:
        if path.suffix == ".html":
            assert "function" not in path.read_text(encoding="utf-8")
            assert "|safe" not in path.read_text(encoding="utf-8")


def test_no_template_leads_out_of_the_page() -> None:
    for path in TEMPLATES:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"https?:|url\(|@import|fetch\(|innerHTML|eval\(", text), path


def test_every_value_is_escaped_and_one_that_is_not_given_is_refused() -> None:
    evil = '</title><script>"1"'
    page = render_page(SHARED, "base.html", title=evil, heading=evil, footer=evil)
    assert evil not in page
    assert page.count("&lt;/title&gt;&lt;script&gt;&#34;1&#34;") == 3
    with pytest.raises(UndefinedError, match="'footer' is undefined"):
        render_page(SHARED, "base.html", title="", heading="")


def test_no_text_is_turned_round_or_hidden() -> None:
    """A name with an override of direction turned the words behind it round: what a page says was not what it had."""
    page = render_page(SHARED, "base.html", title="a\u202eb", heading="a\x1b[2J\u200bb", footer="الف\nb")
    assert [text for text in ("a\\u202eb", "a\\x1b[2J\\u200bb", "الف\nb") if text not in page] == []
    figure = {"id": "f", "data": [{"name": "a\u2066b"}], "layout": {"height": 2}}
    page = render_page(SHARED, "figures.html", title="", heading="", footer="", figures=[figure])
    assert figures_of(page)["f"]["data"] == [{"name": "a\\u2066b"}]


def test_the_policy_of_a_page_forbids_every_request() -> None:
    page = render_page(SHARED, "base.html", title="", heading="", footer="")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert policy[1].split("; ") == [
        "default-src 'none'",
        "img-src data: blob:",
        "script-src 'unsafe-inline'",
        "style-src 'unsafe-inline'",
        "base-uri 'none'",
        "form-action 'none'",
    ]


def test_texts_of_figures_are_escaped_twice_once_for_plotly_and_once_for_the_page() -> None:
    figure = {"id": "</script>", "data": [{"name": "a < b"}], "layout": {"height": 2}}
    page = render_page(SHARED, "figures.html", title="", heading="", footer="", figures=[figure])
    assert page.count("</script>") == 4
    (found,) = figures_of(page).values()
    assert found == {"id": "&lt;/script&gt;", "data": [{"name": "a &lt; b"}], "layout": {"height": 2}}


def test_a_figure_without_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="Out of range float values are not JSON compliant"):
        render_page(SHARED, "figures.html", title="", heading="", footer="", figures=[{"y": float("nan")}])


def test_both_sides_of_the_palette_have_the_same_names() -> None:
    palette = json.loads((LIBRARY / "display/templates/palette.json").read_text(encoding="utf-8"))
    assert list(palette["light"]) == list(palette["dark"])
    used = "".join(path.read_text(encoding="utf-8") for path in TEMPLATES if path.suffix == ".css")
    assert set(re.findall(r"var\(--([\w-]+)\)", used)) <= palette["light"].keys()
