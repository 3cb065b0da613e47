"""Lets several ranks share one GPU: a process group whose collectives go over the host's memory, through gloo.

NCCL refuses two ranks on one GPU ("Duplicate GPU detected"), and gloo has no send and receive for a GPU's tensors. So
each tensor is copied to the host, sent or reduced there by gloo, and copied back. Sums are gloo's, in gloo's order; a
product, a norm or a kernel of a rank is the GPU's own.

On the CPU the same group runs, with copies of memory to memory: so it is tried where there is no GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

BACKEND = "host_staged"
#: What torch gives to a process group, and what a group answers; its stubs lack their names.
Options = Any


def share_gpus() -> None:
    """Puts the staged group in the default one's place where there are fewer GPUs than ranks on this machine."""
    num_gpus = torch.cuda.device_count()
    if int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))) <= max(num_gpus, 1):
        return
    dist.Backend.register_backend(BACKEND, _make_group, devices=["cpu", "cuda"])
    dist.init_process_group = partial(dist.init_process_group, BACKEND)
    set_device = torch.cuda.set_device
    torch.cuda.set_device = lambda device: set_device(int(device) % num_gpus)


def _make_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> HostStagedGroup:
    return HostStagedGroup(store, rank, size, timeout)


class HostStagedGroup(dist.ProcessGroup):
    """A process group of torch's interface around gloo's; tensors may be on any device.

    A collective is done when its call returns. A receive is done when it was waited for, since two ranks may both begin
    with one.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._place = rank, size

    def rank(self) -> int:
        """Returns this process's place in the group."""
        return self._place[0]

    def size(self) -> int:
        """Returns the number of its processes."""
        return self._place[1]

    def getBackendName(self) -> str:
        """Returns the name by which the group was asked for."""
        return BACKEND

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Options = None) -> dist.Work:
        """Reduces in place."""
        return self._run(lambda host: self._gloo.allreduce(host, opts), tensors, tensors)

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Options = None) -> dist.Work:
        """Reduces each in place."""
        plain = dist.AllreduceOptions()
        plain.reduceOp = opts.reduceOp
        for tensor in tensors:
            self.allreduce([tensor], plain)
        return _done(list(tensors))

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Options = None) -> dist.Work:
        """Sends the root's to all."""
        return self._run(lambda host: self._gloo.broadcast(host, opts), tensors, tensors)

    def reduce(self, tensors: Sequence[torch.Tensor], opts: Options = None) -> dist.Work:
        """Reduces to the root."""
        return self._run(lambda host: self._gloo.reduce(host, opts), tensors, tensors)

    def allgather(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Options = None
    ) -> dist.Work:
        """Gathers each rank's tensor into a list of tensors."""
        (own,), (places,) = inputs, outputs
        host, found = _host(own), [_host(place) for place in places]
        self._gloo.allgather([found], [host]).wait()
        return _copy_back(places, found)

    def _allgather_base(self, output: torch.Tensor, own: torch.Tensor, opts: Options = None) -> dist.Work:
        parts = list(output.view(self.size(), -1).unbind(0))
        return self.allgather([parts], [own.reshape(-1)])

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Options = None
    ) -> dist.Work:
        """Gathers several tensors."""
        for output, own in zip(outputs, inputs, strict=True):
            self._allgather_base(output, own)
        return _done(list(outputs))

    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], opts: Options = None
    ) -> dist.Work:
        """Reduces a list of tensors, of which each rank keeps its own."""
        (output,), (parts,) = outputs, inputs
        whole = torch.cat([_host(part).reshape(-1) for part in parts])
        return self._reduce_scatter_base(output, whole, opts)

    def _reduce_scatter_base(self, output: torch.Tensor, whole: torch.Tensor, opts: Options = None) -> dist.Work:
        host = _host(whole).reshape(-1)
        plain = dist.AllreduceOptions()
        plain.reduceOp = opts.reduceOp
        self._gloo.allreduce([host], plain).wait()
        own = host.view(self.size(), -1)[self.rank()]
        return _copy_back([output.view(-1)], [own])

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Options = None
    ) -> dist.Work:
        """Reduces several tensors, of which each rank keeps its own part."""
        for output, whole in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, whole, opts)
        return _done(list(outputs))

    def alltoall_base(
        self,
        output: torch.Tensor,
        own: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Options = None,
    ) -> dist.Work:
        """Exchanges parts of one tensor, along its first dimension."""
        host, found = _host(own), _host(output)
        self._gloo.alltoall_base(found, host, list(output_sizes), list(input_sizes), dist.AllToAllOptions()).wait()
        return _copy_back([output], [found])

    def send(self, tensors: Sequence[torch.Tensor], to: int, tag: int = 0) -> dist.Work:
        """Sends a copy; the tensor may change at once."""
        host = [_host(tensor) for tensor in tensors]
        return _Waiting(self._gloo.send(host, to, tag), lambda: None, kept=host)

    def recv(self, tensors: Sequence[torch.Tensor], source: int, tag: int = 0) -> dist.Work:
        """Receives; the tensors have it when the result was waited for."""
        host = [_host(tensor) for tensor in tensors]
        return _Waiting(self._gloo.recv(host, source, tag), lambda: _copy_back(tensors, host), kept=host)

    def barrier(self, opts: Options = None) -> dist.Work:
        """Waits for all."""
        self._gloo.barrier().wait()
        return _done([])

    def _run(
        self,
        call: Callable[[list[torch.Tensor]], Any],
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> dist.Work:
        host = [_host(tensor) for tensor in inputs]
        call(host).wait()
        return _copy_back(outputs, host)


class _Waiting(dist.Work):
    """A send or receive under way; ``kept`` keeps its memory."""

    def __init__(self, work: Options, then: Callable[[], object], *, kept: list[torch.Tensor]) -> None:
        super().__init__()
        self._work, self._then, self._kept = work, then, kept

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits for the other side."""
        self._work.wait()
        self._then()
        return True

    def is_completed(self) -> bool:
        """Says whether waiting would take no time."""
        return bool(self._work.is_completed())


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _copy_back(tensors: Sequence[torch.Tensor], host: Sequence[torch.Tensor]) -> dist.Work:
    with torch.no_grad():
        for tensor, found in zip(tensors, host, strict=True):
            tensor.detach().copy_(found.view(tensor.shape))
    return _done(list(tensors))


def _done(tensors: list[torch.Tensor]) -> dist.Work:
    future: Future[list[torch.Tensor]] = Future()
    future.set_result(tensors)
    return _create_work_from_future(future)
