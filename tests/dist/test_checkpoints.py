"""Real gloo processes: a checkpoint holds the same in any layout, and training goes on as if it had never stopped."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.layouts.cases import parallel_of
from mock_scheduler.config.layout import ParallelConfig
from mock_scheduler.errors import ConfigError
from mock_scheduler.support.digests import seal
from mock_scheduler.support.files import encode_json
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.full.reader import open_trace
from mock_scheduler.trace.shards import whole
from pipelines.megatron.run_state import check_files, check_same_settings, fixed_settings, read_run_state
from tests.dist.workers.checkpoint_worker import METRICS_FILE, PERTURBATION, VOCAB_SIZE, config_of
from tests.dist.conftest import launch

pytestmark = [pytest.mark.all, pytest.mark.timeout(900)]  # the first test pays for the launches

FLOAT64_BOUND = 1e-12  # of relative differences, in float64
BFLOAT16_BOUND = 2e-2  # the same in bfloat16, whose unit roundoff is 4e-3
# A metric that is a difference of nearly equal numbers is judged against what was subtracted, which is of this size.
METRIC_SCALE = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A checkpoint saved in one layout and loaded in another."""

    model: str
    source: str
    target: str
    precision: str = "float64"

    @property
    def saved(self) -> str:
        """The task that saves."""
        return f"{self.model}/{self.precision}/{self.source}"

    @property
    def loaded(self) -> str:
        """The task that loads."""
        return f"{self.saved}>{self.target}"


DEFAULT = (
    Pair(model="dense", source="tp1", target="tp2-sp-pp2"),
    Pair(model="dense", source="tp2-sp-pp2-vpp2", target="tp2-sp-pp2-vpp2"),
    Pair(model="dense", source="tp2-sp-pp2-vpp2", target="dp4-plain"),
    Pair(model="critic", source="cp2-dp2", target="tp1"),
    Pair(model="late-experts", source="dp4-ep4", target="dp4-ep4"),
    Pair(model="late-experts", source="dp4-ep4", target="pp2-dp2-ep2"),
    Pair(model="late-experts", source="dp4-ep4", target="tp2-sp-dp2-ep2"),
)
FURTHER = (
    Pair(model="gpt2", source="tp1", target="tp4-sp", precision="float32"),
    Pair(model="gpt2", source="tp4-sp", target="pp2-dp2", precision="float32"),
    Pair(model="moe", source="dp4-ep4", target="tp2-sp-dp2-ep2"),
    Pair(model="moe", source="tp2-sp-dp2-ep2", target="pp2-dp2-ep2"),
    Pair(model="moe", source="pp2-vpp2-dp2-ep2", target="pp2-vpp2-dp2-ep2"),
    Pair(model="moe", source="pp2-vpp2-dp2-ep2", target="cp2-dp2-ep4"),
    Pair(model="moe", source="dp4-ep2-plain", target="dp4-ep4"),
    Pair(model="moe", source="tp2-sp-dp2-ep2", target="tp1"),
    Pair(model="late-experts", source="pp2-dp2-ep2", target="dp4-ep4"),
    Pair(model="late-experts", source="pp2-dp2-plain", target="dp4-ep4"),
    Pair(model="critic", source="tp2-sp-pp2", target="dp4"),
    Pair(model="critic-warmup", source="dp4", target="tp2-sp-pp2"),
    Pair(model="adaptive-kl", source="tp2-sp-cp2", target="pp4"),
    Pair(model="dense", source="dp4", target="dp4-plain", precision="float32"),
    Pair(model="dense", source="pp2-dp2", target="pp2-dp2", precision="float32"),
    Pair(model="dense", source="dp4", target="dp4", precision="bfloat16"),
    Pair(model="dense", source="dp4", target="tp2-sp-pp2", precision="bfloat16"),
    Pair(model="dense", source="dp4-plain", target="dp4", precision="bfloat16"),
    Pair(model="dense", source="tp2-sp-pp2-vpp2", target="dp4-plain", precision="bfloat16"),
    Pair(model="late-experts", source="dp4-ep4", target="tp2-sp-dp2-ep2", precision="bfloat16"),
    Pair(model="late-experts", source="dp4-ep4", target="dp4-ep4", precision="bfloat16"),
)


