"""Runs the pipeline several times in one process: ``python -m tests.pipelines.several_runs CASES.json``.

The file lists cases ``{"arguments": [...], "environ": {...}}``; their exit codes are printed as one JSON list. Each is
a whole call of the pipeline's entry, so bad input costs one start of Python for all, not one each.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pipelines.agentic import main


def run_case(arguments: list[str], environ: dict[str, str]) -> int:
    """One run with some variables changed for its duration."""
    before = dict(os.environ)
    os.environ.update(environ)
    try:
        return main(arguments)
    finally:
        os.environ.clear()
        os.environ.update(before)


if __name__ == "__main__":
    cases = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print(json.dumps([run_case(case["arguments"], case["environ"]) for case in cases]))
