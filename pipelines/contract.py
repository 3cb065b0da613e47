"""The contract of an agentic run: what a recording promises, and what a run that replays it must keep."""

from __future__ import annotations

from collections.abc import Mapping

from mock_scheduler.config.schema import EnvManagerConfig, PipelineConfig
from mock_scheduler.determinism.guard import determinism_contract
from mock_scheduler.recording.contract import Contract, ContractField, Rule
from mock_scheduler.scheduler import JSON
from pipelines.environments.grid_tokens import GridTokenizer

# Fields of the model that change how it is computed and not what is computed.
_IMPLEMENTATION = {"transformer_impl", "make_vocab_size_divisible_by", "vocab_size"}

# Facts of the machine: a recording may be replayed on another one.
_MACHINE = {"torch.cpu_capability"}


def build_contract(config: PipelineConfig, tokenizer: GridTokenizer, settings: Mapping[str, str]) -> Contract:
    """Every field of the contract; ``settings``: the determinism settings read back in this process."""
    model = {name: value for name, value in config.model.model_dump(mode="json").items() if name not in _IMPLEMENTATION}
    must_match: dict[str, tuple[JSON, str]] = {
        "vocabulary": (
            tokenizer.digest(),
            f"The recorded token ids mean something else here ({tokenizer.vocab_size} tokens now): use the recording "
            "run's environment settings.",
        ),
        "model.vocab_size": (
            config.model.vocab_size or tokenizer.vocab_size,
            "Set model.vocab_size as in the recording run.",
        ),
        "model": (model, "Set the model section as in the recording run."),
        "seed": (config.seed, "The initial weights follow from seed: set it as in the recording run."),
        "sequence_length": (config.sequence_length, "Set sequence_length as in the recording run."),
        "rollout_batch_size": (config.rollout_batch_size, "Set rollout_batch_size as in the recording run."),
        "val_batch_size": (config.val_batch_size, "Set val_batch_size as in the recording run."),
        "train_environments": (
            _environments(config, config.train_env_manager),
            "Set train_env_manager and custom_envs as in the recording run.",
        ),
        "val_environments": (
            _environments(config, config.val_env_manager),
            "Set val_env_manager and custom_envs as in the recording run.",
        ),
        "sampling": (
            config.actor_infer.model_dump(mode="json"),
            "Set actor_infer as in the recording run: rollout logprobs depend on it.",
        ),
    }
    must_match |= {
        f"determinism.{name}": (value, "Set system_envs as in the recording run.")
        for name, value in determinism_contract(settings).items()
        if name not in _MACHINE
    }
    may_differ: dict[str, JSON] = {
        "parallel": config.parallel.model_dump(mode="json"),
        "training": config.training.model_dump(mode="json"),
        "precision": config.precision,
        "model.transformer_impl": config.model.transformer_impl,
        **{name: value for name, value in settings.items() if name.startswith("version.") or name in _MACHINE},
    }
    fields = [
        ContractField(name=name, value=value, rule=Rule.MUST_MATCH, advice=advice)
        for name, (value, advice) in must_match.items()
    ]
    fields += [
        ContractField(name=name, value=value, rule=Rule.MAY_DIFFER, advice="") for name, value in may_differ.items()
    ]
    return Contract(fields)


def _environments(config: PipelineConfig, manager: EnvManagerConfig) -> JSON:
    environments = {tag: config.custom_envs[tag].model_dump(mode="json") for tag in sorted(set(manager.tags))}
    return {**manager.model_dump(mode="json"), "custom_envs": environments}
