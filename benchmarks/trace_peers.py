"""Dumps a training step with ``torch.save``, in the ways that others have, as peers of a benchmark.

- *hooks*: a hook on every module writes its output and the gradient of it, one file for each tensor; the step's main
  gradients and parameters follow. So do the debug dumps that a training is given by hand.
- *vime*: ``--ci-save-parameter-grads`` writes one file of a rank's main gradients at each update.
- *Megatron*: ``--save-activations-interval``, ``-dgrads-``, ``-wgrads-`` and ``-params-interval`` (Megatron-LM 0.19)
  write one file of each: outputs and their gradients of the last micro-batch alone, main gradients, parameters.

None of them waits for the disk, as a trace does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch


@contextmanager
def save_by_hooks(folder: Path, chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Writes a file for each tensor of the step in the block."""
    number = 0

    def write(name: str, tensor: torch.Tensor) -> None:
        nonlocal number
        number += 1
        torch.save(tensor.detach().clone(), folder / f"{number:06d}.{name}.pt")

    with _watched(chunks, write):
        yield
    for kind, tensors in _state(chunks).items():
        for name, tensor in tensors.items():
            write(f"{kind}.{name}", tensor)


@contextmanager
def save_gradients(folder: Path, chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Writes one file of the main gradients that the block leaves."""
    yield
    torch.save(_state(chunks)["wgrads"], folder / "rank-0.pt")


@contextmanager
def save_by_kind(folder: Path, chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Writes one file of each kind; of outputs and their gradients the last micro-batch alone."""
    last: dict[str, torch.Tensor] = {}

    def keep(name: str, tensor: torch.Tensor) -> None:
        last[name] = tensor.detach().clone()

    with _watched(chunks, keep):
        yield
    for kind in ("activations", "dgrads"):
        torch.save({name: tensor for name, tensor in last.items() if name.startswith(kind)}, folder / f"{kind}.pth")
    for kind, tensors in _state(chunks).items():
        torch.save(tensors, folder / f"{kind}.pth")


@contextmanager
def _watched(chunks: Sequence[torch.nn.Module], take: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
    """Shows ``take`` each module's output and its gradient, in passes that are trained on."""

    def hook_of(name: str) -> Callable[..., None]:
        def hook(_: torch.nn.Module, args: object, output: object) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if not torch.is_grad_enabled() or not isinstance(tensor, torch.Tensor):
                return
            take(f"activations.{name}", tensor)
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: take(f"dgrads.{name}", gradient))

        return hook

    with ExitStack() as stack:
        for chunk in chunks:
            for name, module in chunk.named_modules():
                stack.callback(module.register_forward_hook(hook_of(name)).remove)
        yield


def _state(chunks: Sequence[torch.nn.Module]) -> dict[str, dict[str, torch.Tensor]]:
    parameters = {name: item for chunk in chunks for name, item in chunk.named_parameters()}
    return {
        "wgrads": {name: item.main_grad for name, item in parameters.items()},
        "params": {name: item.detach() for name, item in parameters.items()},
    }
