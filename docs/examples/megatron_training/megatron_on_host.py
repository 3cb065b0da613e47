"""Lets ``megatron.training`` of the megatron-core 0.19.2 wheel run without CUDA, with gloo.

Nothing here belongs to the instruments: on a machine with GPUs the functions change nothing. Each patch says what it is
for; it can go when ``megatron.training`` takes its device from the process group, as ``megatron.core`` mostly does.
"""

from __future__ import annotations

import contextlib
import functools
import os
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mock_scheduler.megatron.host_device import has_cuda, use_host_device

# What parse_and_validate_args reads of the device: an architecture that needs nothing special for tp > 1 or cp > 1.
_HOST_PROPERTIES = types.SimpleNamespace(major=9, minor=0, total_memory=1 << 33, name="host", multi_processor_count=1)

HOST_ARGUMENTS = (
    *("--transformer-impl", "local", "--distributed-backend", "gloo", "--no-persist-layer-norm"),
    *("--no-masked-softmax-fusion", "--no-bias-gelu-fusion", "--no-bias-swiglu-fusion", "--no-bias-dropout-fusion"),
    *("--no-rope-fusion", "--no-gradient-accumulation-fusion"),
)
"""Arguments without which Megatron's fused kernels or NCCL are used."""


def run_megatron_training_on_host() -> None:
    """Patches ``megatron.training`` where there is no CUDA. Must run before its arguments are parsed."""
    if has_cuda():
        return
    use_host_device()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # asked for with tp > 1
    torch._dynamo.config.disable = True  # fused functions are compiled ones
    # Imported here, since the host's device must be in use before.
    from megatron.training import initialize, training

    torch.cuda.get_device_properties = lambda device=None: _HOST_PROPERTIES
    torch.cuda.set_device = lambda device: None
    # It runs make in the installed package, whose wheel has the built helpers and no Makefile.
    initialize._compile_dependencies = lambda: None
    training.initialize_megatron = _with_one_device(
        functools.partial(initialize.initialize_megatron, allow_no_cuda=True)
    )


def _with_one_device(initialize: Callable[..., Any]) -> Callable[..., Any]:
    """Initializes as on a machine with a GPU: without one, Megatron makes no process groups and seeds no rank."""

    @functools.wraps(initialize)
    def initialize_with_one_device(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        with _one_device():
            return initialize(*args, **kwargs)

    return initialize_with_one_device


@contextlib.contextmanager
def _one_device() -> Iterator[None]:
    count = torch.cuda.device_count
    torch.cuda.device_count = lambda: 1
    try:
        yield
    finally:
        torch.cuda.device_count = count
