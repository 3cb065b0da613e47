"""The attributes that Megatron hangs on parameters, read with their types."""

from __future__ import annotations

from typing import Any

import torch


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
