"""Which names the files of a recording have, and what is found among them."""

from pathlib import Path

import pytest

from mock_scheduler.errors import RecordingError, StepInTwoFormsError
from mock_scheduler.recording.paths import (
    file_name,
    find_file,
    find_step,
    format_present,
    list_steps,
    locate_steps,
    parse_folder,
    parse_step_stem,
    shard_stem,
    step_name,
    step_stem,
)
from mock_scheduler.recording.storage import open_storage
from mock_scheduler.scheduler import RowShard


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")


def test_names_are_the_documented_ones() -> None:
    step = step_name(mode="train", scheduler_id="default", step=12)
    assert step == "train/step_000012"
    assert step_name(mode="val", scheduler_id="math", step=1_234_567) == "val.math/step_1234567"
    assert file_name(step) == "train/step_000012.safetensors"
    assert file_name(step, is_compressed=True) == "train/step_000012.safetensors.zst"
    assert file_name(step, shard=RowShard(index=3, count=16)) == "train/step_000012/shard_00003-of-00016.safetensors"


def test_steps_in_all_three_forms_are_found(tmp_path: Path) -> None:
    touch(
        tmp_path,
        "train/step_000002.safetensors",
        "train/step_000000.safetensors.zst",
        "train/step_000001/commit.json",
        "train/step_1000000.safetensors",
        "val.math/step_000003.safetensors",
    )
    storage = open_storage(str(tmp_path))
    assert list_steps(storage) == {"train": [0, 1, 2, 1000000], "val.math": [3]}
    assert list(locate_steps(storage, "train").values()) == [
        "train/step_000000.safetensors.zst",
        "train/step_000001",
        "train/step_000002.safetensors",
        "train/step_1000000.safetensors",
    ]
    assert find_step(storage, "train/step_000000") == "train/step_000000.safetensors.zst"
    assert find_step(storage, "train/step_000001") == "train/step_000001"
    assert find_step(storage, "train/step_000003") is None


def test_what_is_no_step_is_not_listed(tmp_path: Path) -> None:
    touch(
        tmp_path,
        "train/.step_000001.safetensors.1.ab.tmp",  # left by a crash
        "train/step_000002/shard_00000-of-00002.safetensors",  # not committed
        "train/step_0000003.safetensors",  # not the name that step 3 has
        "train/step_4.safetensors",
        "train/step_000005.pkl",
        "train/step_000006",
        "training/step_000007.safetensors",
        "notes.txt",
    )
    assert list_steps(open_storage(str(tmp_path))) == {}
    assert list_steps(open_storage(str(tmp_path / "absent"))) == {}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("step_000000.safetensors", "step_000000.safetensors.zst"),
        ("step_000000.safetensors", "step_000000"),
        ("step_000000.safetensors.zst", "step_000000"),
    ],
)
def test_one_step_in_two_forms_is_an_error_that_names_both(tmp_path: Path, one: str, other: str) -> None:
    for name in (one, other):
        touch(tmp_path, f"train/{name}" if "." in name else f"train/{name}/commit.json")
    storage = open_storage(str(tmp_path))
    for ask in (lambda: find_step(storage, "train/step_000000"), lambda: list_steps(storage)):
        with pytest.raises(StepInTwoFormsError) as caught:
            ask()
        paths = sorted([f"{tmp_path}/train/{one}", f"{tmp_path}/train/{other}"])
        assert sorted(str(caught.value).split(" are the same step")[0].split("] ")[1].split(" and ")) == paths
        assert str(caught.value).endswith(" are the same step: remove all but the one that is meant")


def test_one_shard_in_two_forms_is_an_error(tmp_path: Path) -> None:
    shard = RowShard(index=0, count=1)
    storage = open_storage(str(tmp_path))
    assert find_file(storage, "train/step_000000", shard=shard) is None
    touch(tmp_path, file_name("train/step_000000", shard=shard))
    assert find_file(storage, "train/step_000000", shard=shard) == file_name("train/step_000000", shard=shard)
    touch(tmp_path, file_name("train/step_000000", shard=shard, is_compressed=True))
    with pytest.raises(RecordingError, match="are the same step"):
        find_file(storage, "train/step_000000", shard=shard)


@pytest.mark.parametrize("scheduler_id", ["../x", "", ".hidden", "a/b", "a" * 65, "a\n"])
def test_a_scheduler_id_that_is_no_safe_folder_name_is_refused(scheduler_id: str) -> None:
    with pytest.raises(RecordingError, match="cannot name a folder"):
        step_name(mode="train", scheduler_id=scheduler_id, step=0)


def test_steps_are_shown_as_ranges() -> None:
    assert format_present({"train": [0, 1], "val": [8, 3, 4]}) == "train 0-1; val 3-4, 8"
    assert format_present({}) == "none"


def test_names_are_parsed_as_they_are_built() -> None:
    assert shard_stem(RowShard(index=3, count=16)) == "shard_00003-of-00016"
    for step in (0, 999_999, 1_000_000, 10**11):
        assert parse_step_stem(step_stem(step)) == step
    for name in (
        "step_1",
        "step_0000001",
        "step_000001.safetensors",
        "step_٠٠٠٠٠١",
        "step_000000\n",
        "step_-00001",
        "",
    ):
        assert parse_step_stem(name) is None
    assert parse_folder("train") == ("train", "default")
    assert parse_folder("val.math.v2") == ("val", "math.v2")
    for folder in ("train.", "train.default", "test", "train.a/b", ".train", "train.-a", "train\n", "VAL"):
        assert parse_folder(folder) is None
