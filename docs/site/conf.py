"""Makes a site of README and docs/, the same Markdown that a repository's page shows: ``launch/docs.sh --site DIR``.

The page of pages, ``docs/README.md``, is the first page, and its sections are the navigation. A link or anchor that
leads nowhere is an error.
"""

import re
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
FIRST = "docs/README"

project = "mock-scheduler"
author = copyright = ""
root_doc = FIRST
include_patterns = ["README.md", "docs/*.md", "docs/frameworks/*.md"]
extensions = ["myst_parser"]
myst_heading_anchors = 4  # as GitHub names them
html_theme = "furo"
html_title = project
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
suppress_warnings = ["misc.highlighting_failure"]  # blocks with "…" for cuts


def _add_navigation(app: Sphinx, name: str, source: list[str]) -> None:
    """Appends a hidden table of contents for each section of the page of pages, in its order."""
    if name != FIRST:
        return
    seen: set[str] = set()
    for title, body in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", source[0], re.DOTALL | re.MULTILINE):
        pages = [page for page in re.findall(r"\]\(([\w/]+)\.md(?:#[\w-]*)?\)", body) if page not in seen]
        seen.update(pages)
        if pages:
            entries = "\n".join(dict.fromkeys(pages))
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{entries}\n```\n"
    source[0] += "\n```{toctree}\n:hidden:\n\n/README\n```\n"


def _add_entry(app: Sphinx, error: Exception | None) -> None:
    """Writes the page that a folder opens with."""
    if error is None:
        target = f"{FIRST}.html"
        text = f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={target}">'
        Path(app.outdir, "index.html").write_text(f'{text}<a href="{target}">{project}</a>\n', encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Registers both."""
    app.connect("source-read", _add_navigation)
    app.connect("build-finished", _add_entry)
