"""Makes the environment of the checks' processes; imports the standard library alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

#: The folder of the checkout, from which children are started.
ROOT = Path(__file__).parents[2]
#: What every deterministic run exports (``configs/base.yaml``).
DETERMINISTIC: Mapping[str, str] = {
    "DETERMINISTIC_MODE": "1",
    "PYTHONHASHSEED": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "NCCL_ALGO": "Ring",
    "NCCL_NVLS_ENABLE": "0",
}


def child_environment(device: str, **more: str) -> dict[str, str]:
    """Makes the environment of a check's processes; on the CPU no GPU is visible to them."""
    environment = {**os.environ, **DETERMINISTIC, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **more}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment
