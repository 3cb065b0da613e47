"""What verl 0.9.1 needs to train on a CPU, as one of its own external modules: ``VERL_USE_EXTERNAL_MODULES``.

verl knows accelerators alone: here is a platform ``cpu`` for its registry, and servers that sample by a hash, in the
place of an engine. What they do is counted in the file that ``VERL_COUNTS`` names, one line for each event, from
whichever process.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
from collections.abc import AsyncIterator, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.workers.rollout import base, llm_server
from verl.workers.rollout.replica import TokenOutput

VOCABULARY = 250


def count(event: str) -> None:
    with open(os.environ["VERL_COUNTS"], "a", encoding="utf-8") as file:
        file.write(f"{event}\n")


def _device_module() -> ModuleType:
    """The functions of ``torch.cuda`` that verl calls, of a device without memory of its own."""
    module: Any = ModuleType("torch_cpu_device")
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(module, name, lambda *_a, **_k: 0)
    for name in ("empty_cache", "synchronize", "set_device", "ipc_collect", "reset_peak_memory_stats", "manual_seed"):
        setattr(module, name, lambda *_a, **_k: None)
    module.manual_seed_all = module.set_per_process_memory_fraction = module.manual_seed
    module.is_available = module.is_bf16_supported = lambda *_a: True
    module.device_count = lambda: 1
    module.mem_get_info = lambda *_a: (1 << 30, 1 << 31)
    module.get_rng_state = lambda *_a: torch.get_rng_state()
    module.set_rng_state = lambda state, *_a: torch.set_rng_state(state)
    module.get_device_name = lambda *_a: "cpu"
    module.current_device = lambda: torch.device("cpu")
    module.memory = SimpleNamespace(_record_memory_history=module.manual_seed, _dump_snapshot=module.manual_seed)
    return module


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    device_name = "cpu"
    vendor_name = "host"
    device_module = _device_module()

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_gpus": num_gpus}

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        return {}

    def get_collective_module(self) -> None: ...

    def cudart(self) -> None: ...


class Worker:
    """A training worker's end of the engine: it takes the weights."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any) -> None: ...

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(self, weights: Any, **_options: Any) -> None:
        count("weights")
        async for _ in _each(weights):
            pass


async def _each(weights: Any) -> AsyncIterator[Any]:
    if hasattr(weights, "__aiter__"):
        async for item in weights:
            yield item
    else:
        for item in weights:
            yield item


class Client:
    """Samples tokens by a hash of the prompt and the row, so every run that plays plays alike."""

    async def generate(self, request_id: str, *, prompt_ids: list[int], priority: int = 0, **options: Any) -> Any:
        count("generate")
        seed = hashlib.sha256(repr((prompt_ids, priority, options["sampling_params"])).encode()).digest()
        draw = random.Random(seed)
        tokens = [draw.randrange(3, VOCABULARY) for _ in range(draw.randrange(1, 13))]
        return TokenOutput(
            token_ids=tokens,
            log_probs=[-5.5 - draw.random() for _ in tokens],
            stop_reason="completed",
            extra_fields={"global_steps": None},
        )


class Servers:
    """Stands for ``LLMServerManager`` where a run plays."""

    @classmethod
    def create(cls, *_arguments: Any, **_options: Any) -> Servers:
        count("engine")
        return cls()

    def get_client(self, *_arguments: Any, **_options: Any) -> Client:
        return Client()

    def get_replicas(self) -> list[Any]:
        return []


_init_process_group: Any = dist.init_process_group


def _init(backend: str | None = None, *arguments: Any, **options: Any) -> Any:
    # verl asks for "cpu:gloo,<device>:<backend>", which torch refuses where the device is the CPU.
    is_both = isinstance(backend, str) and backend.startswith("cpu:gloo")
    return _init_process_group("gloo" if is_both else backend, *arguments, **options)


dist.init_process_group = _init
base._ROLLOUT_REGISTRY[("toy", "async")] = f"{__name__}.Worker"
llm_server.LLMServerManager.create = Servers.create
