"""All dialects use these to read another framework's section and to build a ``rollout_mock`` of it.

A user may paste verl's own sections whole. Contract: keys that verl has there, or may have in another release, are set
aside and named; a misspelt key is kept, so the schema refuses it with the nearest. Source of the names:
``rollout/rollout.yaml``, ``data/legacy_data.yaml`` and ``ppo_trainer.yaml`` of ``verl/trainer/config``, in several
releases.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TypeVar

from pydantic import ValidationError

from mock_scheduler.config.base import ConfigSection
from mock_scheduler.config.problems import raise_problems, validation_problems
from mock_scheduler.config.rollout_mock import RolloutMockConfig
from mock_scheduler.support.text import list_some

Section = TypeVar("Section", bound=ConfigSection)


def read_section(model: type[Section], values: Mapping[str, object], *, section: str, origin: str) -> Section:
    """Returns a foreign section as its model; ConfigError lists every problem under ``section``'s dotted key."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise_problems(origin, validation_problems(error, model, section=section))


def build_rollout_mock(source: str, fields: Mapping[str, object], *, remark: str = "") -> RolloutMockConfig:
    """Builds the enabled section with these fields; its ``origin`` names ``source``, its translation and ``remark``.

    Raises ``ConfigError`` for values refused by ``rollout_mock``.
    """
    try:
        config = RolloutMockConfig.model_validate({"enable": True, **fields})
    except ValidationError as error:
        raise_problems(source, validation_problems(error, RolloutMockConfig, section="rollout_mock"))
    return config.model_copy(update={"origin": describe_translation(source, config) + remark})


def describe_translation(source: str, config: RolloutMockConfig) -> str:
    """Returns ``verl's actor_rollout_ref.rollout.skip_rollout became rollout_mock: mode=cache, dump_dir=/data/…``."""
    retention = config.retention
    values = {
        "mode": config.mode,
        "dump_dir": config.dump_dir,
        "schedule": "; ".join(entry.describe() for entry in config.schedule),
        "steps": config.steps,
        "missing_step": config.missing_step if config.missing_step != "error" else None,
        "retention.keep_last": retention.keep_last,
        "retention.pin_steps": retention.pin_steps,
    }
    shown = ", ".join(f"{key}={value}" for key, value in values.items() if value)
    return f"{source} became rollout_mock: {shown}"


_KEYS = {
    "actor_rollout_ref": "_target_ actor hybrid_engine model nccl_timeout ref",
    "actor_rollout_ref.rollout": """
        _target_ agent calculate_log_probs chat_scheduler checkpoint_engine cudagraph_capture_sizes data_parallel_size
        disable_log_stats do_sample dtype enable_chunked_prefill enable_prefix_caching enable_rollout_routing_replay
        enforce_eager engine_kwargs expert_parallel_size free_cache_engine gpu_memory_utilization ignore_eos
        layered_summon load_format log_prob_max_token_len_per_gpu log_prob_micro_batch_size
        log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz logprobs_mode max_model_len max_num_batched_tokens
        max_num_seqs mode mtp multi_stage_wake_up multi_turn name over_sample_rate pipeline_model_parallel_size profiler
        prometheus prompt_length qat quantization quantization_config_file response_length scheduling_policy
        skip_tokenizer_init temperature tensor_model_parallel_size top_k top_p trace update_weights_bucket_megabytes
        use_fire_sampling val_kwargs""",
    "trainer": """
        balance_batch critic_warmup default_hdfs_dir default_local_dir del_local_ckpt_after_load device
        log_val_generations logger max_actor_ckpt_to_keep max_critic_ckpt_to_keep n_gpus_per_node nnodes
        ray_wait_register_center_timeout resume_from_path resume_mode rollout_data_dir save_freq test_freq total_epochs
        total_training_steps val_before_train val_only validation_data_dir""",
    "data": """
        apply_chat_template_kwargs custom_cls databuffer datagen dataloader_num_workers filter_overlong_prompts
        filter_overlong_prompts_workers image_key image_patch_size prompt_key return_full_prompt
        return_multi_modal_inputs return_raw_chat return_raw_input_ids reward_fn_key sampler seed shuffle tokenizer
        tool_config_path train_files train_max_samples truncation trust_remote_code use_shm val_batch_size val_files
        val_max_samples validation_shuffle video_key""",
}
#: Section -> verl's keys there without a word about recording or replaying.
NOT_READ: Mapping[str, frozenset[str]] = {section: frozenset(names.split()) for section, names in _KEYS.items()}

_NUM_NAMED = 12
_CLOSE = 0.75  # as skip_dir is to skip_dump_dir; names of different things are further apart


def set_aside_unread(
    model: type[ConfigSection], values: Mapping[str, object], *, section: str = ""
) -> tuple[dict[str, object], list[str]]:
    """Splits values into the ones for ``model`` to check, and the dotted keys that nothing here reads.

    ``section``: the dotted key at which ``model`` stands; ``""`` for the model of all sections. An empty section is
    left out, as an absent one.
    """
    kept: dict[str, object] = {}
    unread: list[str] = []
    for name, value in values.items():
        key = f"{section}.{name}" if section else name
        field = model.model_fields.get(name)
        if field is None:
            if section in NOT_READ and not _is_mistaken(name, model, section):
                unread.append(key)
            else:
                kept[name] = value
        elif isinstance(field.annotation, type) and issubclass(field.annotation, ConfigSection):
            if isinstance(value, Mapping):
                named = {str(inner): item for inner, item in value.items()}
                kept[name], more = set_aside_unread(field.annotation, named, section=key)
                unread += more
            elif value is not None:
                kept[name] = value
        else:
            kept[name] = value
    return kept, unread


def describe_unread(keys: Iterable[str]) -> str:
    """Returns ``; not read: actor_rollout_ref.actor; trainer.logger, nnodes``, by section; empty without keys."""
    by_section: dict[str, list[str]] = {}
    for key in keys:
        section, _, name = key.rpartition(".")
        by_section.setdefault(section, []).append(name)
    if not by_section:
        return ""
    return "; not read: " + "; ".join(
        f"{section}.{list_some(names, _NUM_NAMED, ', ')}" for section, names in by_section.items()
    )


def _is_mistaken(name: str, model: type[ConfigSection], section: str) -> bool:
    """Says whether a key resembles one that is read, and is no key of verl's."""
    if name in NOT_READ[section]:
        return False
    return name.startswith("skip") or bool(get_close_matches(name, model.model_fields, n=1, cutoff=_CLOSE))