def world_size(layout: str) -> int:
    """Processes that a layout needs."""
    return ParallelConfig.model_validate(parallel_of(layout)).world_size


def run_pairs(folder: Path, pairs: tuple[Pair, ...]) -> Path:
    """Save on one process, save and load on four, load on one: as many launches as there is something to do."""
    saves = list(dict.fromkeys((pair.saved, pair.source) for pair in pairs))
    loads = [(pair.loaded, pair.target) for pair in pairs]
    alone = [task for task, layout in saves if world_size(layout) == 1]
    together = [task for task, layout in (*saves, *loads) if world_size(layout) == 4]
    at_last = [task for task, layout in loads if world_size(layout) == 1]
    for num_ranks, tasks in ((1, alone), (4, together), (1, at_last)):
        if tasks:
            launch(num_ranks, folder, tuple(tasks), module="tests.dist.workers.checkpoint_worker")
    return folder


@pytest.fixture(scope="module")
def default_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_pairs(tmp_path_factory.mktemp("checkpoints"), DEFAULT)


@pytest.fixture(scope="module")
def further_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_pairs(tmp_path_factory.mktemp("further-checkpoints"), FURTHER)


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> tuple[Path, Pair]:
    """The folder of the launches that a pair is of, which are made at the first use."""
    wanted: Pair = request.param
    name = "default_runs" if wanted in DEFAULT else "further_runs"
    return request.getfixturevalue(name), wanted


def of_pairs(*, same_layout: bool | None = None) -> pytest.MarkDecorator:
    """Parametrizes a test over pairs; ``same_layout``: those that load in the layout that saved, or the others."""
    chosen = [
        pytest.param(one, id=one.loaded, marks=[] if one in DEFAULT else [pytest.mark.all])
        for one in (*DEFAULT, *FURTHER)
        if same_layout is None or (one.source == one.target) is same_layout
    ]
    return pytest.mark.parametrize("pair", chosen, indirect=True)


def merged(folder: Path, step: int) -> dict[TraceKey, torch.Tensor]:
    """Every tensor of a step, put together from all ranks, whose replicas must agree to the bit."""
    with open_trace(folder) as trace:
        tensors = {key: trace.merge(key) for key in sorted(trace.keys(step), key=str)}
    assert [conflict.describe() for tensor in tensors.values() for conflict in tensor.conflicts] == []
    return {key: tensor.tensor for key, tensor in tensors.items()}


def metrics(folder: Path) -> dict[str, float]:
    values: list[dict[str, float]] = json.loads((folder / METRICS_FILE).read_text(encoding="utf-8"))
    return values[0]


def facts(folder: Path) -> list[dict[str, Any]]:
    """What each rank counts, by rank."""
    paths = sorted(folder.glob("facts_*.json"))
    assert paths
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def differing(found: dict[TraceKey, torch.Tensor], expected: dict[TraceKey, torch.Tensor]) -> list[str]:
    """The tensors that are not equal to the last bit."""
    assert found.keys() == expected.keys()
    return [key.describe() for key in found if not torch.equal(found[key], expected[key])]


def relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    difference, scale = float((found.double() - expected.double()).norm()), float(expected.double().norm())
    return difference / scale if scale > 0 else difference


@of_pairs()
def test_a_checkpoint_holds_the_same_bits_in_every_layout(pair: tuple[Path, Pair]) -> None:
    """Parameters, Adam's moments, wide copies of bfloat16 parameters, and the biases of experts.

    Megatron narrowed float64 to float32, and failed where a stage has no experts or a rank no part of an optimizer.
    """
    root, one = pair
    saved = merged(root / one.saved / "state", 0)
    assert differing(merged(root / one.loaded / "state", 0), saved) == []
    names = {key.name for key in saved}
    assert any(name.startswith("critic.") for name in names) is one.model.startswith("critic")
    assert any(name.endswith("expert_bias") for name in names) is (one.model in ("moe", "late-experts"))
    assert {key.update for key in saved} == ({0, 1, 2, 3} if one.precision == "bfloat16" else {0, 1, 2})
    zeros = {key.name for key, tensor in saved.items() if key.update in (1, 2) and not tensor.any()}
    policy_is_trained = one.model != "critic-warmup"
    assert all(name.startswith("critic.") is policy_is_trained for name in names & zeros) or not zeros


