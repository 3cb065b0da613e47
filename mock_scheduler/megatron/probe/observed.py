"""Finds the modules whose outputs can be shown, in whatever a training has built, and lists the others with a reason.

A row of a table has a place that Megatron's layers have, and the meaning of the output there. A place without a module
is no part of the model. A later stage also shows what it received. What stands at a place and cannot be shown, what
TransformerEngine fuses away, and modules with parameters that stand at no known place, are *unobserved*: a comparison
then says so. Places: megatron-core 0.16.1 and 0.19.2. Each rank lists its own layers; a trace's reader joins them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.megatron.observed_model import ObservedModel, strip_wrappers, unwrapped
from mock_scheduler.megatron.parameters import layer_offset, mtp_offset
from mock_scheduler.megatron.probe.forms import (
    Content,
    Layer,
    OutputForm,
    base_layer,
    build_form,
    is_latent_attention,
)
from mock_scheduler.megatron.probe.watches import (
    Watch,
    watch_call,
    watch_choice,
    watch_expert_outputs,
    watch_input,
    watch_output,
    watch_probabilities,
    watch_scores,
)
from mock_scheduler.trace.entries import Unobserved
from mock_scheduler.trace.names import canonical_module_name

Hidden = Callable[[Layer], str]
"""Says why a layer's module cannot be shown; an empty text where it can."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedModule:
    """Holds one row of the tables.

    path: within the layer or the model; empty for the layer itself. part: an addition to the name where a module shows
    more than one tensor. watched: the path of the watched module, where it is another one. is_in: the layers that have
    such an output. hidden: why it is not to be seen there. fused_into: the linear layer whose first operation it may
    be. has_gradient: whether it is differentiable.
    """

    path: str
    content: Content = "hidden"
    kind: TraceKind = "activation"
    part: str = ""
    watch: Watch = watch_output
    watched: str | None = None
    is_in: Callable[[Layer], bool] = lambda layer: True
    hidden: Hidden = lambda layer: ""
    fused_into: str = ""
    has_gradient: bool = True


def _has_experts(layer: Layer) -> bool:
    return isinstance(layer.mlp, BaseMoELayer)


def _is_plain_attention(layer: Layer) -> bool:
    return not is_latent_attention(layer)


def _hidden_linear(layer: Layer) -> str:
    """TransformerEngine's operation-based MLP (``use_te_op_fuser``) runs none of its linear layers as a module."""
    is_fused = any(kind.__name__ == "TEFusedMLP" for kind in type(layer.mlp).__mro__)
    return "TransformerEngine computes the whole MLP at once" if is_fused else ""


def _hidden_shared_experts(layer: Layer) -> str:
    overlaps = vars(layer.mlp).get("shared_expert_overlap")
    return "moe_shared_expert_overlap computes them in pieces, between the steps of the dispatcher" if overlaps else ""


def _hidden_choice(layer: Layer) -> str:
    if layer.config.moe_pad_expert_input_to_capacity:
        return "moe_pad_expert_input_to_capacity fills experts up with tokens that did not choose them"
    return ""


def _hidden_expert_outputs(layer: Layer) -> str:
    if not isinstance(layer.mlp.token_dispatcher, MoEAlltoAllTokenDispatcher):
        kind = layer.config.moe_token_dispatcher_type
        return f"the {kind} dispatcher adds the experts' outputs of a token up before the token's rank has them"
    return _hidden_choice(layer)


def _router_part(part: str, content: Content, watch: Watch, hidden: Hidden, *, has_gradient: bool) -> ObservedModule:
    return ObservedModule(
        path="mlp.router",
        part=part,
        content=content,
        kind="router",
        watch=watch,
        is_in=_has_experts,
        hidden=hidden,
        has_gradient=has_gradient,
    )


def _of_latent(path: str, content: Content, fused_into: str = "") -> ObservedModule:
    return ObservedModule(path=path, content=content, is_in=is_latent_attention, fused_into=fused_into)


EMBEDDING = ObservedModule(path="embedding")
#: Of a stage behind the first: what it received, under the name of what the stage before it sent.
RECEIVED = ObservedModule(path="", watch=watch_input)
FINAL_NORM = ObservedModule(path="decoder.final_layernorm")
OUTPUT_LAYER = ObservedModule(path="output_layer", content="output", kind="logits")

_QKV, _Q_UP, _KV_UP = (f"self_attention.linear_{name}" for name in ("qkv", "q_up_proj", "kv_up_proj"))

