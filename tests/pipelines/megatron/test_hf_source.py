"""The digest of a Hugging Face checkpoint: of names and bytes, shared out among ranks, and the same on each machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mock_scheduler.errors import ConfigError
from pipelines.config.model import ModelConfig
from pipelines.megatron.hf_source import HuggingFaceSource, read_source
from tests.hf_checkpoints import make_tensors, write_checkpoint
from tests.pipelines.megatron.ranks import ThreadRank, one_rank, run_ranks


def source_of(folder: Path, ranks: ThreadRank | None = None) -> HuggingFaceSource:
    found = read_source(ModelConfig(hf_checkpoint=str(folder)), ranks or one_rank())
    assert found is not None
    return found


def test_a_model_without_a_checkpoint_has_no_source() -> None:
    assert read_source(ModelConfig(), one_rank()) is None


def test_the_digest_is_of_values_and_dtypes_and_not_of_files(tmp_path: Path) -> None:
    tensors = make_tensors("qwen3")
    write_checkpoint(tmp_path / "one", "qwen3", tensors=tensors)
    write_checkpoint(tmp_path / "several", "qwen3", tensors=tensors, num_files=3)
    one, several = source_of(tmp_path / "one"), source_of(tmp_path / "several")
    assert one.digest == several.digest
    assert (len(one.headers), len(several.headers)) == (1, 3)
    assert list(one.companions) == ["config.json", "tokenizer.json"]
    moved = {**tensors, "model.norm.weight": tensors["model.norm.weight"].nextafter(torch.tensor(9.0))}
    write_checkpoint(tmp_path / "moved", "qwen3", tensors=moved)
    narrow = {name: tensor.to(torch.float16) for name, tensor in tensors.items()}
    write_checkpoint(tmp_path / "narrow", "qwen3", tensors=narrow)
    assert len({one.digest, *(source_of(tmp_path / name).digest for name in ("moved", "narrow"))}) == 3


def test_ranks_of_a_machine_share_the_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, "qwen3")
    whole = source_of(tmp_path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    read: list[list[str]] = []

    def read_as(local_rank: str) -> dict[str, str]:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        parts: list[bytes] = []

        class Listening:
            global_rank, world_size = int(local_rank), 2

            def gather(self, payload: bytes) -> list[bytes]:
                parts.append(payload)
                return [payload]

            def reduce(self, reduction: object) -> list[int]:
                raise NotImplementedError(reduction)

        read_source(ModelConfig(hf_checkpoint=str(tmp_path)), Listening())
        own: dict[str, str] = json.loads(parts[0])
        read.append(sorted(own))
        return own

    merged = read_as("0") | read_as("1")
    assert abs(len(read[0]) - len(read[1])) <= 1
    assert not {*read[0]} & {*read[1]}
    assert len(merged) == len(make_tensors("qwen3"))
    assert whole.digest == source_of_parts(tmp_path, merged)


def source_of_parts(folder: Path, digests: dict[str, str]) -> str:
    """The digest where another rank has read everything."""

    class Given:
        global_rank, world_size = 0, 2

        def gather(self, payload: bytes) -> list[bytes]:
            return [payload, json.dumps(digests).encode()]

        def reduce(self, reduction: object) -> list[int]:
            raise NotImplementedError(reduction)

    found = read_source(ModelConfig(hf_checkpoint=str(folder)), Given())
    assert found is not None
    return found.digest


def test_machines_with_other_values_are_refused_by_the_name_of_a_tensor(tmp_path: Path) -> None:
    tensors = make_tensors("qwen3")
    write_checkpoint(tmp_path / "one", "qwen3", tensors=tensors)
    write_checkpoint(tmp_path / "other", "qwen3", tensors={**tensors, "model.norm.weight": torch.ones(32)})
    same = run_ranks([lambda ranks: source_of(tmp_path / "one", ranks)] * 2)
    assert same[0].digest == same[1].digest
    with pytest.raises(ConfigError, match=r"other values of 1 tensors, the first is model\.norm\.weight"):
        run_ranks([lambda ranks, name=name: source_of(tmp_path / name, ranks) for name in ("one", "other")])
