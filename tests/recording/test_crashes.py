"""Processes that are killed, disks that are full, and processes that write or read at once: real ones, by fork.

Each time the recording holds whole steps that form a prefix, or the error is clear, and the run can be completed.
"""

import errno
import os
import random
import resource
import select
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.errors import RecordingError
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.recording.storage import open_storage
from mock_scheduler.recording.writing.opening import RecordingWriter, WriterOptions, open_recording
from mock_scheduler.scheduler import RolloutRequest
from tests.recording.builders import make_batch, make_contract, make_info
from tests.recording.processes import fork, run_in_child, wait_for

# Python 3.12 warns of a fork beside threads, of which torch and earlier tests may have left some: ours need none.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

NUM_STEPS = 12
BATCHES = [make_batch(4, 4, seed=step) for step in range(NUM_STEPS)]


def request(step: int) -> RolloutRequest:
    return RolloutRequest(global_step=step, batch_size=16)


def open_writer(folder: Path, **changes: object) -> RecordingWriter:
    values: dict[str, object] = {"plan": [request(step) for step in range(NUM_STEPS)], "resume": False, "run_id": "r"}
    return open_recording(str(folder), contract=make_contract(), provenance={}, **{**values, **changes})


def dump(writer: RecordingWriter, batches: list[RolloutBatch] = BATCHES) -> None:
    with closing(writer):
        for step, batch in enumerate(batches):
            writer.submit(batch, make_info(step, run_id=writer.run_id))


def step_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "train").iterdir())}


def check_prefix(folder: Path) -> int:
    """Check that what is listed is whole and the first steps of the run; returns how many there are."""
    assert [name for name in open_storage(str(folder)).list_names("train") if not name.startswith("step_")] == []
    if not (folder / "recording.json").exists():
        assert list(folder.glob("train/step_*")) == []
        return 0
    reader = RecordingReader(str(folder))
    present = reader.steps().get("train", [])
    assert present == list(range(len(present)))
    for step in present:
        assert reader.load_step(request(step)).batch.is_identical(BATCHES[step])
    return len(present)


def check_completed(folder: Path, undisturbed: dict[str, bytes]) -> None:
    dump(open_writer(folder, resume=True))
    assert step_files(folder) == undisturbed


@pytest.fixture
def undisturbed(tmp_path: Path) -> dict[str, bytes]:
    """The step files of a run that nothing happens to."""
    dump(open_writer(tmp_path / "undisturbed"))
    return step_files(tmp_path / "undisturbed")


# --------------------------------------------------------------------------------------------------------------- kills


def start_dump(folder: Path) -> tuple[int, int]:
    """A child that dumps; returns its process id and a descriptor that gives a byte when it begins, then ends."""
    reader, writer_end = os.pipe()
    child = os.fork()
    if child:
        os.close(writer_end)
        return child, reader
    try:
        torch.set_num_threads(1)
        writer = open_writer(folder)
        os.write(writer_end, b"o")
        dump(writer)
    finally:
        os._exit(0)


def dump_and_kill(folder: Path, delay_s: float) -> bool:
    """Kill a dumping process ``delay_s`` after its recording was opened; False where it had ended before."""
    child, reader = start_dump(folder)
    assert os.read(reader, 1) == b"o"
    select.select([reader], [], [], delay_s)
    os.kill(child, signal.SIGKILL)
    os.close(reader)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def measure_dump(folder: Path) -> float:
    child, reader = start_dump(folder)
    assert os.read(reader, 1) == b"o"
    started_s = time.perf_counter()
    assert os.read(reader, 1) == b""
    duration_s = time.perf_counter() - started_s
    os.close(reader)
    os.waitpid(child, 0)
    return duration_s


