"""Every page of the documentation names only things that exist, and is listed on the page of pages."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

_FOLDERS = "mock_scheduler|pipelines|tests|docs|configs|launch|benchmarks"
_PATH = re.compile(rf"`((?:{_FOLDERS})/[\w./-]*)`")
_DOTTED = re.compile(r"(?<![\w./-])((?:mock_scheduler|pipelines|tests|benchmarks)(?:\.[A-Za-z_]\w*+)++)(?!…)")
_LINK = re.compile(r"\]\(([^)#:]*)(?:#([^)]*))?\)")
#: Pages whose lines are still as long as they were: a program writes the first two.
_WIDE = {DOCS / "faults.md", DOCS / "faults_found.md", DOCS / "rollout_correction.md"}
_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def pages() -> list[Path]:
    return [*sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("frameworks/*.md")), ROOT / "README.md"]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_every_path_on_a_page_exists(page: Path) -> None:
    paths = set(_PATH.findall(page.read_text(encoding="utf-8")))
    theirs = {path for path in paths if Path(path).name.startswith("my_")}  # the reader's own files
    assert {path for path in paths - theirs if not (ROOT / path).exists()} == set()


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_every_dotted_name_on_a_page_exists(page: Path) -> None:
    names = set(_DOTTED.findall(page.read_text(encoding="utf-8")))
    assert {name for name in names if not _is_there(name)} == set()


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    broken = set()
    for target, heading in _LINK.findall(_FENCE.sub("", page.read_text(encoding="utf-8"))):
        file = (page.parent / target) if target else page
        if not file.exists() or (heading and heading not in _headings(file)):
            broken.add(f"{target}#{heading}" if heading else target)
    assert broken == set()


@pytest.mark.parametrize("page", [page for page in pages() if page not in _WIDE], ids=lambda page: page.name)
def test_no_line_but_a_table_row_is_longer_than_120_characters(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []


def test_the_readme_is_under_200_lines_and_its_tables_are_as_narrow_as_its_text() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 200
    assert [line for line in lines if len(line) > 120] == []


def test_the_page_of_pages_lists_every_page_and_example() -> None:
    linked = {target for target, _ in _LINK.findall((DOCS / "README.md").read_text(encoding="utf-8"))}
    present = {path.relative_to(DOCS).as_posix() for path in pages()[:-1]} - {"README.md"}
    examples = {f"examples/{path.name}" for path in (DOCS / "examples").iterdir() if path.is_file()}
    assert present | examples <= linked


@pytest.mark.parametrize("page", pages()[:-1], ids=lambda page: page.name)
def test_every_page_says_for_whom_it_is_and_how_long_it_takes(page: Path) -> None:
    title, line = page.read_text(encoding="utf-8").split("\n\n", 2)[:2]
    assert title.startswith("# ")
    assert re.match(r"\*For [^*]*(\d+ minutes?\b|to look things up)[^*]*\.\*", line)


def test_a_name_that_is_not_there_is_found() -> None:
    assert _is_there("mock_scheduler.proxy.build.build_scheduler")
    assert not _is_there("mock_scheduler.proxy.no_such_module")
    assert not _is_there("pipelines.no_such_module")


def _headings(file: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    titles = re.findall(r"^#+ (.*)$", _FENCE.sub("", file.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def _is_there(name: str) -> bool:
    """Whether a dotted name is a module, or a name that a module defines or imports."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        folder = ROOT.joinpath(*parts[:length])
        file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        if not (file.is_file() or folder.is_dir()):
            continue
        rest = parts[length:]
        if not rest:
            return True
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        return re.search(rf"\b{re.escape(rest[0])}\b", text) is not None
    return find_spec(parts[0]) is not None and len(parts) == 1
