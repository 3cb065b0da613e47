"""The head of a critic: one value per token in the place of logits."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig

from pipelines.megatron.parameter_marks import mark_sequence_parallel


class ValueHead(torch.nn.Linear):
    """Stands where ``GPTModel`` has its output layer; every tp rank holds it whole.

    Under sequence parallelism a rank computes the values of its part of the sequence, which are then gathered; the
    gradient of the weight is partial there, and summed over tp because it is marked ``sequence_parallel``.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config.hidden_size, 1, bias=True, dtype=config.params_dtype)
        self._splits_sequence = config.sequence_parallel
        mark_sequence_parallel(self, config.sequence_parallel)

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, weight: torch.Tensor | None = None, **unused: object
    ) -> tuple[torch.Tensor, None]:
        """Values ``[s, b, 1]`` of hidden states ``[s, b, h]``, in float32 or wider, and no bias, as Megatron asks."""
        values = super().forward(hidden_states)
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        if self._splits_sequence:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None
