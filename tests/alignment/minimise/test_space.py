"""What a reduction is in overrides, and that configurations take it."""

from pathlib import Path
from typing import cast

import pytest

from mock_scheduler.alignment.minimise.space import ReductionSpace, build_space
from mock_scheduler.config.align import CandidateConfig
from pipelines.config.loading import load_config
from pipelines.program import PROGRAM

CONFIG = """
exp_name: lake
max_steps: 5
eval_steps: 2
ppo_epochs: 2
rollout_batch_size: 64
model: {num_layers: 4, num_attention_heads: 4, num_query_groups: 4}
training: {micro_batch_size: 4, global_batch_size: 32, sequence_multiple_of: 4}
train_env_manager: {num_env_groups: 8, group_size: 8}
"""
TP2_SP = ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"]
PP2_VPP2 = ["parallel.pipeline_model_parallel_size=2", "parallel.virtual_pipeline_model_parallel_size=2"]
DP2 = "parallel.data_parallel_size=2"


def open_space(
    folder: Path,
    *overrides: str,
    baseline: tuple[str, ...] = (),
    entry: str = "pipelines.agentic",
    python: str | None = None,
) -> ReductionSpace:
    (folder / "lake.yaml").write_text(CONFIG)
    return build_space(
        PROGRAM,
        load_config("lake", config_path=folder, overrides=baseline),
        load_config("lake", config_path=folder, overrides=[*baseline, *overrides]),
        CandidateConfig(name="x", overrides=list(overrides), entry=entry, python=python),
    )


def levels_of(space: ReductionSpace, **chosen: int) -> tuple[int, ...]:
    """By the dimensions' names, with spaces as underscores."""
    names = [dimension.name.replace(" ", "_") for dimension in space.dimensions]
    assert set(chosen) <= set(names), names
    return tuple(chosen.get(name, 0) for name in names)


def test_the_baselines_entry_is_no_change_of_a_candidate(tmp_path: Path) -> None:
    """``pipelines.agentic`` is one beside a baseline with an entry, and the same entry is none."""
    own = {"same": "my.kernel", "plain": "pipelines.agentic"}
    (tmp_path / "lake.yaml").write_text(CONFIG)
    baseline = load_config("lake", config_path=tmp_path, overrides=["align.entry=my.kernel"])
    changes = {
        name: [
            item.name
            for item in build_space(PROGRAM, baseline, baseline, CandidateConfig(name=name, entry=entry)).dimensions
            if item.kind == "change"
        ]
        for name, entry in own.items()
    }
    assert changes == {"same": [], "plain": ["entry pipelines.agentic"]}


def test_everything_that_can_be_reduced_has_its_levels(tmp_path: Path) -> None:
    space = open_space(tmp_path, *TP2_SP, *PP2_VPP2, DP2, "training.lr=1", entry="my.kernel", python="/p")
    assert [(item.kind, item.name, item.original, item.values) for item in space.dimensions] == [
        ("workload", "steps", 5, (2, 1)),
        ("workload", "validation every", 2, (0,)),
        ("workload", "groups", 8, (4, 2, 1)),
        ("workload", "trajectories of a group", 8, (4, 2)),
        ("workload", "epochs", 2, (1,)),
        ("workload", "updates of an epoch", 2, (1,)),
        ("workload", "layers", 4, (2, 1)),
        ("workload", "rows of a micro-batch", 4, (8, 16, 32)),
        ("layout", "sp", True, (False,)),
        ("layout", "vpp", 2, (None,)),
        ("layout", "pp", 2, (1,)),
        ("layout", "tp", 2, (1,)),
        ("layout", "dp", 2, (1,)),
        ("change", "training.lr=1", "training.lr=1", (None,)),
        ("change", "entry my.kernel", "entry", (None,)),
        ("change", "python /p", "python", (None,)),
    ]


def test_nothing_reduced_is_the_candidate_itself(tmp_path: Path) -> None:
    space = open_space(tmp_path, *TP2_SP, DP2, "training.lr=1")
    reduction = space.build(levels_of(space))
    assert reduction.shared == ()
    assert reduction.steps == ()
    assert sorted(reduction.candidate.overrides) == sorted([*TP2_SP, DP2, "training.lr=1"])
    assert reduction.layout == "tp2 pp1 dp2 sp"
    assert not reduction.is_baseline


def test_an_axis_takes_with_it_what_needs_it(tmp_path: Path) -> None:
    space = open_space(tmp_path, *TP2_SP, *PP2_VPP2)
    reduction = space.build(levels_of(space, tp=1, pp=1))
    assert reduction.candidate.overrides == []
    assert reduction.layout == "tp1 pp1 dp1"
    assert reduction.is_baseline
    assert reduction.steps == ("pp 2 → 1", "tp 2 → 1")


