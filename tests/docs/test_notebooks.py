"""The notebooks run as they stand, and give the output that they keep."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.docs.notebook import Notebook, run_notebook

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs/notebooks").glob("*.ipynb"))


def load(path: Path) -> Notebook:
    notebook: Notebook = json.loads(path.read_text(encoding="utf-8"))
    return notebook


def texts(notebook: Notebook) -> list[str]:
    """The output of each code cell, numbers left out: some of them vary by machine."""
    outputs = [json.dumps(cell["outputs"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [re.sub(r"\d[\d.,e+-]*", "#", text) for text in outputs]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_cells_keep_all_of_their_output_or_none_and_no_path_of_a_machine(path: Path) -> None:
    notebook = load(path)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    counts = [cell["execution_count"] for cell in code]
    assert counts in (list(range(1, len(code) + 1)), [None] * len(code))
    assert re.findall(r"(?<![\w.)])/(?:tmp|home|root|work|usr|var|Users)\b", json.dumps(notebook)) == []


@pytest.mark.all
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_gives_the_output_that_it_keeps(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = load(path)
    made = texts(run_notebook(notebook))
    if notebook["cells"][1]["execution_count"] is not None:
        assert made == texts(notebook)
    assert "diverged" in made[-2]
