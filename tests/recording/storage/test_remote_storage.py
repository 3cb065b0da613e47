"""Recordings in an object store, against a server that speaks S3 on this machine."""

from collections.abc import Iterator
from pathlib import Path

import boto3
import fsspec
import pytest

from mock_scheduler.config.rollout_mock import RetentionConfig
from mock_scheduler.errors import CorruptRecordingError, RecordingError, StepExistsError, StepNotFoundError
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.recording.storage import open_storage
from mock_scheduler.recording.storage.remote import FsspecStorage
from mock_scheduler.recording.writing.opening import WriterOptions
from mock_scheduler.scheduler import RowShard
from tests.recording.builders import make_batch, make_info
from tests.recording.processes import run_in_child
from tests.recording.recordings import loaded, open_writer, plan, request, write
from tests.recording.s3_server import s3_server

pytestmark = [
    # What botocore 1.43 and moto 5.2 themselves warn of on newer Pythons.
    pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow:DeprecationWarning"),
]

BUCKET = "recordings"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server(BUCKET) as address:
        yield address


@pytest.fixture
def location(endpoint: str, tmp_path: Path) -> str:
    """A place of its own for each test."""
    return f"s3://{BUCKET}/{tmp_path.name}"


def read_all(storage: FsspecStorage, name: str) -> bytes:
    source = storage.open_source(name)
    return bytes(source.read(0, source.size_bytes))


def opened(location: str) -> FsspecStorage:
    storage = open_storage(location)
    assert isinstance(storage, FsspecStorage)
    return storage


def test_an_object_is_written_once_and_read_by_range(location: str) -> None:
    storage = opened(location + "/")
    assert (storage.location, storage.path("train/a")) == (location, f"{location}/train/a")
    assert storage.publish("train/a", [b"abc", memoryview(b"def")]) == 6
    with pytest.raises(FileExistsError) as caught:
        storage.publish("train/a", [b"other!"])
    assert not isinstance(caught.value, RecordingError)
    source = storage.open_source("train/a")
    assert source.size_bytes == 6
    view = source.read(1, 4)
    assert (bytes(view), view.readonly) == (b"bcd", False)
    assert bytes(source.read(6, 6)) == b""
    assert storage.size_on_disk("train/a") == 6
    with pytest.raises(CorruptRecordingError, match="bytes 3 to 7 are outside the file, which has 6"):
        source.read(3, 7)


