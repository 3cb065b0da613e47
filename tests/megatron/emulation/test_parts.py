"""Parts of virtual ranks are cut and put together by value: no bit is changed, and gradients go the same ways."""

from __future__ import annotations

import pytest
import torch

from mock_scheduler.megatron.emulation.parts import Blocks, Tokens, cut, joined, spread_bias

LINE = torch.arange(8.0)


@pytest.mark.parametrize(
    ("num_parts", "blocks", "parts"),
    [
        (1, "zigzag", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (2, 1, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (2, 2, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (2, "zigzag", [[0, 1, 6, 7], [2, 3, 4, 5]]),
        (4, "zigzag", [[0, 7], [1, 6], [2, 5], [3, 4]]),
    ],
)
def test_a_dimension_is_cut_into_the_pieces_of_each_rank(
    num_parts: int, blocks: Blocks, parts: list[list[float]]
) -> None:
    found = cut(LINE, 0, num_parts, blocks)
    assert [part.tolist() for part in found] == parts
    assert torch.equal(joined(found, 0, blocks), LINE)


def test_parts_lie_in_memory_as_the_whole_does() -> None:
    whole = torch.arange(32.0).reshape(4, 8).t()
    assert [part.stride() for part in cut(whole, 0, 2, "zigzag")] == [(1, 4), (1, 4)]


def test_tokens_are_dealt_to_shares_and_of_each_to_its_ranks() -> None:
    tokens = Tokens(shares=2, blocks="zigzag")
    line = LINE.clone().requires_grad_()
    parts = tokens.cut(line, 4)
    assert [part.tolist() for part in parts] == [[0, 1], [6, 7], [2, 3], [4, 5]]
    (tokens.join([part * factor for part, factor in zip(parts, (1, 2, 3, 4), strict=True)]).sum()).backward()
    assert line.grad is not None
    assert line.grad.tolist() == [1, 1, 3, 3, 4, 4, 2, 2]


def test_a_bias_of_each_rank_gets_the_gradient_of_its_tokens() -> None:
    biases = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    spread = spread_bias(biases, Tokens(shares=2, blocks="zigzag"), 8, 1)
    (spread[:, 0, 0] * LINE).sum().backward()
    assert [bias.grad.tolist() for bias in biases if bias.grad is not None] == [[14.0], [14.0]]
    spread = spread_bias(biases, Tokens(shares=2), 8, 1)
    (spread[:, 0, 0] * LINE).sum().backward()
    assert [bias.grad.tolist() for bias in biases if bias.grad is not None] == [[20.0], [36.0]]
