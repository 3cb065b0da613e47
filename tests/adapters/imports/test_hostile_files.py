"""Hostile files run no code and leave no recording; what cannot be read says so."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mock_scheduler.adapters.formats import FORMATS, find_format
from mock_scheduler.adapters.imports import miles_columns
from mock_scheduler.commands.foreign import ImportCommand, run_export, run_import
from mock_scheduler.errors import BatchError, ConfigError, ForeignFileError, MockSchedulerError, RecordingError
from mock_scheduler.support.pickles.arrays import ArrayProblemError, read_numbers
from tests.adapters.imports.forging import (
    Described,
    Global,
    consolidated,
    plain_tensordict,
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
    "nemo-rl": ("train_data_step1.jsonl", b'{"token_ids": ' + b"[" * 200_000),
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
    with pytest.raises(ConfigError, match="nexrl is read alone; export writes slime"):
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


def test_one_text_in_many_places_is_refused(tmp_path: Path) -> None:
    text = "y" * 50_000
    write(tmp_path / "1.pt", torch_bytes({"samples": [sample(metadata={"texts": [text] * 2_000})]}))
    with pytest.raises(ForeignFileError, match="the values in it are more, or lie in each other without end"):
        imported("slime", tmp_path / "1.pt")
    write(tmp_path / "2.pt", torch_bytes({"samples": [sample(metadata={"names": ["openai/gsm8k"] * 2_000})]}))
    assert len(imported("slime", tmp_path / "2.pt")[2]) == 1


def test_the_text_of_lists_that_share_lists_is_not_made() -> None:
    shared: list[Any] = [1]
    for _ in range(40):
        shared = [shared] * 10
    with pytest.raises(ArrayProblemError, match=r"has a size that is a list of other things; expected whole numbers"):
        read_numbers(shared, "a size")


def test_padding_far_beyond_the_files_is_refused(tmp_path: Path) -> None:
    names = ("input_ids", "attention_mask", "loss_mask")
    many, long = ({name: torch.ones(shape, dtype=torch.int64) for name in names} for shape in ((900, 1), (1, 900)))
    write(tmp_path / "step_0.pt", torch_bytes([many, long]))
    problem = r"its rows have 43200 bytes, and 19461600 where all are padded to 900 tokens: more than 256 times"
    with pytest.raises(ForeignFileError, match=problem):
        imported("areal", tmp_path / "step_0.pt")


def test_rows_that_no_field_holds_are_refused(tmp_path: Path) -> None:
    data = verl_proto(torch_bytes(plain_tensordict({"x": 1, "y": torch.ones(2)}, 10**9)), {}, {})
    write(tmp_path / "1/gen_batch.dp", data)
    with pytest.raises(BatchError, match="states 1000000000 rows, and no field in it has more than 2 values"):
        imported("verl-v0", tmp_path / "1/gen_batch.dp")


def test_columns_far_larger_than_their_file_are_refused() -> None:
    column = SimpleNamespace(num_values=10**9, total_uncompressed_size=500)
    group = SimpleNamespace(num_columns=1, column=lambda _: column)
    metadata = SimpleNamespace(num_rows=1, num_row_groups=1, row_group=lambda _: group)
    with pytest.raises(ForeignFileError, match=r"has 4096 bytes and states 1000000000 values .*: more than 64 times"):
        miles_columns._check_sizes(metadata, 4096, Path("rollout_1.parquet"))
    column.num_values = 64 * 4096
    miles_columns._check_sizes(metadata, 4096, Path("rollout_1.parquet"))


@pytest.mark.parametrize(
    ("name", "file", "content", "found"),
    [
        ("slime", "4.pt", {"samples": [sample(weight_versions=5)]}, "TypeError: 'int' object is not iterable"),
        ("vime-gradients", "a/rollout-0/step-0/rank-0.pt", {"version": 1, "rank": 0}, "KeyError: 'world_size'"),
    ],
)
def test_a_value_of_another_form_is_named(tmp_path: Path, name: str, file: str, content: Any, found: str) -> None:
    write(tmp_path / "files" / file, torch_bytes(content))
    with pytest.raises(ForeignFileError) as caught:
        imported(name, tmp_path / "files")
    assert f"{tmp_path / 'files'} cannot be read as files of {find_format(name).framework}" in str(caught.value)
    assert f"a value is absent or of another form ({found})" in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["files"]


def test_a_ledger_of_another_text_is_named(tmp_path: Path) -> None:
    manifest = b'{"format_version": 2, "active_generation": "generation-0", "segments": ["gen-000001"]}'
    write(tmp_path / "bank/MANIFEST.json", manifest)
    write(tmp_path / "bank/generations/generation-0/gen-000001/ledger.log", b"\xff\xfe{\n")
    with pytest.raises(ForeignFileError, match=r"bank cannot be read as files of Megatron.*UnicodeDecodeError"):
        imported("rollout-bank", tmp_path / "bank")


def test_a_target_that_is_no_new_folder_is_named(tmp_path: Path) -> None:
    source = write(tmp_path / "1.pt", torch_bytes({"samples": [sample()]}))
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(RecordingError, match="s3:/b/x is a URL, and a folder of this machine is expected"):
        run_import("slime", source, Path("s3://b/x"), ImportCommand())
    with pytest.raises(RecordingError, match="link is a link to nowhere, which is not there: remove it"):
        run_import("slime", source, tmp_path / "link", ImportCommand())
