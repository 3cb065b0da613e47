"""Watches the outputs of modules: by forward hooks, and by wrapping a method where a module does not give them.

Each watch is a context manager that tells ``see`` of every tensor computed in its block, with or without a graph. Where
``see`` gives another tensor back, the model and later watches go on with it; else nothing changes. Behind the block
nothing of it is left.

A token's K chosen experts are ordered by their number, ascending, in every tensor with slots: ``topk`` orders them by
score, and two runs may round scores differently. A token of which experts were dropped, as by a capacity, has empty
slots behind them: expert -1, and 0 in every other tensor. The experts' outputs are taken where the all-to-all
dispatcher has brought them back to their tokens' rank (``combine_postprocess``, megatron-core 0.16.1 and 0.19.2),
sorted by expert and then by token. They are already weighted by the router's probabilities, a factor of the experts'
inner activations in Megatron; their sum over the slots, with the shared experts', is the output of the layer's MLP. A
linear layer's output is without a bias left to the next operation, which fuses the addition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from mock_scheduler.errors import TraceError
from mock_scheduler.megatron.probe.forms import base_layer

Gather = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From a tensor as it was computed, or its gradient, and int64 ``[n]``, the places of tokens among its s · b, to what
it has for these tokens, ``[n, ...]``."""

#: Megatron's router, and its layer with experts, which carry no annotations.
Router = Any
ExpertLayer = Any
See = Callable[[torch.Tensor, Gather | None], torch.Tensor | None]
"""Takes a tensor; without a gather it has s · b parts of one size, token after token. Gives what to put in its place,
of the same shape and dtype, or ``None``."""

Watch = Callable[[torch.nn.Module, See], AbstractContextManager[None]]


@contextmanager
def watch_output(module: torch.nn.Module, see: See) -> Iterator[None]:
    """See a module's output; of several, as of a linear layer that leaves its bias to the next, the first."""

    def hook(_: torch.nn.Module, args: object, output: torch.Tensor | tuple[torch.Tensor, ...] | None) -> object:
        if output is None:
            return None  # Megatron-Bridge (0.6.2) calls the hooks of a fused adapter once more, within, with nothing
        if not isinstance(output, tuple):
            return see(output, None)
        other = see(output[0], None)
        return None if other is None else (other, *output[1:])

    with _hooked(module, hook):
        yield


