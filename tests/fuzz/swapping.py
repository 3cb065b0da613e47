"""Changes what lies under a name in a received folder: links, pipes, devices, holes, other files, or nothing."""

from __future__ import annotations

import os
import random
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.fuzz.folders import EVIL
from tests.fuzz.mutations import mutate_bytes

#: What stands in every private file; no output of a command may have it.
CANARY = "canary-7f3a9"
HOLE_BYTES = 100 * 2**30

_Swap = Callable[[Path, random.Random], None]


def remove(path: Path) -> None:
    """Remove a file, a link or a folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _make_pipe(path: Path, _rng: random.Random) -> None:
    remove(path)
    os.mkfifo(path)


def _make_socket(path: Path, _rng: random.Random) -> None:
    remove(path)
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is at most 107 bytes long
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def _link_to(target: str) -> _Swap:
    def swap(path: Path, _rng: random.Random) -> None:
        remove(path)
        path.symlink_to(target)

    return swap


def _private() -> Path:
    folder = Path(tempfile.gettempdir()) / f"private-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    return folder


def _link_out(path: Path, _rng: random.Random) -> None:
    """The same content lies outside, so that nothing is wrong with it but the link."""
    outside = _private() / path.name
    remove(outside)
    path.rename(outside)
    path.symlink_to(outside)


def _link_to_canary(path: Path, _rng: random.Random) -> None:
    outside = _private() / "secret"
    outside.write_text(f"{CANARY}: {CANARY}\n")
    remove(path)
    path.symlink_to(outside)


def _hard_link(path: Path, rng: random.Random) -> None:
    others = [item for item in path.parent.rglob("*") if item.is_file() and not item.is_symlink() and item != path]
    if others:
        other = rng.choice(sorted(others))
        remove(path)
        os.link(other, path)


def _exchange(path: Path, rng: random.Random) -> None:
    others = [item for item in path.parent.parent.rglob("*") if item.is_file() and not item.is_symlink()]
    others = [item for item in others if item.stat().st_size < HOLE_BYTES]
    if others and path.is_file():
        path.write_bytes(rng.choice(sorted(others)).read_bytes())


def _make_hole(path: Path, _rng: random.Random) -> None:
    if path.is_file():
        os.truncate(path, HOLE_BYTES)


def _make_folder(path: Path, _rng: random.Random) -> None:
    remove(path)
    path.mkdir()


def _rename(path: Path, rng: random.Random) -> None:
    name = rng.choice([f"{path.name}{EVIL}".replace("/", "\u2215"), f"{path.stem}²{path.suffix}", f"x\n{path.name}"])
    path.rename(path.with_name(name[:100]))


def _double(path: Path, rng: random.Random) -> None:
    """Give a file a second name, which stands for another step, rank or part."""
    number = rng.choice(["000001", "00001", "1", "-1", "9" * 30, "²"])
    name = path.name.replace("00000", number, 1) if "00000" in path.name else f"{path.stem}{number}{path.suffix}"
    target = path.with_name(name)
    if not target.exists():
        shutil.copytree(path, target) if path.is_dir() else shutil.copyfile(path, target)


def _mutate(path: Path, rng: random.Random) -> None:
    if path.is_file():
        path.write_bytes(mutate_bytes(path.read_bytes(), rng))


def _claim_header(path: Path, rng: random.Random) -> None:
    if path.is_file():
        size = struct.pack("<Q", rng.choice([0, 2**31, 2**62, 2**63, 2**64 - 1, 99_999_999]))
        path.write_bytes(size + path.read_bytes()[8:])


def _remove(path: Path, _rng: random.Random) -> None:
    remove(path)


def _empty(path: Path, _rng: random.Random) -> None:
    if path.is_file():
        path.write_bytes(b"")


SWAPS: tuple[_Swap, ...] = (
    *(_make_pipe, _make_socket, _link_out, _link_to_canary, _hard_link, _exchange, _make_hole, _make_folder, _rename),
    *(_double, _mutate, _mutate, _claim_header, _remove, _empty),
    *map(_link_to, ("/dev/zero", "/dev/full", "/dev/stdin", "/proc/self/environ", ".", "..", "/", "loop", "gone")),
)


def swap_one(root: Path, rng: random.Random) -> str:
    """Change what lies under one or two names of a folder; says what was done."""
    said = []
    for _ in range(rng.choice([1, 1, 2])):
        paths = sorted(path for path in root.rglob("*") if not path.is_symlink() and ".own." not in path.name)
        path, swap = rng.choice(paths), rng.choice(SWAPS)
        if not path.parent.exists():
            continue
        said.append(f"{getattr(swap, '__name__', '')} {path.relative_to(root)}")
        with suppress(FileNotFoundError):  # a folder became a file
            swap(path, rng)
    return "; ".join(said)
