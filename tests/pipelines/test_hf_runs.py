"""Runs that begin with a Hugging Face checkpoint: recorded, replayed, resumed, written back, and refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mock_scheduler.errors import ConfigError
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.support.sources import digest_sources
from pipelines.config.loading import load_config
from pipelines.config.model import ModelConfig
from pipelines.export_hf import export
from pipelines.program import PROGRAM
from tests.hf_checkpoints import make_tensors, write_checkpoint
from tests.pipelines.tiny_runs import run_several, write_tiny_config
from tests.programs import run_program

pytestmark = pytest.mark.timeout(600)

WEIGHTS = "model.safetensors"
STEPS = 2
_RECORDED = ("rollout_mock.enable=true", "rollout_mock.dump_dir={root}/recording")
# Name of the run -> its overrides, in the order in which they are run. {root} is the folder of all.
RUNS: dict[str, list[str]] = {
    "dumped": [*_RECORDED, "rollout_mock.mode=dump", "save_steps=1"],
    # The same weights at another place, in other files, and in another layout of files.
    "moved": [*_RECORDED, "rollout_mock.mode=mock", "model.hf_checkpoint={root}/sharded"],
    "resumed": [
        *(*_RECORDED, "rollout_mock.mode=mock", "model.hf_checkpoint={root}/sharded"),
        "resume_from_checkpoint={root}/dumped/checkpoints/step_000001",
    ],
    "other-weights": [*_RECORDED, "rollout_mock.mode=mock", "model.hf_checkpoint={root}/other"],
    "resumed-with-others": [
        *("model.hf_checkpoint={root}/other", "resume_from_checkpoint={root}/dumped/checkpoints/step_000001"),
    ],
    "critic": [
        *("rollout_mock.enable=false", "adv_estimator=gae", "use_kl_loss=false", "critic.lr=1.0e-12"),
        *("training.lr=1.0e-12", "training.min_lr=0", "max_steps=1", "save_steps=1"),
    ],
    "scratch": ["rollout_mock.enable=false", "max_steps=1", "save_steps=1"],
    "contradicted": ["model.hidden_size=64"],
    "incomplete": ["model.hf_checkpoint={root}/incomplete"],
}
EXPECTED_CODES = {"other-weights": 3, "resumed-with-others": 5, "contradicted": 5, "incomplete": 5}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs, one after the other in one process; ``terminal.txt`` holds what they printed."""
    root = tmp_path_factory.mktemp("hf-runs")
    configs = write_tiny_config(root)
    tensors = write_checkpoint(root / "origin", "qwen3")
    write_checkpoint(root / "sharded", "qwen3", tensors=tensors, num_files=3)
    write_checkpoint(root / "other", "qwen3", tensors=make_tensors("qwen3", seed=1))
    incomplete = {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}
    write_checkpoint(root / "incomplete", "qwen3", tensors=incomplete)
    cases: list[list[str]] = []
    for name, overrides in RUNS.items():
        arguments = [
            *(
                "--config-path",
                str(configs),
                "--config-name",
                "tiny",
                f"max_steps={STEPS}",
                "rollout_mock.enable=false",
            ),
            *("~model", f"++model.hf_checkpoint={root}/origin", f"output_dir={root / name}"),
            *("use_kl_loss=true", *(f"++{override.format(root=root)}" for override in overrides)),
        ]
        if name == "scratch":  # the model of the configuration itself
            arguments = [argument for argument in arguments if "model" not in argument]
        cases.append(arguments)
    codes, output = run_several(root, cases, log="terminal.txt")
    expected = {name: EXPECTED_CODES.get(name, 0) for name in RUNS}
    assert dict(zip(RUNS, codes, strict=True)) == expected, output
    return root


