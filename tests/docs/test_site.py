"""The site is built of the pages as they are, and a link or an anchor that leads nowhere fails."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """The command of ``launch/docs.sh --site``, for a copy of the pages."""
    sphinx = [ROOT / ".venv-docs/bin/python", "-m", "sphinx", "--quiet", "--fail-on-warning"]
    return subprocess.run([*sphinx, "--conf-dir", "docs/site", ".", site], cwd=root, capture_output=True, text=True)


@pytest.mark.all
@pytest.mark.timeout(1800)
def test_the_site_has_every_page_with_search_and_refuses_a_broken_link(tmp_path: Path) -> None:
    command = ["bash", "launch/docs.sh", "--site", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/frameworks/*.md"), ROOT / "README.md"]
    made = [tmp_path / "site" / page.relative_to(ROOT).with_suffix(".html") for page in pages]
    assert [page for page in made if not page.is_file()] == []
    assert "missing_step" in (tmp_path / "site/searchindex.js").read_text(encoding="utf-8")
    assert 'href="tutorial.html">Tutorial' in made[0].read_text(encoding="utf-8")  # the navigation

    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "docs", copy / "docs")
    for page, link in (("docs/metrics.md", "trace.md#no-such-heading"), ("docs/metrics.md", "no_such_page.md")):
        text = (ROOT / page).read_text(encoding="utf-8")
        (copy / page).write_text(f"{text}\n[somewhere]({link})\n", encoding="utf-8")
        shutil.copy(ROOT / "README.md", copy)
        done = build(copy, tmp_path / "broken")
        assert done.returncode != 0
        assert f"{page}" in done.stderr
        assert link.rpartition("#")[2] in done.stderr
