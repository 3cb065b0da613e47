"""Names of a router's choices and of its experts' tensors."""

from __future__ import annotations

from dataclasses import replace

from mock_scheduler.trace.entries import DimName, TraceKey

#: What follows the name of the part that both belong to.
_ROUTER, _EXPERTS = ".router", ".experts"
_CHOICE, _LOGITS = "chosen_experts", "logits"


def is_choice(key: TraceKey) -> bool:
    """Whether a tensor lists the experts each token chose: integers ``[T, slots]``."""
    return key.kind == "router" and key.name.endswith(f"{_ROUTER}.{_CHOICE}")


def logits_key(choice: TraceKey) -> TraceKey:
    """Returns the key of the router's logits ``[T, experts]``, from which the choice was made."""
    return replace(choice, name=choice.name.removesuffix(_CHOICE) + _LOGITS)


def is_by_slot(dims: tuple[DimName, ...]) -> bool:
    """Whether a tensor is stored in the order of each token's chosen experts."""
    return dims[:2] == ("token", "slot")


def routed_part(name: str) -> str:
    """Returns the part of the model that a router and its experts belong to: ``decoder.layers.1.mlp``."""
    for inside in (_ROUTER, _EXPERTS):
        name = name.partition(inside)[0]
    return name
