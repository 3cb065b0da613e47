"""The fused kernels of sketches, in Triton's interpreter: slots, fingerprint and counts have the bits of the C file."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        find_spec("triton") is None, reason="triton is not installed: it comes with CUDA builds of torch"
    ),
]


def test_fused_kernels_have_the_bits_of_the_c_file() -> None:
    command = [sys.executable, "-m", "tests.integrations.fused_sketch_run"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"count": 48, "differences": [], "agrees": True}
