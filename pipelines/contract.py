"""The contract of an agentic run: what a recording promises, and what a run that replays it must keep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mock_scheduler.config.schema import ConfigSection, PipelineConfig
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
    fields = [
        _must_match(
            "vocabulary",
            tokenizer.digest(),
            f"The recorded token ids mean something else here ({tokenizer.vocab_size} tokens now): use the recording "
            "run's environments.",
        ),
        _must_match("model.vocab_size", config.model.vocab_size or tokenizer.vocab_size),
        _must_match("seed", config.seed, "The initial weights follow from seed: set it as in the recording run."),
        *(_must_match(name, value) for name, value in _configured(config).items()),
        *(
            _must_match(f"determinism.{name}", value, "Set system_envs as in the recording run.")
            for name, value in determinism_contract(settings).items()
            if name not in _MACHINE
        ),
        *(_may_differ(name, value) for name, value in _changeable(config, settings).items()),
    ]
    return Contract(fields)


def _must_match(name: str, value: JSON, advice: str | None = None) -> ContractField:
    advice = advice or f"Set {name} as in the recording run."
    return ContractField(name=name, value=value, rule=Rule.MUST_MATCH, advice=advice)


def _may_differ(name: str, value: JSON) -> ContractField:
    return ContractField(name=name, value=value, rule=Rule.MAY_DIFFER, advice="")


def _configured(config: PipelineConfig) -> dict[str, JSON]:
    """The keys of the configuration that decide what was played, one by one, by their dotted names."""
    tags = sorted({*config.train_env_manager.tags, *config.val_env_manager.tags})
    sections: dict[str, JSON] = {
        "model": {key: value for key, value in _dump(config.model).items() if key not in _IMPLEMENTATION},
        "sequence_length": config.sequence_length,
        "rollout_batch_size": config.rollout_batch_size,
        "val_batch_size": config.val_batch_size,
        "actor_infer": _dump(config.actor_infer),
        "train_env_manager": _dump(config.train_env_manager),
        "val_env_manager": _dump(config.val_env_manager),
        "custom_envs": {tag: _dump(config.custom_envs[tag]) for tag in tags},
    }
    return dict(_flatten("", sections))


def _changeable(config: PipelineConfig, settings: Mapping[str, str]) -> dict[str, JSON]:
    """What may be what is being compared: layout, batching, optimizer, precision, implementation, versions."""
    machine = {name: value for name, value in settings.items() if name.startswith("version.") or name in _MACHINE}
    sections: dict[str, JSON] = {
        "parallel": _dump(config.parallel),
        "training": _dump(config.training),
        "precision": config.precision,
        "model.transformer_impl": config.model.transformer_impl,
    }
    return dict(_flatten("", sections)) | machine


def _dump(section: ConfigSection) -> dict[str, JSON]:
    return section.model_dump(mode="json")


def _flatten(prefix: str, value: JSON) -> Iterator[tuple[str, JSON]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flatten(f"{prefix}.{key}" if prefix else key, item)
    else:
        yield prefix, value
