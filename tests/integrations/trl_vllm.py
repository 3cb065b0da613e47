"""vLLM's CPU build behind TRL: its own ``VLLMGeneration`` in colocate mode, which is for GPUs."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any
from unittest import mock

from trl.generation import vllm_generation


def build_host_engine(calls: dict[str, int], **options: Any) -> Any:
    """Build TRL's own ``VLLMGeneration`` on vLLM's CPU build; only its weights go another way.

    TRL loads weights into the layers of the engine's model; those of a CPU have none left once they are packed.
    """

    class HostGeneration(vllm_generation.VLLMGeneration):
        def sync_weights(self) -> None:
            with tempfile.TemporaryDirectory() as folder:
                self.model.save_pretrained(folder)
                self.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
            self.llm.reset_prefix_cache()

        def generate(self, *arguments: Any, **given: Any) -> Any:
            calls["generate"] += 1
            return super().generate(*arguments, **given)

    calls["engine"] += 1
    # Compiling, and attention in pieces, are a GPU's.
    build = partial(vllm_generation.LLM, enforce_eager=True, enable_chunked_prefill=False, dtype="float32")
    with mock.patch.object(vllm_generation, "LLM", build):
        return HostGeneration(**options)
