"""Real gloo processes: one process that follows a layout's order computes the same bits as the layout does.

Everything that a full trace holds is compared, and all metrics, over two steps of two updates with clipped gradients.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from mock_scheduler.config.instruments import TRACE_KINDS
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.full.reader import MergedTensor, open_trace
from tests.dist.conftest import launch
from tests.dist.emulation_cases import EMULATED_MODELS, EmulationCase
from tests.dist.workers.emulation_worker import METRICS_FILE

pytestmark = [pytest.mark.all, pytest.mark.timeout(900)]  # the first test pays for the launches

WORKER = "tests.dist.workers.emulation_worker"
PLAIN = "qwen+rows2/float32/tp1"
NARROW = "qwen-bias+rows2/bfloat16/tp2-sp"
WITH_EXPERTS = "moe+rows2/float32/dp2-ep2"
SHORT = (
    NARROW,
    "qwen+rows2/float32/tp2-sp",
    "gpt+rows2/float32/tp2",
    "gpt-tied+rows2/float32/pp2",
    "qwen-untied+means+rows2/float32/dp2-plain",
    "qwen+rows2/float32/cp2",
    WITH_EXPERTS,
)
FAULTS = {"loss_scale": NARROW, "softmax_sum": NARROW, "expert_weights": WITH_EXPERTS}
LONG = (
    *(
        f"{model}/{precision}/{layout}"
        for model in ("qwen", "qwen-untied", "qwen-bias", "gpt", "gpt-tied")
        for precision in ("float32", "bfloat16")
        for layout in ("tp2", "tp2-sp-plain", "dp2", "pp2")
    ),
    *("qwen/float64/tp2-sp", "qwen/float64/dp2", "qwen+narrow/bfloat16/dp2", "qwen+recompute/float32/tp2-sp"),
    *("qwen+selective/float32/tp2", "qwen+packing/float32/tp2-sp", "qwen+packing/float32/dp2", "qwen/float32/pp2-vpp2"),
    *("qwen+critic/float32/tp2-sp", "qwen+critic/bfloat16/dp2", "qwen+critic/float32/pp2", "gpt/bfloat16/cp2"),
    *("qwen/float32/tp2-sp-pp2", "qwen/bfloat16/tp2-dp2", "gpt/float32/dp4", "qwen/float32/tp4-sp", "qwen/float32/cp4"),
    *("gpt-tied/bfloat16/tp2-sp-pp2", "qwen/float32/dp4-plain", "qwen/bfloat16/tp2-cp2", "qwen/float32/pp2-dp2"),
    *("qwen/float32/tp2-sp-dp4", "qwen/bfloat16/tp2-sp-pp2-dp2", "gpt-tied/float32/tp2-sp-pp2-dp2"),
    *(
        f"{model}/{precision}/{layout}"
        for model in ("moe", "moe-by-row")
        for precision in ("float32", "bfloat16")
        for layout in ("pp2", "dp2", "cp2", "tp2-sp-ep2", "dp2-ep2")
    ),
    *("moe/float64/dp2-ep2", "moe/float32/dp2-ep2-plain", "moe/float32/cp2-ep2", "moe/float32/pp2-vpp2"),
    *("moe+means/float32/dp2", "moe+packing/float32/tp2-sp-ep2", "moe+recompute/bfloat16/dp2-ep2"),
    *("moe/float32/dp4-ep2", "moe/bfloat16/dp4-ep4", "moe/float32/pp2-dp2-ep2", "moe/bfloat16/tp2-sp-pp2-ep2"),
    *("moe/float32/tp2-sp-dp2-ep2", "moe/bfloat16/tp2-sp-dp2-ep4", "moe/float32/cp2-dp2-ep4"),
    *("moe/bfloat16/tp2-sp-cp2-ep2", "moe/float32/tp2-sp-pp2-dp2-ep2", "moe/float32/tp4-sp-ep2"),
    *("moe/float32/cp2-dp2-ep2", "moe/float32/pp2-vpp2-dp2-ep2", "moe/bfloat16/tp2-sp-dp2-ep2-plain"),
    *("moe/float32/pp2-dp2-ep2-plain", "moe+critic/float32/tp2-sp-ep2"),
)


def run_both(root: Path, cases: Sequence[str], *, faults: Mapping[str, str] | None = None) -> Path:
    """Emulated runs of all cases in one process, and the layouts' own by number of processes; faults: of which case."""
    by_size: dict[int, list[str]] = {}
    for name in cases:
        by_size.setdefault(EmulationCase.parse(name).world_size, []).append(name)
    for folder in ("emulated", "layout"):
        (root / folder).mkdir()
    launch(1, root / "emulated", (PLAIN, *cases), module=WORKER)
    for size, names in sorted(by_size.items()):
        planted = [f"{fault}:{name}" for fault, name in (faults or {}).items() if size == 2]
        launch(size, root / "layout", (*names, *planted), module=WORKER)
    return root


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cases of two processes that every run of the tests makes."""
    return run_both(tmp_path_factory.mktemp("emulation"), SHORT, faults=FAULTS)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All models, precisions and layouts."""
    return run_both(tmp_path_factory.mktemp("all-emulation"), LONG)


