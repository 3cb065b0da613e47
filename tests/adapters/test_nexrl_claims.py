"""``.pt`` files of another party: nothing in one runs, and none takes more memory than it holds."""

from __future__ import annotations

import functools
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mock_scheduler.adapters.nexrl.files import load_content
from mock_scheduler.adapters.nexrl.rollouts import DumpFiles
from mock_scheduler.compare_debug_dumps import main
from mock_scheduler.errors import TraceError
from tests.adapters.test_nexrl_comparison import micro_batch, put, write
from tests.fuzz.mutations import limits
from tests.fuzz.test_nexrl_fuzz import claim_tensor, pack_pt

MORE_BYTES = 512 * 2**20


def refused(path: Path) -> str:
    with limits(MORE_BYTES), pytest.raises(TraceError) as caught:
        load_content(path)
    assert str(caught.value).startswith(str(path))
    return str(caught.value).removeprefix(f"{path}").lstrip(": ")


class Calls:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


def test_a_sound_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(pack_pt({"x": claim_tensor(numel=16, size=(4, 4), stride=(4, 1))}))
    assert load_content(path)["x"].tolist() == [[0.0] * 4] * 4


def test_a_compressed_entry_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    """2 MB took 2.3 GB: entries were inflated to see their checksums."""
    path = tmp_path / "a.pt"
    content = {"x": claim_tensor(numel=2**22, size=(2**22,), stride=(1,))}
    path.write_bytes(pack_pt(content, data=bytes(2**24), compression=zipfile.ZIP_DEFLATED))
    assert refused(path) == "archive/data.pkl in it is compressed, which torch.save never does"


def test_entries_that_overlap_are_refused(tmp_path: Path) -> None:
    """Many names of one range of the file: each of them would be read whole."""
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}, protocol=2))
        archive.writestr("archive/data/0", bytes(10**6))
        first = archive.infolist()[1]
        for index in range(1, 40):
            other = zipfile.ZipInfo(f"archive/data/{index}")
            other.header_offset, other.CRC = first.header_offset, first.CRC
            other.file_size = other.compress_size = first.file_size
            archive.filelist.append(other)
    assert refused(path).endswith("and its entries claim more: they overlap")


@pytest.mark.parametrize(
    ("numel", "size", "stride", "problem"),
    [
        (16, (2**40,), (0,), "[1099511627776] on cpu, of which it stores 64 bytes: the others are claimed"),
        (16, (1, 2**30), (0, 0), "[1, 1073741824] on cpu, of which it stores 64 bytes: the others are claimed"),
        (16, (8, 8), (1, 1), "[8, 8] on cpu, of which it stores 64 bytes: the others are claimed"),
        (16, (2**40,), (1,), "[1099511627776] on cpu, of which it stores 64 bytes: the others are claimed (at x)"),
        (2**40, (4,), (1,), "claims a storage of 4398046511104 bytes, and storage '0' has 64 (at x)"),
        (2**20, (2**20,), (1,), "claims a storage of 4194304 bytes, and storage '0' has 64 (at x)"),
        (16, (-1,), (1,), "has a size (-1,); expected whole numbers of at least 0 (at x)"),
        (16, (2,), (-1,), "has strides (-1,); expected whole numbers of at least 0 (at x)"),
        (16, (2, 2), (1,), "has a tensor of size [2, 2] and strides [1] (at x)"),
    ],
)
def test_a_tensor_that_claims_more_than_it_stores_is_refused(
    tmp_path: Path, numel: int, size: tuple[int, ...], stride: tuple[int, ...], problem: str
) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(pack_pt({"x": claim_tensor(numel=numel, size=size, stride=stride)}))
    assert problem in refused(path)


def doubled(times: int) -> object:
    """A text that torch's reader would double so many times."""
    from _codecs import encode  # the function that pickles of Python 2 name

    value: object = "a" * 1000
    for _ in range(times):
        value = Calls(encode, value, "unicode_escape")
    return value


@pytest.mark.parametrize(
    "content",
    [Calls(bytearray, 2**34), doubled(2), [Calls(bytearray, 2**30)] * 3, {"a": Calls(bytearray, 5)}],
    ids=["zeros", "doubled", "many", "small"],
)
def test_a_function_that_makes_large_values_is_refused(tmp_path: Path, content: object) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(pack_pt({"x": content}))
    said = refused(path)
    assert "'__builtin__.bytearray', which is not on the closed list" in said or said == (
        "archive/data.pkl calls a function that makes large values: it is refused (at x)"
    )


