"""Has the ``text`` section: the tokenizer of rollouts in text, and their rules; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from mock_scheduler.config.base import ConfigSection, Decides
from pipelines.config.engine import ActorInferConfig
from pipelines.config.environments import TEXT_ENV_TYPES, CustomEnvConfig
from pipelines.config.model import ModelConfig


class TextConfig(ConfigSection):
    """Holds rollouts of text. ``tokenizer``: the folder of a Hugging Face tokenizer; unset, ``model.hf_checkpoint``.

    ``on_template_break``: a chat template that changes tokens of earlier turns is an error, or ends the episode,
    truncated, behind the last turn that it left as it was.
    """

    decides: ClassVar = Decides.ROLLOUTS

    # Only a place: its files decide the contract's ``vocabulary``.
    tokenizer: Annotated[str | None, Decides.LABEL] = None
    on_template_break: Literal["error", "end"] = "error"


def text_problems(
    text: TextConfig,
    model: ModelConfig,
    engine: ActorInferConfig,
    envs: Mapping[str, CustomEnvConfig],
    *,
    tags: Sequence[str],
) -> list[str]:
    """Lists what rollouts of text lack, and keys of text without rollouts of it. ``tags``: in use."""
    if not any(envs[tag].env_type in TEXT_ENV_TYPES for tag in tags if tag in envs):
        unused = [f"text.{name}" for name in sorted(text.model_fields_set) if getattr(text, name) != _default(name)]
        return [f"{key} has no effect: no tag in use is an environment of text; leave it out" for key in unused]
    problems = []
    if text.tokenizer is None and model.hf_checkpoint is None:
        problems.append("text.tokenizer: environments of text need a tokenizer; set it, or model.hf_checkpoint")
    if model.vocab_size is None:
        problems.append("model.vocab_size: it must be set where text.tokenizer is used without model.hf_checkpoint")
    if engine.only_action_tokens:
        problems.append("actor_infer.only_action_tokens: text has no tokens that are actions; set it to false")
    return problems


def _default(name: str) -> object:
    return TextConfig.model_fields[name].default
