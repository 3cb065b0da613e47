"""A torch norm for Megatron's local layers that also works under sequence parallelism.

Megatron's own wrapper refuses sequence parallelism because it does not mark its parameters; a norm that runs on a
part of the sequence has a partial gradient, which ``finalize_model_grads`` sums over tp for marked parameters only.
"""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig

from pipelines.megatron.parameter_marks import mark_sequence_parallel


class TorchNorm:
    """Builds ``torch.nn.LayerNorm`` or ``torch.nn.RMSNorm`` with parameters marked as Megatron expects."""

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: object
    ) -> torch.nn.Module:
        """A norm over ``hidden_size``, of the kind that ``config.normalization`` names; the rest is Megatron's."""
        norm_class = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = norm_class(hidden_size, eps=eps, dtype=config.params_dtype)
        mark_sequence_parallel(norm, config.sequence_parallel)
        return norm
