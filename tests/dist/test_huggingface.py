"""Real gloo processes: a Hugging Face checkpoint is the same model under every layout, and is written back as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mock_scheduler.errors import ConfigError
from mock_scheduler.support.digests import open_sealed, seal
from mock_scheduler.support.files import save_json
from mock_scheduler.support.foreign_files import copy_folder
from pipelines.config.model import ModelConfig
from pipelines.export_hf import export
from tests.dist.conftest import launch
from tests.hf_checkpoints import CONFIGS, write_checkpoint
from tests.sharing import make_once

pytestmark = pytest.mark.timeout(600)  # the first test pays for the launches

WORKER = "tests.dist.workers.hf_worker"
BOUND = 1e-12  # of logits in float64, against the largest
DENSE, EXPERTS = ("llama", "qwen2", "qwen3"), ("mixtral", "qwen2_moe", "qwen3_moe")
LAYOUTS = {
    **dict.fromkeys(DENSE, ("tp2-sp", "pp2")),
    **dict.fromkeys(EXPERTS, ("dp2-ep2", "pp2")),
}
CASES = [(kind, layout) for kind, layouts in LAYOUTS.items() for layout in layouts]
PRECISIONS = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
# A dtype of its own for each, and files of which one holds several layers' tensors.
WRITTEN = {"qwen3": (torch.bfloat16, 3), "qwen2_moe": (torch.float32, 2)}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the checkpoints are, and what each layout made of them."""
    return make_once(tmp_path_factory, "huggingface", _run)[0]


def _run(folder: Path) -> dict[str, object]:
    for kind in CONFIGS:
        dtype, num_files = WRITTEN.get(kind, (torch.float32, 1))
        write_checkpoint(folder / kind, kind, dtype=dtype, num_files=num_files)
    written = [f"{kind}/{PRECISIONS[dtype]}" for kind, (dtype, _) in WRITTEN.items()]
    one = [f"{kind}/float64/tp1" for kind in CONFIGS]
    launch(1, folder, (*one, *(f"{task}/tp1" for task in written)), module=WORKER)
    two = [f"{kind}/float64/{layout}" for kind, layout in CASES]
    two += [f"{task}/{layout}" for task in written for layout in LAYOUTS[task.partition("/")[0]]]
    launch(2, folder, tuple(two), module=WORKER)
    return {}


def logits_of(folder: Path, task: str) -> torch.Tensor:
    return load_file(folder / task / "logits.safetensors")["logits"]


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_every_layout_computes_the_logits_of_one_process(kind: str, layout: str, folder: Path) -> None:
    one, several = (logits_of(folder, f"{kind}/float64/{name}") for name in ("tp1", layout))
    scale = float(one.abs().max())
    assert scale > 0.1
    assert float((several - one).abs().max()) < BOUND * scale


def test_a_tensor_parallel_rank_has_its_slices(folder: Path) -> None:
    file = load_file(folder / "qwen2" / "model.safetensors")
    own = load_file(folder / "qwen2/float64/tp2-sp" / "rank_1.safetensors")
    layer, theirs = "decoder.layers.1.", "model.layers.1."
    q, k, v = (file[f"{theirs}self_attn.{name}_proj.bias"] for name in "qkv")
    gate, up = (file[f"{theirs}mlp.{name}_proj.weight"] for name in ("gate", "up"))
    expected = {
        "embedding.word_embeddings.weight": file["model.embed_tokens.weight"][48:],
        "output_layer.weight": file["lm_head.weight"][48:],
        f"{layer}self_attention.linear_qkv.bias": torch.cat([q[24:], k[12:], v[12:]]),
        f"{layer}self_attention.linear_proj.weight": file[f"{theirs}self_attn.o_proj.weight"][:, 24:],
        f"{layer}mlp.linear_fc1.weight": torch.cat([gate[20:], up[20:]]),
        f"{layer}mlp.linear_fc2.weight": file[f"{theirs}mlp.down_proj.weight"][:, 20:],
        f"{layer}input_layernorm.weight": file[f"{theirs}input_layernorm.weight"],
    }
    assert all(torch.equal(own[name], values.double()) for name, values in expected.items())


