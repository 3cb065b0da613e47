"""The page on a kernel of one's own: its entry module is the example's, and the examples are judged as it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mock_scheduler import align
from mock_scheduler.alignment.plan.plan import plan_alignment
from mock_scheduler.verdict.wording.own_code import describe_own_code, remark_on_changes
from pipelines.config.loading import build_loader
from pipelines.program import PROGRAM

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "examples" / "my_kernel"
TEXT = (ROOT / "docs" / "my_kernel.md").read_text(encoding="utf-8")


def code_of(text: str) -> str:
    """The module without docstring and comments."""
    return re.sub(r'^""".*?"""\n\n|^ *#.*\n', "", text, flags=re.MULTILINE)


def test_the_entry_module_on_the_page_is_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shown,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert shown == code_of((FOLDER / "right.py").read_text(encoding="utf-8"))
    monkeypatch.chdir(FOLDER)
    plan = plan_alignment(build_loader("align", FOLDER), program=PROGRAM, overrides=[], output_dir=tmp_path / "out")
    assert [(run.name, run.entry, run.must_be_exact) for run in plan.candidates] == [
        (name, name, False) for name in ("right", "wrong", "idle")
    ]
    assert all(f"`{run.entry}.py`" in TEXT for run in plan.candidates)


@pytest.mark.all
@pytest.mark.timeout(1800)
def test_the_right_kernel_passes_the_wrong_one_does_not_and_one_that_never_acts_is_called_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(FOLDER)
    found = {item.name: item for item in align("align.yaml", output_dir=tmp_path / "out").result.candidates}
    assert {name: item.verdict.kind.value for name, item in found.items()} == {
        "right": "rounding",
        "wrong": "diverged",
        "idle": "identical",
    }
    assert describe_own_code(found["right"]).startswith("called: torch.nn.functional.silu (")
    first = found["wrong"].verdict.first
    assert first is not None
    assert (first.step, first.update) == (0, 0)
    assert "gradient" in first.kind
    assert remark_on_changes(found["idle"]) == "but its own code was never called"
    assert "torch.nn" in describe_own_code(found["idle"])
