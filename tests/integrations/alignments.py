"""Runs ``mock-scheduler align`` on a program of others, and reads its result."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs/examples/megatron_training"


@dataclass(frozen=True, kw_only=True, slots=True)
class Alignment:
    """A finished alignment. ``exit_code``: the command's. ``candidates``: by name, as ``align.json`` has them."""

    folder: Path
    exit_code: int
    candidates: dict[str, dict[str, Any]]

    @property
    def verdicts(self) -> dict[str, str]:
        """The verdict on each candidate."""
        return {name: candidate["verdict"] for name, candidate in self.candidates.items()}

    def start(self, run: str) -> dict[str, Any]:
        """What a run found of its baseline's start."""
        document: dict[str, Any] = json.loads((self.folder / run / "start.json").read_text(encoding="utf-8"))
        return document


def candidates(**overrides: Sequence[str]) -> str:
    """The override that gives an alignment these candidates alone, by name; ``_`` in a name stands for ``-``."""
    items = [
        f"{{name: {name.replace('_', '-')}, overrides: [{', '.join(map(repr, texts))}]}}"
        for name, texts in overrides.items()
    ]
    return f"align.candidates=[{', '.join(items)}]"


def align(config: Path, folder: Path, *overrides: str) -> Alignment:
    """Aligns what a configuration says, in a folder of its own."""
    command = [sys.executable, "-m", "mock_scheduler.cli", "align", str(config), "--output-dir", str(folder)]
    done = subprocess.run([*command, *overrides], cwd=ROOT, capture_output=True, text=True, check=False)
    result = folder / "align.json"
    assert result.is_file(), done.stdout + done.stderr
    found = json.loads(result.read_text(encoding="utf-8"))["candidates"]
    return Alignment(
        folder=folder, exit_code=done.returncode, candidates={candidate["name"]: candidate for candidate in found}
    )


def save_checkpoint(folder: Path, *arguments: str, num_processes: int = 1) -> None:
    """Pre-trains three of ten iterations without instruments, and saves the third."""
    saving = ["--host-layers", "--train-iters", "10", "--exit-interval", "3"]
    saving += ["--save", str(folder), "--save-interval", "3", "--ckpt-format", "torch_dist"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    command = [*launcher, str(EXAMPLE / "pretrain_gpt.py"), *saving, *arguments]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
