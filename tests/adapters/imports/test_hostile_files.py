"""Hostile files run no code and leave no recording; what cannot be read says so."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from mock_scheduler.adapters.formats import FORMATS, find_format
from mock_scheduler.commands.foreign import ImportCommand, run_export, run_import
from mock_scheduler.errors import BatchError, ConfigError, ForeignFileError, MockSchedulerError, RecordingError
from tests.adapters.imports.forging import (
    Described,
    Global,
    consolidated,
    roll_proto,
    torch_bytes,
    verl_proto,
)
from tests.adapters.imports.importing import imported, write
from tests.adapters.slime.samples import sample

HOSTILE: dict[str, tuple[str, bytes]] = {
    "verl-v0": ("1/gen_batch.dp", verl_proto(b"", {}, {"x": Described(Global("os", "system"), "true")})),
    "verl-v1": ("1/0/tq_batch.pt", torch_bytes({"tensordict": Described(Global("builtins", "eval"), "1")})),
    "roll": ("train/step_000001.pkl", roll_proto(b"", {}, {"x": Described(Global("builtins", "getattr"), "x", "y")})),
    "slime": ("1.pt", torch_bytes({"samples": [Described(Global("copyreg", "_reconstructor"), int, object, None)]})),
    "areal": ("step_000001.pt", torch_bytes([{"x": Described(Global("torch", "load"), "x")}])),
    "nexrl": ("step_000001.pt", torch_bytes({"trajectories": Described(Global("subprocess", "Popen"), "true")})),
    "prime-rl": ("step_1/rank_0.bin", b"\xdd\xff\xff\xff\xff"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_runs_no_code_and_leaves_no_recording(name: str, tmp_path: Path) -> None:
    file, data = HOSTILE[name]
    path = write(tmp_path / "files" / file, data)
    with pytest.raises(MockSchedulerError) as caught:
        imported(name, tmp_path / "files")
    assert str(path) in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["files"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"leaves": {"x": ("torch.int64", [2**40], 0, 8, 0)}}, r"lies at bytes 0 to 8; expected 8796093022208 bytes"),
        ({"leaves": {"x": ("torch.int64", [1], 2**40, 2**40 + 8, 0)}}, r"lies at bytes 1099511627776 to .* of 8"),
        ({"leaves": {"x": ("torch.int64", [1], -8, 0, 0)}}, "lies at bytes -8 to 0"),
        ({"leaves": {"x": ("torch.qint8", [8], 0, 8, 0)}}, "is of dtype 'qint8'"),
        ({"cls": "LazyStackedTensorDict"}, "a TensorDict within a TensorDict"),
        ({"non_tensors": {"a": 1}}, "a TensorDict within a TensorDict"),
    ],
)
def test_leaves_outside_of_their_storage_are_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    data = verl_proto(torch_bytes(consolidated({"x": torch.tensor([1])}, **changes)), {}, {})
    write(tmp_path / "1/gen_batch.dp", data)
    with pytest.raises(BatchError, match=problem):
        imported("verl-v0", tmp_path / "1/gen_batch.dp")


def test_a_format_that_cannot_be_read_safely_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"SkyRL: trainer\.dump_data_batch are not read: it is a pickle of classes"):
        imported("skyrl", tmp_path)
    with pytest.raises(
        ConfigError, match=r"'slim' is no format of files that are read \(do you mean slime\?\); known are"
    ):
        find_format("slim")
    with pytest.raises(ConfigError, match="files of NexRL: debug dump are not written; slime's are"):
        run_export("nexrl", "x", tmp_path, steps=None)


@pytest.mark.parametrize("name", [one.name for one in FORMATS if one.reader and one.name != "rollout-bank"])
def test_a_folder_without_files_lists_what_is_there(tmp_path: Path, name: str) -> None:
    write(tmp_path / "files/other.txt", b"x")
    with pytest.raises(RecordingError, match=r"holds no file such as .*; it holds other\.txt"):
        imported(name, tmp_path / "files")
    with pytest.raises(RecordingError, match="is not there: give a file such as"):
        imported(name, tmp_path / "nowhere")


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    private = write(tmp_path / "private.pt", torch_bytes({"samples": [sample()]}))
    (tmp_path / "files").mkdir()
    (tmp_path / "files/1.pt").symlink_to(private)
    with pytest.raises(ForeignFileError, match="is a link to"):
        imported("slime", tmp_path / "files")


def test_a_present_folder_is_not_replaced(tmp_path: Path) -> None:
    write(tmp_path / "1.pt", torch_bytes({"samples": [sample()]}))
    (tmp_path / "there").mkdir()
    with pytest.raises(RecordingError, match="is there already: give a new folder"):
        run_import("slime", tmp_path / "1.pt", tmp_path / "there", ImportCommand())
