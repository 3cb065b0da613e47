"""Real gloo processes: every layout plays the same tokens, and those that reorder no sum the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.batch.columns import TensorColumn
from mock_scheduler.recording.step.step_file import decode_step
from tests.dist.conftest import launch
from tests.dist.workers.rollout_worker import ONE_RANK, models_of

pytestmark = [pytest.mark.all, pytest.mark.timeout(300)]  # the first test pays for both launches

# Pipeline and context parallel ranks compute whole rows, and data-parallel ones whole blocks.
SAME_SUMS = ("dp4", "pp2-dp2", "pp2-vpp2-dp2", "cp2-dp2")
OTHER_SUMS = ("tp2-pp2", "tp2-dp2-sp", "ep2-dp4", "ep2-tp2-dp2-sp")
PLAYED = [(layout, model) for layout in (*SAME_SUMS, *OTHER_SUMS) for model in models_of(layout)]
BIT_EQUAL = [(layout, model) for layout, model in PLAYED if layout in SAME_SUMS]

# Rounding of float32 logits of a few units over temperature 0.8, in other orders of summation.
LOGPROB_BOUND = 2e-6


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which one process and four processes have written."""
    folder = tmp_path_factory.mktemp("rollout")
    launch(1, folder, (ONE_RANK,), module="tests.dist.workers.rollout_worker")
    launch(4, folder, (*SAME_SUMS, *OTHER_SUMS), module="tests.dist.workers.rollout_worker")
    return folder


def facts(folder: Path, layout: str, model: str) -> list[dict[str, Any]]:
    """What each rank says, by rank."""
    num_ranks = 1 if layout == ONE_RANK else 4
    paths = [folder / layout / model / f"rank_{rank}.json" for rank in range(num_ranks)]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def rows(folder: Path, layout: str, model: str) -> RolloutBatch:
    """The batch that rank 0 holds."""
    return decode_step((folder / layout / model / "rows.safetensors").read_bytes())[0]


@pytest.mark.parametrize(("layout", "model"), PLAYED)
def test_every_layout_plays_the_episodes_of_one_process(played: Path, layout: str, model: str) -> None:
    found, expected = rows(played, layout, model), rows(played, ONE_RANK, model)
    assert found.identities == expected.identities
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.rewards, expected.rewards)
    assert torch.allclose(found.rollout_logprobs, expected.rollout_logprobs, rtol=0, atol=LOGPROB_BOUND)


@pytest.mark.parametrize(("layout", "model"), BIT_EQUAL)
def test_layouts_that_reorder_no_sum_play_the_same_bits(played: Path, layout: str, model: str) -> None:
    (expected,) = {facts["digest"] for facts in facts(played, ONE_RANK, model)}
    assert {facts["digest"] for facts in facts(played, layout, model)} == {expected}


@pytest.mark.parametrize("layout", [layout for layout, model in PLAYED if model == "experts"])
def test_every_layout_records_the_experts_of_one_process(played: Path, layout: str) -> None:
    """Of all layers and stages, tp ranks' parts of a sequence, and replicas; float32 leaves no choice close enough."""
    found, expected = (rows(played, one, "experts").extras["routed_experts"] for one in (layout, ONE_RANK))
    assert isinstance(found, TensorColumn)
    assert isinstance(expected, TensorColumn)
    assert found.values.dtype == torch.uint8
    assert found.values.shape[1:] == (4, 2)
    assert torch.equal(found.values, expected.values)
    assert rows(played, layout, "experts").meta == {"num_experts": 4}


def test_a_pass_over_whole_rows_chooses_the_recorded_experts(played: Path) -> None:
    assert facts(played, ONE_RANK, "experts")[0]["routes_as_trained"]


@pytest.mark.parametrize(("layout", "model"), PLAYED)
def test_all_ranks_hold_the_same_batch(played: Path, layout: str, model: str) -> None:
    assert len({facts["digest"] for facts in facts(played, layout, model)}) == 1


@pytest.mark.parametrize(
    ("layout", "built"), [("dp4", [4, 4, 4, 0]), ("pp2-dp2", [4, 4, 0, 0]), ("tp2-pp2", [4, 0, 0, 0])]
)
def test_only_leaders_with_blocks_build_environments(played: Path, layout: str, built: list[int]) -> None:
    """Three blocks of four rows: replica 3 of four has none, and of two replicas the first plays two in turn."""
    ledgers = [facts["ledger"]["built"] for facts in facts(played, layout, "rope")]
    assert [ledger["environment"] for ledger in ledgers] == built


def test_an_engine_is_a_replica(played: Path) -> None:
    engines = {
        layout: [facts["ledger"]["built"]["engine"] for facts in facts(played, layout, "rope")]
        for layout in ("dp4", "pp2-dp2", "tp2-pp2")
    }
    assert engines == {"dp4": [1, 1, 1, 1], "pp2-dp2": [1, 1, 0, 0], "tp2-pp2": [1, 0, 0, 0]}


def test_all_ranks_make_the_same_number_of_passes_where_experts_span_replicas(played: Path) -> None:
    """Replica 3 plays nothing, but tokens of the others come to its experts in every pass."""
    experts = [facts["metrics"]["rollout/forward_passes"] for facts in facts(played, "ep2-dp4", "experts")]
    assert len(set(experts)) == 1
    assert experts[0] > 0
    dense = [facts["metrics"]["rollout/forward_passes"] for facts in facts(played, "dp4", "rope")]
    assert dense[3] == 0


@pytest.mark.parametrize(("layout", "model"), PLAYED)
def test_a_leader_reaches_its_replica_with_passes_of_any_length(played: Path, layout: str, model: str) -> None:
    assert [facts["hears_leader"] for facts in facts(played, layout, model)] == [True] * 4