def test_the_store_itself_refuses_a_name_that_was_taken_meanwhile(
    location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between asking and writing another writer may come: here the asking always says that the name is free."""
    storage = opened(location)
    storage.publish("a", [b"first"])
    monkeypatch.setattr(storage._files, "exists", lambda *_args, **_kwargs: False)
    with pytest.raises(FileExistsError):
        storage.publish("a", [b"second"])
    assert read_all(storage, "a") == b"first"


def test_a_write_that_was_repeated_after_its_answer_was_lost_counts_as_written(location: str) -> None:
    """A client repeats a request whose answer did not come: the store then refuses the name that it gave itself."""
    storage = opened(location)
    storage.publish("a", [b"same"])
    assert storage.publish("a", [b"sa", b"me"]) == 4


def test_a_listing_is_of_now(location: str) -> None:
    storage, other = opened(location), opened(location)
    assert storage.list_names("train") == []
    for name in ("train/step_000001/commit.json", "train/step_000000.safetensors", "train/.hidden", "x"):
        other.publish(name, [b"1"])
    assert storage.list_names("train") == ["step_000000.safetensors", "step_000001"]
    assert storage.list_names("") == ["train", "x"]
    assert storage.list_names("x") == []
    other.remove("train/step_000000.safetensors")
    assert storage.list_names("train") == ["step_000001"]
    assert [storage.exists(n) for n in ("train", "train/step_000001", "x", "train/step_000000.safetensors")] == [
        True,
        True,
        True,
        False,
    ]


def test_a_marker_object_of_a_folder_is_not_listed(location: str) -> None:
    """Some tools make an empty object ``train/`` for a folder."""
    storage = opened(location)
    storage.publish("train/a", [b"1"])
    key = f"{location.removeprefix(f's3://{BUCKET}/')}/train/"
    boto3.client("s3").put_object(Bucket=BUCKET, Key=key, Body=b"")
    assert storage.list_names("train") == ["a"]
    assert storage.list_names("") == ["train"]


def test_a_folder_goes_file_by_file_with_the_commit_first(location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = opened(location)
    for name in ("shard_00001-of-00002", "shard_00000-of-00002", "commit.json"):
        storage.publish(f"train/step_000000/{name}", [b"12"])
    assert storage.size_on_disk("train/step_000000") == 6
    removed: list[str] = []
    remove = storage._files.rm_file

    def noting(path: str, **kwargs: object) -> object:
        removed.append(path.rsplit("/", 1)[1])
        return remove(path, **kwargs)

    monkeypatch.setattr(storage._files, "rm_file", noting)
    storage.remove("train/step_000000")
    storage.remove("train/step_000000")
    assert removed == ["commit.json", "shard_00000-of-00002", "shard_00001-of-00002"]
    assert storage.list_names("train") == []


def test_replacing_and_compressing_work_as_in_a_folder(location: str) -> None:
    storage = opened(location)
    storage.replace("retention.json", b"1")
    storage.replace("retention.json", b"22")
    assert storage.read_bytes("retention.json", max_bytes=2) == b"22"
    with pytest.raises(CorruptRecordingError, match="over the limit of 1 bytes"):
        storage.read_bytes("retention.json", max_bytes=1)
    assert storage.publish("a.zst", [bytes(100_000)]) < 100
    assert read_all(storage, "a.zst") == bytes(100_000)
    for absent in ("b", "b.zst"):
        with pytest.raises(FileNotFoundError):
            storage.open_source(absent)


def test_a_store_has_neither_locks_nor_a_bound(location: str) -> None:
    storage = opened(location)
    assert storage.lock("train") is None
    assert storage.free_bytes() is None


def test_a_writable_place_is_tried_and_left_empty(location: str) -> None:
    storage = opened(location)
    storage.check_writable()
    assert boto3.client("s3").list_objects_v2(Bucket=BUCKET, Prefix=location.rsplit("/", 1)[1])["KeyCount"] == 0


def test_a_store_that_overwrites_is_refused_before_anything_is_recorded(
    location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = opened(location)
    pipe_file = storage._files.pipe_file

    def ignoring(path: str, value: bytes, **_kwargs: object) -> object:
        return pipe_file(path, value)

    monkeypatch.setattr(storage._files, "pipe_file", ignoring)
    with pytest.raises(RecordingError) as caught:
        storage.check_writable()
    assert str(caught.value) == (
        f"cannot record in {location}: the store overwrites an object that was only to be created (S3: it ignores "
        "If-None-Match), so two runs could overwrite each other's steps. Use a store or a release that supports it, or "
        "record into a local folder and copy it."
    )
    assert storage.list_names("") == []


def test_a_protocol_that_makes_no_whole_files_is_read_but_not_written() -> None:
    fsspec.register_implementation("slowfs", type(fsspec.filesystem("memory")), clobber=True)
    with pytest.raises(RecordingError) as caught:
        open_storage("slowfs://x").check_writable()
    assert str(caught.value) == (
        "cannot record in slowfs://x: slowfs:// does not make files whole and only where the name is free. Record into "
        "a local folder or one of s3://, s3a://, gs://, gcs://, abfs://, abfss://, az://, memory://, and copy it."
    )
    assert open_storage("slowfs://x").list_names("") == []


def test_a_bucket_that_is_absent_is_a_clear_error(endpoint: str) -> None:
    storage = open_storage("s3://no-such-bucket/x")
    with pytest.raises(RecordingError) as caught:
        storage.check_writable()
    assert str(caught.value) == (
        "cannot record in s3://no-such-bucket/x: FileNotFoundError: The specified bucket does not exist. Check the "
        "bucket, the credentials and the endpoint (AWS_ENDPOINT_URL for S3), or set another rollout_mock.dump_dir."
    )
    with pytest.raises(RecordingError, match=r"cannot write s3://no-such-bucket/x/a \(1 bytes\): FileNotFoundError"):
        storage.publish("a", [b"1"])


def test_an_endpoint_that_does_not_answer_is_a_clear_error(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    fsspec.filesystem("s3").clear_instance_cache()
    storage = open_storage(f"s3://{BUCKET}/x")
    for ask in (storage.check_writable, lambda: storage.list_names(""), lambda: storage.open_source("a")):
        with pytest.raises(RecordingError, match=r'EndpointConnectionError: .*"http://127.0.0.1:9'):
            ask()
    fsspec.filesystem("s3").clear_instance_cache()


def test_credentials_that_are_absent_are_a_clear_error(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    fsspec.filesystem("s3").clear_instance_cache()
    with pytest.raises(RecordingError, match=r"cannot record in .*: NoCredentialsError: Unable to locate credentials"):
        open_storage(f"s3://{BUCKET}/x").check_writable()
    fsspec.filesystem("s3").clear_instance_cache()


def test_denied_access_is_a_clear_error(location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = opened(location)

    def refuse(*_args: object, **_kwargs: object) -> object:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(storage._files, "pipe_file", refuse)
    with pytest.raises(RecordingError, match=r"cannot write .*/a \(1 bytes\): PermissionError: Access Denied\. Check"):
        storage.publish("a", [b"1"])


def test_an_error_that_is_no_failure_of_the_store_is_not_hidden(location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = opened(location)

    def fail(*_args: object, **_kwargs: object) -> object:
        raise ZeroDivisionError

    monkeypatch.setattr(storage._files, "exists", fail)
    with pytest.raises(ZeroDivisionError):
        storage.exists("a")


def test_a_run_is_recorded_resumed_and_trimmed_in_a_store_as_in_a_folder(location: str) -> None:
    options = WriterOptions(compression="zstd", retention=RetentionConfig(keep_last=2), num_planned_steps=9)
    writer = open_writer(location, run_id="r", plan=plan(0, 1, 2), options=options)
    for step in range(3):
        writer.submit(make_batch(seed=step), make_info(step, run_id="r"))
    writer.checkpoint_saved(1)
    writer.close()
    assert RecordingReader(location).steps() == {"train": [1, 2]}
    with pytest.raises(RecordingError, match="already holds a recording"):
        open_writer(location)
    writer = open_writer(location, resume=True, plan=plan(2, 3))
    assert [written.was_present for written in write(writer, [2, 3])] == [True, False]
    with pytest.raises(StepExistsError, match=rf"{location}/train/step_000002.safetensors.zst \(run id r\)"):
        writer.write_step(make_batch(seed=9), make_info(2, run_id="r"))
    writer.close()
    reader = RecordingReader(location)
    assert reader.check_plan(plan(1, 2, 3), verify=True) > 0
    assert loaded(location, 3).is_identical(make_batch(seed=3))
    with pytest.raises(StepNotFoundError, match="Steps removed by retention: train 0\n"):
        loaded(location, 0)


def test_shards_are_committed_in_a_store_and_each_is_read_alone(location: str) -> None:
    batch = make_batch()
    parts = [batch.select([0, 1]), batch.select([2, 3])]
    for index in (1, 0):
        options = WriterOptions(shard=RowShard(index=index, count=2))
        writer = open_writer(location, run_id="r", options=options)
        writer.submit(parts[index], make_info(0, run_id="r"))
        writer.close()
    names = open_storage(location).list_names("train/step_000000")
    assert names == ["commit.json", *(f"shard_0000{index}-of-00002.safetensors" for index in (0, 1))]
    for index in (0, 1):
        step = RecordingReader(location).load_step(request(0), shard=RowShard(index=index, count=2))
        assert step.batch.is_identical(parts[index])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_reads_with_a_client_of_its_own(location: str) -> None:
    """The client's thread does not exist in the child, where its parent's connection would wait for ever."""
    storage = opened(location)
    storage.publish("a", [b"abc"])

    def read() -> None:
        assert read_all(storage, "a") == b"abc"

    assert run_in_child(read) == "done"
    assert read_all(storage, "a") == b"abc"