#: Of every transformer layer, in the order in which they are computed.
LAYER_MODULES: tuple[ObservedModule, ...] = (
    ObservedModule(path="input_layernorm", fused_into=_QKV),
    ObservedModule(path=_QKV, content="qkv"),
    _of_latent("self_attention.linear_q_proj", "expanded_query"),
    _of_latent("self_attention.linear_q_down_proj", "compressed_query"),
    _of_latent("self_attention.linear_kv_down_proj", "compressed_kv"),
    _of_latent("self_attention.q_layernorm", "normed_query", _Q_UP),
    _of_latent("self_attention.kv_layernorm", "normed_kv", _KV_UP),
    _of_latent(_Q_UP, "expanded_query"),
    _of_latent(_KV_UP, "expanded_kv"),
    ObservedModule(path="self_attention.q_layernorm", content="query", is_in=_is_plain_attention),
    ObservedModule(path="self_attention.k_layernorm", content="key", is_in=_is_plain_attention),
    ObservedModule(path="self_attention.core_attention", content="query", is_in=_is_plain_attention),
    _of_latent("self_attention.core_attention", "value"),
    ObservedModule(path="self_attention.linear_proj"),
    ObservedModule(path="self_attention"),
    ObservedModule(path="pre_mlp_layernorm", fused_into="mlp.linear_fc1"),
    ObservedModule(path="mlp.linear_fc1", content="ffn", hidden=_hidden_linear),
    ObservedModule(path="mlp.linear_fc2", hidden=_hidden_linear),
    ObservedModule(path="mlp.shared_experts", is_in=_has_experts, hidden=_hidden_shared_experts),
    _router_part("logits", "expert_scores", watch_scores, lambda layer: "", has_gradient=True),
    _router_part("probs", "expert_choice", watch_probabilities, _hidden_choice, has_gradient=True),
    _router_part("chosen_experts", "expert_choice", watch_choice, _hidden_choice, has_gradient=False),
    ObservedModule(
        path="mlp.experts",
        content="experts",
        watch=watch_expert_outputs,
        watched="mlp",
        is_in=_has_experts,
        hidden=_hidden_expert_outputs,
    ),
    ObservedModule(path="mlp"),
    ObservedModule(path=""),
)