@of_pairs()
def test_a_checkpoint_without_seals_holds_the_same_bits(pair: tuple[Path, Pair]) -> None:
    """It is Megatron's, of releases before seals, and is read as data."""
    root, one = pair
    assert differing(merged(root / one.loaded / "old", 0), merged(root / one.saved / "state", 0)) == []
    kept = ("lr_steps", "learner")
    expected = [{name: rank[name] for name in kept} for rank in facts(root / one.loaded)]
    assert [{name: rank[name] for name in kept} for rank in facts(root / one.loaded / "old")] == expected


@of_pairs()
def test_a_perturbed_run_moves_what_its_checkpoint_has(pair: tuple[Path, Pair]) -> None:
    """Only the embedding's output was moved: what is loaded lay over the moved initial weights."""
    folder, names = pair
    state, moved = merged(folder / names.loaded / "state", 0), merged(folder / names.loaded / "moved", 0)
    dtype = getattr(torch, names.precision)
    expected = {}
    for key, tensor in state.items():
        wide = replace(key, update=3)
        is_moved = key.update in (0, 3) and not key.name.endswith("expert_bias")
        source = state[wide] if is_moved and wide in state else tensor
        found = PERTURBATION.of_weight(source, whole(key.name, tuple(tensor.shape)), dtype) if is_moved else tensor
        expected[key] = (found.to(source.dtype) if is_moved else found).to(tensor.dtype)
    assert differing(moved, expected) == []
    assert any(not torch.equal(moved[key], state[key]) for key in state)


@of_pairs()
def test_schedule_and_learner_go_on_where_they_stood(pair: tuple[Path, Pair]) -> None:
    root, one = pair
    (saved, *_), loaded = facts(root / one.saved), facts(root / one.loaded)
    counted = {"lr_steps": saved["lr_steps"], "learner": saved["learner"]}
    assert [{name: rank[name] for name in counted} for rank in loaded] == [counted] * world_size(one.target)
    expected = {"policy": 0 if one.model == "critic-warmup" else 2}
    assert saved["lr_steps"] == (expected | {"critic": 2} if one.model.startswith("critic") else expected)
    if one.model == "adaptive-kl":
        assert saved["learner"]["kl_in_reward"]["coef"] != pytest.approx(0.1, rel=1e-6)


@of_pairs(same_layout=True)
def test_the_next_step_in_the_same_layout_has_the_same_bits(pair: tuple[Path, Pair]) -> None:
    """Metrics, gradients and parameters of two updates; random states are those of the rank that saved."""
    root, one = pair
    saved, loaded = root / one.saved, root / one.loaded
    assert metrics(loaded / "next") == metrics(saved / "next")
    assert differing(merged(loaded / "next", 1), merged(saved / "next", 1)) == []
    before, after = facts(saved), facts(loaded)
    assert [rank["random"] for rank in after] == [rank["random"] for rank in before]
    assert all(rank["random"] != rank["random_before"] for rank in after)


@of_pairs(same_layout=False)
def test_the_next_step_in_another_layout_is_the_same_but_for_rounding(pair: tuple[Path, Pair]) -> None:
    """A step that Adam counts wrongly spoils its bias correction, and with it the next update, by several times.

    Random states belong to ranks: in another layout they stay as the run's seed made them.
    """
    root, one = pair
    bound = {"float64": FLOAT64_BOUND, "float32": 1e-4, "bfloat16": BFLOAT16_BOUND}[one.precision]
    saved, loaded = root / one.saved, root / one.loaded
    expected, found = metrics(saved / "next"), metrics(loaded / "next")
    assert found.keys() == expected.keys()
    scale = METRIC_SCALE if one.precision == "float64" else 1.0
    wrong = {
        name: (found[name], expected[name])
        for name in found
        if not math.isclose(found[name], expected[name], rel_tol=bound, abs_tol=bound * scale)
    }
    assert wrong == {}
    parameters, found_parameters = merged(saved / "next", 1), merged(loaded / "next", 1)
    assert found_parameters.keys() == parameters.keys()
    is_judged = {key: one.precision == "float64" or key.kind != "gradient" for key in parameters}
    errors = {
        key.describe(): relative_difference(found_parameters[key], parameters[key])
        for key in parameters
        if is_judged[key]
    }
    assert {name: error for name, error in errors.items() if not error <= bound} == {}
    if one.source.removesuffix("-plain") != one.target.removesuffix("-plain"):  # another optimizer is no other layout
        assert all(rank["random"] == rank["random_before"] for rank in facts(loaded))


