"""Finds in a built model what a trace of it would be silently wrong about, by its settings and its objects' types.

Types by name: several of them are extras or exist in some releases alone (megatron-core 0.16.1 and 0.19.2).

What draws random numbers can be followed, and is named: Megatron's random states follow the rank, and their draws the
micro-batches, so another layout draws other numbers. Its activations differ, and nothing is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FunctionType

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer import TransformerConfig
from torch.nn.modules.dropout import _DropoutNd

from mock_scheduler.errors import ConfigError
from mock_scheduler.megatron.observed_model import ObservedModel, strip_wrappers
from mock_scheduler.support.text import bullet_list

_FSDP = "Megatron-FSDP keeps parameters and gradients in shards of its own; wrap the model in DistributedDataParallel"
_HYBRID = "layers of hybrid models split their parameters by rules of their own; no layer of attention stands there"
_GRAPH = "a replayed graph calls no hooks"
_MODULES: Mapping[str, str] = {
    "FullyShardedDataParallel": _FSDP,
    "TorchFullyShardedDataParallel": _FSDP,
    "MegatronFSDP": _FSDP,
    "MambaLayer": _HYBRID,
    "MambaMixer": _HYBRID,
    "GatedDeltaNet": _HYBRID,
    "CudaGraphManager": f"CUDA graphs: {_GRAPH}; capture none",
    "GroupedMLP": "all experts of a rank are in one weight; set moe_use_legacy_grouped_gemm=False",
}
_QUANTIZED = frozenset({"QuantizedTensor", "QuantizedTensorBase", "Float8Tensor", "MXFP8Tensor", "NVFP4Tensor"})
#: Where the functions are defined that stand in a module's ``forward`` once it is captured (torch 2.6 to 2.14,
#: TransformerEngine 2.x).
_CAPTURING = frozenset({"torch.cuda.graphs", "transformer_engine.pytorch.graph"})
_LAYER_WISE = "LayerWiseDistributedOptimizer"


def check_followable(model: ObservedModel) -> None:
    """Refuses what attach cannot follow and whose trace would look right and be wrong.

    Raises:
        ConfigError: with every such feature.
    """
    problems = [text for is_on, text in _settings(model.config) if is_on]
    problems += find_obstacles(model)
    optimizer = model.optimizer
    if optimizer is not None and not isinstance(optimizer, MegatronOptimizer):
        problems.append(f"the optimizer is a {type(optimizer).__name__}; expected one of get_megatron_optimizer")
    if problems:
        raise ConfigError(f"attach cannot follow this training:{bullet_list(problems, limit=None)}")


def find_obstacles(model: ObservedModel) -> Iterator[str]:
    """Yields one text for each kind of object that cannot be followed: where it is, why, and what to do."""
    for number, chunk in enumerate(model.chunks):
        yield from _obstacles_in(chunk)
        is_trained = model.optimizer is not None and any(item.requires_grad for item in chunk.parameters())
        if is_trained and not any(isinstance(item, DistributedDataParallel) for item in chunk.modules()):
            yield (
                f"model chunk {number} is a {type(chunk).__name__} without Megatron's DistributedDataParallel, so its "
                "parameters have no reduced gradients (main_grad); wrap the chunk before the optimizer is built"
            )
    if _LAYER_WISE in _names(model.optimizer):
        yield f"the optimizer is a {_LAYER_WISE}: it keeps states by layer on ranks of its own; use another optimizer"
    if vars(model.config).get("mtp_use_repeated_layer"):
        yield "mtp_use_repeated_layer runs one layer several times in a pass, so its outputs have no place of their own"


def _settings(config: TransformerConfig) -> list[tuple[bool, str]]:
    # Keys of later releases are absent in older ones, which have no such feature.
    values = vars(config)
    return [
        (bool(values.get("fp8") and values.get("fp8_param")), "fp8 parameters: their values are not the tensors' own"),
        (bool(values.get("fp4") and values.get("fp4_param")), "fp4 parameters: their values are not the tensors' own"),
        (bool(values.get("fp16")), "fp16: gradients carry a loss scale that changes; use bf16 or float32"),
        (
            bool(values.get("enable_cuda_graph")),
            f"CUDA graphs: {_GRAPH}; set enable_cuda_graph off",
        ),
        (bool(values.get("external_cuda_graph")), f"CUDA graphs: {_GRAPH}; capture none"),
        (
            _has_graphs(values.get("cuda_graph_impl")),
            f"CUDA graphs: {_GRAPH}; set cuda_graph_impl=none",
        ),
        (bool(values.get("is_hybrid_model")), "hybrid layers: their modules are in no table of observed modules"),
    ]


def _has_graphs(implementation: object) -> bool:
    return implementation not in (None, "none")


def _obstacles_in(chunk: torch.nn.Module) -> Iterator[str]:
    found: dict[str, str] = {}
    for path, module in chunk.named_modules():
        for kind in _names(module) & _MODULES.keys():
            found.setdefault(kind, path or "the model chunk")
    for kind, path in found.items():
        yield f"{path} is a {kind}: {_MODULES[kind]}"
    captured = next(find_captured(chunk), None)
    if captured is not None:
        yield f"{captured} is captured in a CUDA graph: {_GRAPH}; capture none"
    quantized = (path for path, item in strip_wrappers(chunk).named_parameters() if _names(item) & _QUANTIZED)
    first = next(quantized, None)
    if first is not None:
        yield f"{first} is a quantized parameter: its values are not the tensor's own; keep parameters in bfloat16"


def find_captured(chunk: torch.nn.Module) -> Iterator[str]:
    """Yields the paths of modules whose ``forward`` replays a CUDA graph (``make_graphed_callables``)."""
    for path, module in chunk.named_modules():
        forward = vars(module).get("forward")
        if isinstance(forward, FunctionType) and forward.__module__ in _CAPTURING:
            yield path or "the model chunk"


def _names(item: object) -> frozenset[str]:
    return frozenset(kind.__name__ for kind in type(item).__mro__)


def find_draws(model: ObservedModel) -> tuple[str, ...]:
    """Lists what draws in this rank's part of a training model, as ``hidden_dropout``; empty where nothing does.

    Keys of Megatron's configuration first; then dropout of a module with a rate of its own, as of an adapter, by the
    last name of its path.
    """
    config = model.config
    rates = {
        "hidden_dropout": config.hidden_dropout,
        "attention_dropout": config.attention_dropout,
        "moe_input_jitter_eps": config.moe_input_jitter_eps or 0.0,
    }
    own: dict[str, None] = {}
    for gpt in model.gpts():
        for path, module in gpt.named_modules():
            if isinstance(module, _DropoutNd) and module.p > 0.0 and module.p not in rates.values():
                own[path.rpartition(".")[2]] = None
    return (*(name for name, rate in rates.items() if rate), *own)
