"""The way of an error through a step: points in the order of computation, grids of the worst, bounded."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from mock_scheduler.report.comparison.error_path import (
    MAX_COLUMNS,
    MAX_POINTS,
    MAX_ROWS,
    find_error_path,
    find_place,
    layer_grids,
    list_points,
    step_grid,
)
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.verdict.wording.tensors import bound_ratio
from tests.report.comparisons import FAULT, diverged, identical, incomparable, make_difference, make_tensors, rounding


@pytest.mark.parametrize(
    ("name", "layer", "part"),
    [
        ("decoder.layers.3.mlp.linear_fc1.weight", 3, "mlp.linear_fc1"),
        ("decoder.layers.3.mlp.linear_fc1.bias", 3, "mlp.linear_fc1"),
        ("decoder.layers.12", 12, "output of the layer"),
        (
            "decoder.layers.0.mlp.experts.local_experts.17.linear_fc2.weight",
            0,
            "mlp.experts.local_experts.*.linear_fc2",
        ),
        ("critic.decoder.layers.1.input_layernorm.weight", 1, "critic.input_layernorm"),
        ("mtp.layers.0.eh_proj.weight", 0, "mtp.layers.eh_proj"),
        ("embedding.word_embeddings.weight", None, "embedding.word_embeddings"),
        ("logprobs", None, "logprobs"),
    ],
)
def test_a_name_has_a_layer_and_a_part(name: str, layer: int | None, part: str) -> None:
    place = find_place(name)
    assert (place.layer, place.part) == (layer, part)


def test_the_path_is_the_update_of_the_first_divergence_in_order(tmp_path: Path) -> None:
    alignment = diverged(tmp_path).verdict
    path = find_error_path(list_points(alignment), alignment)
    assert (path.step, path.update, path.is_aggregated) == (0, 0, False)
    assert len(path.points) == 159  # 158 tensors of the update, and the bias that one side lacks
    first = [index for index, point in enumerate(path.points) if point.is_first]
    assert [path.points[index].key.name for index in first] == [FAULT]
    assert all(point.tier == "identical" for point in path.points[: first[0]])
    missing = [point.key.name for point in path.points if point.tier == "missing"]
    assert missing == ["decoder.layers.1.mlp.linear_fc1.bias"]


def test_without_a_divergence_the_path_is_the_update_nearest_to_its_bounds(tmp_path: Path) -> None:
    alignment = rounding(tmp_path).verdict
    tensors = alignment.tensors
    assert tensors is not None
    worse = [
        replace(item, relative=9e-5) if item.key.step == 1 and item.key.name == "pg_loss" else item
        for item in tensors.differences
    ]
    alignment = replace(alignment, tensors=replace(tensors, differences=tuple(worse)))
    assert find_error_path(list_points(alignment), alignment).step == 1


def test_nothing_compared_gives_no_points(tmp_path: Path) -> None:
    assert list_points(incomparable(tmp_path).verdict) == []


def test_grids_are_layers_by_parts_of_each_pass(tmp_path: Path) -> None:
    alignment = diverged(tmp_path).verdict
    path = find_error_path(list_points(alignment), alignment)
    grids = layer_grids(path.all_points)
    assert [grid.title for grid in grids] == [
        "forward",
        "backward (gradients of activations)",
        "gradients of parameters",
        "update",
    ]
    forward = grids[0]
    assert forward.columns == ("0", "1", "2", "3", "4", "5", "outside")
    row = forward.rows.index("self_attention.linear_proj")
    cell = forward.cells[row][2]
    assert cell is not None
    assert cell.is_first
    before = forward.cells[row][1]
    assert before is not None
    assert before.tier == "identical"
    assert forward.cells[row][6] is None
    backward = grids[1]
    assert backward.rows[:2] == ("mlp.linear_fc2", "mlp.linear_fc1")  # as computed


def test_the_grid_over_steps_keeps_the_worst_of_each_kind(tmp_path: Path) -> None:
    alignment = diverged(tmp_path).verdict
    grid = step_grid(list_points(alignment))
    assert grid.columns == ("0", "1")
    cell = grid.cells[grid.rows.index("gradient")][0]
    assert cell is not None
    assert (cell.tier, cell.num_tensors) == ("missing", 40)
    activation = grid.cells[grid.rows.index("activation")][0]
    assert activation is not None
    assert activation.is_first


def test_many_tensors_become_fewer_points_that_lose_neither_count_nor_the_first(tmp_path: Path) -> None:
    result = diverged(tmp_path, layers=300, steps=1)
    alignment = result.verdict
    path = find_error_path(list_points(alignment), alignment)
    assert len(path.all_points) > 4 * MAX_POINTS
    assert len(path.points) <= MAX_POINTS
    assert path.is_aggregated
    assert sum(point.num_tensors for point in path.points) == len(path.all_points)
    assert sum(point.is_first for point in path.points) == 1
    embedding = path.points[0]
    assert (embedding.key.name, embedding.tier, embedding.num_tensors) == ("embedding", "identical", 1)
    grid = layer_grids(path.all_points)[0]
    assert len(grid.columns) <= MAX_COLUMNS + 1
    assert grid.note == "a column is the worst of 2 layers"
    assert grid.columns[1] == "2 to 3"


def test_parts_beyond_the_limit_share_a_row(tmp_path: Path) -> None:
    alignment = identical(tmp_path).verdict
    keys = [
        TraceKey(step=0, update=0, kind="gradient", name=f"decoder.layers.0.part{number:02d}.weight")
        for number in range(MAX_ROWS + 5)
    ]
    differences = tuple(make_difference(key, 0.0) for key in keys)
    tensors = replace(make_tensors(size=0.0), differences=differences)
    points = list_points(replace(alignment, tensors=tensors))
    (grid,) = layer_grids(points)
    assert len(grid.rows) == MAX_ROWS + 1
    assert grid.rows[-1] == "5 other parts"
    last = grid.cells[-1][0]
    assert last is not None
    assert last.num_tensors == 5


def test_the_ratio_to_the_bound_is_infinite_where_there_is_no_number() -> None:
    key = TraceKey(step=0, update=0, kind="gradient", name="a")
    assert bound_ratio(None) == math.inf
    assert bound_ratio(make_difference(key, math.inf, figures=None)) == math.inf
    assert bound_ratio(make_difference(key, math.nan, figures=None)) == math.inf
    assert bound_ratio(make_difference(key, 1e-5, tolerance=0.0)) == math.inf
    assert bound_ratio(make_difference(key, 0.0, tolerance=0.0)) == 0.0
    assert bound_ratio(make_difference(key, 1e-5)) == pytest.approx(0.1)
