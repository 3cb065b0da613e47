"""A Ray cluster of a head with a dashboard and several nodes, each of its own processes on loopback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.integrations.ray_head import ROOT
from tests.launch.process_tree import find_below

NUM_CPUS = 4
_NUM_TRIES = 5
_START_S = 120.0
_START = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--node-ip-address=127.0.0.1")
_SMALL = ("--object-store-memory=100000000", "--disable-usage-stats")


@dataclass(kw_only=True)
class Nodes:
    """A cluster; jobs have room on its nodes alone. environ: of a process that uses it."""

    folder: Path
    environ: dict[str, str]
    dashboard: str
    address: str
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def add(self) -> subprocess.Popen[bytes]:
        """Adds a node and waits until it is one of the cluster's."""
        return self.start(f"--address={self.address}", f"--num-cpus={NUM_CPUS}")

    def kill(self, node: subprocess.Popen[bytes]) -> None:
        """Kills a node's own processes at once; its workers end as they notice."""
        for process_id in find_below(node.pid):
            if b"raylet" in _command_line(process_id).split(b" ")[0] or process_id == node.pid:
                with suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGKILL)
        node.wait()

    def find(self, node_id: str) -> subprocess.Popen[bytes]:
        """Finds the process of a living node by the number that Ray gives it."""
        return next(
            process
            for process in self.started
            if process.poll() is None
            and any(node_id.encode() in _command_line(process_id) for process_id in find_below(process.pid))
        )

    def logs(self) -> str:
        """The last lines that the nodes have printed."""
        return "\n".join(f"{path.name}:\n{path.read_text()[-1500:]}" for path in sorted(self.folder.glob("node-*.log")))

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        """Starts a node, again where Ray gives up: it waits half a minute, which a busy machine needs for less."""
        for _ in range(_NUM_TRIES):
            path = self.folder / f"node-{len(self.started)}.log"
            with path.open("ab") as log:
                environ = {**os.environ, **self.environ}
                process = subprocess.Popen([*_START, *_SMALL, *options], cwd=ROOT, env=environ, stdout=log, stderr=log)
            self.started.append(process)
            ends_s = time.monotonic() + _START_S
            while process.poll() is None and time.monotonic() < ends_s:
                if "Ray runtime started" in path.read_text(errors="replace"):
                    return process
                time.sleep(0.2)
            _end_below(process)
        raise RuntimeError(f"a node has not started:\n{self.logs()}")


@contextmanager
def start_nodes(num_nodes: int) -> Iterator[Nodes]:
    """Starts it, and ends it."""
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as name,
        ExitStack() as stack,
    ):
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(4)]
        port, dashboard, client, agent = (item.getsockname()[1] for item in held)
        for item in held:
            item.close()
        folder = Path(name)
        token = folder / "token"
        token.write_text("0123456789abcdef" * 4, encoding="utf-8")
        environ = {
            "RAY_USAGE_STATS_ENABLED": "0",
            # Of several nodes it must be on; some of Ray's ports are then open to other machines, so a token is asked.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_enable_autoscaler_v2": "0",
        }
        nodes = Nodes(
            folder=folder,
            environ=environ,
            dashboard=f"http://127.0.0.1:{dashboard}",
            address=f"127.0.0.1:{port}",
        )
        stack.callback(_end, nodes)
        nodes.start(
            "--head", f"--port={port}", f"--ray-client-server-port={client}", f"--temp-dir={folder}", "--num-cpus=0",
            "--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}",
            f"--dashboard-agent-listen-port={agent}",
        )  # fmt: skip
        for _ in range(num_nodes):
            nodes.add()
        yield nodes


def _command_line(process_id: int) -> bytes:
    try:
        return Path(f"/proc/{process_id}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return b""


def _end(nodes: Nodes) -> None:
    for process in reversed(nodes.started):
        _end_below(process)


def _end_below(process: subprocess.Popen[bytes]) -> None:
    """Ends a node, and whatever of it is left."""
    below = find_below(process.pid) if process.poll() is None else set()
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(30)
    for process_id in below:
        with suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)
    process.wait()
