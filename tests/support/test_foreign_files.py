"""The door for foreign files: regular, inside of its folder, and no larger than its kind may be, or refused by name."""

from __future__ import annotations

import ast
import os
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mock_scheduler.errors import ForeignFileError, MockSchedulerError
from mock_scheduler.support.foreign_files import (
    check_inside,
    load_json,
    open_foreign,
    open_regular,
    read_bytes,
    read_lines,
    read_tail,
    read_text,
)

LIBRARY = Path(__file__).parents[2] / "mock_scheduler"


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        # By a relative name, since a socket's is at most 108 bytes long.
        before = os.getcwd()
        os.chdir(path.parent)
        listener.bind(path.name)
        os.chdir(before)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (os.mkfifo, "a pipe"),
        (Path.mkdir, "a folder"),
        (lambda path: path.symlink_to("/dev/zero"), "a device"),
        (lambda path: path.symlink_to("/dev/null"), "a device"),
    ],
    ids=["pipe", "folder", "zero", "null"],
)
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, make: Callable[[Path], None], kind: str) -> None:
    path = tmp_path / "run.json"
    make(path)
    with pytest.raises(ForeignFileError) as caught:
        read_bytes(path)
    assert str(caught.value) == f"{path} is {kind}, where a regular file is expected: remove it"


def test_a_socket_cannot_be_opened(tmp_path: Path) -> None:
    make_socket(tmp_path / "run.json")
    with pytest.raises(OSError, match="No such device or address"):
        read_bytes(tmp_path / "run.json")


