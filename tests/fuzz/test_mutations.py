"""The fuzzers see what they look for: a planted traceback, too much memory, and a document that was really changed."""

from __future__ import annotations

import copy
import random

import pytest

from mock_scheduler import cli
from mock_scheduler.support.digests import open_sealed
from tests.fuzz.mutations import limits, mutate_bytes, mutate_json, run_command, sealed_file, sealed_text


def test_a_planted_traceback_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> int:
        raise KeyError("planted")

    monkeypatch.setattr(cli, "LazyCommands", fail)
    assert "KeyError: 'planted'" in run_command("inspect", "x")
    assert "ended with 70" in run_command("inspect", "x")


def test_a_clear_error_is_no_finding() -> None:
    assert run_command("inspect", "/nowhere") == ""


def test_memory_beyond_the_limit_is_not_given() -> None:
    with limits(2**28), pytest.raises(MemoryError):
        bytearray(2**30)
    assert len(bytearray(2**28)) == 2**28


def test_each_mutation_changes_something_and_seals_fit() -> None:
    document = {"a": [1, {"b": "x"}], "c": None, "d": 0.5}
    changed = 0
    for seed in range(200):
        mutated = copy.deepcopy(document)
        assert mutate_json(mutated, random.Random(seed))
        changed += mutated != document
        if "Infinity" not in sealed_text(mutated):
            assert open_sealed(sealed_file(mutated)) == open_sealed(sealed_text(mutated))
    assert changed > 180
    data = bytes(range(100))
    assert sum(mutate_bytes(data, random.Random(seed)) != data for seed in range(100)) > 90
