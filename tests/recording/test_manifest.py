import hashlib
import importlib.metadata
import json
import os
import subprocess
from pathlib import Path

import pytest

from mock_scheduler.errors import RecordingError, StepNotFoundError
from mock_scheduler.recording import open_storage
from mock_scheduler.recording.manifest import (
    Manifest,
    collect_provenance,
    decode_manifest,
    encode_manifest,
    load_manifest,
    read_git_revision,
    save_manifest,
)
from tests.recording.builders import make_contract


def make_manifest() -> Manifest:
    return Manifest(run_id="run-1", contract=make_contract(), provenance={"python": "3.11"})


def test_a_manifest_comes_back_as_written(tmp_path: Path) -> None:
    save_manifest(open_storage(str(tmp_path)), make_manifest())
    loaded = load_manifest(open_storage(str(tmp_path)))
    assert (loaded.run_id, loaded.provenance) == ("run-1", {"python": "3.11"})
    assert loaded.contract.fields == make_contract().fields
    assert os.listdir(tmp_path) == ["recording.json"]


def with_version(version: int) -> bytes:
    document = json.loads(encode_manifest(make_manifest()))
    del document["digest"]
    document["version"] = version
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    document["digest"] = hashlib.sha256(text.encode()).hexdigest()
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()


def test_another_version_is_refused() -> None:
    with pytest.raises(RecordingError) as caught:
        decode_manifest(with_version(0), source="x/recording.json")
    assert str(caught.value) == (
        "x/recording.json: recording format version 0 is older than 1, the only one this release reads: record again"
    )
    with pytest.raises(RecordingError) as caught:
        decode_manifest(with_version(2), source="x/recording.json")
    assert str(caught.value) == (
        "x/recording.json: recording format version 2 is newer than 1, the newest that this release reads. "
        "Update mock-scheduler, or record again with this release."
    )


def test_a_missing_recording_names_those_nearby(tmp_path: Path) -> None:
    for name in ("baseline_v1", "baseline_v2"):
        save_manifest(open_storage(str(tmp_path / name)), make_manifest())
    wrong = str(tmp_path / "baseline")
    with pytest.raises(StepNotFoundError) as caught:
        load_manifest(open_storage(wrong))
    assert str(caught.value) == (
        f"[Rollout Mock] Recording not found: {wrong}/recording.json\n"
        "Possible reasons:\n"
        "  1. No run in dump mode has recorded here\n"
        f"  2. dump_dir configuration is incorrect: {wrong}\n"
        f"Recordings nearby: {tmp_path}/baseline_v1, {tmp_path}/baseline_v2\n"
        "Please run in dump mode first to ensure all step data is generated."
    )
    with pytest.raises(StepNotFoundError, match="Recordings nearby: none"):
        load_manifest(open_storage(str(tmp_path / "nowhere" / "baseline")))


def test_a_second_manifest_is_refused(tmp_path: Path) -> None:
    save_manifest(open_storage(str(tmp_path)), make_manifest())
    with pytest.raises(RecordingError, match="another run is recording here"):
        save_manifest(open_storage(str(tmp_path)), make_manifest())


def test_provenance_holds_versions_and_the_settings_given() -> None:
    provenance = collect_provenance({"settings": {"NCCL_ALGO": "Ring"}})
    assert provenance["settings"] == {"NCCL_ALGO": "Ring"}
    assert provenance["packages"]["torch"] == importlib.metadata.version("torch")
    assert set(provenance["packages"]) == {"torch", "megatron-core", "transformer-engine", "safetensors", "numpy"}


def test_provenance_that_would_replace_what_was_read_is_refused() -> None:
    with pytest.raises(RecordingError) as caught:
        collect_provenance({"git": "unknown"})
    assert str(caught.value) == "provenance: ['git'] are read by the recorder itself: give other names"


def test_provenance_that_is_no_json_is_refused() -> None:
    with pytest.raises(RecordingError, match=r"recording.json: provenance is no JSON"):
        encode_manifest(Manifest(run_id="r", contract=make_contract(), provenance={"x": float("inf")}))


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def test_the_revision_is_that_of_the_repository_that_tracks_the_file(tmp_path: Path) -> None:
    """An installed package took the revision of whatever repository its virtual environment lay in."""
    installed = tmp_path / ".venv/lib/package"
    installed.mkdir(parents=True)
    for file in (tmp_path / "module.py", installed / "module.py"):
        file.write_text("")
    assert read_git_revision(tmp_path / "module.py") is None
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "module.py")
    git(tmp_path, "commit", "-qm", "first")
    revision = git(tmp_path, "rev-parse", "HEAD")
    assert read_git_revision(tmp_path / "module.py") == {"revision": revision, "is_modified": False}
    assert read_git_revision(installed / "module.py") is None
    (tmp_path / "module.py").write_text("changed")
    assert read_git_revision(tmp_path / "module.py") == {"revision": revision, "is_modified": True}