def test_lists_in_each_other_are_not_walked_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    value: list[object] = ["x"]
    for _ in range(60):
        value = [value] * 10
    path.write_bytes(pack_pt({"x": value}))
    assert refused(path).endswith("the values in it are more, or lie in each other without end")
    endless: list[object] = []
    endless.append(endless)
    path.write_bytes(pack_pt({"x": endless}))
    assert refused(path).endswith("the values in it are more, or lie in each other without end")


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (torch.zeros(3, dtype=torch.uint8).view(torch.bits8), "torch.bits8"),
        (torch.eye(3).to_sparse(), "torch._utils._rebuild_sparse_tensor"),
        (torch.ones(3, device="meta"), "torch._utils._rebuild_meta_tensor_no_storage"),
    ],
)
def test_a_tensor_without_plain_numbers_is_refused(tmp_path: Path, value: torch.Tensor, name: str) -> None:
    path = tmp_path / "a.pt"
    torch.save({"x": value}, path)
    assert refused(path).startswith(f"a/data.pkl names '{name}', which is not on the closed list; nothing of it is run")


GADGETS = {
    "exec": Calls(exec, "raise SystemExit"),
    "eval": Calls(eval, "1"),
    "system": Calls(os.system, "true"),
    "partial": functools.partial(exec, "raise SystemExit"),
    "getattr": Calls(getattr, "x", "upper"),
    "ordered": OrderedDict([("a", Calls(exec, "raise SystemExit"))]),
    "load": Calls(torch.load, "x"),
    "storage": Calls(torch.storage._load_from_bytes, b"x"),  # type: ignore[no-untyped-call]
    "module": torch.nn.Linear(1, 1),
}


@pytest.mark.parametrize("name", GADGETS)
@pytest.mark.parametrize("form", ["zip", "old", "raw"])
def test_nothing_in_a_file_runs(tmp_path: Path, name: str, form: str) -> None:
    path = tmp_path / "a.pt"
    content = {"step": 0, "x": GADGETS[name]}
    if form == "raw":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=form == "zip")
    refused(path)


def test_a_pipe_in_the_place_of_a_dump_is_refused(tmp_path: Path) -> None:
    for name in ("a.pt", "a.jsonl"):
        os.mkfifo(tmp_path / name)
        assert refused(tmp_path / name) == "is a pipe, where a regular file is expected: remove it"


@pytest.mark.parametrize("kind", ["forward_data", "loss", "is_loss_debug"])
def test_a_link_out_of_a_dump_is_not_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    ours, theirs = write(tmp_path / "ours"), write(tmp_path / "theirs")
    path = sorted((theirs / kind).iterdir())[0]
    path.symlink_to(path.rename(tmp_path / "private.pt"))
    assert main(["--self_hosted_dir", str(ours), "--weaver_dir", str(theirs), "--step", "0"]) == 5
    said = capsys.readouterr()
    assert f"{path} is a link to {tmp_path / 'private.pt'}, outside of {theirs}" in said.err
    assert "Verdict" not in said.out


def test_a_link_out_of_a_folder_of_trajectories_is_not_followed(tmp_path: Path) -> None:
    outside, folder = tmp_path / "step_000000.jsonl", tmp_path / "dump"
    outside.write_text('{"step": 0, "trajectories": []}\n', encoding="utf-8")
    folder.mkdir()
    (folder / outside.name).symlink_to(outside)
    with pytest.raises(TraceError, match="is a link to"):
        DumpFiles(folder, "jsonl").load(0)
    # A link that the user names is followed.
    assert DumpFiles(folder / outside.name, "jsonl").load(0)[0]["step"] == 0


@pytest.mark.parametrize("dtype", ["quint8", "int4", "bits8"])
def test_a_dtype_that_no_file_may_hold_is_refused_in_jsonl_too(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"a": {{"dtype": "{dtype}", "shape": [2], "values": [1, 2]}}}}\n', encoding="utf-8")
    assert f"a tensor is of dtype '{dtype}'" in refused(path)


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("positions", torch.full((2, 4), 2**62), 5),
        ("positions", torch.full((2, 4), -5), 5),
        ("positions", torch.ones(2, 4).to(torch.float8_e5m2), 1),
        ("sample_index", torch.zeros(2, 4).to(torch.float8_e5m2), 1),
        ("effective_valid", torch.ones(2, 4).to(torch.uint16), 1),
    ],
)
def test_odd_tensors_of_a_dump_are_compared_or_refused(
    tmp_path: Path, name: str, value: torch.Tensor, code: int
) -> None:
    """Each of them ended in a traceback."""
    folders = [write(tmp_path / side) for side in ("sound", "forged")]
    put(folders[1], "is_loss_debug", {**micro_batch(("s0", "s1")), name: value})
    for first, second in (folders, folders[::-1]):
        assert main(["--self_hosted_dir", str(first), "--weaver_dir", str(second), "--step", "0"]) in (code, 3)