def test_the_baseline_follows_an_axis_that_both_have(tmp_path: Path) -> None:
    """Reduced in the candidate alone, the axis would become what differs."""
    space = open_space(tmp_path, "training.lr=1", baseline=(*TP2_SP, DP2))
    reduction = space.build(levels_of(space, tp=1))
    assert reduction.shared == ("parallel.tensor_model_parallel_size=1", "parallel.sequence_parallel=false")
    assert reduction.candidate.overrides == ["training.lr=1"]


def test_an_axis_of_the_baseline_alone_stays(tmp_path: Path) -> None:
    space = open_space(tmp_path, "parallel.data_parallel_size=1", "training.lr=1", baseline=(DP2,))
    reduction = space.build(levels_of(space, steps=2))
    assert reduction.shared == ("max_steps=1",)
    assert reduction.candidate.overrides == ["parallel.data_parallel_size=1", "training.lr=1"]


def test_changes_go_one_by_one_with_entry_and_interpreter(tmp_path: Path) -> None:
    space = open_space(tmp_path, DP2, "training.lr=1", "gamma=0.5", entry="my.kernel", python="/p")
    names = [dimension.name for dimension in space.dimensions]
    levels = tuple(int(name in ("training.lr=1", "python /p")) for name in names)
    reduction = space.build(levels)
    assert reduction.candidate == CandidateConfig(name="x", overrides=[DP2, "gamma=0.5"], entry="my.kernel")
    assert reduction.steps == ("without training.lr=1", "without python /p")
    everything = space.build(tuple(int(dimension.kind != "workload") for dimension in space.dimensions))
    assert everything.is_baseline


@pytest.mark.parametrize(
    ("chosen", "shared"),
    [
        # 64 rows of 8 × 8: 4 groups are 32 rows, and an update stays half of a step.
        (
            {"groups": 1},
            ["train_env_manager.num_env_groups=4", "rollout_batch_size=32", "training.global_batch_size=16"],
        ),
        # 2 × 2 rows in two updates of 2: a micro-batch of 4 would not fit.
        (
            {"groups": 2, "trajectories_of_a_group": 2},
            [
                "train_env_manager.num_env_groups=2",
                "train_env_manager.group_size=2",
                "rollout_batch_size=4",
                "training.global_batch_size=2",
                "training.micro_batch_size=1",
            ],
        ),
        ({"updates_of_an_epoch": 1}, ["training.global_batch_size=64"]),
        ({"rows_of_a_micro-batch": 2}, ["training.micro_batch_size=16"]),
        # At two data-parallel ranks of 32 rows at most 16 are of one micro-batch.
        ({"rows_of_a_micro-batch": 3}, ["training.micro_batch_size=16"]),
        ({"layers": 1, "steps": 1, "validation_every": 1}, ["max_steps=2", "eval_steps=0", "model.num_layers=2"]),
    ],
)
def test_a_reduced_workload_stays_whole(tmp_path: Path, chosen: dict[str, int], shared: list[str]) -> None:
    space = open_space(tmp_path, DP2)
    reduction = space.build(levels_of(space, **chosen))
    assert list(reduction.shared) == shared
    load_config("lake", config_path=tmp_path, overrides=[*reduction.shared, *reduction.candidate.overrides])


def test_what_a_level_became_is_said_and_what_has_no_effect_is_not(tmp_path: Path) -> None:
    space = open_space(tmp_path, DP2)
    # 16 of 32 rows fit twice into an update; of 4 rows, 2.
    assert space.build(levels_of(space, **{"rows_of_a_micro-batch": 3})).steps == ("rows of a micro-batch 4 → 16",)
    small = levels_of(space, **{"groups": 3, "rows_of_a_micro-batch": 3})
    assert space.build(small).steps == ("groups 8 → 1",)  # an update of 4 rows has none left to put together


def test_packed_rows_have_no_micro_batch_to_enlarge(tmp_path: Path) -> None:
    (tmp_path / "lake.yaml").write_text(CONFIG)
    config = load_config(
        "lake",
        config_path=tmp_path,
        overrides=["training.batching=dynamic", "training.max_tokens_per_micro_batch=512"],
    )
    names = [item.name for item in build_space(PROGRAM, config, config, CandidateConfig(name="x")).dimensions]
    assert cast("list[str]", names) == [
        "steps",
        "validation every",
        "groups",
        "trajectories of a group",
        "epochs",
        "updates of an epoch",
        "layers",
    ]