@pytest.fixture
def checkpoint(default_runs: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint with a critic."""
    return Path(shutil.copytree(default_runs / "critic/float64/cp2-dp2/checkpoint", tmp_path / "checkpoint"))


def test_a_whole_checkpoint_says_where_it_stands(checkpoint: Path) -> None:
    state = read_run_state(checkpoint)
    check_files(checkpoint, state)
    assert (state.next_step, state.mode, dict(state.scheduler)) == (1, "real", {"policy_version": 1})
    assert state.fixed["models"] == ["policy", "critic"]


def test_a_checkpoint_without_a_models_folder_is_refused(checkpoint: Path) -> None:
    names = [path.relative_to(checkpoint).as_posix() for path in sorted((checkpoint / "critic").iterdir())]
    sizes = [(checkpoint / name).stat().st_size for name in names]
    shutil.rmtree(checkpoint / "critic")
    with pytest.raises(ConfigError) as caught:
        check_files(checkpoint, read_run_state(checkpoint))
    lines = [f"  - {name}: written with {size} bytes, found missing" for name, size in zip(names, sizes, strict=True)]
    assert str(caught.value) == "\n".join(
        [
            f"resume_from_checkpoint: {checkpoint} is not whole:",
            *lines[:10],
            *([f"  - and {len(lines) - 10} more"] if len(lines) > 10 else []),
            "Copy it again from where it was written, or resume from another checkpoint.",
        ]
    )


def test_a_file_that_is_cut_off_is_refused_by_name(checkpoint: Path) -> None:
    path = sorted((checkpoint / "policy").glob("*.safetensors"))[0]
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError) as caught:
        check_files(checkpoint, read_run_state(checkpoint))
    assert str(caught.value) == (
        f"resume_from_checkpoint: {checkpoint} is not whole:\n"
        f"  - policy/{path.name}: written with {size} bytes, found with {size - 1}\n"
        "Copy it again from where it was written, or resume from another checkpoint."
    )


def test_a_run_state_without_its_list_of_files_is_broken(checkpoint: Path) -> None:
    path = checkpoint / "run_state.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    del content["files"], content["digest"]
    path.write_bytes(encode_json(seal(content)))
    with pytest.raises(ConfigError, match=re.escape(f"{path}: files is missing; resume from another")):
        check_files(checkpoint, read_run_state(checkpoint))


def test_a_checkpoint_with_a_critic_is_refused_by_a_run_without_one(checkpoint: Path) -> None:
    """And one of another model; what only losses ask for, and the kind of optimizer, may differ."""
    state = read_run_state(checkpoint)
    free = config_of("critic", "float64", "dp4-plain")
    free = free.model_copy(update={"model": free.model.model_copy(update={"make_vocab_size_divisible_by": 8})})
    check_same_settings(checkpoint, state, fixed_settings(free, vocab_size=VOCAB_SIZE))
    other = fixed_settings(config_of("gpt2", "float64", "tp1"), vocab_size=VOCAB_SIZE)
    with pytest.raises(ConfigError) as caught:
        check_same_settings(checkpoint, state, other)
    lines = str(caught.value).splitlines()
    assert '  - models: the checkpoint has ["policy", "critic"], this run has ["policy"]' in lines
    assert '  - model.normalization: the checkpoint has "RMSNorm", this run has "LayerNorm"' in lines
