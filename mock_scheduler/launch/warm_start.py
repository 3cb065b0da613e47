"""Runs are forked from a process that has imported what all of them import; one such process for each environment.

To import torch and Megatron takes a core several seconds, in every rank of every run; a fork takes none. The process
that ``launch.ranks`` would be is forked here instead, and does the same from there on: a leader of a group of its own,
with ranks below it.

Contract: only installed packages of others are imported beforehand, never code that a user may change, and nothing
computes. Where no fork can be had (a package initialises CUDA when it is imported, as TransformerEngine does beside
FlashAttention; an import fails; it is not Linux), ``start`` says so and the run becomes a new process. All of them end
with the launcher. ``python -P -m mock_scheduler.launch.warm_start CONTROL MODULE ...`` is the process that is forked.
"""

from __future__ import annotations

import gc
import importlib
import io
import json
import os
import select
import selectors
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mock_scheduler.launch import ranks
from mock_scheduler.support.processes import PARENT_VARIABLE

_MODULE = "mock_scheduler.launch.warm_start"
_MESSAGE_BYTES = 1 << 18
_GO = b"g"
_LOST = -9
_CLOSE_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """One fork. ``arguments``: of ``launch.ranks``. ``writes_at_once``: it has no buffers for what it prints."""

    arguments: list[str]
    cwd: str
    writes_at_once: bool


