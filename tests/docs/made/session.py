"""Runs the command blocks of pages in a copy of the checkout, and renews the output that the pages show.

Pages run in the order of ``SESSIONS``, each block in its page's order, in one folder: a later page uses the runs of an
earlier one. A command's output is standard output and error together, 120 columns wide.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from mock_scheduler.errors import MockSchedulerError
from tests.docs.made.excerpts import renew
from tests.docs.made.pages import ROOT, Block, put_blocks, read_blocks

#: Pages with blocks that are run; the tutorial's runs are needed by all that follow it.
SESSIONS = (
    "docs/tutorial.md",
    "docs/python.md",
    "docs/align.md",
    "docs/compare.md",
    "docs/localisation.md",
    "docs/recordings.md",
    "docs/doctor.md",
    "docs/trace.md",
    "docs/remote.md",
    "docs/rollout_correction.md",
    "docs/attach.md",
    "README.md",
)
_COPIED = ("configs", "docs")
_LINKED = (
    "mock_scheduler",
    "pipelines",
    "tests",
    "launch",
    "benchmarks",
    "README.md",
    "requirements.txt",
    "setup.py",
    ".git",
)
_STAMP = ".requirements.sha256"
_SEPARATOR = "\x1e"
_WIDTH = 120


class StalePageError(MockSchedulerError, RuntimeError):
    """A page shows a command that fails here, or lines that its command prints no more."""


def prepare_folder(folder: Path) -> None:
    """Makes a folder in which the commands of pages find what they find in a checkout."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in _LINKED:
        link = folder / name
        if not link.is_symlink() and (ROOT / name).exists():
            link.symlink_to(ROOT / name)
    for name in _COPIED:
        subprocess.run(["cp", "-r", str(ROOT / name), str(folder)], check=True)
    _link_environment(folder)


def _link_environment(folder: Path) -> None:
    """Gives the folder this environment as its ``.venv``, made already, as ``launch/setup_venv.sh`` sees it."""
    own = folder / ".venv"
    own.mkdir(exist_ok=True)
    for path in (ROOT / ".venv").iterdir():
        if path.name != _STAMP and not (own / path.name).is_symlink():
            (own / path.name).symlink_to(path)
    folder = folder.absolute()
    files = "".join(f"{digest_of(folder / name)}  {name}\n" for name in ("requirements.txt", "setup.py"))
    wanted = hashlib.sha256(f"{files}{folder}\n".encode()).hexdigest()
    (own / _STAMP).write_text(f"{wanted}  -\n", encoding="utf-8")


def digest_of(path: Path) -> str:
    """Returns a file's SHA-256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def renew_page(page: Path, text: str, folder: Path, printed: list[str]) -> tuple[str, list[str]]:
    """Runs the blocks of a page's ``text`` in ``folder``; returns it with their output, and what went wrong.

    ``printed``: what blocks of earlier pages printed; the page's own is added.
    """
    changed: dict[Block, str] = {}
    problems: list[str] = []
    scripts: Iterator[str] | None = None
    blocks = read_blocks(text)
    for block in blocks:
        place = f"{page.relative_to(ROOT)}:{block.line}"
        began = time.monotonic()
        try:
            if block.mark == "run" and block.language == "console":
                changed[block] = _renew_console(block, folder, place, problems)
            elif block.mark == "run" and block.language == "python":
                if scripts is None:
                    scripts = _run_python([item for item in blocks if item.mark == "run"], folder)
                printed.append(next(scripts))
            elif block.mark in ("run", "prepare"):
                printed.append(_run(block.text, folder, block.said))
            elif block.mark == "file":
                (folder / block.said).write_text(block.text, encoding="utf-8")
            elif block.mark == "output":
                changed[block] = _renew_output(block, printed, place, problems)
        except StalePageError as error:
            problems.append(f"{place}: {error}")
        if block.mark == "run":
            sys.stderr.write(f"{place}: {time.monotonic() - began:.0f} s\n")
    return put_blocks(text, changed), problems


def _renew_output(block: Block, printed: Sequence[str], place: str, problems: list[str]) -> str:
    """Renews a block by the latest output that has all its lines, else by the one that has most of them."""
    tried = [renew(block.text, output) for output in reversed(printed)] or [(block.text, block.text.splitlines())]
    renewed, lost = min(tried, key=lambda item: len(item[1]))
    problems += [f"{place}: is printed no more: {line}" for line in lost]
    return renewed


def _renew_console(block: Block, folder: Path, place: str, problems: list[str]) -> str:
    """Runs each line that begins with ``$``; returns the block with the lines that it prints."""
    parts: list[str] = []
    codes = [f"exit {code}" for code in block.said.removeprefix("exit ").split(", ")] if block.said else []
    for number, part in enumerate(f"\n{block.text.rstrip()}".split("\n$ ")[1:]):
        command, _, shown = part.partition("\n")
        renewed, lost = renew(shown, _run(command, folder, codes[number] if codes else ""))
        problems += [f"{place}: is printed no more: {line}" for line in lost]
        # An empty line before the next command is no line of the output.
        parts.append(f"$ {command}\n{renewed}" + ("\n" if shown.endswith("\n") else ""))
    return "".join(parts)


def _run(script: str, folder: Path, said: str) -> str:
    """Returns what the lines print; raises ``StalePageError`` for an exit code that ``said`` does not name."""
    expected = int(said.removeprefix("exit ")) if said else 0
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", script],
        cwd=folder,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != expected:
        tail = "\n".join(done.stdout.splitlines()[-12:])
        raise StalePageError(f"exit code {done.returncode} instead of {expected}: {script.strip()}\n{tail}")
    return done.stdout.replace(f"{folder.absolute()}/", "")  # as a reader's command, which names what is beside it


def _environment() -> dict[str, str]:
    bin_folder = Path(sys.executable).parent
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV_"))},
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "COLUMNS": str(_WIDTH),
        "NO_COLOR": "1",
        "OMP_NUM_THREADS": "1",
    }


def _run_python(blocks: Sequence[Block], folder: Path) -> Iterator[str]:
    """Runs the Python blocks of a page in one process; returns what each printed, in their order."""
    texts = [f"print({_SEPARATOR!r}, end='')\n{block.text}\n" for block in blocks if block.language == "python"]
    command = f"{shlex.quote(sys.executable)} - <<'END_OF_BLOCKS'\n{''.join(texts)}END_OF_BLOCKS\n"
    return iter(_run(command, folder, "").split(_SEPARATOR)[1:])