def losses(folder: Path) -> dict[int, tuple[float, float, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {row["step"]: tuple(row["metrics"][name] for name in ("pg_loss", "grad_norm", "kl_loss")) for row in rows}


def test_a_replay_with_the_same_weights_in_other_files_trains_to_the_same_bits(runs: Path) -> None:
    assert losses(runs / "moved") == losses(runs / "dumped")
    assert len(losses(runs / "moved")) == STEPS


def test_a_resumed_run_has_the_reference_policy_of_its_beginning(runs: Path) -> None:
    whole = losses(runs / "dumped")
    assert losses(runs / "resumed") == {1: whole[1]}
    assert whole[1][2] > 0  # the policy has left the reference


def told(runs: Path) -> str:
    return (runs / "terminal.txt").read_text(encoding="utf-8")


def test_a_replay_with_other_weights_is_refused(runs: Path) -> None:
    digest = RecordingReader(str(runs / "recording")).manifest.contract
    (field,) = [field for field in digest.fields if field.name == "initial_weights"]
    assert f"initial_weights: recorded {str(field.value)[:6]}" in told(runs)
    assert "They are those of model.hf_checkpoint: give the checkpoint of the recording run." in told(runs)


def test_resuming_with_other_weights_is_refused(runs: Path) -> None:
    assert "is of a run whose model.hf_checkpoint had weights of digest" in told(runs)


def test_a_key_that_contradicts_the_checkpoint_is_refused_with_both_values(runs: Path) -> None:
    assert f"model.hidden_size: is 64, and {runs}/origin/config.json has 32" in told(runs)


def test_a_checkpoint_without_a_tensor_is_refused(runs: Path) -> None:
    assert "model.norm.weight: is missing; expected shape [32]" in told(runs)


def test_a_trained_checkpoint_is_written_back_with_all_its_files(runs: Path) -> None:
    trained, exported = runs / "dumped" / "checkpoints" / "step_000001", runs / "exported"
    done = run_program("mock_scheduler.cli", ["export-hf", str(trained), str(exported)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"wrote {exported}: 1 weight file, the policy before step 1\n"
    assert sorted(path.name for path in exported.iterdir()) == sorted(path.name for path in (runs / "origin").iterdir())
    for name in ("config.json", "tokenizer.json"):
        assert (exported / name).read_bytes() == (runs / "origin" / name).read_bytes()
    before, after = load_file(runs / "origin" / WEIGHTS), load_file(exported / WEIGHTS)
    assert before.keys() == after.keys()
    moved = {name: float((after[name] - before[name]).abs().max()) for name in before}
    # Each of four updates of Adam moves a weight by about the rate, 2e-3.
    assert all(0 < size < 4 * 2.2e-3 for size in moved.values()), moved


def test_a_critic_has_the_layers_of_the_checkpoint_and_a_head_of_its_own(runs: Path) -> None:
    folder = runs / "critic" / "checkpoints" / "step_000001" / "critic"
    stored = load_file(folder / "rank_00000.safetensors")
    origin = load_file(runs / "origin" / WEIGHTS)
    layer = stored["parameter/critic.decoder.layers.1.mlp.linear_fc2.weight@0,0"]
    assert torch.allclose(layer, origin["model.layers.1.mlp.down_proj.weight"], rtol=0, atol=1e-9)
    head = stored["parameter/critic.output_layer.weight@0,0"]
    assert head.shape == (1, 32)
    assert 0.001 < float(head.std()) < 0.1


def test_nothing_is_written_over_a_folder_or_of_a_damaged_checkpoint(runs: Path, tmp_path: Path) -> None:
    trained = runs / "dumped" / "checkpoints" / "step_000001"
    with pytest.raises(ConfigError, match="is there already"):
        export(trained, runs / "origin")
    copy = tmp_path / "step_000001"
    shutil.copytree(trained, copy)
    path = copy / "policy" / "rank_00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is damaged"):
        export(copy, tmp_path / "out")
    done = run_program("mock_scheduler.cli", ["export-hf", str(runs), str(tmp_path / "out")])
    assert (done.returncode, done.stderr.startswith(f"error: {runs} is not a checkpoint")) == (5, True)
    assert [child.name for child in tmp_path.iterdir()] == ["step_000001"]


def test_a_policy_from_scratch_is_written_as_the_model_that_it_is(runs: Path, tmp_path: Path) -> None:
    trained = runs / "scratch" / "checkpoints" / "step_000001"
    export(trained, tmp_path / "out")
    model = ModelConfig(hf_checkpoint=str(tmp_path / "out"))
    assert (model.num_layers, model.hidden_size, model.query_groups, model.rotary_base) == (2, 64, 2, 100)
    stored = load_file(trained / "policy" / "rank_00000.safetensors")
    exported = load_file(tmp_path / "out" / WEIGHTS)
    name = "decoder.layers.1.self_attention.linear_proj.weight"
    assert torch.equal(exported["model.layers.1.self_attn.o_proj.weight"], stored[f"parameter/{name}@0,0"])


def test_the_next_run_begins_with_an_exported_policy(runs: Path) -> None:
    """What was written is read again: the checkpoint's parameters, bit for bit."""
    exported = load_file(runs / "exported" / WEIGHTS)
    stored = load_file(runs / "dumped" / "checkpoints" / "step_000001" / "policy" / "rank_00000.safetensors")
    fc1 = stored["parameter/decoder.layers.1.mlp.linear_fc1.weight@0,0"]
    halves = [exported[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(fc1, torch.cat(halves))


def test_an_alignment_runs_again_where_a_file_of_the_checkpoint_has_changed(tmp_path: Path) -> None:
    """The place alone says nothing, so the files stand among the sources of a run."""
    write_checkpoint(tmp_path / "model", "llama", num_files=2)
    configs = write_tiny_config(tmp_path)
    overrides = ("~model", f"++model.hf_checkpoint={tmp_path}/model")
    config = load_config("tiny", config_path=configs, overrides=overrides)
    sources = PROGRAM.list_sources(config)
    assert [path.name for path in sources] == [
        *("config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
        *("model.safetensors.index.json", "tokenizer.json"),
    ]
    before = digest_sources((), tuple(sources))
    write_checkpoint(tmp_path / "model", "llama", tensors=make_tensors("llama", seed=1), num_files=2)
    assert digest_sources((), tuple(sources)) != before