@dataclass(slots=True, eq=False)
class ForkedProcess:
    """A forked process, waited for as ``subprocess.Popen`` waits for one. ``pid``: it leads a group of this number."""

    pid: int
    _reply: socket.socket
    _code: int | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def poll(self) -> int | None:
        """Returns the exit code, as ``subprocess`` has it, or ``None`` where it goes on."""
        return self._read(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code when there is one; raises ``subprocess.TimeoutExpired``."""
        code = self._read(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(_MODULE, timeout or 0.0)
        return code

    def _read(self, timeout: float | None) -> int | None:
        if self._code is None and self._is_told(timeout):
            with self._lock:
                if self._code is None:
                    # Whoever would tell the code has been killed, which ends the process too.
                    self._code = int(self._reply.recv(_MESSAGE_BYTES) or _LOST)
                    self._reply.close()
        return self._code

    def _is_told(self, timeout: float | None) -> bool:
        try:
            return bool(select.select([self._reply], [], [], timeout)[0])
        except (OSError, ValueError):  # another thread that waits for it too has read and closed it
            return True


@dataclass(slots=True)
class _Parent:
    """A process to fork from, and the socket that asks it. Held while it is asked."""

    process: subprocess.Popen[bytes]
    control: socket.socket

    def fork(self, request: bytes, descriptors: Sequence[int]) -> ForkedProcess | None:
        own, its = socket.socketpair()
        try:
            with its:
                socket.send_fds(self.control, [request], [its.fileno(), *descriptors])
            told = own.recv(_MESSAGE_BYTES)
            if told:
                own.send(_GO)
                return ForkedProcess(pid=int(told), _reply=own)
        except (ConnectionError, BrokenPipeError):
            pass
        except BaseException:
            own.close()  # it has not been told to go, and ends
            raise
        own.close()
        return None

    def end(self) -> None:
        self.control.close()
        try:
            self.process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class WarmStarts:
    """Starts runs as forks. Thread-safe; the processes that are forked from end with this object, or this process."""

    def __init__(self) -> None:
        self._parents: dict[tuple[object, ...], _Parent | None] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, _end_all, self._parents)

    def start(
        self,
        argv: Sequence[str],
        *,
        preload: Sequence[str],
        environ: Mapping[str, str],
        cwd: Path | None,
        output: tuple[int, int],
    ) -> ForkedProcess | None:
        """Forks the process that starts a run's ranks; ``None`` where it must be a new process.

        Args:
            argv: Its command, as ``ranks_command`` writes it.
            preload: The modules to have imported; none is forked from where there are none.
            environ: All of its variables, which torch reads when it is imported.
            cwd: Its working directory; ``None``: this one's.
            output: The descriptors of its standard output and errors.
        """
        # Forks of one process have its order of sets, by which code of no fixed order would look repeatable.
        if sys.platform != "linux" or not preload or environ.get("PYTHONHASHSEED", "random") == "random":
            return None
        python, position = argv[0], argv.index(ranks.MODULE)
        key = (python, tuple(preload), tuple(sorted(environ.items())))
        with self._lock:
            if key not in self._parents:
                self._parents[key] = _start_parent(python, preload, environ)
        parent = self._parents[key]
        if parent is None:
            return None
        request = _Request(
            arguments=list(argv[position + 1 :]), cwd=str(cwd or Path.cwd()), writes_at_once="-u" in argv[:position]
        )
        forked = parent.fork(json.dumps(asdict(request)).encode(), output)
        if forked is None and parent.process.poll() is not None:
            with self._lock:
                self._parents[key] = None
            parent.end()
        return forked


def _end_all(parents: dict[tuple[object, ...], _Parent | None]) -> None:
    for parent in parents.values():
        if parent is not None:
            parent.end()


def _start_parent(python: str, preload: Sequence[str], environ: Mapping[str, str]) -> _Parent:
    own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        process = subprocess.Popen(
            [python, "-P", "-m", _MODULE, str(its.fileno()), *preload],
            env=dict(environ),
            stdout=subprocess.DEVNULL,  # what packages say of themselves
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C reaches the launcher alone
            pass_fds=(its.fileno(),),
        )
    return _Parent(process=process, control=own)


def _serve(control: socket.socket) -> _Request | None:
    """Forks for every request, and tells of the end of each; returns it in the fork, and here ``None`` at the end."""
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not control:
                    _tell_end(selector, key)
                    continue
                message, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 3)
                if not message:
                    # The launcher has ended: whatever runs is told so by the system, since its parent ends here.
                    return None
                reply = socket.socket(fileno=descriptors[0])
                child = _fork()
                if child == 0:
                    _leave(selector, control)
                    _wait_for_go(reply)
                    request = _Request(**json.loads(message))
                    _become(request, descriptors[1:])
                    return request
                for descriptor in descriptors[1:]:
                    os.close(descriptor)
                if child is None:
                    reply.close()
                else:
                    selector.register(os.pidfd_open(child), selectors.EVENT_READ, (child, reply))


def _fork() -> int | None:
    try:
        return os.fork()
    except OSError:  # no room for a process; others go on, and this run is started another way
        return None


def _tell_end(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    child, reply = key.data
    _, status = os.waitpid(child, 0)
    selector.unregister(key.fileobj)
    os.close(key.fd)
    with reply:
        try:
            reply.send(str(os.waitstatus_to_exitcode(status)).encode())
        except (BrokenPipeError, ConnectionError):  # nobody waits for it any more
            return


def _leave(selector: selectors.BaseSelector, control: socket.socket) -> None:
    """Closes in a fork what only its parent uses, so that an end on either side is seen."""
    for key in list(selector.get_map().values()):
        if key.fileobj is not control:
            os.close(key.fd)
            key.data[1].close()
    selector.close()
    control.close()


def _wait_for_go(reply: socket.socket) -> None:
    with reply:
        reply.send(str(os.getpid()).encode())
        if reply.recv(len(_GO)) != _GO:
            os._exit(0)


def _become(request: _Request, output: Sequence[int]) -> None:
    """Makes this fork what a new process would be: its group, folder, output and parent."""
    os.setsid()
    os.chdir(request.cwd)
    for number, descriptor in zip((1, 2), output, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if request.writes_at_once:
        for name, number in (("stdout", 1), ("stderr", 2)):
            before = getattr(sys, name)
            stream = io.TextIOWrapper(
                io.FileIO(number, "w", closefd=False), before.encoding, before.errors, write_through=True
            )
            setattr(sys, name, stream)
    os.environ[PARENT_VARIABLE] = str(os.getppid())


def _import(modules: Sequence[str]) -> bool:
    """Imports all; says whether the process may be forked."""
    for module in modules:
        importlib.import_module(module)
    torch = sys.modules.get("torch")
    return torch is None or not torch.cuda.is_initialized()


def main(arguments: Sequence[str]) -> int:
    """Forks runs until the launcher ends; in a fork, starts its ranks and returns its exit code."""
    control = socket.socket(fileno=int(arguments[0]))
    os.set_inheritable(control.fileno(), False)
    if not _import(arguments[1:]):
        return 1
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the memory that it looks at
    request = _serve(control)
    return 0 if request is None else ranks.main(request.arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
