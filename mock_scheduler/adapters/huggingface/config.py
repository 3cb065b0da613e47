"""Reads a Hugging Face ``config.json`` as fields of Megatron's configuration; imports no torch.

Contract: nothing is guessed. Every field is either translated, known to leave the mathematics alone, or refused by its
name. A field that decides the mathematics must be there, unless its default is the same for every kind and release. All
problems are in one message. Read from transformers 5.12.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mock_scheduler.adapters.huggingface.architectures import (
    ARCHITECTURES,
    MIXTRAL_EXPERTS,
    Architecture,
    HuggingFaceModel,
)
from mock_scheduler.config.base import is_same_value
from mock_scheduler.errors import ConfigError
from mock_scheduler.support.foreign_files import load_json
from mock_scheduler.support.text import bullet_list, shorten

CONFIG_FILE = "config.json"


def read_model(folder: Path) -> HuggingFaceModel:
    """Reads the ``config.json`` of a folder; raises ``ConfigError`` with all that cannot be computed here."""
    path = folder / CONFIG_FILE
    try:
        content = load_json(path)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror or error}; give the folder of a Hugging Face checkpoint"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, expected an object with the fields of a model")
    return describe_model(content, origin=str(path))


def describe_model(content: Mapping[str, Any], *, origin: str) -> HuggingFaceModel:
    """Translates the fields of a ``config.json``; raises ``ConfigError``. ``origin``: the file, for messages."""
    kind, named = content.get("model_type"), content.get("architectures")
    known = ", ".join(sorted(ARCHITECTURES))
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ConfigError(f"{origin}: model_type is {kind!r}; this release reads {known}")
    architecture = ARCHITECTURES[kind]
    if named not in (None, [architecture.causal]):
        raise ConfigError(
            f"{origin}: architectures is {named!r}; of {kind} this release reads {architecture.causal}, the language "
            "model"
        )
    reader = _Reader(content, architecture)
    fields = reader.read()
    problems = list(dict.fromkeys(reader.problems))  # a field may count in two places
    if problems:
        raise ConfigError(f"{origin} describes a model that cannot be computed here:{bullet_list(problems, 50)}")
    return HuggingFaceModel(architecture=architecture, fields=fields)


#: Fields without an effect on logits, gradients and names: tokens and text, ways to run, initial values, versions.
_HARMLESS = frozenset(
    {
        *("model_type", "architectures", "transformers_version", "_name_or_path", "dtype", "torch_dtype"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id"),
        *("initializer_range", "max_position_embeddings", "use_cache", "pretraining_tp", "is_decoder"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "torchscript"),
        *("id2label", "label2id", "num_labels", "problem_type", "task_specific_params", "finetuning_task"),
        *(
            "is_llama_config",
            "_attn_implementation",
            "_attn_implementation_autoset",
            "attn_implementation",
            "use_flash_attention_2",
        ),
        # Weights of losses, which the configuration of the training gives.
        *("router_aux_loss_coef",),
    }
)
#: Fields that change the mathematics unless they have this value.
_ONLY: Mapping[str, object] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0,
    "partial_rotary_factor": 1,
    "rope_interleaved": False,
    "use_sliding_window": False,
    "use_mrope": False,
    "router_jitter_noise": 0,
    "quantization_config": None,
    "auto_map": None,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
    "chunk_size_feed_forward": 0,
}
_ROPE = ("rope_parameters", "rope_scaling", "rope_theta")
# Far beyond every model, so that nothing here or behind it is as long as a number in a file says.
_LARGEST = {"num_hidden_layers": 10_000}
_LARGEST_NUMBER = 1e12
_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(slots=True)
class _Reader:
    """Reads the fields one by one, and notes each problem."""

    content: Mapping[str, Any]
    architecture: Architecture
    problems: list[str] = field(default_factory=list)
    read_names: set[str] = field(default_factory=set)

    def read(self) -> dict[str, Any]:
        """Reads all fields; what is wrong is in ``problems``."""
        fields = {**self._sizes(), **self._rotary(), **self._experts()}
        self._check_windows()
        for name, only in {**_ONLY, **self._of_architecture()}.items():
            value = self._take(name, only)
            if value is not None and not is_same_value(value, only):
                self.problems.append(f"{name} is {_show(value)}; this release computes only {name} {_show(only)}")
        unknown = sorted(self.content.keys() - self.read_names - _HARMLESS)
        self.problems += [
            f"{name} is {_show(self.content[name])}: an unknown field of {self.content['model_type']} may "
            "change the mathematics; remove it from config.json where it does not"
            for name in unknown
        ]
        return fields

    def _of_architecture(self) -> dict[str, object]:
        """Lists fields that some files have although their kind of model leaves no choice."""
        own, fields = self.architecture, dict[str, object](use_qk_norm=self.architecture.has_qk_norm)
        if not own.has_qkv_bias:
            fields["qkv_bias"] = False
        if not own.has_shared_expert:
            fields["shared_expert_intermediate_size"] = 0
        return fields

    def _take(self, name: str, default: Any = None) -> Any:  # noqa: ANN401 - a value of JSON
        self.read_names.add(name)
        return self.content.get(name, default)

    def _size(self, *names: str, is_optional: bool = False) -> int | None:
        """Reads a positive integer; several names are spellings of one field, and must agree."""
        found = {name: value for name in names if (value := self._take(name)) is not None}
        if not found:
            if not is_optional:
                self.problems.append(f"{names[0]} is missing")
            return None
        for name, value in found.items():
            if type(value) is not int or not 0 < value <= _LARGEST.get(name, 2**31):
                self.problems.append(f"{name} is {_show(value)}, expected a positive integer")
                return None
        if len(set(found.values())) > 1:
            self.problems.append(
                f"{' and '.join(f'{name} {value}' for name, value in found.items())} contradict each other"
            )
        return int(next(iter(found.values())))

    def _number(self, name: str, values: Mapping[str, Any], *, where: str = "") -> float | None:
        value = values.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or value is None or not 0 < value <= _LARGEST_NUMBER:
            shown = "missing" if value is None else _show(value)
            self.problems.append(f"{where}{name} is {shown}, expected a positive number")
            return None
        return int(value) if float(value).is_integer() else float(value)

    def _flag(self, name: str, default: bool | None) -> bool:
        value = self._take(name, default)
        if not isinstance(value, bool):
            self.problems.append(f"{name} is {'missing' if value is None else _show(value)}, expected true or false")
        return bool(value)

    def _sizes(self) -> dict[str, Any]:
        heads, hidden = self._size("num_attention_heads"), self._size("hidden_size")
        # transformers has another default for each of its classes, so none is taken: Qwen3's is 128.
        head = self._size("head_dim", is_optional=not self.architecture.has_qk_norm)
        if head is None and heads and hidden:
            head = hidden // heads
            if hidden % heads:
                self.problems.append(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}")
        self.read_names.add("rms_norm_eps")
        return {
            "num_layers": self._size("num_hidden_layers"),
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_query_groups": self._size("num_key_value_heads"),
            "kv_channels": head,
            "ffn_hidden_size": self._size("intermediate_size"),
            "normalization": "RMSNorm",
            "layernorm_epsilon": self._number("rms_norm_eps", self.content),
            "swiglu": True,
            "add_bias_linear": False,
            "add_qkv_bias": self._flag("qkv_bias", True) if self.architecture.has_qkv_bias else False,
            "qk_layernorm": self.architecture.has_qk_norm,
            "untie_embeddings_and_output_weights": not self._flag("tie_word_embeddings", False),
            "vocab_size": self._size("vocab_size"),
        }

    def _rotary(self) -> dict[str, Any]:
        given = {name: self._take(name) for name in _ROPE}
        nested = [given[name] or {} for name in _ROPE[:2]]
        if not all(isinstance(one, dict) for one in nested):
            self.problems.append("rope_parameters and rope_scaling must be objects")
            return {}
        values: dict[str, Any] = {}
        for one in (*nested, {"rope_theta": given["rope_theta"]}):
            for name, value in one.items():
                name = "rope_type" if name == "type" else name
                if value is not None and not is_same_value(values.setdefault(name, value), value):
                    self.problems.append(f"rope: {name} is {_show(values[name])} and {_show(value)}")
        kind = values.get("rope_type", "default")
        allowed = {"rope_theta", "rope_type", "partial_rotary_factor"}
        scaling: dict[str, Any] | None = None
        if kind == "llama3":
            allowed |= set(_SCALING)
            scaling = {name: self._number(name, values, where="rope: ") for name in _SCALING}
        elif kind != "default":
            self.problems.append(f"rope: rope_type is {_show(kind)}; this release computes default and llama3")
            allowed |= set(values)
        if not is_same_value(values.get("partial_rotary_factor", 1), 1):
            self.problems.append(
                f"rope: partial_rotary_factor is {_show(values['partial_rotary_factor'])}; this release turns "
                "whole heads"
            )
        self.problems += [
            f"rope: {name} is {_show(values[name])}, which has no place in rope_type {kind}"
            for name in sorted(set(values) - allowed)
        ]
        theta = self._number("rope_theta", values)
        return {"position_embedding_type": "rope", "rotary_base": theta, "rope_scaling": scaling}

    def _check_windows(self) -> None:
        window = self._take("sliding_window")
        if self.architecture.has_window_switch:
            self.read_names.add("max_window_layers")
        elif window is not None:
            self.problems.append(f"sliding_window is {_show(window)}; this release attends to whole rows")
        kinds = self._take("layer_types") or []
        other = sorted({str(kind) for kind in kinds} - {"full_attention"}) if isinstance(kinds, list) else [str(kinds)]
        if other:
            self.problems.append(f"layer_types has {', '.join(other)}; this release computes full_attention alone")

    def _experts(self) -> dict[str, Any]:
        names = self.architecture.experts
        if names is None:
            return {"num_moe_experts": None}
        width = self._size(names.width)
        fields: dict[str, Any] = {
            "num_moe_experts": self._size(*names.count),
            "moe_ffn_hidden_size": width,
            "moe_router_topk": self._size("num_experts_per_tok"),
            "moe_router_score_function": "softmax",
            "moe_router_topk_scaling_factor": None,
            "moe_router_enable_expert_bias": False,
            # Mixtral and ``norm_topk_prob`` divide the chosen probabilities by their sum: the softmax of the chosen
            # logits. Without it the probabilities are those of the softmax over all experts.
            "moe_router_pre_softmax": names is not MIXTRAL_EXPERTS and not self._flag("norm_topk_prob", None),
            "moe_layer_freq": 1 if names is MIXTRAL_EXPERTS else self._sparse_layers(),
            "moe_shared_expert_intermediate_size": None,
            "moe_shared_expert_gate": False,
        }
        if self.architecture.has_shared_expert:
            fields["moe_shared_expert_intermediate_size"] = self._size("shared_expert_intermediate_size")
            fields["moe_shared_expert_gate"] = True
        return fields

    def _sparse_layers(self) -> int | list[int]:
        every, dense = self._size("decoder_sparse_step", is_optional=True) or 1, self._take("mlp_only_layers") or []
        if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
            self.problems.append(f"mlp_only_layers is {_show(dense)}, expected a list of layers")
            return 1
        num_layers = self._size("num_hidden_layers", is_optional=True)
        if num_layers is None:
            return 1
        dense = set(dense)
        sparse = [int(layer not in dense and (layer + 1) % every == 0) for layer in range(num_layers)]
        return 1 if all(sparse) else sparse


def _show(value: object) -> str:
    return shorten(json.dumps(value), 80)
