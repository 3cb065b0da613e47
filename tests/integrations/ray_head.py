"""A cluster of Ray's own processes on loopback, for one module of tests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.launch.process_tree import find_below

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Head:
    """A cluster of four CPUs. ``environ``: of a process that joins it."""

    process: subprocess.Popen[bytes]
    environ: Mapping[str, str]

    def actors(self, name: str = "EnvironmentActor") -> list[int]:
        """The processes of its actors that have started."""
        return [pid for pid in find_below(self.process.pid) if f"ray::{name}" in command_line(pid)]


def command_line(process_id: int) -> str:
    try:
        return Path(f"/proc/{process_id}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


@contextmanager
def start_head() -> Iterator[Head]:
    """Starts it, and ends it."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        with socket.create_server(("127.0.0.1", 0)) as free:  # two heads on one machine want two
            client_port = free.getsockname()[1]
        options = ("--port=0", f"--ray-client-server-port={client_port}", "--include-dashboard=false", "--num-cpus=4")
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *options]
        command += ["--node-ip-address=127.0.0.1", f"--temp-dir={folder}", "--object-store-memory=100000000"]
        # Without one of its own a cluster takes the token of this user's home, which another may renew meanwhile.
        token = Path(folder) / "token"
        token.write_text("0123456789abcdef" * 4, encoding="utf-8")
        environ = {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
        }
        with subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environ}) as process:
            place = Path(folder) / "ray_current_cluster"
            ends_s = time.monotonic() + 120
            while not place.is_file() and time.monotonic() < ends_s:
                time.sleep(0.1)
            time.sleep(3)  # the address is there before the node has joined
            try:
                yield Head(process, {**environ, "RAY_ADDRESS": place.read_text(encoding="utf-8")})
            finally:
                process.terminate()
                process.wait(60)
