"""Runs Megatron-core on the CPU with gloo: the only file that knows that there may be no GPU.

Megatron-core names the CUDA device in tensor factories, moves, streams and random states. On a machine without
CUDA, :func:`use_host_device` answers those for the host instead; on a machine with CUDA it changes nothing.
Needed for megatron-core 0.16.1 to 0.19.2; it can go when Megatron-core takes its device from the process group.

Installed once per process, before the model is built, and left on: Megatron asks for the device in every step.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

HOST = torch.device("cpu")

# ``DistributedOptimizer`` and the gradient clipping refuse a type that they do not list, and they list no float64: a
# float64 tensor passes as what they call full precision (``full_precision`` keeps it what it is).
_CUDA_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float64: "torch.cuda.FloatTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float16: "torch.cuda.HalfTensor",
}


def has_cuda() -> bool:
    """Whether this process computes on a GPU."""
    return torch.cuda.is_available()


def compute_device() -> torch.device:
    """Returns the device that models and batches live on: this process's GPU, or the host."""
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else HOST


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":")[0] == "cuda"


class HostDeviceMode(TorchFunctionMode):
    """Maps CUDA device arguments, ``cuda()`` and ``to("cuda")`` to the host, and pins no memory.

    ``Tensor.type()`` reports the CUDA name: ``DistributedOptimizer`` insists on it.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the intercepted function returns
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return _CUDA_TYPE_NAMES.get(args[0].dtype) or func(*args)
        if kwargs and "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": HOST}
        if kwargs and kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}  # for copies to a GPU; rotary embeddings under cp ask for it
        if func is torch.Tensor.to:
            args = [HOST if _is_cuda(argument) else argument for argument in args]
        return func(*args, **kwargs) if kwargs else func(*args)


class _HostStream:
    """A stream on a device that has none: everything is in order already."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...
    def wait_stream(self, stream: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: object = None) -> _HostEvent:
        return _HostEvent()

    def __enter__(self) -> _HostStream:
        return self

    def __exit__(self, *exception: object) -> None: ...


class _HostEvent:
    """An event that has always happened."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...
    def record(self, stream: object = None) -> None: ...
    def wait(self, stream: object = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


@contextlib.contextmanager
def _host_stream_context(stream: object) -> Iterator[None]:
    yield


def _install_cuda_functions() -> None:
    """Answer the functions of ``torch.cuda`` that Megatron-core calls unconditionally."""
    stream = _HostStream()
    replacements: dict[str, Any] = {
        "current_device": lambda: HOST,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "stream": _host_stream_context,
        "Stream": _HostStream,  # a class: annotations of other packages have it in a union
        "Event": _HostEvent,
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)


def _install_random_tracker() -> None:
    """Let Megatron's CUDA random-state tracker keep the CPU generator's state."""
    from megatron.core.tensor_parallel import random as megatron_random

    def get_state(device: object = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    # The tracker warns when the CPU state moves while it holds the "GPU" state; here they are the same state.
    logging.getLogger(megatron_random.__name__).setLevel(logging.ERROR)
    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state


def _install_backward() -> None:
    """Keeps the mode on in backward passes, since recomputation runs forward passes there.

    torch hands ``backward`` to the mode as one function, and a mode is off inside a function it handles.
    """
    autograd: Any = torch.autograd
    run = autograd._engine_run_backward

    @functools.wraps(run)
    def run_with_mode(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        with HostDeviceMode():
            return run(*args, **kwargs)

    autograd._engine_run_backward = run_with_mode


def _install_split_sizes() -> None:
    """Gives the all-to-all its split sizes as NumPy integers.

    The token dispatcher converts them only when it moves them from a GPU; here they would stay tensors, and
    ``all_to_all_single`` refuses tensors.
    """
    from megatron.core.transformer.moe import token_dispatcher

    move = token_dispatcher.maybe_move_tensor_to_cpu

    def move_to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: ANN401
        if as_numpy and isinstance(tensor, torch.Tensor) and not tensor.is_cuda:
            return tensor.numpy()
        return move(tensor, as_numpy=as_numpy, record_stream=record_stream)

    token_dispatcher.maybe_move_tensor_to_cpu = move_to_host


def define_router_gemm() -> None:
    """Say that there is no TransformerEngine GEMM for routers where Megatron-core left its name undefined.

    megatron-core 0.16.1 asks for ``moe_utils.te_general_gemm`` but defines it only together with TransformerEngine;
    ``None`` makes it take torch's product. Needed on any device, before the first forward pass of a layer with experts.
    """
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


@functools.cache
def use_host_device() -> None:
    """Make Megatron-core run on the host where there is no CUDA device; does nothing where there is one.

    Must run before the model is built; a second call has no effect. Every rank calls it; it does not communicate.
    """
    if has_cuda():
        return
    warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS.*")
    _install_cuda_functions()
    _install_random_tracker()
    _install_backward()
    _install_split_sizes()
    define_router_gemm()
    HostDeviceMode().__enter__()
