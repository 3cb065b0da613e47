"""Looks up the processes of a run and their listening sockets while it runs; reads /proc alone."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

#: In the environment of a run's first process, and so of every one below it.
MARK_VARIABLE = "TEST_RUN_MARK"
_LISTEN = "0A"


def find_marked(mark: str) -> dict[int, str]:
    """The living processes with this mark in their environment, with their command lines."""
    marked: dict[int, str] = {}
    for folder, environ in _read_all("environ"):
        if f"{MARK_VARIABLE}={mark}".encode() in environ.split(b"\0"):
            with suppress(OSError):  # it has ended meanwhile
                marked[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return marked


def find_below(process_id: int) -> set[int]:
    """The processes below one, and itself."""
    parents = {
        int(folder.name): int(stat.rpartition(b")")[2].split()[1])
        for folder, stat in _read_all("stat")  # proc(5): the second field after the name is the parent
    }
    found, more = {process_id}, {process_id}
    while more:
        more = {child for child, parent in parents.items() if parent in more} - found
        found |= more
    return found


def wait_until_gone(mark: str, *, timeout_s: float = 20.0) -> dict[int, str]:
    """Waits for the end of all marked processes; returns the ones that stay."""
    ends_s = time.monotonic() + timeout_s
    while (left := find_marked(mark)) and time.monotonic() < ends_s:
        time.sleep(0.02)
    return left


def find_listeners(process_ids: Collection[int]) -> set[tuple[IPv4Address | IPv6Address, int]]:
    """Address and port of every TCP socket that one of the processes listens on."""
    inodes = {inode for process_id in process_ids for inode in _sockets(process_id)}
    return {
        (address, port)
        for process_id in process_ids
        for name in ("tcp", "tcp6")
        for address, port, inode in _read_listening(Path(f"/proc/{process_id}/net/{name}"))
        if inode in inodes
    }


def find_open(process_ids: Collection[int]) -> set[tuple[str, int]]:
    """The listeners of ``find_listeners`` that another address can reach."""
    return {(str(address), port) for address, port in find_listeners(process_ids) if not address.is_loopback}


def _read_all(name: str) -> Iterator[tuple[Path, bytes]]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            content = (folder / name).read_bytes()
        except OSError:
            continue  # it has ended, or is another user's
        if content:  # a process that has ended and waits for its parent has no environment any more
            yield folder, content


def _sockets(process_id: int) -> Iterator[str]:
    try:
        for descriptor in Path(f"/proc/{process_id}/fd").iterdir():
            target = os.readlink(descriptor)
            if target.startswith("socket:["):
                yield target[len("socket:[") : -1]
    except OSError:
        return


def _read_listening(path: Path) -> Iterator[tuple[IPv4Address | IPv6Address, int, str]]:
    try:
        lines = path.read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return
    for line in lines:
        _, local, _, state, *_, inode = line.split()[:10]
        if state == _LISTEN:
            address, port = local.split(":")
            yield _parse_address(address), int(port, 16), inode


def _parse_address(text: str) -> IPv4Address | IPv6Address:
    """The kernel writes an address as 32-bit words in the machine's own order."""
    words = [int(text[start : start + 8], 16).to_bytes(4, "little") for start in range(0, len(text), 8)]
    packed = b"".join(words)
    if len(packed) == 4:
        return IPv4Address(packed)
    address = ip_address(socket.inet_ntop(socket.AF_INET6, packed))
    assert isinstance(address, IPv6Address)
    return address.ipv4_mapped or address