@pytest.mark.parametrize("num_kills", [20, pytest.param(200, marks=pytest.mark.all)])
def test_a_killed_dump_leaves_whole_steps_and_is_completed_to_the_same_bytes(
    tmp_path: Path, undisturbed: dict[str, bytes], num_kills: int, record_property: Callable[[str, object], None]
) -> None:
    duration_s = statistics.median(measure_dump(tmp_path / f"measure{index}") for index in range(5))
    moments = random.Random(num_kills)
    num_killed = num_inside = 0
    prefixes: set[int] = set()
    for number in range(num_kills):
        folder = tmp_path / str(number)
        num_killed += dump_and_kill(folder, moments.uniform(0.0, duration_s))
        num_inside += any(folder.glob("**/.*.tmp"))
        prefixes.add(check_prefix(folder))
        check_completed(folder, undisturbed)
        assert list(folder.glob("**/.*")) == []
    summary = f"{num_killed} of {num_kills} killed, {num_inside} inside a write; {len(prefixes)} different prefixes"
    record_property("kills", summary)
    print(summary)
    assert num_killed > num_kills / 4
    assert num_inside > 0 or num_kills < 100
    assert len(prefixes) > 2


# ----------------------------------------------------------------------------------------------------------- full disks


class FullDisk:
    """Lets ``os.write``, ``os.fsync`` and ``os.link`` fail from their k-th call on, the first write by half."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_good_calls: int) -> None:
        self.num_left, self.was_full = num_good_calls, False
        write, fsync, link = os.write, os.fsync, os.link

        def write_some(descriptor: int, data: bytes) -> int:
            if self.num_left == 1 and len(data) > 1:  # the last good one: a disk takes what it has room for
                self.num_left = 0
                return write(descriptor, data[: len(data) // 2])
            self._count()
            return write(descriptor, data)

        monkeypatch.setattr(os, "write", write_some)
        monkeypatch.setattr(os, "fsync", lambda descriptor: (self._count(), fsync(descriptor))[1])
        monkeypatch.setattr(os, "link", lambda source, target: (self._count(), link(source, target))[1])

    def _count(self) -> None:
        self.num_left -= 1
        if self.num_left < 0:
            self.was_full = True
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(("is_background", "stride"), [(True, 1), (False, 3)])
def test_a_disk_that_is_full_at_any_call_leaves_whole_steps_and_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_background: bool, stride: int
) -> None:
    num_calls, steps_left = 0, set()
    while True:
        folder = tmp_path / str(num_calls)
        with monkeypatch.context() as patch:
            disk = FullDisk(patch, num_calls)
            error = dump_first(folder, 3, background=is_background)
        if not disk.was_full:
            break
        assert "No space left on device" in str(error)
        text = str(error).removeprefix("[Rollout Mock] Nothing more is recorded, since an earlier write failed: ")
        assert text.startswith((f"cannot write {folder}/", f"cannot lock {folder}", f"cannot record in {folder}"))
        if folder.exists():
            steps_left.add(check_prefix(folder))
            assert list(folder.glob("train/.step*")) == []
        assert dump_first(folder, 3, resume=True) is None
        assert check_prefix(folder) == 3
        num_calls += stride
    assert error is None
    assert num_calls > 60  # at least ten pieces, two fsyncs and a link for each file
    assert steps_left >= {0, 1, 2}


def dump_first(folder: Path, num_steps: int, *, background: bool = True, **changes: object) -> RecordingError | None:
    try:
        dump(open_writer(folder, options=WriterOptions(background=background), **changes), BATCHES[:num_steps])
    except RecordingError as error:
        return error
    return None


def test_the_limit_of_the_kernel_on_a_file_is_a_clear_error(tmp_path: Path) -> None:
    """Not simulated: the kernel itself refuses the bytes above the limit, in the middle of a write."""
    large = RolloutBatch.from_trajectories(make_batch(16, 16).rows(), sampling=BATCHES[0].sampling, group_size=16)

    def dump_limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        dump(open_writer(tmp_path), [*BATCHES[:2], large])

    answer = run_in_child(dump_limited)
    assert answer.startswith(f"RecordingError: cannot write {tmp_path}/train/step_000002.safetensors (")
    assert ": File too large. Nothing partial was left; earlier steps are intact." in answer
    assert check_prefix(tmp_path) == 2
    assert os.listdir(tmp_path / "train").count(".lock") <= 1
    dump_first(tmp_path, NUM_STEPS, resume=True)
    assert check_prefix(tmp_path) == NUM_STEPS


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 128 KiB, where this user may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if result.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {result.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_real_full_disk_is_a_clear_error_and_the_forecast_comes_before_it(small_disk: Path) -> None:
    batches = [make_batch(16, 16, seed=step) for step in range(20)]
    for name, options in (("full", WriterOptions()), ("forecast", WriterOptions(num_planned_steps=20))):
        folder = small_disk / name
        writer = open_recording(
            str(folder), contract=make_contract(), plan=(), provenance={}, resume=False, options=options
        )
        reason = "No space left on device" if name == "full" else "The disk will be full before the recording ends"
        with pytest.raises(RecordingError, match=reason):
            dump(writer, batches)
        reader = RecordingReader(str(folder))
        present = reader.steps()["train"]
        assert present == list(range(len(present)))
        for step in present:
            batch = reader.load_step(RolloutRequest(global_step=step, batch_size=256)).batch
            assert batch.is_identical(batches[step])
        assert list(folder.glob("**/.*.tmp")) == []
        if name == "full":
            assert len(present) > 1
            open_storage(str(small_disk)).remove("full")
        else:
            assert present == [0]


# ------------------------------------------------------------------------------------------------------ several at once


def start_together(actions: list[Callable[[], object]]) -> list[str]:
    """Fork a process for each action, let them go at one moment, and return their answers."""
    gate, opener = os.pipe()

    def wait_then(action: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            os.close(opener)
            os.read(gate, 1)  # ends for all when the opener is closed everywhere
            action()

        return run

    children = [fork(wait_then(action)) for action in actions]
    os.close(opener)
    os.close(gate)
    return [wait_for(*child) for child in children]


def test_of_writers_of_one_name_one_wins_as_a_whole(tmp_path: Path) -> None:
    contents = [bytes([index]) * 100_000 for index in range(4)]
    for number in range(10):
        name = f"train/{number}"

        def publish(data: bytes, name: str = name) -> None:
            open_storage(str(tmp_path)).publish(name, [data[:5], data[5:]])

        answers = start_together([lambda data=data: publish(data) for data in contents])
        assert sorted(answer.split(":")[0] for answer in answers) == ["FileExistsError"] * 3 + ["done"]
        assert (tmp_path / name).read_bytes() == contents[answers.index("done")]
    assert sorted(os.listdir(tmp_path / "train")) == sorted(str(number) for number in range(10))


@pytest.mark.parametrize("has_plan", [True, False])
def test_of_runs_that_record_into_one_folder_one_wins_as_a_whole(tmp_path: Path, has_plan: bool) -> None:
    plan = [request(step) for step in range(3)] if has_plan else []
    for number in range(5):
        folder = tmp_path / str(number)

        def record(seed: int, folder: Path = folder) -> None:
            writer = open_writer(folder, run_id=f"run-{seed}", plan=plan)
            dump(writer, [make_batch(4, 4, seed=seed) for _ in range(3)])

        answers = start_together([lambda seed=seed: record(seed) for seed in range(3)])
        assert sorted(answer.split(":")[0] for answer in answers) == ["RecordingError", "RecordingError", "done"]
        winner = answers.index("done")
        reader = RecordingReader(str(folder))
        assert reader.manifest.run_id == f"run-{winner}"
        assert reader.steps() == {"train": [0, 1, 2]}
        for step in range(3):
            assert reader.load_step(request(step)).batch.is_identical(make_batch(4, 4, seed=winner))
        for answer in answers:
            assert answer == "done" or "is being written by" in answer or "recording" in answer


def test_a_reader_beside_a_writer_sees_whole_steps_only(tmp_path: Path) -> None:
    child, descriptor = fork(lambda: dump(open_writer(tmp_path)))
    seen = 0
    while not select.select([descriptor], [], [], 0)[0]:
        if (tmp_path / "recording.json").exists():
            now = check_prefix(tmp_path)
            assert now >= seen
            seen = now
    assert wait_for(child, descriptor) == "done"
    assert check_prefix(tmp_path) == NUM_STEPS
