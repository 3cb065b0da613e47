"""Seals the files of a checkpoint: the size of each, and a CRC-32 of every block of it.

Contract: a CRC-32 finds every single changed bit, and every damage within 32 adjacent bits, for certain; any other
damage of a block escapes it once in 2^32. It guards against disks, copies and files that were mixed up. It is no
signature: whoever can write the folder can seal it anew, so nothing of a checkpoint may run code either.
Blocks are read by several threads; torch's group shares them out among its ranks.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mock_scheduler.determinism.agreement import RankGroup
from mock_scheduler.support.files import Buffer, publish_new

BLOCK_BYTES = 16 * 2**20

_DIGITS = 8  # of a CRC-32, in hex
_READ_BYTES = 2**20  # what stays in a core's cache between its reading and its CRC
_MAX_THREADS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSeal:
    """The size of a file, and the CRC-32 of its blocks, 8 hex digits each; ``None`` where nobody has sealed it."""

    size_bytes: int
    crc32: str | None = None


@dataclass(frozen=True, slots=True)
class _Block:
    name: str
    index: int
    crc32: str


def write_sealed(path: Path, pieces: Sequence[Buffer]) -> FileSeal:
    """Writes a new file that is on the disk when this returns; the CRCs are computed while the disk is at work.

    Raises:
        OSError: the file is there already, or cannot be written.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-seal") as thread:
        seal = thread.submit(seal_pieces, pieces)
        publish_new(path, pieces)
        return seal.result()


def seal_pieces(pieces: Sequence[Buffer]) -> FileSeal:
    """Seals a file of these pieces, one after another."""
    digits: list[str] = []
    crc, room = 0, BLOCK_BYTES
    for piece in pieces:
        rest = memoryview(piece).cast("B")
        while rest:
            part, rest = rest[:room], rest[room:]
            crc, room = zlib.crc32(part, crc), room - len(part)
            if room == 0:
                digits.append(_as_digits(crc))
                crc, room = 0, BLOCK_BYTES
    if room < BLOCK_BYTES:
        digits.append(_as_digits(crc))
    return FileSeal(size_bytes=sum(memoryview(piece).nbytes for piece in pieces), crc32="".join(digits))


def find_wrong_sizes(folder: Path, seals: Mapping[str, FileSeal]) -> list[str]:
    """Describes every file that is missing, of another size, a link or no file at all; reads no content."""
    return [problem for name, seal in seals.items() if (problem := _describe_file(folder, name, seal))]


def _describe_file(folder: Path, name: str, seal: FileSeal) -> str:
    path = folder / name
    if not _is_inside(name) or any(parent.is_symlink() for parent in _parents(path, folder)):
        return f"{name}: leads out of the checkpoint's folder"
    try:
        found = path.lstat()
    except OSError:
        return f"{name}: written with {seal.size_bytes} bytes, found missing"
    if not stat.S_ISREG(found.st_mode):
        return f"{name}: is a link or no file"
    if found.st_size != seal.size_bytes:
        return f"{name}: written with {seal.size_bytes} bytes, found with {found.st_size}"
    return ""


def _is_inside(name: str) -> bool:
    parts = name.split("/")
    return not ({"", ".", ".."} & set(parts)) and "\0" not in name


def _parents(path: Path, folder: Path) -> Iterator[Path]:
    yield from (parent for parent in path.parents if parent != folder and parent.is_relative_to(folder))


def find_damage(folder: Path, seals: Mapping[str, FileSeal], ranks: RankGroup) -> list[str]:
    """Reads every block of the sealed files once, shared out among the ranks, and describes each wrong one.

    Collective; every rank gets the same answer.
    """
    blocks = [block for name, seal in sorted(seals.items()) for block in _blocks_of(name, seal)]
    own = blocks[ranks.global_rank :: ranks.world_size]
    with ThreadPoolExecutor(_num_threads(len(own), ranks.world_size), thread_name_prefix="checkpoint-check") as threads:
        wrong = [block for block in threads.map(lambda block: _find_wrong(folder, block), own) if block]
    gathered = [json.loads(part) for part in ranks.gather(json.dumps(wrong).encode())]
    return sorted(text for part in gathered for text in part)


def _num_threads(num_blocks: int, num_ranks: int) -> int:
    # The ranks of a node share its cores.
    return max(1, min(_MAX_THREADS, num_blocks, (os.cpu_count() or 1) // num_ranks))


def _blocks_of(name: str, seal: FileSeal) -> Iterator[_Block]:
    digits = seal.crc32 or ""
    for index in range(-(-seal.size_bytes // BLOCK_BYTES)):
        yield _Block(name, index, digits[index * _DIGITS : (index + 1) * _DIGITS])


def _find_wrong(folder: Path, block: _Block) -> str:
    start = block.index * BLOCK_BYTES
    where = f"{block.name}: the {BLOCK_BYTES // 2**20} MiB from byte {start} on"
    try:
        return "" if _crc_of(folder / block.name, start) == block.crc32 else f"{where} are not what was written"
    except OSError as error:
        return f"{where} cannot be read: {error.strerror}"


def _crc_of(path: Path, start: int) -> str:
    crc = 0
    buffer = memoryview(bytearray(_READ_BYTES))
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        for place in range(start, start + BLOCK_BYTES, _READ_BYTES):
            size = os.preadv(descriptor, [buffer[: start + BLOCK_BYTES - place]], place)
            crc = zlib.crc32(buffer[:size], crc)
    finally:
        os.close(descriptor)
    return _as_digits(crc)


def _as_digits(crc: int) -> str:
    return f"{crc:0{_DIGITS}x}"