def test_a_rank_has_its_layers_or_its_experts_alone(folder: Path) -> None:
    stage = load_file(folder / "qwen3/float64/pp2" / "rank_0.safetensors")
    assert {name.split(".")[2] for name in stage if name.startswith("decoder.layers.")} == {"0"}
    assert "decoder.final_layernorm.weight" not in stage
    second = load_file(folder / "mixtral/float64/dp2-ep2" / "rank_1.safetensors")
    assert {name.split(".")[6] for name in second if ".local_experts." in name} == {"2", "3"}
    file = load_file(folder / "mixtral" / "model.safetensors")
    expert = second["decoder.layers.0.mlp.experts.local_experts.3.linear_fc2.weight"]
    assert torch.equal(expert, file["model.layers.0.block_sparse_moe.experts.3.w2.weight"].double())


def test_tied_embeddings_are_one_tensor_on_both_stages(folder: Path) -> None:
    first, last = (load_file(folder / "qwen3/float64/pp2" / f"rank_{rank}.safetensors") for rank in (0, 1))
    name = "embedding.word_embeddings.weight"
    assert torch.equal(first[name], last[name])


@pytest.mark.parametrize(
    ("kind", "layout"), [(kind, layout) for kind in WRITTEN for layout in ("tp1", *LAYOUTS[kind])]
)
def test_a_checkpoint_of_any_layout_is_written_back_byte_for_byte(
    kind: str, layout: str, folder: Path, tmp_path: Path
) -> None:
    task = f"{kind}/{PRECISIONS[WRITTEN[kind][0]]}/{layout}"
    export(folder / task / "checkpoint", tmp_path / "exported")
    origin = {path.name: path.read_bytes() for path in (folder / kind).iterdir() if path.is_file()}
    written = {path.name: path.read_bytes() for path in (tmp_path / "exported").iterdir()}
    assert written == origin
    assert sum(name.endswith(".safetensors") for name in written) == WRITTEN[kind][1]


def test_parameters_that_are_wider_than_the_files_are_rounded_and_this_is_said(folder: Path, tmp_path: Path) -> None:
    told = export(folder / "qwen3/float64/pp2/checkpoint", tmp_path / "exported")
    assert told.endswith("Parameters of float64 were rounded to bfloat16, the dtype that was read")
    name = "model-00001-of-00003.safetensors"  # values of bfloat16 come back as they were
    assert (tmp_path / "exported" / name).read_bytes() == (folder / "qwen3" / name).read_bytes()


def without_source(folder: Path, task: str, copy: Path, **fixed: object) -> Path:
    """A checkpoint as of a run from scratch."""
    copy_folder(folder / task / "checkpoint", copy, root=folder)
    state = open_sealed((copy / "run_state.json").read_bytes())
    state["files"] = {name: entry for name, entry in state["files"].items() if not name.startswith("huggingface/")}
    state["fixed"] |= {f"model.{name}": value for name, value in fixed.items()}
    save_json(copy / "run_state.json", seal(state))
    return copy


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_a_model_from_scratch_is_written_as_the_kind_that_it_is(
    kind: str, layout: str, folder: Path, tmp_path: Path
) -> None:
    copy = without_source(folder, f"{kind}/float64/{layout}", tmp_path / "copy")
    export(copy, tmp_path / "exported")
    origin, written = (ModelConfig(hf_checkpoint=str(path)) for path in (folder / kind, tmp_path / "exported"))
    assert written == origin.model_copy(update={"hf_checkpoint": written.hf_checkpoint})
    expected = {name: tensor for path in (folder / kind).glob("*.safetensors") for name, tensor in load_file(path).items()}
    found = load_file(tmp_path / "exported" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor.double()) for name, tensor in expected.items())
    again = tmp_path / "again.safetensors"
    save_file(found, again, metadata={"format": "pt"})  # safetensors' own order and header
    assert again.read_bytes() == (tmp_path / "exported" / "model.safetensors").read_bytes()


def test_a_model_of_no_kind_is_refused_with_every_field(folder: Path, tmp_path: Path) -> None:
    odd = {"add_bias_linear": True, "normalization": "LayerNorm", "position_embedding_type": "learned_absolute"}
    copy = without_source(folder, "llama/float64/tp1", tmp_path / "copy", **odd)
    with pytest.raises(ConfigError) as raised:
        export(copy, tmp_path / "exported")
    assert str(raised.value).splitlines() == [
        "no kind of Hugging Face model is this one; the nearest differs:",
        "  - model.normalization is 'LayerNorm', and llama has 'RMSNorm'",
        "  - model.add_bias_linear is True, and llama has False",
        "  - model.position_embedding_type is 'learned_absolute', and llama has 'rope'",
    ]
    assert not (tmp_path / "exported").exists()
