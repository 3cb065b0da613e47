"""Starts a campaign's runs as forks of one process that has imported torch and Megatron: imports are most of a run.

``serving`` is the process with everything imported; ``python -m tests.faults.own.forking WORLD_SIZE SCRIPT ...`` stands
where ``torchrun --nproc-per-node WORLD_SIZE SCRIPT ...`` does, and asks it for the ranks. Each has the environment, the
folder and the terminal of who asks, and ends with it.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

#: Where the server listens; without it a campaign uses ``torchrun``.
SOCKET_VARIABLE = "OWN_FAULTS_SOCKET"
_SERVE = "--serve"
_ROOT = Path(__file__).parents[3]
#: The words that stand in a command where ``torchrun --standalone --nproc-per-node {world_size}`` does.
COMMAND = (sys.executable, str(Path(__file__)), "{world_size}")


@contextmanager
def serving() -> Iterator[None]:
    """Runs of a campaign in the block are forks of one process."""
    with tempfile.TemporaryDirectory(prefix="own-faults-") as folder:
        path = str(Path(folder) / "socket")
        os.environ[SOCKET_VARIABLE] = path
        words = [sys.executable, str(Path(__file__)), _SERVE, path]
        server = subprocess.Popen(
            words, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}, stdout=subprocess.PIPE
        )
        try:
            assert server.stdout is not None
            if not server.stdout.readline():  # it says when it listens
                raise RuntimeError("the server of the campaign's runs did not start")
            yield
        finally:
            del os.environ[SOCKET_VARIABLE]
            server.terminate()
            server.wait()
            if server.stdout is not None:
                server.stdout.close()


def _ask(arguments: list[str]) -> int:
    """Asks for the ranks of a run, and waits for their end; returns the exit code."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(os.environ[SOCKET_VARIABLE])
        asked = {"world_size": int(arguments[0]), "argv": arguments[1:], "env": dict(os.environ), "cwd": os.getcwd()}
        socket.send_fds(client, [json.dumps(asked).encode() + b"\n"], [1, 2])
        answer = client.recv(16)
        return int(answer) if answer else 1


def _serve(path: str) -> None:
    from tests.faults.own import train_with_fault  # noqa: F401 - here alone: this is what takes seconds
    from tests.faults.own.example import find_module

    find_module("train")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that answer
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("listening", flush=True)
        while True:
            client, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os._exit(_answer(client))
            client.close()


def _answer(client: socket.socket) -> int:
    """Forks the ranks, and tells the one who asked how they ended; they end where it does."""
    data, fds, _, _ = socket.recv_fds(client, 1 << 20, 2)
    while not data.endswith(b"\n"):
        data += client.recv(1 << 20)
    asked = json.loads(data)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [_fork_rank(asked, fds, rank=rank, port=port) for rank in range(asked["world_size"])]
    codes: list[int] = []
    while len(codes) < len(ranks):
        gone = select.select([client], [], [], 0.05)[0]
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes.append(os.waitstatus_to_exitcode(status))
        if gone or any(codes):
            for rank in ranks:
                with suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGTERM)
    with suppress(OSError):
        client.sendall(str(next((abs(code) for code in codes if code), 0)).encode())
    return 0


def _fork_rank(asked: dict[str, Any], fds: list[int], *, rank: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for place, fd in enumerate(fds, start=1):
            os.dup2(fd, place)
        os.chdir(asked["cwd"])
        os.environ.clear()
        os.environ.update(asked["env"])
        size = str(asked["world_size"])
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        sys.argv = asked["argv"]
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - a rank that fails must say so and end, whatever it was
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.path.insert(0, str(_ROOT))
    if sys.argv[1] == _SERVE:
        _serve(sys.argv[2])
    sys.exit(_ask(sys.argv[1:]))