def test_a_file_is_read_whole_and_by_lines(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes("é\n\x0bb\n\nlast".encode())
    assert read_text(path) == "é\n\x0bb\n\nlast"
    assert list(read_lines(path)) == ["é", "\x0bb", "", "last"]
    assert read_tail(path, 1) == "last"
    assert read_bytes(Path("/proc/self/status"), max_bytes=10**6).startswith(b"Name:")  # says a size of 0


def test_a_larger_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.touch()
    os.truncate(path, 100 * 2**30)
    with pytest.raises(ForeignFileError) as caught:
        load_json(path)
    assert str(caught.value) == f"{path} has {100 * 2**30} bytes; a JSON document has at most {64 * 2**20} bytes"
    with pytest.raises(ForeignFileError, match="has a line of more; one line has at most 16777216 bytes"):
        list(read_lines(path))


def test_a_file_that_says_no_size_is_read_to_its_limit(tmp_path: Path) -> None:
    with pytest.raises(ForeignFileError, match="has more; a document has at most 100 bytes"):
        read_bytes("/proc/self/status", max_bytes=100)


def test_a_link_that_the_user_names_is_followed(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("{}")
    (tmp_path / "link").symlink_to("a")
    assert load_json(tmp_path / "link") == {}


@pytest.mark.parametrize("target", ["outside", "../folder2/outside", "folder/../outside", "loop"])
def test_a_link_that_leads_out_of_its_folder_is_not_followed(tmp_path: Path, target: str) -> None:
    folder = tmp_path / "folder"
    for name in ("folder", "folder2"):
        (tmp_path / name).mkdir()
    for name in ("outside", "folder2/outside"):
        (tmp_path / name).write_text("secret")
    (folder / "loop").symlink_to("loop")
    (folder / "link").symlink_to(folder / "loop" if target == "loop" else tmp_path / "folder" / ".." / target)
    if target == "loop":
        with pytest.raises(OSError, match="Too many levels of symbolic links"):
            read_bytes(folder / "link", inside=folder)
        return
    with pytest.raises(ForeignFileError, match=r"is a link to .*outside, outside of .*: it is not followed"):
        read_bytes(folder / "link", inside=folder)
    with pytest.raises(ForeignFileError, match="it is not followed"):
        check_inside(folder / "link", folder)


def test_a_link_within_its_folder_is_followed(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "a").write_text("x")
    (folder / "link").symlink_to("sub/a")
    (tmp_path / "way").symlink_to("folder")  # the folder itself may be named by a link
    assert read_text(tmp_path / "way" / "link", inside=tmp_path / "way") == "x"


def test_a_folder_swapped_for_a_link_while_a_file_is_opened_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the path and the opening, another process may put in a link."""
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    for path in (folder / "sub", outside):
        path.mkdir(parents=True)
        (path / "a").write_text("x")
    real_open = os.open

    def swap_and_open(path: str, flags: int) -> int:
        (folder / "sub").rename(folder / "aside")
        (folder / "sub").symlink_to(outside)
        return real_open(path, flags)

    monkeypatch.setattr(os, "open", swap_and_open)
    with pytest.raises(ForeignFileError, match="was replaced while it was opened, and leads out of"):
        open_regular(folder / "sub" / "a", inside=folder)


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(MockSchedulerError):
            open_regular(tmp_path / "pipe")
        with pytest.raises(MockSchedulerError), open_foreign("/proc/self/exe", max_bytes=1):
            pass
    assert len(os.listdir("/proc/self/fd")) == before


# No way around the door

#: Reads of files beside the door: those of this package, of the system, of the user's own code and configuration, and
#: of what this very process wrote.
BESIDE = {
    "support/foreign_files.py": "the door; makes new files",
    "support/files.py": "writes; opens what it made itself",
    "recording/storage/file_lock.py": "opens lock files to hold them, and never follows a link",
    "run_folder/command_folder.py": "opens a folder to sync it",
    "trace/full/part.py": "gives safetensors a descriptor of the door",
    "adapters/huggingface/files.py": "gives safetensors the user's checkpoint",
    "adapters/huggingface/writing.py": "writes",
    "config/number_traps.py": "the user's configuration",
    "alignment/extract/entry.py": "the user's code",
    "alignment/extract/extraction.py": "a log that this process writes",
    "support/hardware.py": "/proc/cpuinfo",
    "launch/job.py": "opens a lock file to hold it, and never follows a link",
    "support/sources.py": "the sources of this program",
    "determinism/environment.py": "/proc/self/environ",
    "determinism/probes.py": "libraries of this process, and the driver's version",
    "determinism/operations/recorder.py": "a log that this process writes",
    "launch/launcher.py": "a log that this process writes",
    "trace/begun_calls.py": "a log that this process writes",
    "launch/supervision.py": "/proc of its own children",
    "recording/storage/local.py": "opens a folder, to write in it whatever its name becomes",
    "remote/service_file.py": "follows no link, and looks at the rights of the file that it opened",
    "support/fetched_folders.py": "folders and files that this process makes",
    "support/node_cache.py": "a lock of this user's own folder",
    "support/versions.py": "what installed packages say of themselves",
    "support/local_key.py": "the user's key, whose rights are looked at",
}
READERS = {"read_text", "read_bytes", "safe_open", "load_file"}
#: ``module.function`` that reads a file by name or stream.
QUALIFIED_READERS = {"json.load", "torch.load", "np.load", "numpy.load", "os.open", "io.open", "OmegaConf.load"}
#: Methods of ours that only share a name with those of a path.
OWN_METHODS = {"StepFile.open", "OperationLog.open", "storage.read_bytes", "self._storage.read_bytes"}


#: Without one of these words a text has no reader, and need not be parsed.
_WORDS = re.compile(r"\b(?:open|load|read_text|read_bytes|safe_open|load_file)\b")


def find_reads(code: str) -> Iterator[str]:
    """Yields every call that could open a file by its name."""
    for node in ast.walk(ast.parse(code)) if _WORDS.search(code) else ():
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        last = name.rpartition(".")[2]
        if name in OWN_METHODS or name.startswith("foreign_files."):
            continue
        is_method = isinstance(node.func, ast.Attribute)
        if (
            name == "open"
            or name in QUALIFIED_READERS
            or name in {"safe_open", "load_file"}
            or (is_method and (last == "open" or last in READERS))
        ):
            yield name


def test_no_file_of_the_library_reads_beside_the_door() -> None:
    found = {
        path.relative_to(LIBRARY).as_posix(): sorted(set(find_reads(path.read_text(encoding="utf-8"))))
        for path in LIBRARY.rglob("*.py")
    }
    assert {name: reads for name, reads in found.items() if reads and name not in BESIDE} == {}
    assert [name for name in BESIDE if not found.get(name)] == [], "an exception that is not needed any more"


@pytest.mark.parametrize(
    "code",
    [
        "open('x')",
        "path.read_text()",
        "Path('x').open()",
        "torch.load(p)",
        "json.load(f)",
        "safe_open(p)",
        "os.open(p, 0)",
    ],
)
def test_a_read_beside_the_door_is_found(code: str) -> None:
    assert len(list(find_reads(code))) == 1
