import hashlib
import importlib.metadata
import json
import os
import subprocess
from pathlib import Path

import pytest

from mock_scheduler.errors import RecordingError, StepNotFoundError
from mock_scheduler.recording import manifest
from mock_scheduler.recording.manifest import (
    Manifest,
    collect_provenance,
    decode_manifest,
    encode_manifest,
    load_manifest,
    read_git_revision,
    save_manifest,
)
from mock_scheduler.recording.storage import open_storage
from mock_scheduler.support.versions import DISTRIBUTIONS
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


def test_the_nearest_five_recordings_are_named_and_nothing_else(tmp_path: Path) -> None:
    """In /tmp it named every recording that any test had left there, however little it had to do with this one."""
    for name in ("a", "b", "c", "base_1", "baseline_2", "baseline_1", ".hidden"):
        save_manifest(open_storage(str(tmp_path / name)), make_manifest())
    (tmp_path / "baseline_no_recording").mkdir()
    with pytest.raises(StepNotFoundError) as caught:
        load_manifest(open_storage(str(tmp_path / "baseline_3")))
    nearest = ", ".join(f"{tmp_path}/{name}" for name in ("baseline_1", "baseline_2", "base_1", "a", "b"))
    assert f"\nRecordings nearby: {nearest}, and 1 more\n" in str(caught.value)


def test_a_file_in_place_of_the_folder_is_said_to_be_one(tmp_path: Path) -> None:
    file = tmp_path / "v1"
    file.touch()
    for location in (str(file), f"file://{file}"):
        with pytest.raises(RecordingError) as caught:
            load_manifest(open_storage(location))
        assert str(caught.value) == (
            f"[Rollout Mock] {location} is a file, and a recording is a folder with recording.json in it: give the "
            "folder as dump_dir"
        )


def test_a_second_manifest_is_refused(tmp_path: Path) -> None:
    save_manifest(open_storage(str(tmp_path)), make_manifest())
    with pytest.raises(RecordingError, match="another run is recording here"):
        save_manifest(open_storage(str(tmp_path)), make_manifest())


def test_provenance_holds_versions_and_the_settings_given() -> None:
    provenance = collect_provenance({"settings": {"NCCL_ALGO": "Ring"}})
    assert provenance["settings"] == {"NCCL_ALGO": "Ring"}
    assert provenance["packages"]["torch"] == importlib.metadata.version("torch")
    assert set(provenance["packages"]) == set(DISTRIBUTIONS)


def test_provenance_tells_the_callers_code_from_the_librarys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording said which revision of this library made it, and nothing about the code that trained."""
    project = tmp_path / "my_project"
    (project / "scripts").mkdir(parents=True)
    (project / "train.py").write_text("")
    monkeypatch.chdir(project / "scripts")
    library = read_git_revision(Path(manifest.__file__))
    assert collect_provenance({})["git"] is None
    git(project, "init", "-q")
    assert collect_provenance({})["git"] is None
    git(project, "add", "train.py")
    git(project, "commit", "-qm", "first")
    (project / "train.py").write_text("changed")
    provenance = collect_provenance({})
    revision = git(project, "rev-parse", "HEAD")
    assert provenance["git"] == {"root": "my_project", "revision": revision, "is_modified": True}
    assert provenance["library_git"] == library


def test_provenance_that_would_replace_what_was_read_is_refused() -> None:
    with pytest.raises(RecordingError) as caught:
        collect_provenance({"git": "unknown", "library_git": None})
    assert str(caught.value) == "provenance: ['git', 'library_git'] are read by the recorder itself: give other names"


def test_provenance_that_is_no_json_is_refused() -> None:
    with pytest.raises(RecordingError, match=r"recording.json: provenance.x is inf; JSON has no NaN and no infinity"):
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
    expected = {"root": tmp_path.name, "revision": revision, "is_modified": False}
    assert read_git_revision(tmp_path / "module.py") == expected
    assert read_git_revision(installed / "module.py") is None
    (tmp_path / "module.py").write_text("changed")
    assert read_git_revision(tmp_path / "module.py") == {**expected, "is_modified": True}
