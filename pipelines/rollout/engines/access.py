"""Says whether an engine can be started or reached, before anything is built."""

from __future__ import annotations

from collections.abc import Mapping

from mock_scheduler.errors import ConfigError
from pipelines.config.schema import PipelineConfig
from pipelines.megatron.hf_export import describe_own
from pipelines.megatron.transformer_config import DTYPES
from pipelines.rollout.engines.installed import find_vllm


def check_engine(config: PipelineConfig, environ: Mapping[str, str], *, vocab_size: int) -> None:
    """Refuses an engine that cannot be reached or started, before a model is built.

    Raises:
        ConfigError: its Python, or the variable with its key, is not there, the run spans machines, or the model is of
            no kind that an engine knows.
    """
    engine = config.actor_infer
    if config.model.hf_checkpoint is None:
        model = config.model.model_copy(update={"vocab_size": vocab_size})
        describe_own(model, dtype=DTYPES[config.engine_dtype], positions=config.sequence_length)
    if engine.engine == "openai":
        read_key(engine.server.api_key_variable, environ)
        return
    if environ.get("LOCAL_WORLD_SIZE", environ.get("WORLD_SIZE", "1")) != environ.get("WORLD_SIZE", "1"):
        raise ConfigError(
            "actor_infer.engine vllm: the run spans machines, and its server listens on one of them alone; start vLLM "
            "yourself, and set actor_infer.engine=openai with its address in actor_infer.server.base_url"
        )
    find_vllm(engine.engine_python)


def read_key(variable: str | None, environ: Mapping[str, str]) -> str | None:
    """Reads the key of a server; ``None`` where no variable has one. Raises ``ConfigError`` where it is not set."""
    if variable is None:
        return None
    key = environ.get(variable)
    if not key:
        raise ConfigError(f"actor_infer.server.api_key_variable: the variable {variable} is not set; it has the key")
    return key
