"""Builds each case, ``kind/layout``, and reads it: ``python -m tests.integrations.host_kernels FOLDER CASE ...``.

``FOLDER/CASE.json`` says what this project finds on each rank; ``FOLDER/CASE.pt`` has the tensors that Megatron's and
Megatron-Bridge's own checkpoints would hold (``sharded_state_dict``), with each element's value made of its canonical
name and its place in the whole tensor.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from megatron.bridge.peft.lora_layers import TEFusedLoRALinear
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from mock_scheduler.config.instruments import OrderConfig
from mock_scheduler.megatron.emulation.described import describe_run
from mock_scheduler.megatron.emulation.limits import model_limits
from mock_scheduler.megatron.followable import check_followable, find_draws
from mock_scheduler.megatron.host_device import use_host_device
from mock_scheduler.megatron.observed_model import ObservedModel, observe_model, strip_wrappers, unwrapped
from mock_scheduler.megatron.parameters import iterate_parameters
from mock_scheduler.megatron.probe.forms import base_layer
from mock_scheduler.megatron.probe.observed import observed_outputs, unobserved_outputs
from mock_scheduler.megatron.probe.state import read_state
from mock_scheduler.megatron.probe.watches import watch_choice, watch_output, watch_probabilities, watch_scores
from mock_scheduler.trace.shards import cut_shard
from tests.integrations.model_kinds import HIDDEN, KINDS, LENGTH, build_chunks, num_ranks, on_rank

#: Megatron-Bridge 0.6.2 raises a ``TypeError`` there: it leaves out an argument of its own function.
WITHOUT_CHECKPOINT = frozenset({"lora_outer"})


@torch.no_grad()
def number_elements(model: ObservedModel) -> None:
    """Each element's value is made of its name and its place in the whole tensor; exact in float32."""
    for item in iterate_parameters(model):
        places = torch.arange(torch.Size(item.spec.global_shape).numel(), dtype=torch.float32)
        start = zlib.crc32(item.spec.name.encode()) % 512 * 2**15
        item.parameter.copy_(cut_shard((places + start).view(item.spec.global_shape), item.spec))


def gather_checkpoint(chunks: Sequence[Any], merged: dict[str, torch.Tensor]) -> list[str]:
    """Puts this rank's tensors where Megatron's checkpoint would have them; gives the names of its extra states."""
    extra: list[str] = []
    for chunk in chunks:
        state = chunk.module.sharded_state_dict()
        apply_factories(state)
        extra += [item.unique_key for item in _items(state, ShardedObject)]
        for shard in _items(state, ShardedTensor):
            whole = merged.setdefault(shard.key, torch.full(shard.global_shape, torch.nan))
            axes = shard.prepend_axis_num
            lengths = (1,) * axes + tuple(shard.local_shape)
            place = tuple(slice(at, at + size) for at, size in zip(shard.global_offset, lengths, strict=True))
            whole[place] = shard.data.detach().reshape(lengths)
    return extra


def _items(state: Any, kind: type[Any]) -> Iterator[Any]:
    if isinstance(state, kind):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _items(value, kind)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _items(value, kind)


def widths(model: ObservedModel) -> dict[str, tuple[int, int]]:
    """By linear layer: how many numbers this project expects of it for a token, and how many it says it has."""
    found: dict[str, tuple[int, int]] = {}
    for output in observed_outputs(model):
        if not output.row.watched:
            layer = base_layer(output.watched)
            size = vars(layer).get("out_features") or vars(layer).get("output_size_per_partition")
            found |= {output.name: (output.form.width, size)} if size else {}
    return found


@torch.no_grad()
def route_with_an_adapter(chunks: Sequence[torch.nn.Module]) -> list[str]:
    """Lets a router with an adapter choose; gives what is wrong with what is seen of it."""
    router = unwrapped(chunks[0]).decoder.layers[0].mlp.router
    router.adapter.linear_out.weight.fill_(0.5)
    hidden = torch.randn(LENGTH, 1, HIDDEN, generator=torch.Generator().manual_seed(1))
    seen: dict[str, torch.Tensor] = {}
    watches = {"scores": watch_scores, "probabilities": watch_probabilities, "choice": watch_choice}
    places = torch.arange(LENGTH)
    with ExitStack() as stack:
        for name, watch in watches.items():

            def see(tensor: torch.Tensor, gather: Any, name: str = name) -> None:
                seen[name] = tensor if gather is None else gather(tensor, places)

            stack.enter_context(watch(router, see))
        probabilities, routing_map = router(hidden)
    logits = router.to_wrap.gating(hidden) + router.adapter(hidden)
    expected = {"scores": logits, "probabilities": probabilities[routing_map].view(LENGTH, -1)}
    wrong = [name for name, value in expected.items() if not torch.equal(seen[name], value)]
    return wrong + (["choice"] if not routing_map.gather(1, seen["choice"]).all() else [])


def call_hooks_of_a_fused_adapter(chunks: Sequence[torch.nn.Module]) -> list[str]:
    """Megatron-Bridge's fused adapter calls hooks of its own, without an output; gives what went wrong."""
    linear = unwrapped(chunks[0]).decoder.layers[0].self_attention.linear_proj
    fused = TEFusedLoRALinear(linear.to_wrap, linear.adapter)
    seen: list[object] = []
    with watch_output(fused, lambda tensor, gather: seen.append(tensor)):
        _, branch = fused._make_fused_branches()
        for hook in branch._forward_hooks.values():
            hook(branch, (), None)
    return [f"{len(branch._forward_hooks)} hooks saw {seen}"] if seen or not branch._forward_hooks else []


CALLS = {"lora_sequential/tp1": route_with_an_adapter, "lora/tp1": call_hooks_of_a_fused_adapter}


def fp8_metadata(model: ObservedModel) -> dict[str, list[str]]:
    """By module of the first chunk: what TransformerEngine keeps of FP8 beside parameters and buffers."""
    modules = unwrapped(model.chunks[0]).named_modules()
    return {path: sorted(vars(module)["fp8_meta"]) for path, module in modules if "fp8_meta" in vars(module)}


def order_limits(model: ObservedModel) -> list[str]:
    """What keeps one process from following another layout with this model."""
    chunk: Any = model.chunks[0]
    return model_limits(model, describe_run(next(model.gpts()), chunk.ddp_config, OrderConfig()))


def read_rank(model: ObservedModel) -> dict[str, Any]:
    """What this project finds on a rank, and Megatron's own marks beside it."""
    check_followable(model)
    marks = {
        name: (list(item.shape), vars(item).get("partition_dim") if vars(item).get("tensor_model_parallel") else None)
        for chunk in model.chunks
        for name, item in strip_wrappers(chunk).named_parameters()
    }
    return {
        "coordinates": model.ranks.coordinates,
        "marks": marks,
        "parameters": [asdict(item.spec) for item in iterate_parameters(model)],
        "observed": [item.name for item in observed_outputs(model)],
        "widths": widths(model),
        "gradients": [asdict(piece.spec) for piece in read_state(model, "gradient")],
        "draws": find_draws(model),
        "fp8_metadata": fp8_metadata(model),
        "order_limits": order_limits(model),
        "unobserved": sorted({(item.name, item.reason) for item in unobserved_outputs(model)}),
    }


def build_case(folder: Path, case: str) -> None:
    """Writes one case's files."""
    kind, layout = case.split("/")
    ranks, merged = [], dict[str, torch.Tensor]()
    for rank in range(num_ranks(layout)):
        with on_rank(layout, rank) as options:
            is_distributed = "distributed" in layout.split("-")
            chunks = build_chunks(KINDS[kind], options, is_distributed=is_distributed)
            adam = OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=is_distributed)
            model = observe_model(chunks, get_megatron_optimizer(adam, chunks, use_gloo_process_groups=False))
            ranks.append(read_rank(model))
            number_elements(model)
            if kind not in WITHOUT_CHECKPOINT:
                ranks[-1]["extra_states"] = gather_checkpoint(chunks, merged)
            if case in CALLS:
                ranks[-1]["wrong"] = CALLS[case](chunks)
    place = folder / case
    place.parent.mkdir(parents=True, exist_ok=True)
    place.with_suffix(".json").write_text(json.dumps(ranks), encoding="utf-8")
    torch.save(merged, place.with_suffix(".pt"))


def build_cases(folder: Path, cases: Sequence[str]) -> None:
    """Builds all cases, in order."""
    torch.set_num_threads(1)
    use_host_device()
    for case in cases:
        build_case(folder, case)