@contextmanager
def watch_input(layer: torch.nn.Module, see: See) -> Iterator[None]:
    """See the hidden states that Megatron's block gives a transformer layer, by name or as its first argument."""

    def hook(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if args:
            other = see(args[0], None)
            return None if other is None else ((other, *args[1:]), kwargs)
        other = see(kwargs["hidden_states"], None)
        return None if other is None else (args, {**kwargs, "hidden_states": other})

    handle = layer.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def watch_call(path: str, call: int) -> Watch:
    """Watches the output of one of the calls of a model's module in a forward pass; ``call``: its number, from 0."""

    @contextmanager
    def watch(model: torch.nn.Module, see: See) -> Iterator[None]:
        num_calls = 0

        def begin(*_: object) -> None:
            nonlocal num_calls
            num_calls = 0

        def see_call(tensor: torch.Tensor, gather: Gather | None) -> torch.Tensor | None:
            nonlocal num_calls
            num_calls += 1
            return see(tensor, gather) if num_calls == call + 1 else None

        handle = model.register_forward_pre_hook(begin)
        try:
            with watch_output(model.get_submodule(path), see_call):
                yield
        finally:
            handle.remove()

    return watch


@contextmanager
def watch_scores(router: Router, see: See) -> Iterator[None]:
    """See a router's logits ``[s, b, E]``, before anything is made of them; with an adapter's part of them."""
    base: Router = base_layer(router)
    if base is not router:  # it adds its part to what ``gating`` gives
        route = base.routing

        def routing(logits: torch.Tensor, *args: object, **kwargs: object) -> object:
            other = see(logits, None)
            return route(logits if other is None else other, *args, **kwargs)

        with patch.object(base, "routing", routing):
            yield
        return
    compute = router.gating

    def gating(*args: object, **kwargs: object) -> torch.Tensor:
        logits: torch.Tensor = compute(*args, **kwargs)
        other = see(logits, None)
        return logits if other is None else other

    with patch.object(router, "gating", gating):
        yield


@contextmanager
def watch_probabilities(router: Router, see: See) -> Iterator[None]:
    """See the weights of the chosen experts, gathered to ``[n, K]`` of a router's ``[s · b, E]``."""

    base: Router = base_layer(router)

    def hook(_: torch.nn.Module, args: object, output: tuple[torch.Tensor, torch.Tensor]) -> object:
        probs, routing_map = output

        def gather(tensor: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            chosen = chosen_experts(routing_map[places], base.topk)
            return tensor[places].gather(1, chosen.clamp(min=0)).masked_fill(chosen < 0, 0)

        other = see(probs, gather)
        return None if other is None else (other, routing_map)

    with _hooked(router, hook):
        yield


@contextmanager
def watch_choice(router: Router, see: See) -> Iterator[None]:
    """See the chosen experts, gathered to int64 ``[n, K]`` of a router's bool map ``[s · b, E]``."""

    base: Router = base_layer(router)

    def hook(_: torch.nn.Module, args: object, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        see(output[1], lambda routing_map, places: chosen_experts(routing_map[places], base.topk))

    with _hooked(router, hook):
        yield


@contextmanager
def watch_expert_outputs(layer: ExpertLayer, see: See) -> Iterator[None]:
    """See each chosen expert's output for each token, gathered to ``[n, K, h]``, of a layer with experts."""
    dispatcher = layer.token_dispatcher
    combine = dispatcher.combine_postprocess
    if isinstance(combine, _WatchedCombine):  # each later watch sees what the earlier ones put there
        combine.sees.append(see)
        try:
            yield
        finally:
            combine.sees.remove(see)
        return
    with patch.object(dispatcher, "combine_postprocess", _WatchedCombine(layer, combine, see)):
        yield


class _WatchedCombine:
    """A dispatcher's ``combine_postprocess`` whose input ``sees`` see one after another."""

    def __init__(self, layer: ExpertLayer, combine: Callable[[torch.Tensor], torch.Tensor], see: See) -> None:
        self.sees = [see]
        self._dispatcher, self._topk = layer.token_dispatcher, layer.config.moe_router_topk
        self._combine = combine

    def __call__(self, permuted: torch.Tensor) -> torch.Tensor:
        gather = _gather_from_experts(self._dispatcher.routing_map, self._topk)
        for see in self.sees:
            other = see(permuted, gather)
            permuted = permuted if other is None else other
        return self._combine(permuted)


def chosen_experts(routing_map: torch.Tensor, topk: int) -> torch.Tensor:
    """Returns int64 ``[n, K]``, ascending: the experts of each token of a bool map ``[n, E]``, and -1 behind them.

    Raises:
        TraceError: a token has more than K experts.
    """
    most = int(routing_map.sum(dim=1).max()) if len(routing_map) else 0
    if most > topk:
        raise TraceError(f"a router chose {most} experts for a token; expected moe_router_topk, {topk}, at most")
    chosen = routing_map.new_full((len(routing_map), topk), -1, dtype=torch.int64)
    tokens, experts = routing_map.nonzero(as_tuple=True)
    chosen[tokens, routing_map.cumsum(dim=1)[tokens, experts] - 1] = experts
    return chosen


def _gather_from_experts(routing_map: torch.Tensor, topk: int) -> Gather:
    """Gathers each token's rows, ``[n, K, h]``, out of rows sorted by expert and then by token, one for each choice."""

    def gather(permuted: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        numbered = routing_map.T.flatten().cumsum(dim=0) - 1
        row_of_pair = numbered.view(routing_map.shape[1], -1).T[places]
        chosen = chosen_experts(routing_map[places], topk)
        slots = permuted.new_zeros((*chosen.shape, *permuted.shape[1:]))
        is_chosen = chosen >= 0
        slots[is_chosen] = permuted[row_of_pair.gather(1, chosen.clamp(min=0))[is_chosen]]
        return slots

    return gather


@contextmanager
def _hooked(module: torch.nn.Module, hook: Callable[..., object]) -> Iterator[None]:
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
