"""On a GPU: a replay in the same layout is equal to the last bit, with local layers and with TransformerEngine's."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from mock_scheduler.cli import main

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU is visible"),
    pytest.mark.timeout(280),
]
needs_te = pytest.mark.skipif(find_spec("transformer_engine") is None, reason="transformer_engine is not installed")


@pytest.mark.parametrize("impl", ["local", pytest.param("transformer_engine", marks=needs_te)])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_replay_in_the_same_layout_is_identical_on_a_gpu(tmp_path: Path, impl: str, precision: str) -> None:
    overrides = [
        f"model.transformer_impl={impl}",
        f"actor_infer.use_kv_cache={str(impl == 'local').lower()}",
        f"precision={precision}",
        "max_steps=3",
        "align.candidates=[{name: replay}]",
        "align.tolerance={metric: 0, gradient: 0, update: 0}",
    ]
    code = main(["align", "quickstart", *overrides, "--output-dir", str(tmp_path / "align")])
    result = json.loads((tmp_path / "align" / "align.json").read_text())
    assert [candidate["verdict"] for candidate in result["candidates"]] == ["identical"]
    assert code == 0
