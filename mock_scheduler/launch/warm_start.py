"""Runs are forked from a process that has imported what all of them import; one such process for each environment.

To import torch and Megatron takes a core several seconds, in every rank of every run; a fork takes none. The process
that ``launch.ranks`` would be is forked here instead, and does the same from there on: a leader of a group of its own,
with ranks below it.

Contract: what is imported beforehand computes nothing, and every run has the code that lies on the disk when it
starts: where a file has changed since it was imported, a new process takes over. Where no fork can be had (a package
initialises CUDA when it is imported, as TransformerEngine does beside FlashAttention; an import fails; it is not
Linux), ``start`` says so and the run becomes a new process. All of them end with the launcher.
``python -P -m mock_scheduler.launch.warm_start CONTROL MODULE ...`` is the process that is forked.
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
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mock_scheduler.launch import ranks
from mock_scheduler.support.loaded_code import find_own_files
from mock_scheduler.support.processes import PARENT_VARIABLE, end_process

_MODULE = "mock_scheduler.launch.warm_start"
_MESSAGE_BYTES = 1 << 18
_GO = b"g"
_OUTDATED = b"o"
_LOST = -9
_CLOSE_S = 5.0

#: By file, when it was last changed, and its size.
_Files = dict[str, tuple[int, int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Origin:
    """What decides which process a run may be forked from."""

    python: str
    cwd: str
    preload: tuple[str, ...]
    environ: tuple[tuple[str, str], ...]


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
    """A process to fork from, and the socket that asks it. ``is_outdated``: it has other code than the disk."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    is_outdated: bool = False

    def fork(self, request: bytes, descriptors: Sequence[int]) -> ForkedProcess | None:
        own, its = socket.socketpair()
        try:
            with its:
                socket.send_fds(self.control, [request], [its.fileno(), *descriptors])
            told = own.recv(_MESSAGE_BYTES)
            if told == _OUTDATED:
                self.is_outdated = True
            elif told:
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
        self._parents: dict[_Origin, _Parent | None] = {}
        self._started: list[_Parent] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _end_all, self._started)

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
            cwd: Its working directory, absolute; ``None``: this one's.
            output: The descriptors of its standard output and errors.
        """
        # Forks of one process have its order of sets, by which code of no fixed order would look repeatable.
        if sys.platform != "linux" or not preload or environ.get("PYTHONHASHSEED", "random") == "random":
            return None
        python, position = argv[0], argv.index(ranks.MODULE)
        request = _Request(
            arguments=list(argv[position + 1 :]), cwd=str(cwd or Path.cwd()), writes_at_once="-u" in argv[:position]
        )
        message = json.dumps(asdict(request)).encode()
        # The working directory, since folders in PYTHONPATH may be relative to it.
        origin = _Origin(python=python, cwd=request.cwd, preload=tuple(preload), environ=tuple(sorted(environ.items())))
        while True:
            parent = self._find_parent(origin)
            if parent is None:
                return None
            forked = parent.fork(message, output)
            if not parent.is_outdated:
                break
        if forked is None and parent.process.poll() is not None:
            with self._lock:
                self._parents[origin] = None
        return forked

    def _find_parent(self, origin: _Origin) -> _Parent | None:
        with self._lock:
            parent = self._parents.get(origin)
            # An outdated one goes on beside it: its runs would end with it.
            if origin not in self._parents or (parent is not None and parent.is_outdated):
                parent = self._parents[origin] = _start_parent(origin)
                self._started.append(parent)
            return parent


def _end_all(parents: Sequence[_Parent]) -> None:
    for parent in parents:
        parent.end()


def _start_parent(origin: _Origin) -> _Parent:
    own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        process = subprocess.Popen(
            [origin.python, "-P", "-m", _MODULE, str(its.fileno()), *origin.preload],
            cwd=origin.cwd,
            env=dict(origin.environ),
            stdout=subprocess.DEVNULL,  # what packages say of themselves
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C reaches the launcher alone
            pass_fds=(its.fileno(),),
        )
    return _Parent(process=process, control=own)


def _serve(control: socket.socket, imported: _Files) -> _Request | None:
    """Forks for every request, and tells of the end of each; returns it in the fork, and here ``None`` at the end.

    Where a file that was ``imported`` has changed, it says so instead.
    """
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
                if _look_at(imported) != imported:
                    reply.send(_OUTDATED)
                    for descriptor in (reply.detach(), *descriptors[1:]):
                        os.close(descriptor)
                    continue
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


def _import(modules: Sequence[str]) -> _Files | None:
    """Imports all; returns the files that it has read, or ``None`` where the process must not be forked."""
    started_ns = time.time_ns()
    for module in modules:
        importlib.import_module(module)
    find_own_files()  # each fork asks for them twice
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return None
    paths = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    files = _look_at(path for path in paths if path)
    # A file that was written while it was read may be either.
    return None if any(changed_ns >= started_ns for changed_ns, _ in files.values()) else files


def _look_at(paths: Iterable[str]) -> _Files:
    found: _Files = {}
    for path in paths:
        try:
            state = os.stat(path)
        except OSError:  # removed, or within an archive
            continue
        found[path] = (state.st_mtime_ns, state.st_size)
    return found


def main(arguments: Sequence[str]) -> int:
    """Forks runs until the launcher ends; a fork starts its ranks, and ends with their exit code."""
    control = socket.socket(fileno=int(arguments[0]))
    os.set_inheritable(control.fileno(), False)
    gc.disable()  # all that is imported stays
    imported = _import(arguments[1:])
    if imported is None:
        return 1
    gc.freeze()  # a collection in a fork would copy the memory that it looks at
    gc.enable()
    request = _serve(control, imported)
    if request is not None:
        end_process(ranks.main(request.arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
