"""``mock-scheduler frameworks``: what is installed, what was tried, what is missing."""

import json

import pytest

from mock_scheduler.adapters import frameworks
from mock_scheduler.adapters.frameworks import Framework, find_frameworks, look_around
from mock_scheduler.cli import main


def declare(**changes: object) -> Framework:
    values = {"name": "X", "distribution": "x", "tried": ("1.0",), "seam": "s", "suppressed": "engine", "page": "p"}
    return Framework(**{**values, **changes})


def test_each_state_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frameworks, "find_version", {"x": "1.0", "y": "2.0"}.get)
    declared = [
        declare(),
        declare(distribution="y"),
        declare(needs=("y", "z")),
        declare(distribution="z", tried=("0.9", "1.0")),
        declare(distribution=None),
    ]
    assert [state.status for state in look_around(declared)] == [
        "tried",
        "installed in a version that was not tried",
        "needs z",
        "not installed: pip install z==1.0",
        "used from its sources: see its page",
    ]


def test_the_command_lists_every_adapter_with_a_declaration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["frameworks", "--json", "-"]) == 0
    listed = json.loads(capsys.readouterr().out)["frameworks"]
    assert [item["name"] for item in listed] == [framework.name for framework in find_frameworks()]
    assert {"Megatron-LM, Megatron-Bridge", "Ray", "slime, miles, vime", "TRL"} <= {item["name"] for item in listed}
    (trl,) = [item for item in listed if item["name"] == "TRL"]
    assert trl["tried"] == ["1.16.0"]
    assert main(["frameworks"]) == 0
    assert "TRL" in capsys.readouterr().out
