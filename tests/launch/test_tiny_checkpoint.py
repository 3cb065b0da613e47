"""The script that makes a tiny Qwen3: the model begins with it, and it has the same bits every time."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from pipelines.config.model import ModelConfig
from pipelines.megatron.hf_source import find_weight_files
from tests.programs import run_program

SCRIPT = "launch.make_tiny_qwen3"


def make(folder: Path, *options: str) -> Path:
    done = run_program(SCRIPT, (str(folder), *options))
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer."""
    return make(tmp_path_factory.mktemp("checkpoint") / "one", "--layers", "1", "--hidden", "64")


def test_the_model_begins_with_it(tmp_path: Path) -> None:
    model = ModelConfig(hf_checkpoint=str(make(tmp_path / "tied", "--layers", "2", "--hidden", "64", "--tied")))
    assert (model.num_layers, model.hidden_size, model.kv_channels, model.num_query_groups) == (2, 64, 32, 1)
    assert (model.vocab_size, model.untie_embeddings_and_output_weights) == (259, False)
    with find_weight_files(model) as files:
        assert len(files.places) == 2 + 2 * 11


def test_it_has_the_same_bits_every_time(small: Path, tmp_path: Path) -> None:
    content = (small / "model.safetensors").read_bytes()
    assert hashlib.sha256(content).hexdigest() == GOLDEN
    other = make(tmp_path / "two", "--layers", "1", "--hidden", "64", "--seed", "1") / "model.safetensors"
    assert other.read_bytes() != content


def test_every_byte_is_one_token(small: Path) -> None:
    tokenizer = json.loads((small / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(259))
    assert [vocabulary[letter] - 3 for letter in ("A", "Ġ", "Ċ", "ÿ")] == [ord("A"), ord(" "), ord("\n"), 255]


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    done = run_program(SCRIPT, (str(tmp_path),))
    assert (done.returncode, "give a new folder" in done.stderr) == (5, True)


GOLDEN = "d30fed0958114b3b9cc05b8df380e56985bd792b36703c011a6ebbd5f4e2c91a"
