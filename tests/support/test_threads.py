"""Torch's own threads, off and given back."""

from __future__ import annotations

import pytest
import torch

from mock_scheduler.support.threads import without_inner_threads


def fail_with_one_thread() -> None:
    with without_inner_threads():
        assert torch.get_num_threads() == 1
        raise KeyError


def test_torchs_own_threads_are_given_back_even_after_an_error() -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyError):
        fail_with_one_thread()
    assert torch.get_num_threads() == before
