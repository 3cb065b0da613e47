"""Every way to compute the same training: batching, packing and recomputation give what plain micro-batches give.

In float64 only rounding is left; float32 rounds more. All that is trained here is in two launches.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.layouts.cases import LONGEST_ROW, PRECISIONS, SEED, Case, build_config, option_cases
from benchmarks.layouts.comparison import is_first_update, merged_pairs
from benchmarks.layouts.options import split_options
from benchmarks.layouts.training import random_batch
from benchmarks.layouts.comparison import CaseResult
from mock_scheduler.errors import ConfigError
from pipelines.batching.placement import place_rows
from pipelines.config.training import TrainingConfig
from pipelines.megatron.transformer_config import build_transformer_config
from pipelines.megatron.model import wrap_data_parallel
from mock_scheduler.megatron.host_device import has_cuda
from tests.dist.case_runs import describe_unaligned, train_and_compare

pytestmark = [pytest.mark.all, pytest.mark.timeout(600)]  # the first test pays for both launches
# Megatron-core 0.16.1 warns of its own default where its configuration is made.
ignores_default = pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning")

SAME = [
    *(
        Case(model="dense", precision="float64", layout=layout, option=option)
        for layout, option in (
            *(("tp1", "micro-batch-4"), ("tp1", "packing"), ("tp1", "recompute-uniform-2"), ("tp1", "turns+packing")),
            *(("pp2-vpp2", "critic+turns+dynamic"), ("cp2", "packing"), ("tp2-sp", "packing"), ("dp2", "critic")),
        )
    ),
    *(
        Case(model="moe-by-row", precision="float64", layout=layout, option=option)
        for layout, option in (
            *(("tp1", "dynamic"), ("tp1", "packing+recompute-full"), ("tp1", "recompute-block-1")),
            *(("pp2", "dynamic"), ("pp2-vpp2", "packing"), ("tp2-sp-ep2", "packing"), ("dp2", "turns+packing")),
        )
    ),
    Case(model="dense", precision="float32", option="packing"),
]
OTHER_MICRO_BATCHES = Case(model="moe", precision="float64", option="one-update+micro-batch-4")
WIDE = Case(model="dense", precision="bfloat16", layout="dp2", option="one-update+micro-batch-2")
NARROW = Case(model="dense", precision="bfloat16", layout="dp2", option="one-update+micro-batch-2+narrow-accumulation")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("options")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, CaseResult]:
    return train_and_compare(folder, [*SAME, OTHER_MICRO_BATCHES, WIDE, NARROW])


@pytest.mark.parametrize("case", SAME, ids=[case.name for case in SAME])
def test_an_option_trains_as_plain_micro_batches_do(results: dict[str, CaseResult], case: Case) -> None:
    """Every metric, gradient and parameter of all updates; recomputation in one process to the last bit."""
    assert describe_unaligned([results[case.name]]) == []
    assert case.is_exact == case.option.startswith("recompute")
    num_steps_and_updates, kinds = 2 * 2, 2
    assert results[case.name].comparison.num_tensors > num_steps_and_updates * kinds * 40


def test_a_loss_that_balances_micro_batches_is_another_function_of_other_micro_batches(
    results: dict[str, CaseResult],
) -> None:
    """``aux_loss`` balances the tokens of a micro-batch: in float64 the difference is no rounding, and is reported."""
    result = results[OTHER_MICRO_BATCHES.name]
    assert not result.is_aligned
    assert 1e-6 < result.comparison.first_gradient.value < 1.0


def test_gradients_of_bfloat16_parameters_accumulate_in_float32(folder: Path, results: dict[str, CaseResult]) -> None:
    """Sums of several micro-batches have digits that bfloat16 has not; where it accumulates, none has any."""
    assert results[WIDE.name].comparison.num_conflicts == results[NARROW.name].comparison.num_conflicts == 0
    wide_is_narrow, differences = [], []
    for key, narrow, wide in merged_pairs(folder / NARROW.name, folder / WIDE.name):
        if key.kind != "gradient" or not is_first_update(key):
            continue
        assert wide.tensor.dtype is torch.float32
        assert torch.equal(narrow.tensor.float(), narrow.tensor.bfloat16().float())
        wide_is_narrow.append(torch.equal(wide.tensor, wide.tensor.bfloat16().float()))
        differences.append(float((wide.tensor - narrow.tensor.float()).norm() / wide.tensor.norm()))
    assert wide_is_narrow
    assert not any(wide_is_narrow)
    # A few roundings to 8 bits: a unit roundoff is 2^-8 = 4e-3.
    assert all(1e-4 < difference < 3e-2 for difference in differences)


def test_the_random_rows_let_every_option_do_something() -> None:
    """Lines of several rows, micro-batches of several shapes, and turns that fill no whole number of them."""
    for step in range(2):
        rows = random_batch(SEED + step, longest=LONGEST_ROW)
        turns = random_batch(SEED + step, longest=LONGEST_ROW, form="step")
        assert (len(rows), turns.num_trajectories) == (16, 16)
        assert len(turns) > 24
        assert torch.equal(turns.tokens[turns.response_mask], rows.tokens[rows.response_mask])
        packed = place_rows(rows, build_config(Case(model="dense", precision="float64", option="packing")).training)
        assert {len(line.rows) > 1 for update in packed for line in update} >= {True}
        dynamic = place_rows(rows, build_config(Case(model="dense", precision="float64", option="dynamic")).training)
        assert len({placement.shape for update in dynamic for placement in update}) > 3
    assert any(
        len(update[-1].rows) < 8
        for update in place_rows(
            turns, build_config(Case(model="dense", precision="float64", option="turns+micro-batch-8")).training
        )
    )


@ignores_default
@pytest.mark.parametrize(
    ("layout", "option", "varies"),
    [("pp2", "dynamic", True), ("pp2-vpp2", "dynamic", True), ("pp2", "packing", False), ("tp1", "dynamic", False)],
)
def test_stages_exchange_shapes_where_these_differ(layout: str, option: str, varies: bool) -> None:
    config = build_config(Case(model="dense", precision="float64", layout=layout, option=option))
    assert build_transformer_config(config).variable_seq_lengths is varies


@ignores_default
@pytest.mark.skipif(has_cuda(), reason="a GPU is visible: overlap is possible here")
@pytest.mark.parametrize(
    "keys", [{"overlap_grad_reduce": True}, {"overlap_grad_reduce": True, "overlap_param_gather": True}]
)
def test_overlap_is_refused_without_a_gpu(keys: dict[str, bool]) -> None:
    transformer_config = build_transformer_config(build_config(Case(model="dense", precision="float32")))
    with pytest.raises(ConfigError) as refused:
        wrap_data_parallel([], transformer_config, TrainingConfig(**keys))
    assert str(refused.value) == (
        "training.overlap_grad_reduce and overlap_param_gather need CUDA streams, and no GPU is visible here; set both "
        "to false"
    )


def test_unknown_options_are_named() -> None:
    with pytest.raises(ValueError, match="no option is named 'packed'; known: plain, repeat, micro-batch-2"):
        split_options("packed+dynamic")


@pytest.mark.all
@pytest.mark.timeout(3600)
def test_all_options_of_all_models_in_both_precisions(tmp_path: Path) -> None:
    cases = option_cases(("dense", "moe-by-row"), PRECISIONS)
    assert describe_unaligned(list(train_and_compare(tmp_path, cases).values())) == []
