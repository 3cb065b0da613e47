"""Says along which dimension ranks split a parameter: by the type of its module, else by Megatron's marks.

A type is surer than a mark: TransformerEngine marks every weight as split, also one that each rank has whole and, with
experts, a row-parallel one along the wrong dimension (2.20.2). Megatron's own layers leave a mark out where nobody
initializes them (``perform_initialization``). Where a layer of Megatron's own has another mark than its type says, one
of the two is wrong, and so would be the trace.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

from mock_scheduler.errors import TraceError

# Megatron's wrappers of TransformerEngine's layers, by the names of their classes: they are an extra.
_TE_COLUMN = frozenset({"TEColumnParallelLinear", "TELayerNormColumnParallelLinear", "TEColumnParallelGroupedLinear"})
_TE_ROW = frozenset({"TERowParallelLinear", "TERowParallelGroupedLinear"})
_TE_LINEAR = frozenset({"TELinear", "TEGroupedLinear"})
_NORM = "layer_norm_"
# The logit of each head's sink (softmax_type=learnable), in Megatron's attention and TransformerEngine's; unmarked.
_ATTENTION, _SINK = "DotProductAttention", "softmax_offset"
# Every rank has all of these, whatever their marks say: a wrong mark is found where it acts, in the norm of gradients.
_WHOLE = ("Norm", "Router")
_NOT_SPLIT = -1
# Megatron-Bridge's (0.6.2): adapters of grouped experts that have the matrices of a rank's experts in one weight, one
# after another; and DoRA's, with a length for each output of the layer that it wraps.
_PACKED_EXPERTS = frozenset({"_GroupedExpertAdapterWeight", "PackedPerExpertLinear"})
_DORA, _LENGTHS = "ParallelLinearDoRAAdapter", "weight_magnitude"


def is_column_parallel(module: torch.nn.Module) -> bool:
    """Whether tp ranks split the outputs of a linear layer."""
    return isinstance(module, ColumnParallelLinear) or _is_te(module, _TE_COLUMN, "column")


def is_row_parallel(module: torch.nn.Module) -> bool:
    """Whether tp ranks split the inputs of a linear layer, and sum up its outputs."""
    return isinstance(module, RowParallelLinear) or _is_te(module, _TE_ROW, "row")


def packs_experts(module: torch.nn.Module) -> bool:
    """Whether the first dimension of a module's weight counts the rank's experts."""
    return bool(_class_names(module) & _PACKED_EXPERTS)


def split_dim(module: torch.nn.Module, own_name: str, parameter: torch.nn.Parameter, name: str) -> int | None:
    """Returns the dimension that ranks of tp (experts: etp) split a parameter along; ``None`` where each has all of it.

    Args:
        module: the one that holds it.
        own_name: within the module.
        parameter: itself.
        name: its canonical name, for messages.

    Raises:
        TraceError: the mark of one of Megatron's layers contradicts the layer's type, or a mark says no dimension.
    """
    marked = partition_dim(parameter) if is_marked_split(parameter) else None
    if marked == _NOT_SPLIT and any(part in kind for kind in _class_names(module) for part in _WHOLE):
        return None
    is_bias = own_name.startswith("bias")
    if isinstance(module, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding):
        by_type = None if isinstance(module, RowParallelLinear) and is_bias else 0
        if isinstance(module, RowParallelLinear) and not is_bias:
            by_type = 1
        if marked is not None and marked != by_type:
            raise TraceError(
                f"{name}: Megatron's mark says that ranks split it along dimension {marked}; expected {by_type} of a "
                f"{type(module).__name__}. A wrong mark makes gradient norms and traces wrong: set the parameter's "
                "partition_dim as its layer does, or remove the mark"
            )
        return by_type
    if _class_names(module) & (_TE_COLUMN | _TE_ROW | _TE_LINEAR):
        if own_name.startswith(_NORM):
            return None
        if is_column_parallel(module):
            return 0
        return 1 if is_row_parallel(module) and not is_bias else None
    if own_name == _SINK and _ATTENTION in _class_names(module):
        return 0
    if own_name == _LENGTHS and _DORA in _class_names(module):
        adapter = vars(module)
        return 0 if adapter["base_linear_is_parallel"] and not adapter["input_is_parallel"] else None
    if marked is not None and not 0 <= marked < parameter.dim():
        raise TraceError(
            f"{name}: Megatron's mark says that ranks split it along dimension {marked}; expected one of its "
            f"{parameter.dim()} dimensions. Set the parameter's partition_dim"
        )
    return marked


def _is_te(module: torch.nn.Module, names: frozenset[str], mode: str) -> bool:
    """Whether a layer is one of these, or TransformerEngine's plain one in this parallel mode."""
    own = _class_names(module)
    if own & names:
        return True
    is_plain = bool(own & _TE_LINEAR) and not own & (_TE_COLUMN | _TE_ROW)
    return is_plain and vars(module).get("parallel_mode") == mode


def _class_names(module: torch.nn.Module) -> frozenset[str]:
    return frozenset(kind.__name__ for kind in type(module).__mro__)


def main_grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Returns the buffer that accumulates a parameter's gradient, in the accumulator's dtype."""
    marked: Any = parameter
    grad: torch.Tensor = marked.main_grad
    return grad


def main_param(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Returns the wide copy that ``Float16OptimizerWithFloat16Params`` updates in the parameter's place."""
    marked: Any = parameter
    wide: torch.Tensor = marked.main_param
    return wide


def is_marked_split(parameter: torch.nn.Parameter) -> bool:
    """Whether Megatron has marked a parameter as split over tp ranks; it leaves the mark out of others."""
    return bool(vars(parameter).get("tensor_model_parallel", False))


def partition_dim(parameter: torch.nn.Parameter) -> int:
    """Returns the dimension that tp ranks split a parameter along; -1 where they do not."""
    marked: Any = parameter
    return int(marked.partition_dim)


def mark_sequence_parallel(module: torch.nn.Module, is_parallel: bool) -> None:
    """Says whether a module's gradients are of a part of the sequence, to be summed over tp."""
    for parameter in module.parameters():
        marked: Any = parameter
        marked.sequence_parallel = is_parallel
