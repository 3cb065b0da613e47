"""Changes of the real training that are taken back: attributes replaced for a block, what is done to new models."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.transformer_layer import TransformerLayer

from tests.faults.counting import Fired
from tests.faults.fault import Injector

Wrap = Callable[[Any], Any]
"""From what is there to what is put in its place."""

_ABSENT = object()


@contextmanager
def replaced(owner: Any, name: str, wrap: Wrap) -> Iterator[None]:
    """Replace an attribute in the block; what the owner itself held comes back, a ``staticmethod`` as one."""
    held = vars(owner).get(name, _ABSENT)
    setattr(owner, name, wrap(getattr(owner, name)))
    try:
        yield
    finally:
        if held is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, held)


def replacing(owner: Callable[[], Any] | Any, name: str, wrap: Callable[[Fired, Any], Any]) -> Injector:
    """The injector that replaces one attribute; ``wrap`` gets the counter and what is there."""

    @contextmanager
    def inject(fired: Fired) -> Iterator[None]:
        with replaced(owner, name, lambda original: wrap(fired, original)):
            yield

    return inject


def on_modules(kind: type | tuple[type, ...], harm: Callable[[Fired, Any], None]) -> Injector:
    """The injector that does something to each module of a kind when it has been built, whoever builds it."""

    @contextmanager
    def inject(fired: Fired) -> Iterator[None]:
        def wrap(initialise: Callable[..., None]) -> Callable[..., None]:
            @functools.wraps(initialise)
            def initialise_and_harm(module: torch.nn.Module, *arguments: object, **options: object) -> None:
                initialise(module, *arguments, **options)
                harm(fired, module)

            return initialise_and_harm

        with ExitStack() as stack:
            for each in kind if isinstance(kind, tuple) else (kind,):
                stack.enter_context(replaced(each, "__init__", wrap))
            yield

    return inject


def on_outputs(kind: type | tuple[type, ...], change: Callable[[Fired, Any], Any]) -> Injector:
    """The injector that changes what each module of a kind gives."""

    def harm(fired: Fired, module: torch.nn.Module) -> None:
        forward = module.forward

        def changed(*arguments: object, **options: object) -> object:
            return change(fired, forward(*arguments, **options))

        module.forward = changed

    return on_modules(kind, harm)


def on_data_parallel(harm: Callable[[Fired, DistributedDataParallel], None]) -> Injector:
    """The injector that does something to the gradient buffers of a chunk when these have been made."""
    return on_modules(DistributedDataParallel, harm)


def on_layer(number: int, harm: Callable[[Fired, TransformerLayer], None]) -> Injector:
    """The injector that does something to one layer, counted from 0 over all stages."""

    def harm_this(fired: Fired, layer: TransformerLayer) -> None:
        if layer.layer_number == number + 1:
            harm(fired, layer)

    return on_modules(TransformerLayer, harm_this)


def wrap_forward(module: Any, change: Callable[..., Any]) -> None:
    """Calls ``change`` in the place of a module's forward pass; it gets this and its arguments."""
    module.forward = functools.partial(change, module.forward)


class Standing:
    """A module with some of its attributes replaced, for code that looks them up in it."""

    def __init__(self, behind: Any, **replaced_by: object) -> None:
        self._behind = behind
        self.__dict__.update(replaced_by)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behind, name)


def without_all_reduce(module: Any, skips: Callable[[torch.Tensor], bool]) -> Injector:
    """The injector that leaves out the all-reduces of a module's code for which ``skips`` holds."""

    def wrap(fired: Fired, whole_torch: Any) -> Standing:
        def all_reduce(tensor: torch.Tensor, *arguments: object, **options: object) -> object:
            if skips(tensor):
                fired.count += 1
                return None
            return whole_torch.distributed.all_reduce(tensor, *arguments, **options)

        return Standing(whole_torch, distributed=Standing(whole_torch.distributed, all_reduce=all_reduce))

    return replacing(module, "torch", wrap)


def tp_rank() -> int:
    """This rank's place on tp."""
    return int(parallel_state.get_tensor_model_parallel_rank())


def tp_size() -> int:
    """Ranks on tp."""
    return int(parallel_state.get_tensor_model_parallel_world_size())


def pp_rank() -> int:
    """This rank's stage."""
    return int(parallel_state.get_pipeline_model_parallel_rank())


def pp_size() -> int:
    """Stages."""
    return int(parallel_state.get_pipeline_model_parallel_world_size())


def cp_size() -> int:
    """Ranks on cp."""
    return int(parallel_state.get_context_parallel_world_size())


def dp_rank() -> int:
    """This rank's place on dp."""
    return int(parallel_state.get_data_parallel_rank())


def dp_size() -> int:
    """Ranks on dp."""
    return int(parallel_state.get_data_parallel_world_size())


def ep_rank() -> int:
    """This rank's place on ep."""
    return int(parallel_state.get_expert_model_parallel_rank())


def ep_size() -> int:
    """Ranks on ep."""
    return int(parallel_state.get_expert_model_parallel_world_size())