#: Of every prediction module (MTP), beside those of its transformer layer.
PREDICTION_MODULES: tuple[ObservedModule, ...] = (
    ObservedModule(path="enorm"),
    ObservedModule(path="hnorm"),
    ObservedModule(path="eh_proj", content="joined"),
    ObservedModule(path="final_layernorm"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedOutput:
    """Holds one tensor that a module of this rank shows.

    name: canonical, with the model's prefix. watched: the module that ``row.watch`` is put on.
    """

    name: str
    row: ObservedModule
    form: OutputForm
    watched: torch.nn.Module


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """A row at a place of this rank: its path in the whole model, the module that may be there, and its layer."""

    path: str
    row: ObservedModule
    owner: torch.nn.Module
    layer: Layer

    @property
    def module(self) -> torch.nn.Module | None:
        """The module, where it computes anything."""
        found = find_module(self.owner, self.row.path)
        return None if isinstance(found, IdentityOp) else found


def observed_outputs(model: ObservedModel) -> Iterator[ObservedOutput]:
    """Yields every output of this rank's chunks that can be shown, in the order of computation within each."""
    for place, found in _find(model):
        if not isinstance(found, OutputForm):
            continue
        row = place.row
        watched = find_module(place.owner, row.path if row.watched is None else row.watched)
        assert watched is not None
        yield ObservedOutput(name=_join(model.prefix + place.path, row.part), row=row, form=found, watched=watched)


def unobserved_outputs(model: ObservedModel) -> Iterator[Unobserved]:
    """Yields values and gradients that this rank's part of the model has, and nothing shows."""
    for place, found in _find(model):
        if isinstance(found, str):
            name = _join(model.prefix + place.path, place.row.part)
            yield Unobserved(kind=place.row.kind, name=name, reason=found)
            if place.row.has_gradient:
                yield Unobserved(kind="activation_gradient", name=name, reason=found)
    yield from _strangers(model)


def find_module(owner: torch.nn.Module, path: str) -> torch.nn.Module | None:
    """The module at a path below another; ``None`` where there is none."""
    found: torch.nn.Module | None = owner
    for part in path.split(".") if path else ():
        found = None if found is None else found._modules.get(part)
    return found


def _find(model: ObservedModel) -> Iterator[tuple[_Place, OutputForm | str]]:
    """Yields each place of this rank that belongs to the model, with the form of its output or why there is none."""
    for gpt in model.gpts():
        for place in _places(gpt):
            if not place.row.is_in(place.layer):
                continue
            module = place.module
            if module is not None:
                reason = place.row.hidden(place.layer)
                yield place, reason or build_form(place.row.content, module, place.layer, model)
            elif _is_fused(place):
                yield place, f"TransformerEngine computes it within {place.row.fused_into}"


def _is_fused(place: _Place) -> bool:
    """Whether the linear layer behind a norm's place has the norm's weight."""
    linear = find_module(place.owner, place.row.fused_into) if place.row.fused_into else None
    return linear is not None and "layer_norm_weight" in base_layer(linear)._parameters


def _places(gpt: GPTModel) -> Iterator[_Place]:
    """Yields all rows at all places that this chunk could have."""
    predictions = _prediction_modules(gpt)
    # Megatron calls embedding and output layer once more for each prediction module, the output layer last for itself.
    first, last = (None, None) if not predictions else (0, len(predictions))
    if gpt.pre_process:
        yield _called(EMBEDDING.path, EMBEDDING, gpt, first)
    offset = layer_offset(gpt)
    if not gpt.pre_process and len(gpt.decoder.layers):
        # Both stages hold these elements, so they are replicas: a message that changed a bit is a conflict of two
        # ranks, and a graft of the name is put in at both ends.
        sent = f"decoder.layers.{offset - 1}" if offset else EMBEDDING.path
        yield _Place(path=sent, row=RECEIVED, owner=gpt.decoder.layers[0], layer=gpt.decoder.layers[0])
    for number, layer in enumerate(gpt.decoder.layers):
        yield from _rows(f"decoder.layers.{offset + number}", LAYER_MODULES, layer, layer)
    yield _Place(path=FINAL_NORM.path, row=FINAL_NORM, owner=gpt, layer=gpt)
    for number, (path, module) in enumerate(predictions):
        yield _called(f"{path}.embedding", EMBEDDING, gpt, number + bool(gpt.pre_process))
        inner = find_module(module, "mtp_model_layer") or find_module(module, "transformer_layer")
        yield from _rows(path, PREDICTION_MODULES, module, module)
        if inner is not None and "self_attention" in inner._modules:
            yield from _rows(f"{path}.transformer_layer", LAYER_MODULES, inner, inner)
        if gpt.post_process:
            yield _called(f"{path}.output_layer", OUTPUT_LAYER, gpt, number)
    if gpt.post_process:
        yield _called(OUTPUT_LAYER.path, OUTPUT_LAYER, gpt, last)


def _prediction_modules(gpt: GPTModel) -> list[tuple[str, torch.nn.Module]]:
    """Lists the chunk's prediction modules with their paths in the whole model."""
    block: Any = gpt._modules.get("mtp")
    if block is None:
        return []
    return [(f"mtp.layers.{mtp_offset(gpt) + number}", layer) for number, layer in enumerate(block.layers)]


def _rows(path: str, rows: Sequence[ObservedModule], owner: torch.nn.Module, layer: Layer) -> Iterator[_Place]:
    for row in rows:
        yield _Place(path=_join(path, row.path), row=row, owner=owner, layer=layer)


def _called(path: str, row: ObservedModule, gpt: GPTModel, call: int | None) -> _Place:
    """A module that a forward pass calls several times; ``call``: which of them is meant, ``None`` of the only one."""
    if call is not None:
        row = replace(row, watch=watch_call(row.path, call), watched="")
    return _Place(path=path, row=row, owner=gpt, layer=gpt)


def _join(name: str, part: str) -> str:
    return f"{name}.{part}" if part else name


_CONTAINERS = frozenset({"", "self_attention", "mlp"})


def _strangers(model: ObservedModel) -> Iterator[Unobserved]:
    """Yields modules with parameters of their own at no place of the tables, the outermost of each."""
    for chunk in model.chunks:
        gpt, inner = unwrapped(chunk), strip_wrappers(chunk)
        known = {place.path for place in _places(gpt) if place.row.path not in _CONTAINERS}
        known |= {EMBEDDING.path} if _prediction_modules(gpt) else set()  # their stage has one of its own
        found: dict[str, str] = {}
        numbers = {"layer_offset": layer_offset(gpt), "mtp_offset": mtp_offset(gpt)}
        for path, module in gpt.named_modules():
            if module._parameters and any(item is not None for item in module._parameters.values()):
                name = canonical_module_name(path, **numbers)
                if not any(f"{name}.".startswith(f"{place}.") for place in known):
                    found[name] = type(module).__name__
        for path, module in inner.named_children() if inner is not gpt else ():
            if all(item is not gpt for item in module.modules()):
                found[path] = type(module).__name__
        for name, kind in found.items():
            reason = f"a {kind} stands at no place whose output is known"
            for trace_kind in ("activation", "activation_gradient"):
                yield Unobserved(kind=trace_kind, name=model.prefix + name, reason=reason)
