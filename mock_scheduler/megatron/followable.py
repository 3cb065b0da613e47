"""Finds in a built model what a trace of it would be silently wrong about, by the types of its objects.

Types by name: several of them are extras or exist in some releases alone (megatron-core 0.16.1 and 0.19.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from megatron.core.distributed import DistributedDataParallel

from mock_scheduler.megatron.observed_model import ObservedModel, strip_wrappers

_FSDP = "Megatron-FSDP keeps parameters and gradients in shards of its own; wrap the model in DistributedDataParallel"
_HYBRID = "layers of hybrid models split their parameters by rules of their own; no layer of attention stands there"
_MODULES: Mapping[str, str] = {
    "FullyShardedDataParallel": _FSDP,
    "TorchFullyShardedDataParallel": _FSDP,
    "MegatronFSDP": _FSDP,
    "MambaLayer": _HYBRID,
    "MambaMixer": _HYBRID,
    "GatedDeltaNet": _HYBRID,
    "GroupedMLP": "all experts of a rank are in one weight; set moe_use_legacy_grouped_gemm=False",
}
_QUANTIZED = frozenset({"QuantizedTensor", "QuantizedTensorBase", "Float8Tensor", "MXFP8Tensor", "NVFP4Tensor"})
_LAYER_WISE = "LayerWiseDistributedOptimizer"


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


def _obstacles_in(chunk: torch.nn.Module) -> Iterator[str]:
    found: dict[str, str] = {}
    for path, module in chunk.named_modules():
        for kind in _names(module) & _MODULES.keys():
            found.setdefault(kind, path or "the model chunk")
    for kind, path in found.items():
        yield f"{path} is a {kind}: {_MODULES[kind]}"
    quantized = (path for path, item in strip_wrappers(chunk).named_parameters() if _names(item) & _QUANTIZED)
    first = next(quantized, None)
    if first is not None:
        yield f"{first} is a quantized parameter: its values are not the tensor's own; keep parameters in bfloat16"


def _names(item: object) -> frozenset[str]:
    return frozenset(kind.__name__ for kind in type(item).__mro__)
