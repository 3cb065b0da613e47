"""Files of slime, miles and vime become recordings, and recordings become their files."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from mock_scheduler import RolloutRequest, build_scheduler, read_recording
from mock_scheduler.adapters.imports.steps import state_sampling
from mock_scheduler.adapters.slime.files import build_content
from mock_scheduler.commands.foreign import ImportCommand, run_export, run_import
from mock_scheduler.errors import ForeignFileError, RecordingError, StepNotFoundError
from mock_scheduler.support.foreign_files import load_json
from mock_scheduler.support.pickles.torch_files import read_torch_file
from tests.adapters.bits import bits
from tests.adapters.imports.forging import (
    Described,
    Global,
    torch_bytes,
)
from tests.adapters.imports.importing import imported, lacks, write
from tests.adapters.slime.samples import sample
from tests.batches import make_batch


def test_slime_files_become_a_recording_and_files_again(tmp_path: Path) -> None:
    contents = {
        3: {"rollout_id": 3, "samples": [sample(index=i, weight_versions=["2"]) for i in range(2)]},
        4: {"rollout_id": 4, "samples": [sample(index=2, rollout_log_probs=None)], "metadata": {"seed": np.float32(1)}},
    }
    for step, content in contents.items():
        write(tmp_path / f"files/{step}.pt", torch_bytes(content))
    write(tmp_path / "files/eval_3.pt", torch_bytes({"rollout_id": 3, "samples": [sample(reward=9.0)]}))
    batches = imported("slime", tmp_path / "files")
    assert batches[3].rollout_logprobs.tolist() == pytest.approx([-0.1, -0.2, -0.3] * 2)
    assert batches[3].policy_versions.tolist() == [2, 2]
    assert (lacks(batches[3]), lacks(batches[4])) == ([], ["rollout_logprobs", "policy_versions"])
    recording = read_recording(tmp_path / "recording of slime")
    assert recording.batch(3, mode="val").rewards.tolist() == [9.0]
    assert recording.info(3).policy_version == 2
    told = tmp_path / "told.json"
    recorded = str(tmp_path / "recording of slime")
    assert run_export("slime", recorded, tmp_path / "again", steps=None, json_path=str(told)) == 0
    assert load_json(told) == {
        "format_version": 1,
        "format": "slime",
        "folder": str(tmp_path / "again"),
        "num_files": 3,
    }
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == ["3.pt", "4.pt", "eval_3.pt"]
    for step, content in contents.items():
        found = read_torch_file(tmp_path / f"again/{step}.pt")
        assert bits(found) == bits(read_torch_file(tmp_path / f"files/{step}.pt"))
        assert list(found) == list(content)
    with pytest.raises(RecordingError, match=r"3\.pt is there already, and is not replaced"):
        run_export("slime", str(tmp_path / "recording of slime"), tmp_path / "again", steps=None)


def test_rows_recorded_elsewhere_become_samples() -> None:
    batch = make_batch()
    content = build_content(7, batch)
    rows = batch.rows()
    assert content["rollout_id"] == 7
    assert [one["tokens"] for one in content["samples"]] == [row.tokens.tolist() for row in rows]
    for one, row in zip(content["samples"], rows, strict=True):
        assert one["response_length"] == len(row.tokens) - row.prompt_length == len(one["loss_mask"])
        stated = [value for value, flag in zip(one["rollout_log_probs"], one["loss_mask"], strict=True) if flag]
        assert stated == row.rollout_logprobs.tolist()


def test_an_imported_recording_is_replayed(tmp_path: Path) -> None:
    write(tmp_path / "0.pt", torch_bytes({"rollout_id": 0, "samples": [sample(index=i) for i in range(2)]}))
    (tmp_path / "contract.json").write_text('{"model": "m"}', encoding="utf-8")
    told = tmp_path / "told.json"
    command = ImportCommand(contract=tmp_path / "contract.json", shift=5, json_path=str(told))
    run_import("slime", tmp_path / "0.pt", tmp_path / "recording", command)
    absent = [*(f"sampling.{name}" for name in ("temperature", "top_p", "top_k", "logprobs_mode")), "policy_versions"]
    facts = {"format_version": 1, "format": "slime", "folder": str(tmp_path / "recording")}
    assert load_json(told) == {**facts, "steps": {"train": [5]}, "not_in_source": absent}
    config = {"enable": True, "mode": "mock", "dump_dir": str(tmp_path / "recording")}
    with build_scheduler(config, object, {"model": "m"}) as scheduler:
        batch = scheduler.get_batch(RolloutRequest(global_step=5, batch_size=2))
    assert batch.rewards.tolist() == [1.0, 1.0]


def test_stated_sampling_is_no_assumption(tmp_path: Path) -> None:
    write(tmp_path / "0.pt", torch_bytes({"rollout_id": 0, "samples": [sample(reward={"acc": 0.5})]}))
    sampling, stated = state_sampling(temperature=0.7, top_p=None, top_k=None, logprobs_mode="raw")
    batch = imported("slime", tmp_path / "0.pt", sampling=sampling, stated=stated, reward_key="acc")[0]
    assert batch.meta["not_in_source"] == ["sampling.top_p", "sampling.top_k", "policy_versions"]
    assert (batch.sampling.temperature, batch.sampling.logprobs_mode, batch.rewards.tolist()) == (0.7, "raw", [0.5])


@pytest.mark.parametrize(
    ("changes", "lacking"),
    [
        ({"reward": None}, ["rewards"]),
        ({"reward": {"acc": 0.5}}, ["rewards"]),
        ({"status": "weird"}, ["terminations"]),
        ({"status": None, "reward": float("nan")}, ["rewards", "terminations"]),
    ],
)
def test_what_one_sample_does_not_say_is_named(tmp_path: Path, changes: dict[str, object], lacking: list[str]) -> None:
    stated = {"weight_versions": ["2"]}
    samples = [sample(index=0, **stated), {**sample(index=1, **stated), **changes}]
    write(tmp_path / "0.pt", torch_bytes({"rollout_id": 0, "samples": samples}))
    batch = imported("slime", tmp_path / "0.pt")[0]
    assert lacks(batch) == lacking
    assert batch.rewards.tolist() == [1.0, 0.0 if "rewards" in lacking else 1.0]


def test_images_in_a_sample_are_refused_with_the_remedy(tmp_path: Path) -> None:
    image = Described(Global("PIL.PngImagePlugin", "PngImageFile"))
    write(tmp_path / "0.pt", torch_bytes({"samples": [sample(multimodal_inputs={"images": [image]})]}))
    with pytest.raises(
        ForeignFileError, match=r"PIL\.PngImagePlugin.* Samples with images are not read: set multimodal"
    ):
        imported("slime", tmp_path / "0.pt")


def test_evaluation_is_seen_behind_any_prefix(tmp_path: Path) -> None:
    for name in ("run_4", "run_eval_4", "rolleval_5", "eval_6"):
        content = {"rollout_id": int(name[-1]), "samples": [sample(reward=9.0 if "eval" in name else 1.0)]}
        write(tmp_path / f"files/{name}.pt", torch_bytes(content))
    assert imported("slime", tmp_path / "files")[4].rewards.tolist() == [1.0]
    recording = read_recording(tmp_path / "recording of slime")
    assert recording.steps == {"train": [4], "val": [4, 5, 6]}
    assert recording.batch(4, mode="val").rewards.tolist() == [9.0]


def test_an_export_is_whole_or_writes_nothing(tmp_path: Path) -> None:
    for step in (4, 5):
        write(tmp_path / f"files/{step}.pt", torch_bytes({"rollout_id": step, "samples": [sample()]}))
    imported("slime", tmp_path / "files")
    recording = tmp_path / "recording of slime"
    with pytest.raises(StepNotFoundError, match=r"there is no step 9; .* has train 4-5"):
        run_export("slime", str(recording), tmp_path / "out", steps="4,9")
    with pytest.raises(RecordingError, match="s3:/b/x is a URL"):
        run_export("slime", str(recording), Path("s3://b/x"), steps=None)
    # The later of two files is there: the earlier one is not left.
    write(tmp_path / "present/5.pt", b"mine")
    with pytest.raises(RecordingError, match=r"5\.pt is there already, and is not replaced"):
        run_export("slime", str(recording), tmp_path / "present", steps=None)
    assert [path.name for path in (tmp_path / "present").iterdir()] == ["5.pt"]
    shutil.copytree(recording / "train", recording / "train.judge")
    with pytest.raises(RecordingError, match=r"has steps of several schedulers \(default, judge\)"):
        run_export("slime", str(recording), tmp_path / "out", steps=None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "present", "recording of slime"]
