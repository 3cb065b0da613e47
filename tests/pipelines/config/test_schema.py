"""Combinations of keys that the schema refuses, with whole messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from mock_scheduler.errors import ConfigError
from pipelines.config.engine import ActorInferConfig, GeneratingArgs
from pipelines.config.environments import CustomEnvConfig, EnvManagerConfig
from pipelines.config.loading import load_config
from pipelines.config.schema import PipelineConfig

CONFIGS = Path(__file__).parents[3] / "configs"


def refused(*overrides: str) -> str:
    """The one problem that ``quickstart`` has with these overrides."""
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart", config_path=CONFIGS, overrides=overrides)
    origin = f"configuration 'quickstart' ({CONFIGS}/quickstart.yaml) has 1 problem:\n  - "
    assert str(caught.value).startswith(origin)
    return str(caught.value).removeprefix(origin)


def test_training_that_samples_otherwise_than_it_trains_is_refused() -> None:
    """Training sampled with its manager's own settings while the trainer computed with the common ones: every ratio of
    new to old policy was then that of another policy than the one that had sampled.
    """
    assert refused("train_env_manager.generating_args={temperature: 0.7, top_k: 5}") == (
        "training must sample from the policy that is trained, softmax(logits / "
        "actor_infer.generating_args.temperature):\n"
        "    - train_env_manager.generating_args differs from actor_infer.generating_args (temperature 0.7 instead of "
        "1.0, top_k 5 instead of 0): the trainer computes with the latter; leave it out and set "
        "actor_infer.generating_args"
    )


def test_truncated_sampling_of_training_is_refused() -> None:
    """top_k and top_p cut tokens off in sampling and not in training, so that the two had other log-probabilities."""
    assert refused("actor_infer.generating_args.top_k=3", "actor_infer.generating_args.top_p=0.9") == (
        "training must sample from the policy that is trained, softmax(logits / "
        "actor_infer.generating_args.temperature):\n"
        "    - actor_infer.generating_args.top_k 3 cuts tokens off: the trainer's log-probabilities are those of the "
        "softmax at `temperature`, and a truncated one would be another policy; set 0, and top_k only in "
        "val_env_manager.generating_args\n"
        "    - actor_infer.generating_args.top_p 0.9 cuts tokens off: the trainer's log-probabilities are those of the "
        "softmax at `temperature`, and a truncated one would be another policy; set 1.0, and top_p only in "
        "val_env_manager.generating_args"
    )


def test_validation_may_sample_in_its_own_way() -> None:
    config = load_config(
        "quickstart",
        config_path=CONFIGS,
        overrides=[
            "val_env_manager.generating_args={temperature: 0.5, top_k: 3, top_p: 0.9}",
            "actor_infer.generating_args.temperature=0.8",
            "train_env_manager.generating_args={temperature: 0.8}",
        ],
    )
    assert config.val_env_manager.generating_args is not None
    assert config.val_env_manager.generating_args.top_k == 3


@pytest.mark.parametrize("position", ["rope", "learned_absolute"])
def test_a_sequence_length_that_padding_exceeds_is_refused(position: str) -> None:
    """Learned positions ended in an IndexError of torch when a row of 185 to 190 tokens was padded to 192."""
    assert refused("sequence_length=190", f"model.position_embedding_type={position}") == (
        "sequence_length 190 is not a multiple of training.sequence_multiple_of 8: the longest rows would be padded "
        "beyond it"
    )


@pytest.mark.parametrize("folder", ["''", "' '"])
def test_an_empty_checkpoint_folder_is_refused(folder: str) -> None:
    """An empty text, as from an unset variable, was the working directory."""
    assert refused(f"resume_from_checkpoint={folder}") == (
        "resume_from_checkpoint: is empty; give a folder such as {output_dir}/checkpoints/step_000010, or null for a "
        f'new run (given as "resume_from_checkpoint={folder}")'
    )


def test_a_warm_up_that_outlasts_the_decay_is_refused() -> None:
    """The decay was lengthened to one update after the warm-up, without a word."""
    assert refused("training.lr_decay_style=linear", "training.lr_warmup_iters=16") == (
        "training.lr_warmup_iters 16 leaves no update to decay in: the decay ends with update 16 "
        "(training.lr_decay_iters, or all updates of the run)"
    )


def test_a_smallest_rate_above_the_largest_is_refused() -> None:
    """It was an AssertionError of Megatron's without a message."""
    assert refused("training.min_lr=0.1") == "training.min_lr 0.1 is larger than training.lr 0.002"


def test_what_depends_on_the_mode_is_that_of_the_mode() -> None:
    config = PipelineConfig(
        exp_name="x",
        rollout_batch_size=256,
        val_batch_size=64,
        actor_infer=ActorInferConfig(generating_args=GeneratingArgs(temperature=0.5)),
        train_env_manager=EnvManagerConfig(tags=["B"], num_env_groups=8),
        val_env_manager=EnvManagerConfig(tags=["B", "A"], num_env_groups=4, generating_args=GeneratingArgs(top_k=1)),
        custom_envs={tag: CustomEnvConfig() for tag in ("A", "B", "unused")},
    )
    assert (config.batch_size("train"), config.batch_size("val")) == (256, 64)
    assert (config.env_manager("train").num_env_groups, config.env_manager("val").num_env_groups) == (8, 4)
    assert config.sampling("train") == GeneratingArgs(temperature=0.5)
    assert config.sampling("val") == GeneratingArgs(top_k=1)
    assert config.tags_in_use == ["A", "B"]
    assert config.training.num_micro_batches == 4
