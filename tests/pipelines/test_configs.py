"""Every shipped configuration loads, and its run and its alignment can be planned."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from launch import make_tiny_qwen3
from mock_scheduler.alignment.plan.plan import plan_alignment
from mock_scheduler.determinism.environment import check_settings
from pipelines.config.loading import load_config
from pipelines.environments.registry import build_tokenizer
from pipelines.megatron.model import find_idle_vocabulary
from pipelines.megatron.parameter_shapes import parameter_shapes
from pipelines.program import PROGRAM
from tests.programs import run_program

CONFIGS = Path(__file__).parents[2] / "configs"
# They begin with a checkpoint: one that the first lines of the file make, one of the user's.
OF_CHECKPOINT = ("qwen3_tiny_reasoning", "qwen3_0_6b_reasoning")
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
WHOLE = [name for name in NAMES if name not in OF_CHECKPOINT]
# Named here, since each worker of a test run would load all files only to list its tests.
WITHOUT_CANDIDATES = ("base", "frozen_lake_mismatch", "frozen_lake_random", "nexrl_debug", "sokoban")
ALIGNED = [name for name in WHOLE if name not in WITHOUT_CANDIDATES]

# config.json as Qwen publishes it with Qwen3-0.6B.
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def write_checkpoint(folder: Path, name: str) -> None:
    """A checkpoint of the tiny model's files, with the published shape for the large one."""
    make_tiny_qwen3.write(folder, num_layers=1, hidden=64)
    if name == "qwen3_0_6b_reasoning":
        (folder / "config.json").write_text(json.dumps(QWEN3_0_6B), encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_configuration_loads_and_is_deterministic(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in OF_CHECKPOINT:
        write_checkpoint(tmp_path / "qwen3_tiny", name)
        monkeypatch.setenv("MOCK_SCHEDULER_OUTPUT", str(tmp_path))
        monkeypatch.setenv("QWEN3_0_6B", str(tmp_path / "qwen3_tiny"))
    config = load_config(name, config_path=CONFIGS)
    assert config.exp_name == name
    assert bool(config.align.candidates) == (name not in WITHOUT_CANDIDATES)
    assert config.system_envs["DETERMINISTIC_MODE"] == "1"
    check_settings(config.system_envs)
    assert build_tokenizer(config).vocab_size > 0


def test_qwen3_0_6b_has_its_published_shape_and_fits_one_gpu_and_eight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers in the first lines of the file are computed of these."""
    write_checkpoint(tmp_path / "qwen", "qwen3_0_6b_reasoning")
    monkeypatch.setenv("QWEN3_0_6B", str(tmp_path / "qwen"))
    config = load_config("qwen3_0_6b_reasoning", config_path=CONFIGS)
    model = config.model
    shapes = parameter_shapes(model, vocab_size=model.vocab_size or 0, sequence_length=config.sequence_length)
    num_parameters = sum(math.prod(shape) for shape in shapes.values())
    assert num_parameters == 596_049_920
    assert (model.head_size, model.query_groups, model.rotary_base, model.qk_layernorm) == (128, 8, 1_000_000, True)
    assert model.layernorm_epsilon == 1e-6
    gigabytes = {dp: num_parameters * (2 + 4 + 12 / dp) / 1e9 for dp in (1, 8)}
    text = (CONFIGS / "qwen3_0_6b_reasoning.yaml").read_text(encoding="utf-8")
    assert f"{gigabytes[1]:.1f} GB on one\n# GPU" in text
    assert f"{gigabytes[8]:.1f} GB on each" in text
    rows = config.actor_infer.rows_per_forward
    cache = rows * config.sequence_length * model.num_layers * 2 * model.query_groups * model.head_size * 2
    assert f"{cache / 1e9:.1f} GB, the logits" in text
    logits = config.training.micro_batch_size * config.sequence_length * (model.vocab_size or 0) * 4
    assert f"in float32\n# {logits / 1e9:.1f} GB" in text
    eight = load_config("qwen3_0_6b_reasoning", config_path=CONFIGS, overrides=["parallel.data_parallel_size=8"])
    assert eight.parallel.world_size == 8
    assert eight.training.num_micro_batches == 16


@pytest.mark.parametrize("name", ALIGNED)
def test_every_shipped_alignment_can_be_planned(name: str, tmp_path: Path) -> None:
    """Each candidate's overrides load, and its entry is a module that exists."""
    plan = plan_alignment(
        lambda overrides: load_config(name, config_path=CONFIGS, overrides=overrides),
        program=PROGRAM,
        overrides=[],
        output_dir=tmp_path,
    )
    for candidate in plan.candidates:
        assert (CONFIGS.parent / (candidate.entry.replace(".", "/") + ".py")).is_file()


@pytest.mark.parametrize(
    ("name", "idle"),
    # The quickstart's policy chooses among four actions, which lie on the first rank; its verdicts say so.
    [("computation_options", []), ("experts", []), ("quickstart", [1])],
)
def test_tensor_parallel_candidates_exercise_every_part_of_the_vocabulary(name: str, idle: list[int]) -> None:
    config = load_config(name, config_path=CONFIGS)
    tokenizer = build_tokenizer(config)
    overrides = [item.overrides for item in config.align.candidates]
    layouts = [load_config(name, config_path=CONFIGS, overrides=[*own]).parallel for own in overrides]
    split = [item.tensor_model_parallel_size for item in layouts if item.tensor_model_parallel_size > 1]
    assert split
    allowed = tokenizer.action_ids if config.actor_infer.only_action_tokens else None
    for tp_size in split:
        assert find_idle_vocabulary(allowed, tokenizer.vocab_size, multiple_of=1, tp_size=tp_size) == idle


def test_every_planted_fault_of_the_configurations_can_be_planted() -> None:
    """One named a module that had moved: its candidate failed, and was incomparable in the place of diverged."""
    entries = {
        candidate.entry
        for name in WHOLE
        for candidate in load_config(name, config_path=CONFIGS).align.candidates
        if candidate.entry is not None and candidate.entry.startswith("tests.faults.")
    }
    assert len(entries) >= 4
    done = run_program("tests.faults.plant_all", sorted(entries))
    assert done.returncode == 0, done.stderr
