"""Reads what a machine has and lacks for the checks: ``python -m benchmarks.gpu_check.machine DEVICE`` prints JSON.
The last line counts.

A process of its own reads it, since a broken driver can end the process that asks it. Imports the standard library
alone before it knows that torch is there.
"""

from __future__ import annotations

import json
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

#: Distribution -> its module, of all that the checks and this project import; ``setup.py`` has the ranges.
NEEDED: Mapping[str, str] = {
    "torch": "torch",
    "anyio": "anyio",
    "megatron-core": "megatron.core",
    "fsspec": "fsspec",
    "gymnasium": "gymnasium",
    "httpx": "httpx",
    "hydra-core": "hydra",
    "isal": "isal",
    "jinja2": "jinja2",
    "numpy": "numpy",
    "omegaconf": "omegaconf",
    "plotly": "plotly",
    "psutil": "psutil",
    "pydantic": "pydantic",
    "pyyaml": "yaml",
    "rich": "rich",
    "safetensors": "safetensors",
    "starlette": "starlette",
    "tensorboard": "tensorboard",
    "typer": "typer",
    "uvicorn": "uvicorn",
}
_SHOWN = ("transformer-engine", "transformer-engine-torch", "flash-attn", "apex", "triton", "causal-conv1d")
TRANSFORMER_ENGINE = "transformer_engine_torch"


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Holds what was found. lacking: distributions of ``NEEDED``. capability: of the first GPU, as (9, 0).

    transformer_engine: why its layers cannot compute here; empty where they can. mps: whether CUDA's Multi-Process
    Service can be started.
    """

    device: str
    python: str = ""
    gpus: tuple[str, ...] = ()
    capability: tuple[int, int] = (0, 0)
    torch: str = ""
    cuda: str = ""
    nccl: str = ""
    cuda_problem: str = ""
    lacking: tuple[str, ...] = ()
    transformer_engine: str = "not looked for"
    mps: bool = False
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def has_transformer_engine(self) -> bool:
        """Whether its layers can compute."""
        return not self.transformer_engine

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> Machine:
        """Reads what ``main`` printed."""
        lists = {name: tuple(content[name]) for name in ("gpus", "capability", "lacking")}
        return cls(**{**content, **lists})


def is_there(module: str) -> bool:
    """Whether a module can be found, without importing it (but for the packages around it)."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def read_versions() -> dict[str, str]:
    """Reads the installed versions of what the checks use, by distribution."""
    found: dict[str, str] = {}
    for name in (*NEEDED, *_SHOWN):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def read_machine(device: str) -> Iterator[Machine]:
    """Reads this machine, with more from one to the next; starts CUDA where ``device`` is ``cuda``.

    The import of a broken TransformerEngine can end the process: what is known before it is given before it.
    """
    lacking = tuple(name for name, module in NEEDED.items() if not is_there(module))
    found: dict[str, Any] = {"python": platform.python_version(), "lacking": lacking, "versions": read_versions()}
    found["mps"] = shutil.which("nvidia-cuda-mps-control") is not None
    found["transformer_engine"] = "TransformerEngine is not installed"
    if "torch" not in lacking:
        found |= _read_torch(device)
    if found.get("gpus") and not found.get("cuda_problem") and is_there("transformer_engine"):
        ended = "the import of transformer_engine.pytorch ended the process, or took too long"
        yield Machine(device=device, **{**found, "transformer_engine": ended})
        found["transformer_engine"] = _transformer_engine_problem()
    yield Machine(device=device, **found)


def _read_torch(device: str) -> dict[str, Any]:
    import torch  # not before it is known to be there

    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda or ""}
    if device == "cpu":
        return found | {"transformer_engine": "its kernels need a GPU"}
    if not torch.cuda.is_available():
        built = "no CUDA GPU is visible" if torch.version.cuda else "this torch was built without CUDA"
        return found | {"cuda_problem": built, "transformer_engine": f"its kernels need a GPU, and {built}"}
    try:
        count = torch.cuda.device_count()
        found["gpus"] = tuple(torch.cuda.get_device_name(index) for index in range(count))
        found["capability"] = torch.cuda.get_device_capability(0)
        torch.zeros(1, device="cuda").add_(1).item()
        if torch.distributed.is_nccl_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    except RuntimeError as error:
        problem = f"CUDA does not compute: {error}"
        return found | {"cuda_problem": problem, "transformer_engine": problem}
    return found


def _transformer_engine_problem() -> str:
    try:
        import transformer_engine.pytorch  # noqa: F401 - a broken build shows here alone
    except Exception as error:  # noqa: BLE001 - whatever its libraries raise, it cannot be used, and the text says why
        return f"transformer_engine.pytorch cannot be imported: {error}"
    return ""


if __name__ == "__main__":
    for machine in read_machine(sys.argv[1]):
        print(json.dumps(asdict(machine)), flush=True)
