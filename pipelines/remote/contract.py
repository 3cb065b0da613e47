"""The contract between a training service and its client: both train by the same mathematics.

Layout, kernels, precision and batches are the service's own.
"""

from __future__ import annotations

from mock_scheduler.config.base import Decides
from mock_scheduler.support.digests import JSON
from pipelines.config.schema import PipelineConfig
from pipelines.environments.grid_tokens import GridTokenizer
from pipelines.environments.registry import vocab_size_in_effect
from pipelines.keys import effect_of, keys_in_effect


def service_contract(config: PipelineConfig, tokenizer: GridTokenizer) -> dict[str, JSON]:
    """Reads every field by its dotted key: what decides training, of training alone, and the vocabulary."""
    values = keys_in_effect(config, vocab_size=vocab_size_in_effect(config, tokenizer))
    shared = {key: value for key, value in values.items() if _is_shared(effect_of(key))}
    return {**shared, "vocabulary": tokenizer.digest()}


def _is_shared(facts: Decides) -> bool:
    return Decides.TRAINING in facts and Decides.VALIDATION not in facts
