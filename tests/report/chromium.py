"""Pages in headless Chromium: what a reader's browser makes of them, where one is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import pytest

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    *("--enable-logging=stderr", "--v=0"),
)
_TIMEOUT_S = 120
#: Counts every error and request of the page; stands before all else in it.
_WATCH = """<script>
window.seen = {errors: [], requests: []};
window.addEventListener("error", event => seen.errors.push(String(event.message)));
new PerformanceObserver(list => list.getEntries().forEach(entry => seen.requests.push(entry.name)))
  .observe({type: "resource", buffered: true});
</script>"""
#: Writes what ``measures`` give into the document, when it has been laid out.
_REPORT = """<script>
window.addEventListener("load", () => {
  const measures = {%s};
  const values = Object.fromEntries(Object.entries(measures).map(([name, measure]) => [name, measure()]));
  const place = document.createElement("div");
  place.id = "measured";
  place.textContent = JSON.stringify({...values, ...seen});
  document.body.appendChild(place);
});
</script>"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """values: of the measures, and ``errors`` and ``requests``. console: what the page wrote to the console."""

    values: dict[str, Any]
    console: tuple[str, ...]


def need_chromium() -> str:
    """The browser's path; the test is skipped where there is none."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium is installed")
    return found


def look_at(page: Path, measures: dict[str, str], *, is_dark: bool, width: int = 1280, anchor: str = "") -> Seen:
    """Open a page and evaluate ``measures``, JavaScript expressions by name, in it."""
    watched = page.with_name(f"watched-{'dark' if is_dark else 'light'}{anchor.replace('/', '-')}.html")
    functions = ", ".join(f"{json.dumps(name)}: () => {expression}" for name, expression in measures.items())
    text = page.read_text(encoding="utf-8").replace("<head>", f"<head>{_WATCH}", 1)
    watched.write_text(text.replace("</body>", f"{_REPORT % functions}</body>", 1), encoding="utf-8")
    address = f"{watched.as_uri()}{f'#{anchor}' if anchor else ''}"
    scheme = f"--blink-settings=preferredColorScheme={0 if is_dark else 1}"
    done = _run(page.parent, scheme, f"--window-size={width},900", "--dump-dom", address)
    found = re.search(r'<div id="measured">(.*?)</div>', done.stdout)
    assert found is not None, done.stderr
    console = tuple(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return Seen(values=json.loads(unescape(found[1])), console=console)


def print_pdf(page: Path, pdf: Path) -> None:
    """Print a page as a reader does."""
    _run(page.parent, "--no-pdf-header-footer", f"--print-to-pdf={pdf}", page.as_uri())


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """One run with a profile of its own in ``folder``."""
    profile = f"--user-data-dir={folder / 'profile'}"
    return subprocess.run(
        [need_chromium(), *_FLAGS, profile, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
    )
