"""Updates that nothing teaches leave weights alone, count, and are said; ordinary ones keep every bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.trace.full.reader import open_trace
from tests.pipelines.tiny_runs import run_several, write_tiny_config
from tests.programs import run_ranks

pytestmark = pytest.mark.timeout(600)

TRACE = ("trace.level=full", "trace.kinds=[initial,parameter]")
DECAY = ("training.weight_decay=0.1", "training.lr_decay_style=linear")
REJECTED = ("algorithm.rollout_correction.rules=[{level: token, action: reject_token, lower: 1000000.0}]",)
OLD = ("training.on_no_signal=update",)
#: Groups of one trajectory have advantage 0, and no other term of the loss is on.
FLAT = (
    *("train_env_manager.num_env_groups=16", "train_env_manager.group_size=1"),
    *("entropy_loss_coef=0", "use_kl_loss=false", "kl_loss_coef=0"),
)

#: The routers' losses have a gradient, whatever correction rejects.
EXPERTS = (
    *("model.num_moe_experts=4", "model.moe_ffn_hidden_size=64", "model.moe_router_topk=2"),
    *("model.moe_router_score_function=sigmoid", "model.moe_router_load_balancing_type=seq_aux_loss"),
    *("model.moe_aux_loss_coeff=0.1", "max_steps=1"),
)


def mock(root: Path) -> tuple[str, ...]:
    return ("rollout_mock.enable=true", "rollout_mock.mode=mock", f"rollout_mock.dump_dir={root / 'recording'}")


def resumed(root: Path) -> tuple[str, ...]:
    """From a checkpoint whose moments are not 0."""
    return (*mock(root), f"resume_from_checkpoint={root / 'dump/checkpoints/step_000001'}")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("no-signal")
    configs = write_tiny_config(root)
    dump = ("rollout_mock.enable=true", "rollout_mock.mode=dump", f"rollout_mock.dump_dir={root / 'recording'}")
    cases = {
        "dump": (*dump, "save_steps=1"),
        "ordinary-old": (*mock(root), *OLD),
        "rejected": (*resumed(root), *REJECTED),
        "rejected-old": (*resumed(root), *REJECTED, *OLD),
        "flat": FLAT,
        "flat-old": (*FLAT, *OLD),
        "experts": (*EXPERTS, *REJECTED),
    }
    listed = [
        [
            *("--config-path", str(configs), "--config-name", "tiny", *TRACE, *DECAY),
            *(f"output_dir={root / name}", *overrides),
        ]
        for name, overrides in cases.items()
    ]
    codes, output = run_several(root, listed, log="log.txt")
    assert codes == [0] * len(cases), output
    return root


def weights(folder: Path, step: int, kind: TraceKind) -> dict[str, torch.Tensor]:
    """Weights before a step (``initial``), or after its last update (``parameter``)."""
    with open_trace(folder / "trace") as reader:
        keys = [key for key in reader.keys(step) if key.kind == kind]
        last = max(key.update for key in keys)
        return {key.name: reader.merge(key).tensor.clone() for key in keys if key.update == last}


def metrics(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["metrics"] for line in lines]


def is_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def test_ordinary_updates_have_the_bits_of_a_run_without_the_check(runs: Path) -> None:
    for step in (0, 1):
        assert is_equal(weights(runs / "dump", step, "parameter"), weights(runs / "ordinary-old", step, "parameter"))
    assert [step["updates_without_signal"] for step in metrics(runs / "dump")] == [0.0, 0.0]


def test_a_step_whose_every_token_is_rejected_moves_no_weight(runs: Path) -> None:
    before = weights(runs / "dump", 0, "parameter")
    assert is_equal(weights(runs / "rejected", 1, "parameter"), before)
    assert not is_equal(weights(runs / "rejected-old", 1, "parameter"), before)
    for name in ("rejected", "rejected-old"):
        last = metrics(runs / name)[-1]
        assert last["updates_without_signal"] == 1.0
        assert last["grad_norm"] == 0.0
        assert last["skipped_updates"] == 0.0  # which are those of gradients that are not finite


def test_a_gradient_that_is_exactly_0_moves_no_weight(runs: Path) -> None:
    initial = weights(runs / "flat", 0, "initial")
    assert is_equal(weights(runs / "flat", 1, "parameter"), initial)
    assert not is_equal(weights(runs / "flat-old", 1, "parameter"), initial)
    assert [step["updates_without_signal"] for step in metrics(runs / "flat")] == [1.0, 1.0]


def test_a_step_that_would_teach_the_routers_balance_alone_moves_no_weight(runs: Path) -> None:
    (only,) = metrics(runs / "experts")
    assert only["updates_without_signal"] == 1.0
    assert only["grad_norm"] > 0.0
    assert is_equal(weights(runs / "experts", 0, "parameter"), weights(runs / "experts", 0, "initial"))


def test_the_schedule_counts_a_skipped_update(runs: Path) -> None:
    rates = [[step["lr"] for step in metrics(runs / name)] for name in ("flat", "flat-old", "dump")]
    assert rates[0] == rates[1] == rates[2]
    assert rates[0][1] < rates[0][0]


def test_it_is_said_in_the_log(runs: Path) -> None:
    log = (runs / "log.txt").read_text(encoding="utf-8")
    words = "of 4 updates of the policy have no signal (every gradient is 0, or every token is rejected): "
    assert f"step 1: 4 {words}skipped (training.on_no_signal=skip)" in log
    assert f"step 1: 4 {words}moments and weight decay move the weights all the same (training.on_no_signal=up" in log


@pytest.mark.parametrize("layout", [pytest.param("tensor_model", marks=pytest.mark.all), "data"])
def test_every_layout_decides_alike(runs: Path, layout: str) -> None:
    output = runs / f"rejected-{layout}"
    finished = run_ranks(
        2,
        "pipelines.agentic",
        [
            *("--config-path", str(runs / "configs"), "--config-name", "tiny", *TRACE, *DECAY),
            *(*resumed(runs), *REJECTED, f"parallel.{layout}_parallel_size=2", f"output_dir={output}"),
        ],
        told_to=output,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert is_equal(weights(output, 1, "parameter"), weights(runs / "dump", 0, "parameter"))
    assert metrics(output)[-1]["updates_without_signal"] == 1.0
