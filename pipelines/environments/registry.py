"""Builds environments and the tokenizer that they share, by ``env_type``.

Gymnasium, reasoning-gym and transformers are imported where an environment is built or checked and nowhere else: a mock
run builds no environment and never loads them.
"""

from __future__ import annotations

from mock_scheduler.errors import ConfigError
from pipelines.config.environments import (
    TEXT_ENV_TYPES,
    CustomEnvConfig,
    GymnasiumTextEnvConfig,
    ReasoningGymEnvConfig,
    TextArenaEnvConfig,
)
from pipelines.config.schema import PipelineConfig
from pipelines.environments.base import Split, TokenEnvironment, Tokenizer
from pipelines.environments.grid_tokens import GridTokenizer
from pipelines.environments.kinds import ENVIRONMENT_KINDS
from pipelines.environments.text_tokens import TextTokenizer, find_tokenizer


def build_tokenizer(config: PipelineConfig) -> GridTokenizer | TextTokenizer:
    """Builds the one tokenizer of a run: all of its environments share a vocabulary.

    Raises:
        ConfigError: the tags in use speak different vocabularies, the model's vocabulary is too small, or the first
            prompt of a board leaves no token of ``sequence_length`` for an action.
    """
    envs = {tag: config.custom_envs[tag] for tag in config.tags_in_use}
    tokenizers: dict[str, GridTokenizer | TextTokenizer] = {
        tag: _text_tokenizer(config) if env.env_type in TEXT_ENV_TYPES else _tokenizer_of(env)
        for tag, env in envs.items()
    }
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
    if isinstance(tokenizer, TextTokenizer):
        return tokenizer  # the lengths of its prompts are known when they are played
    prompt_length = tokenizer.num_cells + 2
    if prompt_length >= config.sequence_length:
        raise ConfigError(
            f"sequence_length {config.sequence_length} leaves no room for an action after the first prompt of "
            f"{prompt_length} tokens ({tokenizer.num_cells} cells, the token that opens an episode and the query); set "
            f"sequence_length to at least {prompt_length + 1}, or use a smaller board"
        )
    return tokenizer


def vocab_size_in_effect(config: PipelineConfig, tokenizer: Tokenizer) -> int:
    """Returns the size of the model's vocabulary, unpadded: the configured one, or else the tokenizer's."""
    return config.model.vocab_size or tokenizer.vocab_size


def can_show(config: PipelineConfig, tokenizer: Tokenizer) -> bool:
    """Says whether the vocabulary is at hand: one of boards always, one of text where this run will play."""
    return config.samples or not isinstance(tokenizer, TextTokenizer)


def check_environments(config: PipelineConfig, tokenizer: Tokenizer) -> None:
    """Loads the tokenizer of text, and makes a question of every tag, where this run will play; else does nothing.

    Raises:
        ConfigError: a package is missing, the tokenizer cannot be used, or the settings of a task are refused.
    """
    if not config.samples or not isinstance(tokenizer, TextTokenizer):
        return
    # They import packages for which no other run should wait.
    from pipelines.environments.reasoning import check_reasoning
    from pipelines.environments.text_games import check_games

    tokenizer.load()
    envs = {tag: config.custom_envs[tag] for tag in config.tags_in_use}
    check_reasoning(envs)
    check_games(envs)


def _text_tokenizer(config: PipelineConfig) -> TextTokenizer:
    return find_tokenizer(
        str(config.text.tokenizer or config.model.hf_checkpoint),
        vocab_size=int(config.model.vocab_size or 0),
        on_break=config.text.on_template_break,
    )


def _tokenizer_of(config: CustomEnvConfig) -> GridTokenizer:
    kind = ENVIRONMENT_KINDS[config.env_type]
    return GridTokenizer(num_cells=kind.board_size(config.env_config) ** 2, glyphs=kind.glyphs, actions=kind.actions)


def build_environment(config: CustomEnvConfig, tokenizer: Tokenizer, *, split: Split = "all") -> TokenEnvironment:
    """Builds an environment of the configured type, for the layouts of ``split``.

    Raises:
        ConfigError: ``split`` asks for held-out layouts, and the settings hold none out.
        ValueError: ``tokenizer`` is another environment's.
    """
    if config.env_type in TEXT_ENV_TYPES:
        return _build_text(config, tokenizer, split=split)
    expected = _tokenizer_of(config)
    if not isinstance(tokenizer, GridTokenizer) or tokenizer != expected:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens of other boards or actions than {config.env_type}'s "
            f"{expected.vocab_size}"
        )
    # Imported here to keep gymnasium out of runs that build no environment.
    import gymnasium

    from pipelines.environments import gymnasium_ids  # noqa: F401 - registers the ids
    from pipelines.environments.grid_tokens import GridTokenEnvironment

    kind = ENVIRONMENT_KINDS[config.env_type]
    env = gymnasium.make(
        kind.gymnasium_id,
        disable_env_checker=True,  # its checks of every step take longer than the step
        settings=config.env_config,
        max_steps=config.max_steps,
        split=split,
    )
    return GridTokenEnvironment(env, tokenizer, player_glyphs=kind.player_glyphs)


def _build_text(config: CustomEnvConfig, tokenizer: Tokenizer, *, split: Split) -> TokenEnvironment:
    from pipelines.environments.text_tokens import TextEnvironment, TextTokenEnvironment

    if not isinstance(tokenizer, TextTokenizer):
        raise ValueError(f"the tokenizer has {tokenizer.vocab_size} tokens of boards, and {config.env_type} needs text")
    settings = config.env_config
    environment: TextEnvironment
    if isinstance(settings, TextArenaEnvConfig | GymnasiumTextEnvConfig):
        from pipelines.environments.text_games import GameEnv

        environment = GameEnv(settings, max_steps=config.max_steps, split=split)
    else:
        from pipelines.environments.reasoning import ReasoningGymEnv

        assert isinstance(settings, ReasoningGymEnvConfig)
        environment = ReasoningGymEnv(settings, max_steps=config.max_steps, split=split)
    return TextTokenEnvironment(environment, tokenizer)
