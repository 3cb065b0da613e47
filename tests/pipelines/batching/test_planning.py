"""What is known before anything is built: requests, processes, padded vocabularies, initial weights, checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mock_scheduler.config.layout import ParallelConfig
from mock_scheduler.errors import ConfigError, LayoutError
from mock_scheduler.trace.full.files import remove_steps_from
from pipelines.config.model import ModelConfig
from pipelines.config.schema import PipelineConfig
from pipelines.megatron.model import find_idle_vocabulary, padded_vocab_size
from pipelines.megatron.process_of_rank import check_world_size
from pipelines.megatron.run_state import (
    RunState,
    check_same_settings,
    checkpoint_folder,
    fixed_settings,
    read_run_state,
)
from pipelines.megatron.weights import canonical_initial_weight
from pipelines.rollout.plan import planned_requests

MODEL = ModelConfig(num_layers=8, init_method_std=0.5)


def planned(*, max_steps: int, eval_steps: int, first_step: int = 0) -> list[tuple[str, int]]:
    config = PipelineConfig(exp_name="x", max_steps=max_steps, eval_steps=eval_steps)
    return [(request.mode, request.global_step) for request in planned_requests(config, first_step=first_step)]


def test_validation_comes_before_every_step_that_eval_steps_divides() -> None:
    assert planned(max_steps=3, eval_steps=2) == [("val", 0), ("train", 0), ("train", 1), ("val", 2), ("train", 2)]


def test_validation_comes_after_the_last_step_where_eval_steps_divides_it() -> None:
    assert planned(max_steps=2, eval_steps=2) == [("val", 0), ("train", 0), ("train", 1), ("val", 2)]


@pytest.mark.parametrize("shorter", range(1, 7))
def test_a_shorter_replay_asks_for_nothing_that_a_longer_recording_lacks(shorter: int) -> None:
    assert set(planned(max_steps=shorter, eval_steps=3)) <= set(planned(max_steps=7, eval_steps=3))


def test_without_eval_steps_there_is_no_validation() -> None:
    assert planned(max_steps=2, eval_steps=0) == [("train", 0), ("train", 1)]


def test_a_resumed_run_plans_what_is_left() -> None:
    assert planned(max_steps=4, eval_steps=2, first_step=3) == [("train", 3), ("val", 4)]


def test_requests_carry_batch_size_and_policy_version() -> None:
    config = PipelineConfig(exp_name="x", max_steps=1, eval_steps=1, rollout_batch_size=256)
    values = [(item.mode, item.batch_size, item.policy_version) for item in planned_requests(config, first_step=0)]
    assert values == [("val", 128, 0), ("train", 256, 0), ("val", 128, 1)]


def test_processes_that_the_layout_does_not_use_up_are_refused() -> None:
    parallel = ParallelConfig(tensor_model_parallel_size=2, data_parallel_size=2)
    check_world_size(parallel, 4)
    with pytest.raises(LayoutError) as caught:
        check_world_size(parallel, 8)
    assert str(caught.value) == (
        "layout tp2 pp1 dp2 needs 2 × 1 × 2 = 4 processes, but 8 were started. Start the run with launch/train.sh, "
        "which takes the number from the configuration, or set parallel.data_parallel_size."
    )


@pytest.mark.parametrize(
    ("vocab_size", "multiple_of", "tp_size", "expected"),
    [(69, 1, 1, 69), (69, 1, 2, 70), (69, 16, 1, 80), (69, 16, 2, 96), (128, 64, 2, 128)],
)
def test_a_vocabulary_is_padded_so_that_ranks_hold_equal_parts(
    vocab_size: int, multiple_of: int, tp_size: int, expected: int
) -> None:
    assert padded_vocab_size(vocab_size, multiple_of=multiple_of, tp_size=tp_size) == expected


def test_norms_start_at_one_and_biases_at_zero() -> None:
    ones = canonical_initial_weight("decoder.layers.0.self_attention.q_layernorm.weight", (3,), model=MODEL, seed=1)
    zeros = canonical_initial_weight("decoder.final_layernorm.bias", (3,), model=MODEL, seed=1)
    assert (ones.tolist(), zeros.tolist()) == ([1.0] * 3, [0.0] * 3)


def test_weights_are_normal_and_residual_writers_scaled_by_depth() -> None:
    """std 0.5, and 0.5 / sqrt(2 · 8) = 0.125; a sample of 40,000 has a relative deviation of 1 / sqrt(80,000)."""
    for name, std in (("mlp.linear_fc1.weight", 0.5), ("mlp.linear_fc2.weight", 0.125)):
        weight = canonical_initial_weight(f"decoder.layers.0.{name}", (200, 200), model=MODEL, seed=1)
        assert weight.dtype is torch.float32
        assert float(weight.std()) == pytest.approx(std, rel=0.02)
        assert float(weight.mean()) == pytest.approx(0.0, abs=0.02)


def test_a_weight_follows_from_its_name_and_the_seed_alone() -> None:
    def weight(name: str, seed: int) -> list[float]:
        return canonical_initial_weight(name, (4,), model=MODEL, seed=seed).tolist()

    torch.manual_seed(0)
    first = weight("a.weight", 1)
    torch.manual_seed(9)
    assert weight("a.weight", 1) == first
    assert weight("b.weight", 1) != first
    assert weight("a.weight", 2) != first
    # NumPy's Philox is specified; another value here would change every recorded run.
    assert first == [-0.0779624730348587, -0.11159249395132065, -0.08563585579395294, 0.3653894066810608]


def test_a_folder_without_run_state_is_no_checkpoint(tmp_path: Path) -> None:
    folder = checkpoint_folder(tmp_path, 12)
    assert folder.name == "step_000012"
    with pytest.raises(ConfigError) as caught:
        read_run_state(folder)
    assert str(caught.value) == (
        f"resume_from_checkpoint: {folder} is not a checkpoint (run_state.json is missing); give a folder such as "
        "{output_dir}/checkpoints/step_000010"
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is not JSON: Expecting value: line 1 column 1 (char 0)"),
        ("[1]", "is of type list, expected an object"),
        ('{"next_step": "3", "fixed": {}, "scheduler": null}', "does not match its digest"),
    ],
)
def test_a_broken_run_state_is_refused_by_name(tmp_path: Path, text: str, problem: str) -> None:
    """It was a JSONDecodeError or KeyError that named no file."""
    (tmp_path / "run_state.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_run_state(tmp_path)
    assert str(caught.value) == (
        f"resume_from_checkpoint: {tmp_path / 'run_state.json'}: {problem}; resume from another checkpoint"
    )


def settings_of(**values: object) -> dict[str, object]:
    config = PipelineConfig.model_validate({"exp_name": "x", **values})
    return fixed_settings(config, vocab_size=config.model.vocab_size or 69)


def test_every_setting_that_a_checkpoint_does_not_fit_is_refused_at_once() -> None:
    """Only the seed was compared; another model failed inside Megatron, and another precision or kind of optimizer
    loaded what was not there.
    """
    state = RunState(next_step=1, mode="real", fixed=settings_of(), scheduler={}, learner={})
    check_same_settings(Path("c"), state, settings_of(model={"vocab_size": 69}, max_steps=3, training={"lr": 0.1}))
    other = settings_of(
        seed=7,
        precision="bfloat16",
        model={"num_layers": 4, "vocab_size": 70},
    )
    with pytest.raises(ConfigError) as caught:
        check_same_settings(Path("c"), state, other)
    assert str(caught.value) == (
        "resume_from_checkpoint: c is of a run with other settings, which its tensors, reference policy, environments "
        "or samples follow from:\n"
        "  - seed: the checkpoint has 42, this run has 7\n"
        '  - precision: the checkpoint has "float32", this run has "bfloat16"\n'
        "  - model.num_layers: the checkpoint has 2, this run has 4\n"
        "  - model.vocab_size: the checkpoint has 69, this run has 70\n"
        "Set them as they were, or start a new run."
    )


def test_a_resumed_run_drops_the_traced_steps_that_it_computes_anew(tmp_path: Path) -> None:
    """They were left, and the first step of the resumed run failed because it was traced already."""
    for name in ("step_000000", "step_000001", "step_000002", "step_1000000", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank_00000.safetensors").touch()
    remove_steps_from(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step_000000", "step_000001"]
    remove_steps_from(tmp_path / "no_trace", 0)


def test_tp_ranks_without_a_token_to_choose_are_found() -> None:
    """Four actions at the beginning of a vocabulary of 66, padded to 72 for four ranks, are all tp0's."""
    actions, options = [2, 3, 4, 5], {"multiple_of": 2, "tp_size": 4}
    assert find_idle_vocabulary(actions, 66, **options) == [1, 2, 3]
    assert find_idle_vocabulary([2, 18, 40, 71], 66, **options) == []
    assert find_idle_vocabulary(None, 66, **options) == []
    assert find_idle_vocabulary(actions, 66, multiple_of=2, tp_size=1) == []
