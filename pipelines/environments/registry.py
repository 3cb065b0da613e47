"""Environments by ``env_type``: the tokens that one speaks, and how to build it.

A tokenizer is built without gymnasium, which is imported where an environment is built and nowhere else: a mock run
builds none and never loads it.
"""

from __future__ import annotations

from mock_scheduler.config.schema import CustomEnvConfig, PipelineConfig
from mock_scheduler.errors import ConfigError
from pipelines.environments.base import TokenEnvironment
from pipelines.environments.frozen_lake_alphabet import ACTIONS, GLYPHS
from pipelines.environments.grid_tokens import GridTokenizer


def build_tokenizer(config: PipelineConfig) -> GridTokenizer:
    """The one tokenizer of a run: all of its environments share a vocabulary.

    Raises:
        ConfigError: the tags in use speak different vocabularies, or the model's vocabulary is too small.
    """
    tokenizers = {tag: _frozen_lake_tokenizer(config.custom_envs[tag]) for tag in config.tags_in_use}
    tokenizer = tokenizers[config.tags_in_use[0]]
    if any(other != tokenizer for other in tokenizers.values()):
        sizes = ", ".join(f"{tag}: {other.vocab_size} tokens" for tag, other in tokenizers.items())
        raise ConfigError(f"custom_envs of one run must share a vocabulary, but these differ: {sizes}")
    vocab_size = config.model.vocab_size
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"model.vocab_size {vocab_size} is smaller than the environment's vocabulary of {tokenizer.vocab_size} "
            f"tokens; set it to at least that, or leave it out to take the vocabulary's size"
        )
    return tokenizer


def vocab_size_in_effect(config: PipelineConfig, tokenizer: GridTokenizer) -> int:
    """The model's vocabulary, unpadded: the configured size, or else the tokenizer's."""
    return config.model.vocab_size or tokenizer.vocab_size


def _frozen_lake_tokenizer(config: CustomEnvConfig) -> GridTokenizer:
    size = 4 if config.env_config.map_name else config.env_config.size
    return GridTokenizer(num_cells=size * size, glyphs=GLYPHS, actions=ACTIONS)


def build_environment(config: CustomEnvConfig, tokenizer: GridTokenizer) -> TokenEnvironment:
    """An environment of the configured type."""
    # Imported here to keep gymnasium out of runs that build no environment.
    from pipelines.environments.frozen_lake import FrozenLakeEnvironment

    return FrozenLakeEnvironment(config, tokenizer)
