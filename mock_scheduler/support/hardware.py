"""Facts of this machine with an effect on the last bits of a run: its processor, its GPUs and their driver.

Contract: standard library only.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")
_QUERY_S = 20.0


def read_hardware() -> dict[str, str]:
    """Reads architecture, processor and GPUs, each in words; takes no memory of any GPU."""
    return {"architecture": platform.machine(), "processor": _read_processor(), "gpus": _read_gpus()}


def _read_processor() -> str:
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _read_gpus() -> str:
    """Names and driver, asked of the driver's own tool: torch would take memory of every GPU to tell."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "none"
    query = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_QUERY_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return "; ".join(done.stdout.split("\n")).strip("; ") or "none"
