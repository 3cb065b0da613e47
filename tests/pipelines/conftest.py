"""One real alignment run, recorded once and shared by all tests that need real output."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.pipelines.tiny_runs import read_json, run_cli, write_tiny_config
from tests.sharing import make_once


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyAlignment:
    """A finished ``mock-scheduler align``: its configuration folder, output folder, exit code and terminal output."""

    configs: Path
    folder: Path
    exit_code: int
    terminal: str

    def candidate(self, name: str) -> dict[str, Any]:
        """One candidate's part of ``align.json``."""
        result = read_json(self.folder / "align.json")
        return next(candidate for candidate in result["candidates"] if candidate["name"] == name)

    @property
    def recording(self) -> Path:
        """What the baseline dumped: training steps 0 and 1."""
        return self.folder / "recording"


@pytest.fixture(scope="session")
def tiny_alignment(tmp_path_factory: pytest.TempPathFactory) -> TinyAlignment:
    """A baseline and six candidates through the real command line."""
    root, told = make_once(tmp_path_factory, "tiny", _align)
    return TinyAlignment(
        configs=root / "configs", folder=root / "align", exit_code=told["exit_code"], terminal=told["terminal"]
    )


def _align(root: Path) -> dict[str, object]:
    configs = write_tiny_config(root)
    finished = run_cli(
        "align", configs, [f"align.output_dir={root / 'align'}"], module="tests.pipelines.workers.forking_align"
    )
    terminal = finished.stdout + finished.stderr
    assert (root / "align" / "align.json").is_file(), terminal
    return {"exit_code": finished.returncode, "terminal": terminal}
