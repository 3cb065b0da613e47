"""Makes a small random Qwen3 with a tokenizer of bytes, as a Hugging Face checkpoint; the same bits every time.

    python launch/make_tiny_qwen3.py FOLDER [--layers 4] [--hidden 128] [--seed 0] [--tied]

Every byte is a token, so any text can be written; three further tokens end a text, and begin and end a message in the
chat template (ChatML). transformers, vLLM and ``model.hf_checkpoint`` read the folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from mock_scheduler.support.arguments import ArgumentParser

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_VOCAB_SIZE = len(_SPECIAL) + 256
_HEAD = 32
_STD = 0.02
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_config(*, num_layers: int, hidden: int, is_tied: bool) -> dict[str, Any]:
    """The fields of ``config.json``."""
    heads = hidden // _HEAD
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "float32",
        "eos_token_id": 2,
        "head_dim": _HEAD,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": _STD,
        "intermediate_size": 3 * hidden,
        "max_position_embeddings": 4096,
        "num_attention_heads": heads,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": max(1, heads // 2),
        "pad_token_id": 0,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "sliding_window": None,
        "tie_word_embeddings": is_tied,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": _VOCAB_SIZE,
    }


def list_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor with its shape."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries, keys = (_HEAD * config[name] for name in ("num_attention_heads", "num_key_value_heads"))
    yield "model.embed_tokens.weight", (_VOCAB_SIZE, hidden)
    for layer in range(config["num_hidden_layers"]):
        own = f"model.layers.{layer}."
        yield from ((f"{own}{name}layernorm.weight", (hidden,)) for name in ("input_", "post_attention_"))
        yield f"{own}self_attn.q_proj.weight", (queries, hidden)
        yield from ((f"{own}self_attn.{name}_proj.weight", (keys, hidden)) for name in "kv")
        yield f"{own}self_attn.o_proj.weight", (hidden, queries)
        yield from ((f"{own}self_attn.{name}_norm.weight", (_HEAD,)) for name in "qk")
        yield from ((f"{own}mlp.{name}_proj.weight", (inner, hidden)) for name in ("gate", "up"))
        yield f"{own}mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (_VOCAB_SIZE, hidden)


def make_tensor(name: str, shape: tuple[int, ...], *, seed: int, num_layers: int) -> torch.Tensor:
    """Norms are 1; all else is normal, and smaller by depth where it is added to the residual stream."""
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    key = hashlib.sha256(f"tiny-qwen3/{seed}/{name}".encode()).digest()[:16]
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    std = _STD / (2 * num_layers) ** 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else _STD
    return torch.from_numpy((generator.standard_normal(shape) * std).astype(np.float32))


def make_tokenizer() -> dict[str, Any]:
    """The content of ``tokenizer.json``: byte-level BPE without merges."""
    # GPT-2's letters for bytes: printable ones stand for themselves, the others for letters from 256 on.
    own = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in own]
    letters = [chr(byte) if byte in own else chr(256 + others.index(byte)) for byte in range(256)]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocabulary = {token: number for number, token in enumerate([*_SPECIAL, *letters])}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": text, **plain} for number, text in enumerate(_SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }


def write(folder: Path, *, num_layers: int = 4, hidden: int = 128, seed: int = 0, is_tied: bool = False) -> None:
    """Writes the checkpoint to a new folder."""
    config = make_config(num_layers=num_layers, hidden=hidden, is_tied=is_tied)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _SPECIAL[2],
        "pad_token": _SPECIAL[0],
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        "chat_template": _TEMPLATE,
    }
    folder.mkdir(parents=True)
    documents = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": 2, "pad_token_id": 0},
        "tokenizer.json": make_tokenizer(),
        "tokenizer_config.json": settings,
    }
    for name, content in documents.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    tensors = {name: make_tensor(name, shape, seed=seed, num_layers=num_layers) for name, shape in list_shapes(config)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    """Reads the command line."""
    parser = ArgumentParser(description="Make a small random Qwen3 checkpoint with a tokenizer of bytes.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128, help=f"a multiple of {2 * _HEAD}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tied", action="store_true", help="the output head is the embedding")
    given = parser.parse_args()
    if given.folder.exists() or given.layers < 1 or given.hidden < 1 or given.hidden % (2 * _HEAD):
        parser.error(f"give a new folder, at least one layer, and a hidden size that is a multiple of {2 * _HEAD}")
    write(given.folder, num_layers=given.layers, hidden=given.hidden, seed=given.seed, is_tied=given.tied)
    print(f"wrote {given.folder}")


if __name__ == "__main__":
    main()
