"""Reads the attributes that Megatron hangs on parameters, with their types."""

from __future__ import annotations

from typing import Any

import torch


def main_grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The buffer in which a parameter's gradient is accumulated, in the accumulator's dtype."""
    marked: Any = parameter
    grad: torch.Tensor = marked.main_grad
    return grad


def main_param(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The wide copy that ``Float16OptimizerWithFloat16Params`` updates in the parameter's place."""
    marked: Any = parameter
    wide: torch.Tensor = marked.main_param
    return wide


def partition_dim(parameter: torch.nn.Parameter) -> int:
    """The dimension along which tp ranks split a parameter; -1 where they do not."""
    marked: Any = parameter
    return int(marked.partition_dim)


def mark_sequence_parallel(module: torch.nn.Module, is_parallel: bool) -> None:
    """Say whether a module's gradients are those of a part of the sequence, so that they are summed over tp."""
    for parameter in module.parameters():
        marked: Any = parameter
        marked.sequence_parallel = is_parallel
