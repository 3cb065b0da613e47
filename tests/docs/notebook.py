"""Runs a notebook's cells one after another and keeps their output: ``python -m tests.docs.notebook NOTEBOOK``.

A cell's last expression is its result, as in Jupyter. Everything happens in one namespace, in the working directory.
"""

from __future__ import annotations

import ast
import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

Notebook = dict[str, Any]


def run_notebook(notebook: Notebook) -> Notebook:
    """Returns the notebook with the output of every code cell; an error of a cell is raised."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells, number = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            number += 1
            cell = {**cell, "execution_count": number, "outputs": _run_cell("".join(cell["source"]), namespace, number)}
        cells.append(cell)
    return {**notebook, "cells": cells}


def _run_cell(source: str, namespace: dict[str, Any], number: int) -> list[Notebook]:
    tree, last = ast.parse(source), None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]
    stdout = io.StringIO()
    with redirect_stdout(stdout):
        exec(compile(tree, f"cell {number}", "exec"), namespace)
        result = None if last is None else eval(compile(last, f"cell {number}", "eval"), namespace)
    outputs: list[Notebook] = []
    if stdout.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": stdout.getvalue().splitlines(keepends=True)})
    if result is not None:
        data = {"text/plain": repr(result).splitlines(keepends=True)}
        if hasattr(result, "_repr_html_"):
            data = {"text/html": result._repr_html_().splitlines(keepends=True), **data}
        outputs.append({"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": data})
    return outputs


def main(path: Path) -> None:
    """Runs a notebook and writes its output into it."""
    done = run_notebook(json.loads(path.read_text(encoding="utf-8")))
    path.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
