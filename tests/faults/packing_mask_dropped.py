"""A planted fault: packed rows attend to the rows before them in their line, as where a causal mask is the only one.

Without packing it does no harm, since every line then has one row. Run as the ``entry`` of an alignment candidate.
"""

from __future__ import annotations

from tests.faults.harness import Fired, run_with_fault


def plant(fired: Fired) -> None:
    """Let a token see every real token before it in its line, whatever row that is of."""
    import torch

    from pipelines.megatron import places

    def line_mask(
        query_rows: torch.Tensor, query_positions: torch.Tensor, key_rows: torch.Tensor, key_positions: torch.Tensor
    ) -> torch.Tensor:
        fired.count += 1
        columns = torch.arange(key_rows.shape[1], device=key_rows.device)
        not_later = (columns <= columns.unsqueeze(1)).unsqueeze(0)
        both_real = (query_rows.unsqueeze(2) < 0) == (key_rows.unsqueeze(1) < 0)
        return ~(both_real & not_later).unsqueeze(1)

    places.row_mask = line_mask


if __name__ == "__main__":
    run_with_fault(plant)
