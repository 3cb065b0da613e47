"""Megatron's configuration objects as what the library's rules look at before a model is built.

The one place that knows how ``TransformerConfig`` spells its values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig

from mock_scheduler.determinism.probes import gpu_capability, installed_versions
from mock_scheduler.megatron.rules.rule import Setup
from mock_scheduler.support.tensor_bytes import dtype_name
from pipelines.config.model import ModelConfig
from pipelines.config.training import LOSS_VALUES


def megatron_values(
    transformer_config: TransformerConfig, ddp_config: DistributedDataParallelConfig | None = None
) -> dict[str, object]:
    """Every field of both configurations by name, and torch's own switch as ``torch.deterministic_algorithms``.

    Enums by their member's name, dtypes by name; functions and modules are left out. A field that both have is the
    optimizer's concern and is taken from ``ddp_config``.
    """
    configs = [config for config in (transformer_config, ddp_config) if config is not None]
    values = {
        field.name: _plain(getattr(config, field.name)) for config in configs for field in dataclasses.fields(config)
    }
    plain = {name: value for name, value in values.items() if not callable(value)}
    return {**plain, "torch.deterministic_algorithms": torch.are_deterministic_algorithms_enabled()}


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.name
    return dtype_name(value) if isinstance(value, torch.dtype) else value


def read_setup(
    transformer_config: TransformerConfig,
    ddp_config: DistributedDataParallelConfig | None = None,
    *,
    model: ModelConfig,
    environ: Mapping[str, str],
) -> Setup:
    """All that the library's rules look at, for ``find_conflicts`` and ``check_conflicts``. Every rank may call it.

    ``model``: says whose router is used. ``environ``: ``os.environ``.
    """
    own = {"moe_router_impl": model.moe_router_impl, "loss_values": LOSS_VALUES}
    return Setup(
        values={**megatron_values(transformer_config, ddp_config), **own},
        environ=environ,
        versions=installed_versions(),
        device=gpu_capability(environ),
    )
