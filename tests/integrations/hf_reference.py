"""Makes a small Hugging Face checkpoint of each family, and computes its logits by transformers.

``python -m tests.integrations.hf_reference FOLDER TOKENS``: into ``FOLDER/{kind}`` goes the checkpoint, and into
``FOLDER/reference/{kind}.safetensors`` the logits in ``float32`` and ``float64`` of the tokens in the file ``TOKENS``.
transformers computes norms, rotary embedding, router and softmax in float32 whatever the model's dtype; for float64
they are widened here. Imports nothing of this project, and runs apart from Megatron.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode

_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "decoder_sparse_step": 1}
# So short that some waves are stretched, some are not, and some lie between.
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
#: The class of each kind, its further settings, and the largest bytes of a file.
KINDS: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}, "1GB"),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 12}, "60KB"),
    "qwen3_wide_heads": ("Qwen3", {"head_dim": 32}, "1GB"),
    "llama": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.5}}, "60KB"),
    "llama3": ("Llama", {"head_dim": 16, "rope_parameters": _LLAMA3}, "1GB"),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}, "100KB"),
    "qwen2_moe": (
        "Qwen2Moe",
        {**_EXPERTS, "norm_topk_prob": False, "mlp_only_layers": [], "shared_expert_intermediate_size": 56},
        "1GB",
    ),
    "qwen3_moe": ("Qwen3Moe", {**_EXPERTS, "head_dim": 12, "norm_topk_prob": True, "mlp_only_layers": [2]}, "1GB"),
    "qwen3_moe_unnormed": ("Qwen3Moe", {**_EXPERTS, "head_dim": 12, "norm_topk_prob": False}, "1GB"),
}


class _Widening(TorchFunctionMode):
    """Lets every conversion to float32 be one to float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if one is torch.float32 else one for one in args)
        wide = {name: torch.float64 if one is torch.float32 else one for name, one in (kwargs or {}).items()}
        return func(*args, **wide)


def build(kind: str) -> Any:
    """A model of this kind with random weights, norms and biases included."""
    name, own, _ = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**{**_COMMON, **own})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith("norm.weight"):
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.normal_(std=0.1)
    return model


@torch.no_grad()
def compute_logits(folder: Path, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The logits of a saved model, ``[rows, length, V]``."""
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager", "experts_implementation": "eager"}
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    if dtype is not torch.float64:
        return model(tokens).logits
    with _Widening():
        rotary = model.model.rotary_emb
        rotary.inv_freq = frequencies(rotary)
        logits: torch.Tensor = model(tokens).logits
    return logits


def frequencies(rotary: Any) -> torch.Tensor:
    """The frequencies of a rotary embedding, in float64 where conversions are widened."""
    kind = rotary.rope_type
    compute = rotary.compute_default_rope_parameters
    if kind != "default":
        compute = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind]
    found: torch.Tensor = compute(rotary.config, torch.device("cpu"))[0]
    return found


def main() -> None:
    """All kinds."""
    root, tokens = Path(sys.argv[1]), load_file(sys.argv[2])["tokens"]
    torch.set_num_threads(1)
    (root / "reference").mkdir(parents=True, exist_ok=True)
    for kind, (_, _, largest) in KINDS.items():
        build(kind).save_pretrained(root / kind, max_shard_size=largest)
        logits = {
            name: compute_logits(root / kind, tokens, dtype)
            for name, dtype in (("float32", torch.float32), ("float64", torch.float64))
        }
        save_file(logits, root / "reference" / f"{kind}.safetensors")


if __name__ == "__main__":
    main()
