"""The contract of an agentic run tells which keys must match in a replay and which may differ.

A recording promises it, and a run that replays the recording must keep it. A key must match if rollouts follow from it
(``Decides.ROLLOUTS`` at its field), and may differ if it decides training, bits, order or execution alone. The keys
with their rules stand in ``docs/configuration.md``.
"""

from __future__ import annotations

from collections.abc import Mapping

from mock_scheduler.config.base import Decides, Mode
from mock_scheduler.determinism.guard import is_repeatability_setting
from mock_scheduler.recording.contract import Contract, ContractField, Match, Rule
from mock_scheduler.support.digests import JSON
from pipelines.config.schema import PipelineConfig
from pipelines.environments.grid_tokens import GridTokenizer
from pipelines.environments.registry import vocab_size_in_effect
from pipelines.keys import effect_of, keys_in_effect
from pipelines.megatron.weights import compute_initial_weights_digest
from pipelines.rollout.plan import first_episode

# What may be the thing that is compared: layout, algorithm, optimizer, precision, kernels.
_CHANGEABLE = Decides.TRAINING | Decides.BITS | Decides.ORDER | Decides.EXECUTION

# The order in which recordings list their fields; a key below none of these comes last, in the schema's order.
_LISTED_FIRST = (
    *("model.transformer_impl", "model.attention_backend", "model.make_vocab_size_divisible_by"),
    *("model.moe_router_impl", "model", "sequence_length", "rollout_form", "rollout_batch_size", "val_batch_size"),
    *("actor_infer", "train_env_manager", "val_env_manager", "custom_envs"),
    *("parallel", "training", "precision", "max_steps", "eval_steps", "order", "perturbation", "graft"),
)

_MODES: tuple[Mode, ...] = ("train", "val")
_VERSION_PREFIX = "version."
_CPU_CAPABILITY = "version.cpu_capability"  # the name of an instruction set


def build_contract(
    config: PipelineConfig,
    tokenizer: GridTokenizer,
    settings: Mapping[str, str],
    *,
    weights_digest: str | None = None,
) -> Contract:
    """Builds every field of the contract.

    A run that goes on from a checkpoint has the contract of its beginning; the data cursor of each request is checked
    step by step.

    Args:
        tokenizer: the one of all environments of the run.
        settings: the determinism settings read back in this process.
        weights_digest: of the weights of ``model.hf_checkpoint``, where the model begins with them.
    """
    vocab_size = vocab_size_in_effect(config, tokenizer)
    derived = _derived(config, tokenizer, vocab_size=vocab_size, weights_digest=weights_digest)
    names = {field.name for field in derived}
    configured = [field for field in _configured(config, vocab_size=vocab_size) if field.name not in names]
    return Contract(
        [
            *derived,
            *(field for field in configured if field.rule is Rule.MUST_MATCH),
            *(
                _must_match(f"determinism.{name}", value, "Set system_envs as in the recording run.")
                for name, value in settings.items()
                if is_repeatability_setting(name)
            ),
            *(field for field in configured if field.rule is Rule.MAY_DIFFER),
            *(_may_differ(name, value) for name, value in settings.items() if not is_repeatability_setting(name)),
        ]
    )


def _derived(
    config: PipelineConfig, tokenizer: GridTokenizer, *, vocab_size: int, weights_digest: str | None
) -> list[ContractField]:
    """Builds the fields that follow from several keys, and the one whose advice is its own."""
    return [
        ContractField(
            name="vocabulary",
            value=tokenizer.digest(),
            rule=Rule.MUST_MATCH,
            advice=f"The recorded token ids mean something else here ({tokenizer.vocab_size} tokens now): use the "
            "recording run's environments.",
            match=Match.DIGEST,
        ),
        _must_match("model.vocab_size", vocab_size),
        _must_match("seed", config.seed, "The initial weights follow from seed: set it as in the recording run."),
        _initial_weights(config, vocab_size, weights_digest),
        _must_match(
            "data_cursor",
            {mode: {"first_episode": first_episode(config, mode, 0)} for mode in _MODES},
            "The run begins at other episodes than the recorded one: start it where that began.",
        ),
    ]


def _initial_weights(config: PipelineConfig, vocab_size: int, weights_digest: str | None) -> ContractField:
    advice = "They follow from seed, the model section and the vocabulary: set these as in the recording run."
    if config.model.hf_checkpoint is not None:
        advice = "They are those of model.hf_checkpoint: give the checkpoint of the recording run."
    return ContractField(
        name="initial_weights",
        value=weights_digest
        or compute_initial_weights_digest(
            config.model, vocab_size=vocab_size, sequence_length=config.sequence_length, seed=config.seed
        ),
        rule=Rule.MUST_MATCH,
        advice=advice,
        match=Match.DIGEST,
    )


def _must_match(name: str, value: JSON, advice: str | None = None) -> ContractField:
    advice = advice or f"Set {name} as in the recording run."
    return ContractField(name=name, value=value, rule=Rule.MUST_MATCH, advice=advice)


def _may_differ(name: str, value: JSON) -> ContractField:
    return ContractField(name=name, value=value, rule=Rule.MAY_DIFFER, advice="", match=_match_of(name))


def _match_of(name: str) -> Match:
    """Says how a field that may differ is compared; the words about a difference follow from it.

    More steps than recorded are no breach: cache and a resumed dump add them, and mock names each missing step.
    """
    if name == "max_steps":
        return Match.AT_MOST
    is_version = name.startswith(_VERSION_PREFIX) and name != _CPU_CAPABILITY
    return Match.VERSION if is_version else Match.EQUAL


def _configured(config: PipelineConfig, *, vocab_size: int) -> list[ContractField]:
    """Puts each key under its rule: it must match where rollouts follow from it, and may differ elsewhere.

    The other keys decide neither rollouts nor training, or are compared as they are read back.
    """
    values = keys_in_effect(config, vocab_size=vocab_size)
    fields = []
    for key in sorted(values, key=_place_in_list):
        facts = effect_of(key)
        if Decides.ROLLOUTS in facts:
            fields.append(_must_match(key, values[key]))
        elif facts & _CHANGEABLE:
            fields.append(_may_differ(key, values[key]))
    return fields


def _place_in_list(key: str) -> int:
    places = (place for place, name in enumerate(_LISTED_FIRST) if key == name or key.startswith(f"{name}."))
    return next(places, len(_LISTED_FIRST))