def merged_pairs(one: Path, other: Path) -> Iterator[tuple[TraceKey, MergedTensor, MergedTensor]]:
    """Every tensor of both traces, which must have the same ones."""
    with open_trace(one) as left, open_trace(other) as right:
        assert left.steps == right.steps
        for step in left.steps:
            keys = set(left.keys(step))
            assert keys == set(right.keys(step))
            for key in sorted(keys, key=str):
                yield key, left.merge(key), right.merge(key)


def unequal(emulated: Path, layout: Path, *, has_experts: bool = False) -> list[str]:
    """Tensors and metrics that are not the same to the bit, and replicas of the layout that are not."""
    found, kinds = [], set()
    for key, one, other in merged_pairs(emulated, layout):
        kinds.add(key.kind)
        bits = [item.tensor.reshape(-1).view(torch.uint8) for item in (one, other)]
        same_form = (one.tensor.shape, one.tensor.dtype) == (other.tensor.shape, other.tensor.dtype)
        if not same_form or not torch.equal(*bits) or other.conflicts:
            found.append(key.describe())
    # Neither side recomputes anything otherwise than at first.
    assert kinds >= set(TRACE_KINDS) - {"recomputed", "weight"} - (set() if has_experts else {"router"})
    ours, theirs = (json.loads((folder / METRICS_FILE).read_text(encoding="utf-8")) for folder in (emulated, layout))
    assert [step.keys() for step in ours] == [step.keys() for step in theirs]
    found += [
        f"metric {name} of step {number}"
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True))
        for name in one
        if one[name] != other[name]
    ]
    assert all(step["grad_norm"] > 0.3 for step in ours)  # so that clipping changed every gradient
    return found


@pytest.mark.parametrize("name", SHORT)
def test_one_process_computes_the_bits_of_the_layout(short: Path, name: str) -> None:
    has_experts = name.startswith("moe")
    assert unequal(short / "emulated" / name, short / "layout" / name, has_experts=has_experts) == []


@pytest.mark.parametrize(("fault", "name"), FAULTS.items())
def test_a_fault_below_the_noise_of_bfloat16_is_found(short: Path, fault: str, name: str) -> None:
    """0.05 % of the loss or of an expert's weights, or 0.1 % of one rank's share of the softmax; in bfloat16 rounding
    alone moves gradients by 2 %.
    """
    found = unequal(short / "emulated" / name, short / "layout" / fault / name)
    gradients = [item for item in found if item.startswith("gradient of ")]
    assert gradients
    assert "metric grad_norm of step 0" in found


def test_the_bias_of_experts_is_traced_as_state_that_its_counts_move(short: Path) -> None:
    """Float32, held alike by both ranks: up by its rate where fewer tokens than the mean chose an expert, else down."""
    rate = EMULATED_MODELS["moe"]["moe_router_bias_update_rate"]
    router = "decoder.layers.1.mlp.router"
    with open_trace(short / "layout" / WITH_EXPERTS) as reader:
        key = TraceKey(step=0, update=0, kind="initial", name=f"{router}.expert_bias")
        expected = reader.merge(key).tensor
        assert (expected.tolist(), expected.dtype) == ([0.0] * 4, torch.float32)
        for step, update in ((step, update) for step in reader.steps for update in range(2)):
            key = TraceKey(step=step, update=update, kind="router", name=f"{router}.chosen_experts")
            choice = reader.merge(key)
            chosen = choice.tensor if choice.present is None else choice.tensor[choice.present.reshape(-1)]
            counts = torch.bincount(chosen.flatten(), minlength=4).float()
            expected = expected + torch.sign(counts.mean() - counts) * rate
            key = TraceKey(step=step, update=update, kind="parameter", name=f"{router}.expert_bias")
            merged = reader.merge(key)
            assert torch.equal(merged.tensor, expected)
            assert merged.conflicts == ()
            assert [piece.place.global_rank for piece in reader.pieces(key)] == [0, 1]
    assert expected.any()


def test_the_emulated_order_is_the_reference_but_for_rounding(short: Path) -> None:
    """First gradients in float32: other sums, but the same to a few units of the last place."""
    emulated, plain = short / "emulated" / "qwen+rows2/float32/tp2-sp", short / "emulated" / PLAIN
    ratios = [
        float((one.tensor - other.tensor).norm() / other.tensor.norm())
        for key, one, other in merged_pairs(emulated, plain)
        if key.kind == "gradient" and key.step == key.update == 0
    ]
    assert 0.0 < max(ratios) < 1e-5


@pytest.mark.all
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", LONG)
def test_every_model_and_layout_is_followed_to_the_bit(long: Path, name: str) -> None:
    has_experts = name.startswith("moe")
    assert unequal(long / "emulated" / name, long / "layout" / name, has_experts=has_experts) == []
