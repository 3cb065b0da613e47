"""Tables of the traced modules say their names, and how each output lies in the whole tensor.

A row has a module's place in the model, the meaning of its output, and its layers; everything else follows. A canonical
output is ``[T, ...]``: the step's tokens, then one process's numbers for a token. Names and layouts of outputs:
megatron-core 0.16.1 and 0.19.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import BaseMoELayer

from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.errors import TraceError
from mock_scheduler.megatron.observed_model import ObservedModel
from mock_scheduler.megatron.parameters import has_value_head, layer_offset
from mock_scheduler.megatron.probe.watches import (
    Watch,
    watch_choice,
    watch_expert_outputs,
    watch_output,
    watch_probabilities,
    watch_scores,
)
from mock_scheduler.support.text import bullet_list
from mock_scheduler.trace.entries import DimName, Unobserved
from mock_scheduler.trace.names import canonical_module_name
from mock_scheduler.trace.shards import Block, Split, even_split

#: Megatron's transformer layer, which carries no annotations.
Layer = Any
Content = Literal["hidden", "qkv", "query", "key", "ffn", "output", "experts", "expert_scores", "expert_choice"]
"""What an output has for each token; ``build_form`` says its dimensions and how tensor parallelism splits them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedModule:
    """One row of the tables.

    path: within the layer or the model; empty for the layer itself. part: an addition to the name where a module shows
    more than one tensor. watched: the path of the watched module, where it is another one. is_in: the layers with it.
    has_gradient: whether it is differentiable.
    """

    path: str
    content: Content = "hidden"
    kind: TraceKind = "activation"
    part: str = ""
    watch: Watch = watch_output
    watched: str | None = None
    is_in: Callable[[Layer], bool] = lambda layer: True
    has_gradient: bool = True


def _is_dense(layer: Layer) -> bool:
    return not isinstance(layer.mlp, BaseMoELayer)


def _has_experts(layer: Layer) -> bool:
    return isinstance(layer.mlp, BaseMoELayer)


def _has_shared_experts(layer: Layer) -> bool:
    return isinstance(layer.mlp, BaseMoELayer) and layer.mlp.shared_experts is not None


def _has_qk_layernorm(layer: Layer) -> bool:
    return bool(layer.config.qk_layernorm)


def _router_part(part: str, content: Content, watch: Watch, *, has_gradient: bool = True) -> ObservedModule:
    return ObservedModule(
        path="mlp.router",
        part=part,
        content=content,
        kind="router",
        watch=watch,
        is_in=_has_experts,
        has_gradient=has_gradient,
    )


EMBEDDING = ObservedModule(path="embedding")
FINAL_NORM = ObservedModule(path="decoder.final_layernorm")
OUTPUT_LAYER = ObservedModule(path="output_layer", content="output", kind="logits")

