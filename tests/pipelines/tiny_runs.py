"""A tiny configuration on top of the shipped ones, and the real command line on it, for end-to-end tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.programs import run_program

ROOT = Path(__file__).parents[2]

TINY_YAML = """\
defaults:
  - quickstart
  - _self_

exp_name: tiny
max_steps: 2
eval_steps: 0
rollout_batch_size: 16
track_with: none
training:
  micro_batch_size: 4
  global_batch_size: 8
  lr: 2.0e-3
train_env_manager: {num_env_groups: 4, group_size: 4}
align:
  proofs: {num_perturbations: 2, localise: false}  # every proof once; localisation has tests of its own
  candidates:
    - name: same-layout
      entry: tests.pipelines.workers.gymnasium_must_not_load
    - name: tp2-pp2
      overrides: [parallel.tensor_model_parallel_size=2, parallel.pipeline_model_parallel_size=2]
    - name: clip-range
      overrides: [pg_clip=0.1]
    - name: double-lr
      overrides: [training.lr=4.0e-3]
    - name: norm-gradients
      overrides: [parallel.tensor_model_parallel_size=2, parallel.sequence_parallel=true]
      entry: tests.faults.norm_gradients_not_reduced
    - name: other-length
      overrides: [sequence_length=96]
"""


def write_tiny_config(folder: Path) -> Path:
    """``{folder}/configs`` with the shipped files and ``tiny.yaml``."""
    configs = folder / "configs"
    shutil.copytree(ROOT / "configs", configs)
    (configs / "tiny.yaml").write_text(TINY_YAML, encoding="utf-8")
    return configs


def run_command(
    arguments: Sequence[str], *, environ: Mapping[str, str] | None = None, timeout_s: float = 560.0
) -> subprocess.CompletedProcess[str]:
    """``python ARGUMENTS`` in the repository's root, with this process's environment and ``environ`` over it."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200", **(environ or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def run_cli(
    command: str,
    configs: Path,
    overrides: Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
    module: str = "mock_scheduler.cli",
) -> subprocess.CompletedProcess[str]:
    """``mock-scheduler COMMAND --config-path CONFIGS tiny OVERRIDES``."""
    arguments = ["-m", module, command, "--config-path", str(configs), "tiny", *overrides]
    return run_command(arguments, environ=environ)


def run_tiny(configs: Path, overrides: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """The run of ``tiny`` with these overrides in one process, as the launcher starts it."""
    named = ("--config-path", str(configs), "--config-name", "tiny")
    return run_program("pipelines.agentic", [*named, *overrides])


def run_several(root: Path, cases: Sequence[Sequence[str]], *, log: str) -> tuple[list[int], str]:
    """Runs the pipeline with each list of arguments, in one process; returns the exit codes, and the output.

    ``log``: the file in ``root`` for the output.
    """
    path = root / "cases.json"
    path.write_text(json.dumps([{"arguments": [*case], "environ": {}} for case in cases]), encoding="utf-8")
    finished = run_program("tests.pipelines.several_runs", [str(path)])
    output = finished.stdout + finished.stderr
    (root / log).write_text(output, encoding="utf-8")
    assert finished.returncode == 0, finished.stderr
    codes: list[int] = json.loads(finished.stdout.splitlines()[-1])
    return codes, output


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
