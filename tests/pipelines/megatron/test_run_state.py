"""A checkpoint is sealed: one changed bit in any of its files is found and named, before anything of it is used."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from mock_scheduler.errors import ConfigError, ExitCode
from mock_scheduler.support.digests import seal
from mock_scheduler.support.files import encode_json
from mock_scheduler.trace.shards import whole
from pipelines.megatron import file_seals
from pipelines.megatron.file_seals import FileSeal, find_damage, seal_pieces, write_sealed
from pipelines.megatron.run_state import (
    ModelCounters,
    RecordingPlace,
    RunState,
    check_contents,
    check_files,
    read_run_state,
    write_run_state,
)
from pipelines.megatron.stored_boxes import LocalTensor, encode_tensors, write_tensors
from tests.dist.old_checkpoint import write_old_run_state
from tests.pipelines.megatron.ranks import one_rank, run_ranks

STATE = RunState(
    next_step=3,
    mode="dump",
    # A number whose exponent, and a text whose escape, may be written in two ways.
    fixed={"model.layernorm_epsilon": 1e-05, "exp_name": "Größe", "model.vocab_size": 69},
    scheduler={"policy_version": 2},
    learner={"kl_in_reward": {"coef": 0.1}},
    recording=RecordingPlace(run_id="a", last_step=2, digest="0f"),
    counters={"policy": ModelCounters(num_updates=2, lr_steps=2)},
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tensors = [
        LocalTensor(key=f"{kind}/w", spec=whole("w", (4, 3)), tensor=torch.randn(4, 3)) for kind in ("parameter", "x")
    ]
    files = {f"policy/{name}": one for name, one in write_tensors(folder / "policy", tensors, one_rank()).items()}
    random = encode_tensors({"cpu": torch.arange(20, dtype=torch.uint8)}, metadata={"layout": "tp1"})
    name = "random_states/rank_00000.safetensors"
    write_run_state(folder, replace(STATE, files={**files, name: write_sealed(folder / name, random)}))
    return folder


@pytest.fixture
def checkpoint(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "checkpoint"))


def check(folder: Path) -> RunState:
    """Everything that is checked before a checkpoint is used."""
    state = read_run_state(folder)
    check_files(folder, state)
    check_contents(folder, state, one_rank())
    return state


def flips(folder: Path) -> Iterator[tuple[Path, int]]:
    """Every bit of every file."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield from ((path, bit) for bit in range(8 * path.stat().st_size))


def find_missed(folder: Path, step: int) -> tuple[int, list[str]]:
    """Changes every so many-th bit, one at a time; returns their number, and those that were not found by file."""
    missed, num_flips = [], 0
    for path, bit in list(flips(folder))[::step]:
        content = path.read_bytes()
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        num_flips += 1
        try:
            check(folder)
            missed.append(f"{path.name}: bit {bit}")
        except ConfigError as error:
            if path.relative_to(folder).as_posix() not in str(error) or error.exit_code != ExitCode.USAGE:
                missed.append(f"{path.name}: bit {bit} is not named: {error}")
        path.write_bytes(content)
    return num_flips, missed


def test_a_changed_bit_in_any_file_is_refused_by_name(checkpoint: Path) -> None:
    num_flips, missed = find_missed(checkpoint, 37)
    assert missed == []
    assert num_flips > 200


@pytest.mark.all
def test_every_changed_bit_of_a_checkpoint_is_refused_by_name(checkpoint: Path) -> None:
    num_flips, missed = find_missed(checkpoint, 1)
    assert missed == []
    assert num_flips > 9_000


def test_a_whole_checkpoint_comes_back(checkpoint: Path) -> None:
    state = check(checkpoint)
    assert state.is_sealed
    assert replace(state, files={}) == STATE
    assert sorted(state.files) == ["policy/rank_00000.safetensors", "random_states/rank_00000.safetensors"]


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"counters": {"policy": {"num_updates": 10**20, "lr_steps": 2}}}, "counters.policy.num_updates is 1000"),
        ({"counters": {"policy": {"num_updates": 2, "lr_steps": 2**63}}}, "counters.policy.lr_steps is 9223"),
        ({"next_step": 10**400}, "next_step is 1000"),
    ],
)
def test_a_number_that_nothing_counts_to_is_refused(checkpoint: Path, change: dict[str, object], place: str) -> None:
    """Sealed anew by a stranger, such a number of updates ended the resume in an OverflowError."""
    path = checkpoint / "run_state.json"
    document = json.loads(path.read_text())
    del document["digest"]
    path.write_bytes(encode_json(seal(document | change)))
    with pytest.raises(ConfigError, match=place) as caught:
        read_run_state(checkpoint)
    assert str(caught.value).endswith("expected at most 9223372036854775807; resume from another checkpoint")


@pytest.mark.parametrize(("old", "new"), [(b"1e-05", b"1E-05"), (b"\\u00df", b"\\u00DF"), (b'"dump"', b'"d\\u0075mp"')])
def test_other_bytes_of_the_same_content_are_refused(checkpoint: Path, old: bytes, new: bytes) -> None:
    path = checkpoint / "run_state.json"
    assert old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new))
    with pytest.raises(ConfigError, match=re.escape(f"{path}: does not match its digest: its bytes")):
        read_run_state(checkpoint)


