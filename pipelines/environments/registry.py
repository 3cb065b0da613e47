"""Environments by ``env_type``: the tokens that one speaks, and how to build it.

Another environment is one entry of ``ENVIRONMENT_KINDS`` and one module with a ``GridEnv``; its glyphs and actions are
in a module of their own, so that a tokenizer is built without gymnasium. That is imported where an environment is built
and nowhere else: a mock run builds none and never loads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mock_scheduler.errors import ConfigError
from pipelines.config.environments import CustomEnvConfig
from pipelines.config.schema import PipelineConfig
from pipelines.environments import frozen_lake_alphabet, sokoban_alphabet
from pipelines.environments.base import Split, TokenEnvironment
from pipelines.environments.grid_tokens import GridTokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentKind:
    """One ``env_type``. ``entry_point``: module and class, as gymnasium imports them.

    ``board_size``: from the settings to the cells along one side of the board that the tokens show.
    ``player_glyphs``: those of ``glyphs`` that show the player's cell.
    """

    gymnasium_id: str
    entry_point: str
    glyphs: str
    player_glyphs: str
    actions: tuple[str, ...]
    board_size: Callable[[Any], int]


ENVIRONMENT_KINDS: Mapping[str, EnvironmentKind] = {
    "frozen_lake": EnvironmentKind(
        gymnasium_id="mock_scheduler/FrozenLake-v0",
        entry_point="pipelines.environments.frozen_lake:FrozenLakeEnv",
        glyphs=frozen_lake_alphabet.GLYPHS,
        player_glyphs=frozen_lake_alphabet.PLAYER_GLYPHS,
        actions=frozen_lake_alphabet.ACTIONS,
        board_size=frozen_lake_alphabet.board_size,
    ),
    "sokoban": EnvironmentKind(
        gymnasium_id="mock_scheduler/Sokoban-v0",
        entry_point="pipelines.environments.sokoban:SokobanEnv",
        glyphs=sokoban_alphabet.GLYPHS,
        player_glyphs=sokoban_alphabet.PLAYER_GLYPHS,
        actions=sokoban_alphabet.ACTIONS,
        board_size=sokoban_alphabet.board_size,
    ),
}


def build_tokenizer(config: PipelineConfig) -> GridTokenizer:
    """The one tokenizer of a run: all of its environments share a vocabulary.

    Raises:
        ConfigError: the tags in use speak different vocabularies, the model's vocabulary is too small, or the first
            prompt leaves no token of ``sequence_length`` for an action.
    """
    tokenizers = {tag: _tokenizer_of(config.custom_envs[tag]) for tag in config.tags_in_use}
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
    prompt_length = tokenizer.num_cells + 2
    if prompt_length >= config.sequence_length:
        raise ConfigError(
            f"sequence_length {config.sequence_length} leaves no room for an action after the first prompt of "
            f"{prompt_length} tokens ({tokenizer.num_cells} cells, the token that opens an episode and the query); set "
            f"sequence_length to at least {prompt_length + 1}, or use a smaller board"
        )
    return tokenizer


def vocab_size_in_effect(config: PipelineConfig, tokenizer: GridTokenizer) -> int:
    """The model's vocabulary, unpadded: the configured size, or else the tokenizer's."""
    return config.model.vocab_size or tokenizer.vocab_size


def _tokenizer_of(config: CustomEnvConfig) -> GridTokenizer:
    kind = ENVIRONMENT_KINDS[config.env_type]
    return GridTokenizer(num_cells=kind.board_size(config.env_config) ** 2, glyphs=kind.glyphs, actions=kind.actions)


def build_environment(config: CustomEnvConfig, tokenizer: GridTokenizer, *, split: Split = "all") -> TokenEnvironment:
    """An environment of the configured type that plays the layouts of ``split``.

    Raises:
        ConfigError: the settings hold no layouts out and ``split`` asks for such.
        ValueError: ``tokenizer`` is that of another environment.
    """
    expected = _tokenizer_of(config)
    if tokenizer != expected:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens of other boards or actions than {config.env_type}'s "
            f"{expected.vocab_size}"
        )
    # Imported here to keep gymnasium out of runs that build no environment.
    import gymnasium

    from pipelines.environments import gymnasium_ids  # noqa: F401 - registers the ids
    from pipelines.environments.token_environment import GridTokenEnvironment

    kind = ENVIRONMENT_KINDS[config.env_type]
    env = gymnasium.make(
        kind.gymnasium_id,
        disable_env_checker=True,  # its checks of every step take longer than the step
        settings=config.env_config,
        max_steps=config.max_steps,
        split=split,
    )
    return GridTokenEnvironment(env, tokenizer, player_glyphs=kind.player_glyphs)
