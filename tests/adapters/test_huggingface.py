"""Files of Hugging Face checkpoints: which rows go where, what is refused, and the same bytes when written."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file

from mock_scheduler.adapters.huggingface.files import WeightFiles, read_header
from mock_scheduler.adapters.huggingface.writing import write_weights
from mock_scheduler.errors import ConfigError
from mock_scheduler.trace.shards import Block, ShardSpec, Split, even_split, whole
from pipelines.config.model import ModelConfig
from pipelines.megatron.hf_source import find_weight_files
from tests.fuzz.mutations import mutate_bytes, mutate_json
from tests.hf_checkpoints import (
    CONFIGS,
    EXPERT_INNER,
    HEAD,
    HEADS,
    HIDDEN,
    INNER,
    VOCAB,
    config_of,
    make_tensors,
    save_json,
    write_checkpoint,
)

# --- Rows of tensors --------------------------------------------------------------------------------------------------


def open_files(folder: Path) -> WeightFiles:
    return find_weight_files(ModelConfig(hf_checkpoint=str(folder)))


def read_part(folder: Path, name: str, shape: tuple[int, ...], splits: tuple[Split, ...] = ()) -> torch.Tensor:
    local = list(shape)
    for split in splits:
        local[split.dim] = sum(block.length for block in split.blocks)
    with open_files(folder) as files:
        return files.read(ShardSpec(name=name, global_shape=shape, local_shape=tuple(local), splits=splits), name)


def test_queries_keys_and_values_stand_group_by_group(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path, "qwen2", num_files=3)
    for kind in ("weight", "bias"):
        q, k, v = (tensors[f"model.layers.1.self_attn.{name}_proj.{kind}"] for name in "qkv")
        shape = (2 * 4 * HEAD, *q.shape[1:])  # two groups of two queries, a key and a value
        name = f"decoder.layers.1.self_attention.linear_qkv.{kind}"
        expected = torch.cat([q[:24], k[:12], v[:12], q[24:], k[12:], v[12:]])
        assert torch.equal(read_part(tmp_path, name, shape), expected)
        # The second of two tensor-parallel ranks has the second group.
        second = even_split(0, size=shape[0], rank=1, num_ranks=2)
        assert torch.equal(read_part(tmp_path, name, shape, second), torch.cat([q[24:], k[12:], v[12:]]))
        # And a part that begins and ends within a projection has just these rows.
        part = (Split(dim=0, blocks=(Block(local_start=0, global_start=20, length=9),)),)
        assert torch.equal(read_part(tmp_path, name, shape, part), expected[20:29])


def test_a_rank_has_its_rows_of_the_gate_and_the_same_of_the_up_projection(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path, "llama")
    gate, up = (tensors[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    split = even_split(0, size=2 * INNER, rank=1, num_ranks=2, num_parts=2)
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    assert torch.equal(read_part(tmp_path, name, (2 * INNER, HIDDEN), split), torch.cat([gate[20:], up[20:]]))


def test_a_rank_has_its_columns_of_the_output_projection(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path, "llama")
    split = even_split(1, size=HEADS * HEAD, rank=1, num_ranks=2)
    read = read_part(tmp_path, "decoder.layers.0.self_attention.linear_proj.weight", (HIDDEN, HEADS * HEAD), split)
    assert torch.equal(read, tensors["model.layers.0.self_attn.o_proj.weight"][:, 24:])


@pytest.mark.parametrize(
    ("kind", "gate", "up", "down", "inner"),
    [
        (
            "mixtral",
            "block_sparse_moe.experts.3.w1",
            "block_sparse_moe.experts.3.w3",
            "block_sparse_moe.experts.3.w2",
            INNER,
        ),
        *(
            (kind, *(f"mlp.experts.3.{name}_proj" for name in ("gate", "up", "down")), EXPERT_INNER)
            for kind in ("qwen2_moe", "qwen3_moe")
        ),
    ],
)
def test_an_expert_has_its_own_tensors(kind: str, gate: str, up: str, down: str, inner: int, tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path, kind)
    own = "decoder.layers.1.mlp.experts.local_experts.3."
    first, second = (tensors[f"model.layers.1.{name}.weight"] for name in (gate, up))
    assert torch.equal(read_part(tmp_path, f"{own}linear_fc1.weight", (2 * inner, HIDDEN)), torch.cat([first, second]))
    read = read_part(tmp_path, f"{own}linear_fc2.weight", (HIDDEN, inner))
    assert torch.equal(read, tensors[f"model.layers.1.{down}.weight"])


def test_padding_of_the_vocabulary_is_0(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path, "qwen3")
    spec = ShardSpec(
        name="embedding.word_embeddings.weight",
        global_shape=(VOCAB, HIDDEN),
        local_shape=(40, HIDDEN),
        splits=(Split(dim=0, blocks=(Block(local_start=0, global_start=80, length=16),)),),
    )
    with open_files(tmp_path) as files:
        read = files.read(spec, spec.name)
    assert torch.equal(read[:16], tensors["model.embed_tokens.weight"][80:])
    assert not read[16:].any()


# --- Files ------------------------------------------------------------------------------------------------------------


def test_what_is_missing_superfluous_or_mis_shaped_is_refused_by_name(tmp_path: Path) -> None:
    tensors = make_tensors("qwen3")
    del tensors["model.layers.1.self_attn.q_norm.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(48)
    tensors["model.norm.weight"] = torch.ones(33)
    tensors["model.layers.0.input_layernorm.weight"] = torch.zeros(HIDDEN, dtype=torch.int8)
    tensors["lm_head.weight"] = torch.zeros(VOCAB, HIDDEN)
    write_checkpoint(tmp_path, "qwen3", tensors=tensors)
    with pytest.raises(ConfigError) as raised:
        open_files(tmp_path)
    assert sorted(str(raised.value).splitlines()[1:]) == [
        "  - lm_head.weight: is of no part of this model, by tie_word_embeddings of config.json",
        "  - model.layers.0.input_layernorm.weight: is of dtype I8; read are F64, F32, BF16, F16",
        "  - model.layers.0.self_attn.q_proj.bias: is of no part of this model",
        "  - model.layers.1.self_attn.q_norm.weight: is missing; expected shape [12]",
        "  - model.norm.weight: has shape [33], expected [32]",
    ]


def test_an_output_head_that_is_missing_is_told_with_the_field_behind_it(tmp_path: Path) -> None:
    tensors = make_tensors("llama")
    del tensors["lm_head.weight"]
    write_checkpoint(tmp_path, "llama", tensors=tensors)
    with pytest.raises(ConfigError, match=r"lm_head\.weight: is missing, by tie_word_embeddings of config\.json"):
        open_files(tmp_path)


def change_index(folder: Path, **places: str | None) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    for name, file in places.items():
        index["weight_map"].pop(name.replace("__", "."), None)
        if file is not None:
            index["weight_map"][name.replace("__", ".")] = file
    save_json(path, index)


def test_an_index_that_says_something_else_than_its_files_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", num_files=2)
    second = "model-00002-of-00002.safetensors"
    change_index(tmp_path, model__embed_tokens__weight=second, lm_head__weight=None)
    with pytest.raises(ConfigError) as raised:
        open_files(tmp_path)
    first = "model-00001-of-00002.safetensors"
    assert sorted(str(raised.value).splitlines()[1:]) == [
        f"  - lm_head.weight: is in {first}, and model.safetensors.index.json has it nowhere",
        f"  - model.embed_tokens.weight: is in {first}, and model.safetensors.index.json has it in {second}",
        f"  - model.embed_tokens.weight: model.safetensors.index.json has it in {second}, which does not hold it",
    ]


@pytest.mark.parametrize("file", ["../elsewhere.safetensors", "pytorch_model.bin"])
def test_an_index_leads_to_no_other_file(file: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", num_files=2)
    change_index(tmp_path, lm_head__weight=file)
    with pytest.raises(ConfigError, match="which is no safetensors file of the folder"):
        open_files(tmp_path)


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def spoil_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"dtype":"F32"', b'"dtype":"F64"', 1))


def leave_only_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def remove_files(folder: Path) -> None:
    write_checkpoint(folder, "llama", num_files=3)
    for name in ("model.safetensors", "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"):
        (folder / name).unlink()


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (cut, "is no whole safetensors file: its tensors have"),
        (spoil_header, "bytes; copy it again"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 16), "says that its header has"),
        (
            leave_only_a_pickle,
            "has neither model.safetensors nor model.safetensors.index.json; only safetensors are read",
        ),
        (remove_files, "model-00003-of-00003.safetensors cannot be read: No such file"),
        (lambda folder: write_checkpoint(folder, "llama", num_files=2), "has both model.safetensors and"),
        (lambda folder: (folder / "config.json").unlink(), "config.json cannot be read: No such file"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "holds a list, expected an object"),
    ],
)
def test_a_folder_that_is_no_whole_checkpoint_is_refused(spoil: Any, text: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    spoil(tmp_path)
    with pytest.raises((ConfigError, ValueError)) as raised:
        open_files(tmp_path)
    assert text in str(raised.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_file_that_is_written_with_its_header_has_the_same_bytes(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = make_tensors("qwen3_moe", dtype)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()  # safetensors puts wider ones first
    origin, copy = tmp_path / "model.safetensors", tmp_path / "copy"
    save_file(tensors, origin, metadata={"format": "pt"})
    copy.mkdir()
    write_weights(copy, {origin.name: read_header(origin).text}, tensors.__getitem__)
    assert (copy / origin.name).read_bytes() == origin.read_bytes()


def test_whole_tensors_of_every_family_are_read_in_the_dtype_of_the_file(tmp_path: Path) -> None:
    for kind in CONFIGS:
        tensors = write_checkpoint(tmp_path / kind, kind, dtype=torch.bfloat16, num_files=2)
        with open_files(tmp_path / kind) as files:
            read = files.read(whole("x", (VOCAB, HIDDEN)), "embedding.word_embeddings.weight")
        assert torch.equal(read, tensors["model.embed_tokens.weight"])
        assert read.dtype is torch.bfloat16


def test_a_rank_reads_its_own_part_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, "llama")
    num_read = 0
    read_slice = WeightFiles._read_part

    def count(files: WeightFiles, tensor: str, part: tuple[slice, ...]) -> torch.Tensor:
        nonlocal num_read
        values = read_slice(files, tensor, part)
        num_read += values.numel()
        return values

    monkeypatch.setattr(WeightFiles, "_read_part", count)
    name, shape = "decoder.layers.0.mlp.linear_fc1.weight", (2 * INNER, HIDDEN)
    read_part(tmp_path, name, shape, even_split(0, size=2 * INNER, rank=3, num_ranks=4, num_parts=2))
    assert num_read == 2 * INNER * HIDDEN // 4


@pytest.mark.parametrize("number", range(4))
def test_damaged_files_are_read_or_refused_and_nothing_else(number: int, tmp_path: Path) -> None:
    """Whatever stands in configuration, index and header: a model, or a ``ConfigError``."""
    write_checkpoint(tmp_path, "qwen3_moe", num_files=2)
    rng = random.Random(number)
    names = ("config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors")
    origins = {name: (tmp_path / name).read_bytes() for name in names}
    outcomes = set()
    for _ in range(60):
        name = rng.choice(names)
        damaged = mutate_bytes(origins[name], rng)
        if name.endswith(".json") and rng.random() < 0.7:
            document = json.loads(origins[name])
            mutate_json(document, rng)
            damaged = json.dumps(document).encode()
        (tmp_path / name).write_bytes(damaged)
        try:
            with find_weight_files(ModelConfig(hf_checkpoint=str(tmp_path))) as files:
                files.read(whole("x", (VOCAB, HIDDEN)), "embedding.word_embeddings.weight")
            outcomes.add("read")
        except (ConfigError, ValidationError):
            outcomes.add("refused")
        (tmp_path / name).write_bytes(origins[name])
    assert outcomes == {"read", "refused"}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_hidden_layers": 9_000}, "tensors, too few for the 9000 layers of its config.json"),
        ({"num_experts": 10**6}, "too few for the 2 layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, expected a positive integer"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
    ],
)
def test_no_number_of_a_file_makes_more_than_the_file_holds(
    changes: dict[str, object], text: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, "qwen3_moe", config=config_of("qwen3_moe", **changes))
    with pytest.raises((ConfigError, ValidationError)) as raised:
        open_files(tmp_path)
    assert text in str(raised.value)
