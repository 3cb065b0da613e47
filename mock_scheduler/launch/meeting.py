"""Lets the ranks of one machine meet where nobody else can come by, whoever wrote their program.

torch's own meeting (``env://``, and torchrun's) is a store that listens on every address of the machine, and torchrun
unpickles what anybody puts into it. Ranks of a supervisor of ours meet in a file of its memory instead: torch
is told so when it is imported, so the program's own ``init_process_group()`` needs no other argument.

Contract: standard library only, until the program imports torch.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import MutableMapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

#: The file in which the ranks of one machine meet.
STORE_VARIABLE = "MOCK_SCHEDULER_STORE"
# Under this address torch is given that file, and nobody listens there.
_HOST, _PORT = "127.0.0.1", 29500

# Read by gloo and NCCL whenever a group is made.
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# torch (2.0 to 2.13) makes the stores of env:// and tcp:// by this function of this module.
_MODULE, _MAKER = "torch.distributed.rendezvous", "_create_c10d_store"


def stay_on_this_machine(environ: MutableMapping[str, str]) -> None:
    """Has gloo and NCCL of this process listen on the loopback interface, where ``environ`` names no other."""
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in names if name in {"lo", "lo0"}), None)
    if loopback is not None:
        for variable in _INTERFACE_VARIABLES:
            environ.setdefault(variable, loopback)


def meet_in_memory(environ: MutableMapping[str, str]) -> None:
    """Has this rank of one machine meet the others in their file by ``env://``, and stay on the machine."""
    stay_on_this_machine(environ)
    environ.update({"MASTER_ADDR": _HOST, "MASTER_PORT": str(_PORT)})
    if environ["LOCAL_WORLD_SIZE"] != "1":
        environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun gives them
    sys.meta_path.insert(0, _StoreInMemory(environ[STORE_VARIABLE]))


class _StoreInMemory(MetaPathFinder):
    """Changes torch's module of meetings when it is imported. ``path``: of the file."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._num_made = 0

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds this one module, and nothing else."""
        spec = PathFinder.find_spec(fullname, path) if fullname == _MODULE else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_change(module: ModuleType) -> None:
            run(module)
            self._change(module)

        spec.loader.exec_module = run_and_change  # type: ignore[method-assign]  # of this one loader
        return spec

    def _change(self, module: ModuleType) -> None:
        make = getattr(module, _MAKER, None)
        if make is None:
            raise ImportError(
                f"{_MODULE} of this torch has no {_MAKER}, so its ranks would meet where others can come by; start "
                "them by another launcher in a network of your own"
            )

        def make_in_memory(host: str, port: int, rank: int, world_size: int, *others: Any, **named: Any) -> Any:  # noqa: ANN401 - torch's
            if (host, int(port)) != (_HOST, _PORT):
                return make(host, port, rank, world_size, *others, **named)
            torch_distributed = sys.modules["torch.distributed"]  # not imported here: configurations import this module
            # A program may leave its group and make another one: of equal keys the old ones would be read.
            self._num_made += 1
            file = torch_distributed.FileStore(self._path, world_size)
            return torch_distributed.PrefixStore(f"meeting_{self._num_made}", file)

        setattr(module, _MAKER, make_in_memory)
