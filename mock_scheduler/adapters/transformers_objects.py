"""A model and a tokenizer of Hugging Face, described by what they are.

Contract: attributes are read by name, and transformers is not imported.
"""

from __future__ import annotations

from typing import Any

from mock_scheduler.support.digests import JSON, compute_json_digest

#: Of a model's configuration: neither its name nor how it is computed (precision, attention) makes it another one.
_MODEL = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
)


def describe_model(config: Any) -> dict[str, JSON]:  # noqa: ANN401 - transformers'
    """Describe a model's kind and size by its configuration, that of the text part; empty where it has none."""
    text = getattr(config, "get_text_config", lambda: config)()
    found = {name: getattr(text, name, None) for name in _MODEL}
    return {name: value for name, value in found.items() if type(value) in (str, int, bool)}


def describe_tokenizer(tokenizer: Any) -> str:  # noqa: ANN401 - transformers'
    """Give the digest of a tokenizer: its vocabulary, its merges where it shows them, and its special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    whole: JSON = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
    special = {name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items())}
    return compute_json_digest([whole, special])
