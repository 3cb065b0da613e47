"""Tensors that several tests of comparisons share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def hidden() -> torch.Tensor:
    """300 tokens of 64 channels, in bfloat16."""
    return torch.randn(300, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
