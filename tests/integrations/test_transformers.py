"""A Hugging Face checkpoint of transformers' has its logits in Megatron, and is written back as it was.

transformers 5.12.1 computes in a process of its own, Megatron-core 0.19.2 in others. Every difference is printed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipelines.export_hf import export
from tests.dist.conftest import launch
from tests.dist.workers.hf_worker import token_ids

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(1800)]  # the first test pays for all runs

ROOT = Path(__file__).parents[2]
PACKAGES = Path(sys.prefix) / "text"
WORKER = "tests.dist.workers.hf_worker"
VOCAB_SIZE = 96
DENSE = ("qwen2", "qwen3", "qwen3_wide_heads", "llama", "llama3")
EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_moe_unnormed")
BOUNDS = {"float32": 1e-5, "float64": 1e-12}  # of a difference, in float64 as a part of the largest logit
LAYOUTS = {
    **dict.fromkeys(DENSE, ("tp1", "tp2", "tp2-sp", "pp2")),
    **dict.fromkeys(EXPERTS, ("tp1", "pp2", "dp2-ep2")),
}
TASKS = [f"{kind}/{precision}/{layout}" for precision in BOUNDS for kind in LAYOUTS for layout in LAYOUTS[kind]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All checkpoints, transformers' logits and ours."""
    assert PACKAGES.is_dir(), f"{PACKAGES} is not there; launch/test.sh --integrations installs it"
    place = tmp_path_factory.mktemp("transformers")
    save_file({"tokens": token_ids(VOCAB_SIZE)}, place / "tokens.safetensors")
    command = [sys.executable, "-W", "ignore", "-m", "tests.integrations.hf_reference", str(place)]
    environment = {**os.environ, "PYTHONPATH": f"{PACKAGES}:{ROOT}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, str(place / "tokens.safetensors")], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    launch(1, place, tuple(task for task in TASKS if task.endswith("/tp1")), module=WORKER)
    launch(2, place, tuple(task for task in TASKS if not task.endswith("/tp1")), module=WORKER)
    return place


@pytest.mark.parametrize("task", TASKS)
def test_logits_are_those_of_transformers(task: str, folder: Path) -> None:
    kind, precision, _ = task.split("/")
    expected = load_file(folder / "reference" / f"{kind}.safetensors")[precision]
    found = load_file(folder / task / "logits.safetensors")["logits"]
    assert (found.dtype, found.shape) == (expected.dtype, (3, 32, VOCAB_SIZE))
    scale = float(expected.abs().max())
    assert 1.0 < scale < 10.0
    difference = float((found.double() - expected.double()).abs().max())
    print(f"{task}: {difference:.2g} of {scale:.3g}")
    assert difference < BOUNDS[precision] * (scale if precision == "float64" else 1.0)


def test_a_wrong_reading_of_a_field_is_far_beyond_the_bound(folder: Path) -> None:
    """``norm_topk_prob``: the same kind of weights with and without."""
    first, second = (
        load_file(folder / "reference" / f"{kind}.safetensors")["float64"]
        for kind in ("qwen3_moe", "qwen3_moe_unnormed")
    )
    assert float((first - second).abs().max()) > 0.1


@pytest.mark.parametrize("kind", LAYOUTS)
def test_what_save_pretrained_wrote_is_written_back_byte_for_byte(kind: str, folder: Path, tmp_path: Path) -> None:
    for layout in LAYOUTS[kind]:
        export(folder / f"{kind}/float32/{layout}" / "checkpoint", tmp_path / layout)
        origin = {path.name: path.read_bytes() for path in (folder / kind).iterdir() if path.is_file()}
        written = {path.name: path.read_bytes() for path in (tmp_path / layout).iterdir()}
        assert written == origin
    assert torch.equal(token_ids(VOCAB_SIZE), load_file(folder / "tokens.safetensors")["tokens"])


_TOKENIZE = """
import json, sys, transformers
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
text = "What is 12 + 30?\\n \\u00e4\\u20ac"
ids = tokenizer(text)["input_ids"]
asked = tokenizer.apply_chat_template([{"role": "user", "content": "4"}], add_generation_prompt=True)
print(json.dumps([ids, tokenizer.decode(ids) == text, list(asked["input_ids"])]))
"""


def test_transformers_reads_the_tokenizer_of_the_tiny_checkpoint(tmp_path: Path) -> None:
    made = subprocess.run([sys.executable, "launch/make_tiny_qwen3.py", str(tmp_path / "tiny")], cwd=ROOT, check=False)
    assert made.returncode == 0
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _TOKENIZE, str(tmp_path / "tiny")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(PACKAGES)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    ids, is_same, asked = json.loads(done.stdout.splitlines()[-1])
    assert (len(ids), is_same) == (len("What is 12 + 30?\n ä€".encode()), True)
    letters = {letter: ids[index] - ids[0] for index, letter in enumerate("What")}
    assert letters == {letter: ord(letter) - ord("W") for letter in "What"}
    message = [1, *(ids[0] + ord(letter) - ord("W") for letter in "4")]
    assert asked[0] == 1
    assert asked.count(2) == 1  # <|im_end|>
    assert message[1] in asked