#: Of every layer, in the order in which they are computed.
LAYER_MODULES: tuple[ObservedModule, ...] = (
    ObservedModule(path="input_layernorm"),
    ObservedModule(path="self_attention.linear_qkv", content="qkv"),
    ObservedModule(path="self_attention.q_layernorm", content="query", is_in=_has_qk_layernorm),
    ObservedModule(path="self_attention.k_layernorm", content="key", is_in=_has_qk_layernorm),
    ObservedModule(path="self_attention.core_attention", content="query"),
    ObservedModule(path="self_attention.linear_proj"),
    ObservedModule(path="self_attention"),
    ObservedModule(path="pre_mlp_layernorm"),
    ObservedModule(path="mlp.linear_fc1", content="ffn", is_in=_is_dense),
    ObservedModule(path="mlp.linear_fc2", is_in=_is_dense),
    ObservedModule(path="mlp.shared_experts", is_in=_has_shared_experts),
    _router_part("logits", "expert_scores", watch_scores),
    _router_part("probs", "expert_choice", watch_probabilities),
    _router_part("chosen_experts", "expert_choice", watch_choice, has_gradient=False),
    ObservedModule(
        path="mlp.experts", content="experts", watch=watch_expert_outputs, watched="mlp", is_in=_has_experts
    ),
    ObservedModule(path="mlp"),
    ObservedModule(path=""),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputForm:
    """The dimensions after the token dimension of an output.

    dims, shape: of the canonical tensor. local_shape: this rank's part. splits: the place of this part. width: how many
    numbers the module gives per token, where vocabulary padding follows the local part; else its size. is_sliced:
    sequence parallelism leaves this rank a slice of the columns.
    """

    dims: tuple[DimName, ...]
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    splits: tuple[Split, ...] = ()
    width: int
    is_sliced: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedOutput:
    """One tensor that a module of this rank shows.

    name: canonical, with the model's prefix. watched: the module that ``row.watch`` is put on.
    """

    name: str
    row: ObservedModule
    form: OutputForm
    watched: torch.nn.Module


def observed_outputs(model: ObservedModel) -> Iterator[ObservedOutput]:
    """Yields every output of this rank's chunks, in the order of computation within each.

    Raises:
        TraceError: the model's modules are not its configuration's; lists all differences.
    """
    problems: dict[str, str] = {}
    fused = fused_norms(model)
    for gpt in model.gpts():
        offset = layer_offset(gpt)
        found = {canonical_module_name(name, layer_offset=offset): item for name, item in gpt.named_modules()}
        for path, row in _expected(gpt, offset):
            module = found.get(path)
            if module is None or isinstance(module, IdentityOp):
                if path not in fused:
                    problems[path] = "absent, or computes nothing"
            elif path in fused:
                problems[path] = "computes something by itself, where another module was expected to do it"
            else:
                watched = module if row.watched is None else found[path.removesuffix(row.path) + row.watched]
                name = _join(model.prefix + path, row.part)
                yield ObservedOutput(name=name, row=row, form=build_form(row.content, model), watched=watched)
    if problems:
        listed = bullet_list([f"{path}: {problem}" for path, problem in problems.items()])
        raise TraceError(f"the model is not built as the tables of probing/observed.py say:{listed}")


def _expected(gpt: GPTModel, offset: int) -> Iterator[tuple[str, ObservedModule]]:
    """Path within the model and row of everything that a chunk must have."""
    if gpt.pre_process:
        yield EMBEDDING.path, EMBEDDING
    for number, layer in enumerate(gpt.decoder.layers):
        for row in LAYER_MODULES:
            if row.is_in(layer):
                yield _join(f"decoder.layers.{offset + number}", row.path), row
    if gpt.post_process:
        yield FINAL_NORM.path, FINAL_NORM
        yield OUTPUT_LAYER.path, OUTPUT_LAYER


def _join(name: str, part: str) -> str:
    return f"{name}.{part}" if part else name


def fused_norms(model: ObservedModel) -> dict[str, str]:
    """Norms of all layers of the model whose output is never in memory: path within the model, and the reason.

    The same on every rank. TransformerEngine's layers fuse a norm into the linear layer that follows it, but for the
    one before experts (megatron-core ``gpt_layer_specs.py``).
    """
    if model.config.transformer_impl != "transformer_engine":
        return {}
    reasons: dict[str, str] = {}
    for layer, has_experts in enumerate(_moe_layers(model.config)):
        pairs = [("input_layernorm", "self_attention.linear_qkv")]
        if not has_experts:
            pairs.append(("pre_mlp_layernorm", "mlp.linear_fc1"))
        for norm, linear in pairs:
            reasons[f"decoder.layers.{layer}.{norm}"] = f"TransformerEngine computes it within {linear}"
    return reasons


def _moe_layers(config: TransformerConfig) -> list[bool]:
    """Says of every layer of the model whether it has experts."""
    frequency = config.moe_layer_freq
    if config.num_moe_experts is None:
        return [False] * config.num_layers
    if isinstance(frequency, int):
        return [layer % frequency == 0 for layer in range(config.num_layers)]
    return [bool(has_experts) for has_experts in frequency]


def unobserved_outputs(model: ObservedModel) -> Iterator[Unobserved]:
    """Values and gradients that the configuration has and this implementation does not show; the same on all ranks."""
    for path, reason in fused_norms(model).items():
        name = model.prefix + path
        yield Unobserved(kind="activation", name=name, reason=reason)
        yield Unobserved(kind="activation_gradient", name=name, reason=reason)


def build_form(content: Content, model: ObservedModel) -> OutputForm:
    """How an output of this content lies in the whole, on this rank."""
    config, ranks = model.config, model.ranks
    groups, heads, head_size = config.num_query_groups, config.num_attention_heads, config.kv_channels
    if content == "output":
        return _output_form(model)
    if content in ("qkv", "query", "key"):
        # Within linear_qkv's output each group has its query heads, then its key and its value.
        num_heads = {"qkv": heads + 2 * groups, "query": heads, "key": groups}[content]
        return _split_form(("head", "channel"), (num_heads, head_size), model)
    if content == "ffn":
        num_parts = 2 if config.gated_linear_unit else 1
        return _split_form(("channel",), (num_parts * config.ffn_hidden_size,), model, num_parts=num_parts)
    dims, shape = _unsplit_features(content, model)
    is_sliced = config.sequence_parallel and ranks.tp_size > 1
    return OutputForm(dims=dims, shape=shape, local_shape=shape, width=_product(shape), is_sliced=is_sliced)


def _unsplit_features(content: Content, model: ObservedModel) -> tuple[tuple[DimName, ...], tuple[int, ...]]:
    config = model.config
    if content == "hidden":
        return ("channel",), (config.hidden_size,)
    if content == "expert_scores":
        return ("expert",), (config.num_moe_experts,)
    if content == "expert_choice":
        return ("slot",), (config.moe_router_topk,)
    return ("slot", "channel"), (config.moe_router_topk, config.hidden_size)


def _split_form(
    dims: tuple[DimName, ...], shape: tuple[int, ...], model: ObservedModel, *, num_parts: int = 1
) -> OutputForm:
    """Features whose first dimension tensor parallelism splits; every rank has all columns."""
    ranks = model.ranks
    local_shape = (shape[0] // ranks.tp_size, *shape[1:])
    splits = even_split(1, size=shape[0], rank=ranks.tp_rank, num_ranks=ranks.tp_size, num_parts=num_parts)
    return OutputForm(dims=dims, shape=shape, local_shape=local_shape, splits=splits, width=_product(local_shape))


def _output_form(model: ObservedModel) -> OutputForm:
    """Describes logits without vocabulary padding (the last ranks have most of it), or one value, on every rank."""
    if any(map(has_value_head, model.gpts())):
        return OutputForm(dims=("channel",), shape=(1,), local_shape=(1,), width=1)
    ranks, vocab_size = model.ranks, model.vocab_size
    width = next(int(gpt.vocab_size) for gpt in model.gpts()) // ranks.tp_size
    start = ranks.tp_rank * width
    length = max(0, min(width, vocab_size - start))
    splits: tuple[Split, ...] = ()
    if ranks.tp_size > 1:
        splits = (Split(dim=1, blocks=(Block(local_start=0, global_start=start, length=length),)),)
    return OutputForm(dims=("vocab",), shape=(vocab_size,), local_shape=(length,), splits=splits, width=width)


def _product(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())
