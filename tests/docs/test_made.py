"""The pages have what scripts write into them, and each of their command blocks says how it is kept true."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from mock_scheduler.verdict.verdict import VerdictKind
from tests.docs.made import __main__ as program
from tests.docs.made.excerpts import renew
from tests.docs.made.generators import WHOLE_PAGES, render_all
from tests.docs.made.keys import render_keys
from tests.docs.made.pages import ROOT, Block, list_pages, list_regions, put_blocks, put_regions, read_blocks
from tests.docs.made.session import SESSIONS, prepare_folder, renew_page

WRITTEN = [page for page in list_pages() if page not in WHOLE_PAGES]
MARKED = [(page, block) for page in WRITTEN for block in read_blocks(page.read_text(encoding="utf-8"))]


def place(page: Path, block: Block) -> str:
    return f"{page.relative_to(ROOT)}:{block.line}"


def test_what_follows_from_definitions_is_in_the_pages() -> None:
    stale = [str(path) for path, text in render_all().items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run: bash launch/docs.sh"


def test_every_command_and_printed_block_says_how_it_is_kept_true() -> None:
    assert len(MARKED) > 100
    assert [place(page, block) for page, block in MARKED if block.needs_mark and not block.mark] == []
    needs_text = ("not run", "tested", "file")
    assert [place(page, block) for page, block in MARKED if block.mark in needs_text and not block.said] == []


def test_every_test_that_a_mark_names_is_there() -> None:
    named = {
        place(page, block): found
        for page, block in MARKED
        for found in re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", block.said)
    }
    assert len(named) > 10
    assert {where: test for where, test in named.items() if not is_test(*test)} == {}


@cache
def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def is_test(path: str, name: str) -> bool:
    return (ROOT / path).is_file() and (not name or name in functions_of(path))


def test_every_page_with_a_block_to_run_is_in_a_session() -> None:
    assert {page.relative_to(ROOT).as_posix() for page, block in MARKED if block.mark == "run"} == set(SESSIONS)


def test_every_key_has_a_meaning() -> None:
    rows = [line.strip("| ").split(" | ") for line in render_keys().splitlines() if line.startswith("| `")]
    assert len(rows) > 250
    assert [row[0] for row in rows if len(row) < 4 or row[3].startswith("One of ")] == []


@pytest.mark.parametrize("page", ["README.md", "docs/verdicts.md"])
def test_the_table_of_verdicts_has_each_with_its_exit_code(page: str) -> None:
    rows = re.findall(r"^\| `([\w ()]+)` \|.*\| (\d) \|$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert dict(rows) == {kind.value: str(int(kind.exit_code)) for kind in VerdictKind}


PAGE = """# A page

<!-- run: exit 1 -->
```bash
align; exit 1
```

<!-- output -->
```
loss 0.5 of 12 tensors …
…
equal: 7
```

```yaml
a: 1
```

<!-- begin table -->
old
<!-- end table -->
"""


def test_blocks_are_read_with_their_marks_and_written_back() -> None:
    run, output, other = read_blocks(PAGE)
    assert [(block.language, block.mark, block.said) for block in (run, output, other)] == [
        ("bash", "run", "exit 1"),
        ("", "output", ""),
        ("yaml", "", ""),
    ]
    assert (run.text, run.line, other.needs_mark) == ("align; exit 1\n", 4, False)
    assert put_blocks(PAGE, {other: "b: 2\n"}) == PAGE.replace("a: 1", "b: 2")
    assert list(list_regions(PAGE)) == ["table"]
    assert put_regions(PAGE, {"table": "new"}) == PAGE.replace("\nold\n", "\nnew\n")


@pytest.mark.parametrize(
    ("shown", "printed", "renewed", "lost"),
    [
        ("done in 2.0 s\n", "done in 31.5 s\n", "done in 2.0 s\n", []),  # seconds vary, and stay
        ("equal: 7\n", "first\nequal: 8\nlast\n", "equal: 8\n", []),  # a count is the command's
        ("41% of its bound\n", "35% of its bound\n", "41% of its bound\n", []),  # rounding decides it
        ("equal: 7\n…\nlast 1\n", "equal: 7\nmore\nlast 2\n", "equal: 7\n…\nlast 2\n", []),
        ("equal: 7 …\n", "equal: 7 of all\n", "equal: 7 …\n", []),
        ("  … the 67 tensors before\n", "as is; the 60 tensors before\n", "  … the 60 tensors before\n", []),
        ("of 38 metrics, … 3 worse\n", "of 43 metrics, 5 or 6, 4 worse\n", "of 43 metrics, … 4 worse\n", []),
        ("equals: 7\nlast\n", "equal: 7\nlast\n", "equals: 7\nlast\n", ["equals: 7"]),  # says so, and goes on
        ("b\na\n", "a\nb\n", "b\na\n", ["a"]),  # the order counts
    ],
)
def test_an_excerpt_is_renewed_line_by_line(shown: str, printed: str, renewed: str, lost: list[str]) -> None:
    assert renew(shown, printed) == (renewed, lost)


def test_a_block_that_fails_or_prints_something_else_is_named(tmp_path: Path) -> None:
    """Negative control; and a console's commands are run one by one."""
    text = (
        "<!-- run -->\n```bash\necho three 3\n```\n\n<!-- output -->\n```\nthree 4\n```\n\n"
        "<!-- run -->\n```bash\nfalse\n```\n\n"
        "<!-- run: exit 0, 5 -->\n```console\n$ echo one 2\none 1\n\n$ exit 5\n```\n"
    )
    renewed, problems = renew_page(ROOT / "docs" / "page.md", text, tmp_path, [])
    assert renewed == text.replace("three 4", "three 3").replace("one 1", "one 2")
    assert [problem.splitlines()[0] for problem in problems] == ["docs/page.md:12: exit code 1 instead of 0: false"]


def test_a_check_shows_what_would_change_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("old\n")
    monkeypatch.setattr(program, "ROOT", tmp_path)
    monkeypatch.setattr(program, "render_all", lambda: {page: "new\n"})
    assert program.main(["--check"]) == 1
    assert capsys.readouterr().out == "--- page.md\n+++ page.md\n@@ -1 +1 @@\n-old\n+new\n"
    assert page.read_text() == "old\n"
    assert program.main([]) == 0
    assert (page.read_text(), program.main(["--check"])) == ("new\n", 0)
    assert program.main(["--checks"]) == 5
    assert program.main(["docs/tutorial.md"]) == 5  # a page whose commands run, and no folder for them


@pytest.mark.all
@pytest.mark.timeout(7200)
def test_the_pages_show_what_their_commands_print(tmp_path: Path) -> None:
    prepare_folder(tmp_path)
    printed: list[str] = []
    problems: list[str] = []
    changed: list[str] = []
    for name in SESSIONS:
        text = (ROOT / name).read_text(encoding="utf-8")
        renewed, found = renew_page(ROOT / name, text, tmp_path, printed)
        problems += found
        changed += [name] if renewed != text else []
    assert (problems, changed) == ([], []), "run: bash launch/docs.sh --runs DIR"
