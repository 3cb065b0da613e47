"""Pieces that adapters share: plain values come back with every type, and settings are one sound file."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mock_scheduler.adapters.plain_values import pack, unpack
from mock_scheduler.adapters.roll.settings import RollSettings
from mock_scheduler.adapters.rows import experts_are_usable
from mock_scheduler.adapters.settings import load_settings, read_sampling_at
from mock_scheduler.errors import BatchError, ConfigError
from tests.adapters.bits import bits


@pytest.mark.parametrize(
    "value",
    [
        bytearray(b"a"),
        torch.Size([2, 3]),
        np.bytes_(b"a\0"),
        np.str_(""),
        np.str_("a\0\ud800"),
        np.int64(2**53 + 1),
        np.float64("-0.0"),
        {"$size": [1], "b": {"$bytes": (None, -0.0)}},
        [2**53 + 1] * 20,
        np.array([b"a\0", b"b"]),
        np.empty((0, 3), dtype=">f4"),
    ],
    ids=repr,
)
def test_a_value_comes_back_with_its_type(value: object) -> None:
    packed, content = pack([value], "it")
    (found,) = unpack(json.loads(json.dumps(packed, sort_keys=True)), bytes(content))
    assert type(found) is type(value)
    assert bits(found) == bits(value)


@pytest.mark.parametrize("value", [np.ma.array([1, 2], mask=[0, 1]), np.rec.array([1, 2])], ids=["masked", "rec"])
def test_an_array_that_is_more_than_its_numbers_is_refused(value: object) -> None:
    with pytest.raises(BatchError, match=r"^it holds a value of type numpy\.\w+\.\w+, which cannot be recorded"):
        pack(value, "it")


def test_experts_of_another_kind_of_array_are_not_taken_for_an_array() -> None:
    experts = np.zeros((2, 1, 1), dtype=np.int32)
    assert experts_are_usable(experts, 2)
    assert not experts_are_usable(np.ma.array(experts), 2)


_MOCK = "rollout_mock: {enable: true, mode: mock}\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- rollout_mock", "holds a list; expected keys such as rollout_mock"),
        (_MOCK + "contrct: {}", "contrct: unknown key; nearest known key: contract"),
        # The last one would win, and the run be live.
        (_MOCK + "rollout_mock: {enable: false}", "line 2: the key .rollout_mock. is there twice"),
        (_MOCK + "resume: [1]", "resume: is \\[1\\], should be a valid boolean"),
        ("a: [", "is not YAML"),
    ],
)
def test_a_file_with_problems_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem) as caught:
        load_settings(RollSettings, path)
    assert str(path) in str(caught.value)


def test_a_date_in_the_contract_is_its_text(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(_MOCK + "contract: {data: 2026-01-01}")
    assert load_settings(RollSettings, path).contract == {"data": "2026-01-01"}


def test_a_folder_is_the_same_for_processes_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def folder(**mock: Any) -> object:
        settings = load_settings(RollSettings, {"rollout_mock": {"enable": True, **mock}}).with_absolute_folder()
        return settings.rollout_mock.get("dump_dir")

    monkeypatch.chdir(tmp_path)
    assert folder(dump_dir="dumps/a") == str(tmp_path / "dumps" / "a")
    assert folder() == str(tmp_path / "rollout_mock_dumps")
    assert folder(dump_dir="s3://bucket/a") == "s3://bucket/a"
    assert folder(mode="real") is None


def test_what_a_configuration_leaves_open_is_not_cut() -> None:
    found = read_sampling_at(SimpleNamespace(a=SimpleNamespace(temperature=0, top_p=None, top_k=-1)), "a")
    assert (found.temperature, found.top_p, found.top_k) == (0.0, 1.0, 0)
