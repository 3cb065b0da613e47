"""Megatron's parameters under Hugging Face's names, and the parts of them that ranks hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mock_scheduler.adapters.nexrl.parameters import (
    ModelLayout,
    NamedRows,
    Piece,
    check_pattern,
    cut_piece,
    hugging_face_rows,
    matching_tensors,
    merge_pieces,
    piece_content,
    read_piece,
)
from mock_scheduler.errors import ConfigError, TraceError
from mock_scheduler.trace.shards import ShardSpec, cut_shard, even_split, whole

LAYOUT = ModelLayout(num_heads=4, num_query_groups=2, is_gated=True)
QKV = "decoder.layers.1.self_attention.linear_qkv.weight"
FC1 = "decoder.layers.0.mlp.linear_fc1.weight"


def rows_by_name(name: str, num_rows: int, layout: ModelLayout = LAYOUT) -> dict[str, list[int] | None]:
    found = hugging_face_rows(name, num_rows, layout)
    return {item.name: None if item.rows is None else item.rows.tolist() for item in found}


def test_attention_is_cut_by_query_group() -> None:
    """Head size 1: group 0 is q0 q1 k0 v0, group 1 is q2 q3 k1 v1."""
    assert rows_by_name(QKV, 8) == {
        "model.layers.1.self_attn.q_proj.weight": [0, 1, 4, 5],
        "model.layers.1.self_attn.k_proj.weight": [2, 6],
        "model.layers.1.self_attn.v_proj.weight": [3, 7],
    }
    assert rows_by_name(QKV.replace("weight", "bias"), 16)["model.layers.1.self_attn.k_proj.bias"] == [4, 5, 12, 13]


def test_a_gated_mlp_is_cut_in_halves_and_another_is_not() -> None:
    assert rows_by_name(FC1, 4) == {
        "model.layers.0.mlp.gate_proj.weight": [0, 1],
        "model.layers.0.mlp.up_proj.weight": [2, 3],
    }
    assert rows_by_name(FC1, 4, replace(LAYOUT, is_gated=False)) == {"model.layers.0.mlp.up_proj.weight": None}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        ("output_layer.weight", "lm_head.weight"),
        ("decoder.final_layernorm.weight", "model.norm.weight"),
        ("decoder.layers.3.input_layernorm.weight", "model.layers.3.input_layernorm.weight"),
        ("decoder.layers.3.pre_mlp_layernorm.weight", "model.layers.3.post_attention_layernorm.weight"),
        ("decoder.layers.3.self_attention.linear_proj.weight", "model.layers.3.self_attn.o_proj.weight"),
        ("decoder.layers.3.self_attention.q_layernorm.weight", "model.layers.3.self_attn.q_norm.weight"),
        ("decoder.layers.3.self_attention.k_layernorm.weight", "model.layers.3.self_attn.k_norm.weight"),
        ("decoder.layers.3.mlp.linear_fc2.weight", "model.layers.3.mlp.down_proj.weight"),
        ("decoder.layers.3.mlp.router.weight", "model.layers.3.mlp.gate.weight"),
        (
            "decoder.layers.3.mlp.experts.local_experts.12.linear_fc2.weight",
            "model.layers.3.mlp.experts.12.down_proj.weight",
        ),
        ("decoder.layers.3.mlp.shared_experts.linear_fc2.weight", "model.layers.3.mlp.shared_expert.down_proj.weight"),
        ("critic.decoder.layers.0.mlp.linear_fc2.weight", "critic.model.layers.0.mlp.down_proj.weight"),
    ],
)
def test_what_is_not_fused_has_one_name(name: str, expected: str) -> None:
    assert rows_by_name(name, 4) == {expected: None}


def test_experts_are_cut_as_mlps_are() -> None:
    assert rows_by_name("decoder.layers.0.mlp.experts.local_experts.7.linear_fc1.weight", 2) == {
        "model.layers.0.mlp.experts.7.gate_proj.weight": [0],
        "model.layers.0.mlp.experts.7.up_proj.weight": [1],
    }


def test_what_has_no_such_name_has_none() -> None:
    assert rows_by_name("embedding.position_embeddings.weight", 4) == {}
    assert rows_by_name("decoder.layers.0.mlp.other.weight", 4) == {}


def names(pattern: str, name: str = QKV) -> list[str]:
    return [item.name for item in matching_tensors(name, 8, pattern, LAYOUT)]


def test_a_pattern_is_searched_for_in_both_systems_names() -> None:
    assert names(r"model\.layers\.1\.self_attn\.q_proj\.weight") == ["model.layers.1.self_attn.q_proj.weight"]
    assert names(r"linear_qkv") == [QKV]
    assert names(r"layers\.1\.") == [
        QKV,
        *(f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"),
    ]
    assert names("mlp") == []


def test_a_pattern_that_matches_nothing_names_some_that_there_are() -> None:
    shapes = {QKV: (8, 4), "output_layer.weight": (16, 4)}
    check_pattern("lm_head", shapes, LAYOUT)
    with pytest.raises(ConfigError) as caught:
        check_pattern(r"layers\.9", shapes, LAYOUT)
    assert str(caught.value) == (
        "debug.target_param_pattern 'layers\\\\.9' matches no parameter of this model. Megatron's names: "
        f"{QKV}, output_layer.weight. Hugging Face's: model.layers.1.self_attn.q_proj.weight, "
        "model.layers.1.self_attn.k_proj.weight, model.layers.1.self_attn.v_proj.weight, lm_head.weight"
    )


def shards(name: str, tensor: torch.Tensor, *, dim: int, size: int, parts: int = 1) -> list[ShardSpec]:
    shape = tuple(tensor.shape)
    local = tuple(length // size if index == dim else length for index, length in enumerate(shape))
    return [
        ShardSpec(
            name=name,
            global_shape=shape,
            local_shape=local,
            splits=even_split(dim, size=shape[dim], rank=rank, num_ranks=size, num_parts=parts),
        )
        for rank in range(size)
    ]


def pieces_of(named: NamedRows, tensor: torch.Tensor, specs: Sequence[ShardSpec]) -> list[Piece]:
    cut = [cut_piece(named, spec, cut_shard(tensor, spec)) for spec in specs]
    return [read_piece(piece_content(piece), "file") for piece in cut if piece is not None]


@pytest.mark.parametrize("size", [1, 2])
def test_shards_of_attention_merge_to_the_projections(size: int) -> None:
    tensor = torch.arange(16 * 3, dtype=torch.float32).view(16, 3)
    by_group = tensor.view(2, 8, 3)
    expected = {
        "q_proj": by_group[:, :4].reshape(8, 3),
        "k_proj": by_group[:, 4:6].reshape(4, 3),
        "v_proj": by_group[:, 6:].reshape(4, 3),
    }
    for named in hugging_face_rows(QKV, 16, LAYOUT):
        pieces = pieces_of(named, tensor, shards(QKV, tensor, dim=0, size=size))
        assert len(pieces) == size
        merged = merge_pieces(pieces, where="x")
        assert torch.equal(merged.tensor, expected[named.name.split(".")[-2]])
        assert not merged.absent.any()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_shards_of_a_gated_mlp_merge_to_gate_and_up(size: int) -> None:
    tensor = torch.arange(16 * 2, dtype=torch.float32).view(16, 2)
    for named, expected in zip(hugging_face_rows(FC1, 16, LAYOUT), tensor.chunk(2), strict=True):
        pieces = pieces_of(named, tensor, shards(FC1, tensor, dim=0, size=size, parts=2))
        assert torch.equal(merge_pieces(pieces, where="x").tensor, expected)


def test_shards_by_columns_merge() -> None:
    tensor = torch.arange(12, dtype=torch.bfloat16).view(3, 4)
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    (named,) = hugging_face_rows(name, 3, LAYOUT)
    merged = merge_pieces(pieces_of(named, tensor, shards(name, tensor, dim=1, size=2)), where="x")
    assert torch.equal(merged.tensor, tensor)


@given(cuts=st.lists(st.integers(1, 47), min_size=1, max_size=3, unique=True))
def test_flat_ranges_of_the_distributed_optimizer_merge(cuts: list[int]) -> None:
    tensor = torch.arange(48, dtype=torch.float32).view(16, 3)
    bounds = [0, *sorted(cuts), 48]
    for named in (NamedRows(name=QKV), *hugging_face_rows(QKV, 16, LAYOUT)):
        pieces = []
        for start, stop in pairwise(bounds):
            spec = replace(whole(QKV, (16, 3)), flat_range=(start, stop))
            # What is outside of the range is no value of this rank's.
            dirty = torch.full((16, 3), -1.0)
            dirty.view(-1)[start:stop] = tensor.view(-1)[start:stop]
            for local in (dirty, tensor.view(-1)[start:stop]):
                piece = cut_piece(named, spec, local)
                pieces += [] if piece is None else [piece]
        merged = merge_pieces(pieces, where="x")
        assert torch.equal(merged.tensor, tensor if named.rows is None else tensor[named.rows])
        assert not merged.absent.any()
        assert merged.num_conflicts == 0


def test_padding_of_the_vocabulary_is_in_no_piece() -> None:
    tensor = torch.arange(6, dtype=torch.float32).view(3, 2)
    splits = even_split(0, size=3, rank=0, num_ranks=1)
    spec = ShardSpec(name="output_layer.weight", global_shape=(3, 2), local_shape=(4, 2), splits=splits)
    local = torch.cat([tensor, torch.full((1, 2), 9.0)])
    piece = cut_piece(NamedRows(name="lm_head.weight"), spec, local)
    assert piece is not None
    assert torch.equal(piece.tensor, tensor)


def test_a_rank_without_any_of_it_has_no_piece() -> None:
    q, _, _ = hugging_face_rows(QKV, 8, LAYOUT)
    spec = replace(whole(QKV, (8, 1)), flat_range=(2, 4))  # k0 and v0
    assert cut_piece(q, spec, torch.zeros(8, 1)) is None


def test_what_no_rank_holds_and_what_two_hold_differently_is_counted() -> None:
    specs = shards("n", torch.zeros(4, 1), dim=0, size=2)
    one = cut_piece(NamedRows(name="n"), specs[0], torch.tensor([[1.0], [2.0]]))
    other = cut_piece(NamedRows(name="n"), specs[0], torch.tensor([[1.0], [3.0]]))
    assert one is not None
    assert other is not None
    merged = merge_pieces([one, other], where="x")
    assert merged.absent.flatten().tolist() == [False, False, True, True]
    assert (merged.num_conflicts, merged.tensor.flatten().tolist()) == (1, [1.0, 2.0, 0.0, 0.0])


def test_parts_that_do_not_belong_together_are_refused() -> None:
    parts = [
        Piece(name="n", global_shape=(2,), tensor=torch.zeros(2, dtype=dtype), indices=(None,))
        for dtype in (torch.float32, torch.bfloat16)
    ]
    with pytest.raises(TraceError) as caught:
        merge_pieces(parts, where="first dump, n")
    assert str(caught.value) == "first dump, n: its parts are of several forms: bfloat16 [2], float32 [2]"


def test_a_damaged_part_is_refused() -> None:
    piece = Piece(name="n", global_shape=(3,), tensor=torch.zeros(2), indices=(torch.tensor([0, 2]),))
    content = piece_content(piece)
    with pytest.raises(TraceError, match=r"f\.pt holds no part of a parameter: 'owned'"):
        read_piece({name: value for name, value in content.items() if name != "owned"}, "f.pt")
    with pytest.raises(TraceError) as caught:
        read_piece({**content, "tensor": torch.zeros(3)}, "f.pt")
    assert str(caught.value) == "f.pt, n: is [3]; its indices say [2] of [3]"
    # Indices outside of the tensor ended in a traceback.
    with pytest.raises(TraceError, match=r"f\.pt, n: is \[2\]; its indices say \[2\] of \[3\]"):
        read_piece({**content, "indices": [torch.tensor([0, 3])]}, "f.pt")