def test_files_that_changed_places_are_refused(checkpoint: Path) -> None:
    state = read_run_state(checkpoint)
    one = checkpoint / "policy/rank_00000.safetensors"
    two = one.with_name("rank_00001.safetensors")
    shutil.copy(one, two)
    two.write_bytes(two.read_bytes()[::-1])
    files = {**state.files, "policy/rank_00001.safetensors": seal_pieces([two.read_bytes()])}
    write_run_state(checkpoint, replace(state, files=files))
    check(checkpoint)
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    with pytest.raises(ConfigError, match="is damaged") as caught:
        check(checkpoint)
    assert "rank_00000" in str(caught.value)
    assert "rank_00001" in str(caught.value)


def test_the_run_state_of_another_checkpoint_is_refused(checkpoint: Path) -> None:
    state = read_run_state(checkpoint)
    seals = {name: seal_pieces([b"x" * one.size_bytes]) for name, one in state.files.items()}
    write_run_state(checkpoint, replace(state, files=seals))
    with pytest.raises(ConfigError, match="is damaged"):
        check(checkpoint)


@pytest.mark.parametrize("kind", ["link", "folder link", "fifo", "folder"])
def test_a_file_that_is_none_is_refused(checkpoint: Path, tmp_path: Path, kind: str) -> None:
    path = checkpoint / "policy/rank_00000.safetensors"
    (tmp_path / "elsewhere").mkdir()
    moved = Path(shutil.move(path, tmp_path / "elsewhere" / path.name))
    if kind == "link":
        path.symlink_to(moved)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.parent.rmdir()
        path.parent.symlink_to(moved.parent)
    with pytest.raises(ConfigError, match=r"policy/rank_00000.safetensors: (is a link or no file|leads out of)"):
        check(checkpoint)


def test_the_last_file_is_no_link_out_of_the_folder_either(checkpoint: Path, tmp_path: Path) -> None:
    path = checkpoint / "run_state.json"
    path.symlink_to(shutil.move(path, tmp_path / "elsewhere"))
    with pytest.raises(ConfigError, match=r"run_state.json: .* is a link to .*elsewhere, outside of"):
        read_run_state(checkpoint)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "policy/../../secret", "./x", ""])
def test_a_name_that_leads_out_of_the_folder_is_refused(checkpoint: Path, name: str) -> None:
    (checkpoint.parent / "secret").write_bytes(b"secret")
    write_run_state(checkpoint, replace(read_run_state(checkpoint), files={name: seal_pieces([b"secret"])}))
    with pytest.raises(ConfigError, match="leads out of the checkpoint's folder"):
        check(checkpoint)


def test_a_later_format_is_refused_as_such(checkpoint: Path) -> None:
    path = checkpoint / "run_state.json"
    content = json.loads(path.read_bytes())
    del content["digest"]
    path.write_bytes(encode_json(seal({**content, "version": 3})))
    with pytest.raises(ConfigError, match=r"is of format 'mock_scheduler.checkpoint', version 3; this release reads"):
        read_run_state(checkpoint)


def test_a_seal_that_is_taken_off_is_no_old_checkpoint(checkpoint: Path) -> None:
    path = checkpoint / "run_state.json"
    content = json.loads(path.read_bytes())
    del content["digest"]
    path.write_bytes(encode_json(content))
    with pytest.raises(ConfigError, match="does not match its digest"):
        read_run_state(checkpoint)


def test_a_checkpoint_of_before_seals_opens_with_a_warning(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    (checkpoint / "run_state.json").unlink()
    write_old_run_state(checkpoint, STATE)
    state = check(checkpoint)
    assert not state.is_sealed
    assert state.next_step == 3
    assert caplog.messages == [
        f"{checkpoint} is unsealed: it was written by a release without seals, so a changed bit in it cannot be found. "
        "Nothing in it is run. A checkpoint that this run saves is sealed."
    ]


def test_ranks_share_the_blocks_and_all_hear_of_each_wrong_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_seals, "BLOCK_BYTES", 64)
    content = bytes(range(256)) * 2
    seals = {name: write_sealed(tmp_path / name, [content[:100], content[100:]]) for name in ("a", "b")}
    assert seals["a"] == seal_pieces([content])
    assert len(seals["a"].crc32 or "") == 8 * 8
    for name, place in (("a", 0), ("a", 511), ("b", 200)):
        changed = bytearray((tmp_path / name).read_bytes())
        changed[place] ^= 16
        (tmp_path / name).write_bytes(changed)
    first, *others = run_ranks([partial(find_damage, tmp_path, seals)] * 3)
    assert [text.split(" are not")[0] for text in first] == [
        "a: the 0 MiB from byte 0 on",
        "a: the 0 MiB from byte 448 on",
        "b: the 0 MiB from byte 192 on",
    ]
    assert others == [first, first]


def test_a_file_of_no_bytes_has_no_blocks(tmp_path: Path) -> None:
    assert write_sealed(tmp_path / "a", [b""]) == FileSeal(size_bytes=0, crc32="")
    assert find_damage(tmp_path, {"a": FileSeal(size_bytes=0, crc32="")}, one_rank()) == []
