"""A checkpoint that a stranger sealed anew is loaded, or refused with a clear error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.programs import run_program


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num", [60, pytest.param(3_000, marks=pytest.mark.all)])
def test_a_forged_checkpoint_is_loaded_or_refused(num: int, tmp_path: Path) -> None:
    finished = run_program("tests.fuzz.checkpoint_worker", (str(tmp_path), str(num), "18"))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    found = json.loads(finished.stdout.splitlines()[-1])
    assert found["problems"] == []
    assert sum(found["ends"].values()) == num
    assert found["ends"]["refused"] > num // 4
    assert found["ends"]["loaded"] > num // 20
