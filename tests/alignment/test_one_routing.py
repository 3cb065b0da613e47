"""A policy with experts aligned in bfloat16 under ep2 and tp2: without replayed routing tokens change their experts.

With it no token that the engine has read does, and what is left is rounding; the emulation of the candidate's order
replays the routing too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from mock_scheduler.trace.full.reader import open_trace
from tests.pipelines.tiny_runs import read_json, run_cli, write_tiny_config

pytestmark = [pytest.mark.all, pytest.mark.timeout(1800)]

EXPERTS = (
    *("precision=bfloat16", "model.num_moe_experts=16", "model.moe_router_topk=4", "model.moe_ffn_hidden_size=32"),
    "actor_infer.record_routed_experts=true",
)
LAYOUTS = {
    "dp2-ep2": ("parallel.data_parallel_size=2", "parallel.expert_model_parallel_size=2"),
    "tp2-sp-ep2": (
        *("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"),
        "parallel.expert_model_parallel_size=2",
    ),
}


def align(folder: Path, replay: str) -> Mapping[str, dict[str, Any]]:
    """What ``align.json`` says of each layout."""
    texts = [f"{{name: {name}, overrides: [{', '.join(map(repr, overrides))}]}}" for name, overrides in LAYOUTS.items()]
    command = ["--output-dir", str(folder / "out"), f"align.candidates=[{', '.join(texts)}]", *EXPERTS]
    command += ["max_steps=1", f"model.moe_router_replay={replay}", "trace.kinds=[initial,router,gradient,parameter]"]
    finished = run_cli("align", write_tiny_config(folder), command)
    assert (folder / "out" / "align.json").is_file(), finished.stdout + finished.stderr
    return {item["name"]: item for item in read_json(folder / "out" / "align.json")["candidates"]}


def count_flips(folder: Path, name: str) -> tuple[int, int]:
    """Tokens of all layers and updates with other experts than the baseline's, and how many there are.

    Without each row's last token: the engine has not read it, so it has no recorded experts, and no loss sees it.
    """
    num_flips = num_choices = 0
    with (
        open_trace(folder / "out" / "baseline" / "trace") as baseline,
        open_trace(folder / "out" / name / "trace") as candidate,
    ):
        footer = baseline.footer(0)
        for key in sorted(baseline.keys(0), key=str):
            if key.name.endswith(".router.chosen_experts"):
                pair = (reader.merge(key).tensor for reader in (baseline, candidate))
                is_other = next(pair).ne(next(pair)).any(dim=1)
                lengths = torch.tensor([footer.rows.lengths[row] for row in footer.update_rows[key.update]])
                assert int(lengths.sum()) == len(is_other)
                is_other[lengths.cumsum(0) - 1] = False
                num_flips += int(is_other.sum())
                num_choices += len(is_other) - len(lengths)
    return num_flips, num_choices


def test_replayed_routing_takes_the_flips_of_experts_out_of_an_alignment(tmp_path: Path) -> None:
    found = {}
    for replay in ("off", "replay"):
        (tmp_path / replay).mkdir()
        for name, candidate in align(tmp_path / replay, replay).items():
            assert candidate["verdict"] in ("rounding", "identical (emulated)"), candidate["reason"]
            found[replay, name] = count_flips(tmp_path / replay, name)
    assert all(num_choices > 2000 for _, num_choices in found.values())
    assert {key: num_flips for key, (num_flips, _) in found.items() if key[0] == "replay"} == {
        ("replay", name): 0 for name in LAYOUTS
    }
    assert found["off", "tp2-sp-ep2"][0] > 0
