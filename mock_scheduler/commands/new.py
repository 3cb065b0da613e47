"""Writes a folder to start from for ``mock-scheduler new``: a training, a kernel of one's own, and an alignment."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from mock_scheduler.display.terminal import build_console
from mock_scheduler.errors import ConfigError
from mock_scheduler.support.text import list_some, printable

_TEMPLATES = Path(__file__).parent / "templates"
#: In the order in which a reader takes them up.
_FILES = {
    "align.yaml": "how train.py is started, and what is compared with it",
    "train.py": "a small training on Megatron-core, in the place of yours",
    "my_kernel.py": "the same training with code of your own in it",
}


def run_new(folder: Path) -> int:
    """Write the folder and print the command that aligns it; returns the exit code.

    Raises ``ConfigError`` where the folder holds anything, is a file, or cannot be written; nothing is changed then.
    """
    shown = printable(str(folder))
    try:
        present = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        if present:
            raise ConfigError(
                f"{shown} is not empty: it holds {list_some([printable(name) for name in present], 3, ', ')}; "
                "name a folder that does not exist yet"
            )
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{shown} is a file; name a folder that does not exist yet")
        folder.mkdir(parents=True, exist_ok=True)
        for name in _FILES:
            shutil.copyfile(_TEMPLATES / name, folder / name)
    except OSError as error:
        raise ConfigError(f"{shown} cannot be made: {error.strerror}; name a folder where you may write") from error
    console = build_console()
    console.print(f"made {shown}", markup=False, highlight=False, soft_wrap=True)
    for name, content in _FILES.items():
        console.print(f"  {name:<14}{content}", markup=False, highlight=False, soft_wrap=True)
    where = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(shown)} && "
    for label, text in (
        ("next", f"{where}mock-scheduler align align.yaml    (about a minute on two CPU cores)"),
        ("then", "open output/align/align.html; put your own training in (align.yaml marks the lines to CHANGE)"),
        ("page", "docs/my_kernel.md for a kernel, docs/attach.md for a training on Megatron-core"),
    ):
        console.print(f"{label:<6}{text}", markup=False, highlight=False, soft_wrap=True)
    return 0
