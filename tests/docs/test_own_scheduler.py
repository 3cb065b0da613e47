"""The page for adopters: its code runs as it stands there, and it names every option, method and field."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from mock_scheduler.proxy.settings import BuildOptions
from mock_scheduler.scheduler import RolloutRequest, RolloutScheduler

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "own_scheduler.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_the_code_runs_in_order_and_prints_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "own_scheduler"}
    for number, block in enumerate(BLOCKS, start=1):
        exec(compile(block, f"own_scheduler.md, block {number}", "exec"), names)
    printed = capsys.readouterr().out
    dumped, replayed, later, resumed, again = printed.split("Ledger\n")[1:6]
    assert "  schedulers built: 1\n" in dumped
    assert re.search(r"\n  recording: recorded_bytes \d+, recorded_steps 4\n", dumped)
    assert "  schedulers built: 0\n" in replayed
    assert "  calls answered from the recording: get_batch 2, load_state_dict 1, state_dict 2\n" in later
    assert "\nkilled in step 2, which is recorded; " in later
    assert re.search(r"\n  recording: present_steps 1, recorded_bytes \d+, recorded_steps 1\n", resumed)
    assert "  schedulers built: 0\n" in again
    built = re.findall(r"step (\d): schedulers built so far: (\d)", printed)
    assert built == [("0", "0"), ("1", "0"), ("2", "1"), ("3", "1")]
    present = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("dumps/*/train*"))
    assert present == [
        "dumps/mixed/train.code",
        "dumps/mixed/train.math",
        "dumps/rewards/train",
        "dumps/v1/train",
    ]


def test_every_option_method_and_field_is_explained() -> None:
    options = {*BuildOptions.__annotations__, "ledger"}
    assert {name for name in options if f"| `{name}` | " not in TEXT} == set()
    fields = {field.name for field in dataclasses.fields(RolloutRequest)}
    assert {name for name in fields if f"`{name}`" not in TEXT} == set()
    methods = {name for name in vars(RolloutScheduler) if not name.startswith("_")}
    assert {name for name in methods if f"`{name}(" not in TEXT} == set()
