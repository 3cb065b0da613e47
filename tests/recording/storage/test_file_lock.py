"""Who writes into a folder holds it alone, for as long as the process lives; real processes, by fork."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from mock_scheduler.errors import RecordingError
from mock_scheduler.recording.storage import open_storage
from tests.recording.processes import run_in_child

# Python 3.12 warns of a fork beside threads, of which torch and earlier tests may have left some: ours need none.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def test_a_folder_that_another_process_writes_is_refused_with_process_and_host(tmp_path: Path) -> None:
    lock = open_storage(str(tmp_path)).lock("train")
    assert lock is not None
    answer = run_in_child(lambda: open_storage(str(tmp_path)).lock("train"))
    assert answer == (
        f"RecordingError: [Rollout Mock] {tmp_path}/train is being written by process {os.getpid()} on "
        f"{os.uname().nodename}: two runs cannot record into one folder. Wait for the other run to end, or set another "
        "rollout_mock.dump_dir."
    )
    lock.release()
    lock.release()
    assert run_in_child(lambda: open_storage(str(tmp_path)).lock("train")) == "done"


def test_a_second_writer_in_this_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    lock = storage.lock("train")
    with pytest.raises(RecordingError, match=r"by this very process .*, whose earlier writer was not closed"):
        storage.lock("train")
    assert storage.lock("val") is not None
    del lock
    assert storage.lock("train") is not None


def test_a_killed_process_leaves_no_lock_and_its_leftovers_go(tmp_path: Path) -> None:
    def be_killed() -> None:
        storage = open_storage(str(tmp_path))
        lock = storage.lock("train")
        (tmp_path / "train" / ".step.1.ab.tmp").write_bytes(b"half")
        (tmp_path / "train" / ".step_000001.1.cd.tmp").mkdir()
        assert lock is not None
        os.kill(os.getpid(), 9)

    assert run_in_child(be_killed) == "signal 9"
    assert (tmp_path / "train" / ".lock").exists()
    lock = open_storage(str(tmp_path)).lock("train")
    assert lock is not None
    assert os.listdir(tmp_path / "train") == [".lock"]
    lock.release()
    assert os.listdir(tmp_path) == []


def test_a_forked_child_neither_holds_nor_releases_its_parents_lock(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    lock = storage.lock("train")
    assert lock is not None
    assert run_in_child(lock.release) == "done"
    with pytest.raises(RecordingError, match="is being written"):
        storage.lock("train")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # lives on after its parent has given the lock back
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    os.close(reader)
    lock.release()
    again = storage.lock("train")
    os.close(writer)
    os.waitpid(child, 0)
    assert again is not None


def test_shards_are_written_at_once_but_not_beside_a_whole_writer(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    first, second = storage.lock("train", part="shard_0"), storage.lock("train", part="shard_1")
    assert first is not None
    assert second is not None
    for part in (None, "shard_0"):
        with pytest.raises(RecordingError, match="is being written by this very process"):
            storage.lock("train", part=part)
    first.release()
    with pytest.raises(RecordingError, match="is being written"):
        storage.lock("train")
    second.release()
    whole = storage.lock("train")
    with pytest.raises(RecordingError, match="is being written"):
        storage.lock("train", part="shard_0")
    assert whole is not None


def test_a_patient_lock_waits_for_the_other(tmp_path: Path) -> None:
    lock = open_storage(str(tmp_path)).lock("")
    assert lock is not None
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"1")
        taken = open_storage(str(tmp_path)).lock("", is_patient=True)
        os._exit(0 if taken is not None else 1)
    os.read(reader, 1)
    lock.release()
    assert os.waitpid(child, 0)[1] == 0
    os.close(reader)
    os.close(writer)


def test_no_link_is_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("kept")
    for part, name in ((None, ".lock"), ("shard_0", ".lock.shard_0")):
        (tmp_path / name / "train").mkdir(parents=True)
        (tmp_path / name / "train" / name).symlink_to(outside)
        with pytest.raises(RecordingError, match=r"^cannot lock .*Too many levels of symbolic links"):
            open_storage(str(tmp_path / name)).lock("train", part=part)
    (tmp_path / ".run").symlink_to(outside)
    with pytest.raises(RecordingError, match=r"^cannot lock "):
        open_storage(str(tmp_path)).claim("run")
    assert outside.read_text() == "kept"


def test_who_waited_at_a_file_that_was_removed_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS renames an open file that is removed, so that the inode keeps its name and only the path tells."""
    storage = open_storage(str(tmp_path))
    taken = []
    real = fcntl.flock

    def remove_first(descriptor: int, mode: int) -> None:
        monkeypatch.setattr("fcntl.flock", real)
        (tmp_path / "train" / ".lock").rename(tmp_path / "train" / ".nfs1")
        taken.append(storage.lock("train"))
        real(descriptor, mode)

    monkeypatch.setattr("fcntl.flock", remove_first)
    with pytest.raises(RecordingError, match="is being written by this very process"):
        storage.lock("train")
    assert taken[0] is not None


def test_a_file_system_without_locks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int, mode: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert open_storage(str(tmp_path)).lock("train") is None
    assert [record.getMessage() for record in caplog.records][-1] == (
        f"[Rollout Mock] The file system of {tmp_path}/train has no locks (No locks available): make sure that only "
        "one run records there"
    )
