"""Real gloo processes of a plain Megatron loop, and the same loop in one process in the order of their layout.

Two updates with clipped gradients: losses of all tokens, gradients, norms and parameters are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from mock_scheduler.megatron.emulation.follow import LOSS_SUMS
from tests.dist.conftest import launch
from tests.dist.workers.follow_worker import REFUSAL, Case
from tests.dist.following import differences, read_ranks

WORKER = "tests.dist.workers.follow_worker"
SHORT = ("moe/float32/tp2-sp-ep2-plain", "gpt+tied+means/float32/dp2")
#: Faults that are planted in the one process, and the case that shows each.
IN_BLOCKS = "gpt+tied+means/float32/dp2"
REVERSED = "qwen/float32/tp4-sp-plain"
GATHERED = "moe+gathered/float32/tp2-sp-ep2-plain"
SLICED = "qwen/float32/cp2-plain"
BROKEN = "moe+broken/float32/cp2"
#: ((r3 + r2) + r1) + r0 in place of ((r0 + r1) + r2) + r3; all experts' outputs of a token in one sum; the
#: slices of a line are its first and third quarter, and the others.
LONG_FAULTS = {"reversed": REVERSED, "at-once": GATHERED, "sliced-otherwise": SLICED}
LONG = (
    *(
        "qwen/float32/tp2-plain",
        "qwen/float32/tp2-sp",
        "gpt/bfloat16/tp2-plain",
        "gpt+tied+means/bfloat16/dp2",
        "gpt+tied/bfloat16/tp2-sp-plain",
    ),
    *("qwen+tied/bfloat16/tp2-sp-plain", "gpt+means/float32/tp2-sp", "qwen+recompute/float32/tp2-sp-plain"),
    *("qwen+packed/float32/tp2-plain", "qwen+packed/bfloat16/dp2-plain"),
    *("gpt+tied/float32/pp2-plain", "qwen+means/bfloat16/pp2-plain", "qwen/float32/pp2-vpp2-plain"),
    *("qwen/float32/dp2", "qwen/float32/dp2-plain", "qwen+means/float32/dp2-plain", "gpt/float32/dp2"),
    *("moe/bfloat16/tp2-sp-ep2-plain", "moe+rows/float32/tp2-sp-ep2", "moe+means/bfloat16/tp2-sp-ep2-plain"),
    *("moe+means/float32/dp2-plain", "moe/bfloat16/dp2", "moe/float32/pp2-plain"),
    *("qwen/float32/tp2-pp2-plain", "qwen/bfloat16/tp2-dp2", "qwen/float32/dp4-plain", "qwen+means/float32/dp4"),
    *("gpt+tied/float32/tp2-sp-pp2", "gpt+tied/bfloat16/pp2-dp2", REVERSED),
    *("moe/float32/tp2-sp-dp2-ep2", "moe+rows/bfloat16/tp2-sp-pp2-ep2-plain"),
    *(GATHERED, "moe+gathered/bfloat16/tp2-sp-ep2", "moe+gathered/float32/tp4-sp-ep2-plain"),
    *(SLICED, "gpt/bfloat16/cp2", "qwen/bfloat16/tp2-sp-cp2", "gpt+tied/float32/pp2-cp2", "qwen/float32/cp2-dp2"),
    *("qwen+recompute/float32/cp4-plain",),
)


def run_both(root: Path, cases: Sequence[str], *faults: str) -> Path:
    """The layouts in processes, and all of them followed in one; faults: ``name:case``, in the one process."""
    for folder in ("followed", "layout"):
        (root / folder).mkdir()
    launch(1, root / "followed", (*cases, *faults), module=WORKER)
    for size in (2, 4):
        names = tuple(name for name in cases if Case.parse(name).parallel.world_size == size)
        if names:
            launch(size, root / "layout", names, module=WORKER)
    return root


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_both(tmp_path_factory.mktemp("follow"), SHORT, f"in-blocks:{IN_BLOCKS}", BROKEN)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_both(tmp_path_factory.mktemp("all-follow"), LONG, *(f"{fault}:{case}" for fault, case in LONG_FAULTS.items()))


@pytest.mark.parametrize("name", SHORT)
def test_one_process_computes_the_bits_of_the_layout(short: Path, name: str) -> None:
    assert list(differences(short / "followed" / name, short / "layout" / name)) == []
    assert read_ranks(short / "followed" / name)[0]["not_followed"] == (LOSS_SUMS,)


def test_replicas_that_get_others_micro_batches_are_seen(short: Path) -> None:
    """The first two micro-batches for the first replica: the same sums but for their order."""
    fault = short / "followed" / "in-blocks" / IN_BLOCKS
    found = list(differences(fault, short / "layout" / IN_BLOCKS))
    assert any(line.startswith("parameters of ") and line.endswith("of update 0") for line in found)
    assert "loss of micro-batch 3 of update 1" in found


def test_everything_that_cannot_be_followed_is_named_before_the_first_step(short: Path) -> None:
    assert (short / "followed" / BROKEN / REFUSAL).read_text(encoding="utf-8") == (
        "order.emulate: one process cannot follow tp1 pp1 cp2 dp1 in this training:\n"
        "  - module decoder.layers.0.input_layernorm is a __main__.OwnNorm, whose products and sums are "
        "not known\n"
        "  - TransformerConfig.moe_router_load_balancing_type global_aux_loss: only aux_loss or seq_aux_loss or none is "
        "followed\n"
        "  - context_parallel_size 2 with experts: one process routes the tokens of a line in their order, and ranks "
        "route slices of it"
    )


@pytest.mark.all
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", LONG)
def test_every_model_and_layout_is_followed_to_the_bit(long: Path, name: str) -> None:
    assert list(differences(long / "followed" / name, long / "layout" / name)) == []


@pytest.mark.all
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("fault", "case"), LONG_FAULTS.items())
def test_another_order_is_seen(long: Path, fault: str, case: str) -> None:
    found = list(differences(long / "followed" / fault / case, long / "layout" / case))
    assert any(line.startswith("gradients of ") and line.endswith("of update 0") for line in found)
    assert any(line.startswith("loss of micro-batch") and line.endswith("of update 0") for line in found)
