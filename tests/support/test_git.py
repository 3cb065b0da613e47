"""A repository that somebody sent runs none of its programs where git is asked about it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mock_scheduler.recording.manifest import read_folder_revision
from mock_scheduler.support.git import Repository


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "received"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "data.txt").write_text("one")
    git(folder, "add", "data.txt")
    git(folder, "commit", "-qm", "first")
    (folder / "data.txt").write_text("two")
    return folder


def status(folder: Path) -> None:
    """Asks as a careless program does."""
    subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=folder, capture_output=True, check=False)


@pytest.mark.parametrize(
    "settings",
    [
        {"core.fsmonitor": "touch {mark}; false"},
        {"filter.evil.clean": "touch {mark}; cat"},
        {"filter.a=b.clean": "touch {mark}; cat"},
        {"filter.evil.process": "touch {mark}", "filter.evil.required": "true"},
    ],
)
def test_a_program_of_a_repository_is_not_run(repository: Path, settings: dict[str, str]) -> None:
    mark = repository.parent / "PWNED"
    name = next(iter(settings)).split(".")[1]
    (repository / ".gitattributes").write_text(f"*.txt filter={name}\n")
    for key, value in settings.items():
        git(repository, "config", key, value.format(mark=mark))
    found = read_folder_revision(repository)
    assert not mark.exists()
    assert found == {"root": "received", "revision": git(repository, "rev-parse", "HEAD"), "is_modified": True}
    # Without the care it does run: so that is what kept it.
    status(repository)
    assert mark.exists()


def test_a_repository_in_the_place_of_a_folder_is_none(tmp_path: Path) -> None:
    """A folder of data may have the files of a bare repository beside them, which git takes for one."""
    git(tmp_path, "init", "-q", "--bare", ".")
    assert Repository(tmp_path).ask("rev-parse", "--is-bare-repository") is None


def test_missing_objects_are_not_fetched(repository: Path) -> None:
    mark = repository.parent / "PWNED"
    for key, value in {
        "core.repositoryformatversion": "1",
        "extensions.partialClone": "origin",
        "remote.origin.promisor": "true",
        "remote.origin.url": f"ext::sh -c touch% {mark}",
        "protocol.ext.allow": "always",
    }.items():
        git(repository, "config", key, value)
    tree = git(repository, "rev-parse", "HEAD^{tree}")
    (repository / ".git" / "objects" / tree[:2] / tree[2:]).unlink()
    assert read_folder_revision(repository) is not None
    assert not mark.exists()
    status(repository)
    assert mark.exists()
