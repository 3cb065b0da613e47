"""Runs of text: recorded with a tokenizer and reasoning tasks, replayed without either, and refused with another.

The packages are the stand-ins of ``tests/text_packages``; ``tests/integrations/test_text.py`` has the real ones.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from launch import make_tiny_qwen3
from mock_scheduler.batch import Termination
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.scheduler import RolloutRequest
from tests.pipelines.tiny_runs import ROOT, run_command
from tests.programs import run_program

pytestmark = pytest.mark.timeout(600)

PACKAGES = ROOT / "tests" / "text_packages"
END = 2


def arguments(root: Path, name: str, *overrides: str) -> list[str]:
    """A run of the shipped configuration on the checkpoint in ``root``."""
    recorded = ("rollout_mock.enable=true", f"rollout_mock.dump_dir={root}/recording", f"output_dir={root / name}")
    batches = ("rollout_batch_size=16", "training.global_batch_size=8", "training.micro_batch_size=4")
    envs = ("train_env_manager.num_env_groups=2", "train_env_manager.num_env_workers=1", "entropy_loss_coef=0.01")
    small = (*batches, *envs, "max_steps=3", "sft.steps=1", "sft.lr=2.0e-3", "eval_steps=0", "training.lr=1e-3")
    return [
        *("--config-path", str(ROOT / "configs"), "--config-name", "qwen3_tiny_reasoning"),
        *(*recorded, *small, f"model.hf_checkpoint={root}/tiny", "save_steps=3", "track_with=none", *overrides),
    ]


def run_with_packages(module: str, given: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs a module where the stand-ins of the text packages can be imported, in its workers too."""
    return run_program(module, given, environ={"PYTHONPATH": f"{PACKAGES}:{ROOT}"}, cwd=PACKAGES)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint and a recording of three steps, the first of them supervised."""
    place = tmp_path_factory.mktemp("text-runs")
    make_tiny_qwen3.write(place / "tiny", num_layers=1, hidden=64)
    dumped = run_with_packages("pipelines.agentic", arguments(place, "dumped", "rollout_mock.mode=dump"))
    assert dumped.returncode == 0, dumped.stdout + dumped.stderr
    return place


def test_a_replay_loads_no_tokenizer_and_no_task_and_trains_to_the_same_bits(root: Path) -> None:
    """The entry fails where a package was loaded; this process could not load one either."""
    replayed = run_program(
        "tests.pipelines.workers.gymnasium_must_not_load",
        # Nor Ray, whatever the configuration says of workers.
        arguments(root, "replayed", "rollout_mock.mode=mock", "++env_workers.type=ray"),
    )
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    ledger = json.loads((root / "replayed" / "ledger.json").read_text(encoding="utf-8"))
    assert ledger["built"] == {"engine": 0, "environment": 0, "scheduler": 0}
    policies = [
        (root / name / "checkpoints" / "step_000003" / "policy" / "rank_00000.safetensors").read_bytes()
        for name in ("dumped", "replayed")
    ]
    assert policies[0] == policies[1]
    losses = [json.loads(line)["metrics"] for line in (root / "dumped" / "metrics.jsonl").read_text().splitlines()]
    assert all(step["grad_norm"] > 0 for step in losses)


def test_rows_are_a_prompt_of_the_template_and_what_was_sampled(root: Path) -> None:
    request = RolloutRequest(global_step=1, batch_size=16)
    batch = RecordingReader(str(root / "recording")).open_step(request).load()
    names = {number: name for name, number in make_tiny_qwen3.make_tokenizer()["model"]["vocab"].items()}
    for row in batch.rows():
        tokens, length = row.tokens.tolist(), row.prompt_length
        prompt = "".join(names[token] for token in tokens[:length])
        assert prompt.startswith("<|im_start|>userĊ")
        assert re.search(r"backward:Ġ[abc]{3,4}<\|im_end\|>Ċ<\|im_start\|>assistantĊ$", prompt)
        assert row.response_mask.tolist() == [False] * length + [True] * (len(tokens) - length)
        has_ended = tokens[-1] == END
        assert row.termination is (Termination.TERMINATED if has_ended else Termination.TRUNCATED)
        assert len(tokens) - length == 6 or has_ended
        assert END not in tokens[length:-1]
    assert len(batch.rows()) == 16
    assert len(set(batch.prompt_digests)) == 2  # one question for each group


def test_the_supervised_start_trains_on_the_tasks_own_answers_and_is_recorded(root: Path) -> None:
    """Its questions are others than those of the rollouts, each its own group; the answers end with the end token."""
    reader = RecordingReader(str(root / "recording"))
    supervised, played = (reader.open_step(RolloutRequest(global_step=s, batch_size=16)).load() for s in (0, 1))
    letters = {number: name for name, number in make_tiny_qwen3.make_tokenizer()["model"]["vocab"].items()}
    for row in supervised.rows():
        prompt, answer = (row.tokens[row.response_mask == of_answer].tolist() for of_answer in (False, True))
        word = "".join(letters[token] for token in prompt).partition("backward:Ġ")[2].partition("<")[0]
        assert "".join(letters[token] for token in answer) == word[::-1] + "<|im_end|>"
        assert (row.turn_rewards.tolist(), row.termination) == ([1.0], Termination.TERMINATED)
    assert (supervised.num_groups, len(supervised.rows())) == (16, 16)
    assert not supervised.extras["rollout_logprobs_valid"].values.any()  # type: ignore[union-attr]
    assert not {row.identity.group_key for row in supervised.rows()} & {row.identity.group_key for row in played.rows()}
    metrics = [json.loads(line)["metrics"] for line in (root / "dumped" / "metrics.jsonl").read_text().splitlines()]
    # A random model gives each of its 259 tokens about the same chance; two updates from sft.lr to training.lr.
    assert metrics[0]["sft/loss"] == pytest.approx(math.log(259), rel=0.05)
    assert metrics[0]["lr"] == pytest.approx((2e-3 + 1e-3) / 2)
    assert [step["lr"] for step in metrics[1:]] == pytest.approx([1e-3, 1e-3], rel=0.02)
    assert "reward" not in metrics[0]
    assert "sft/loss" not in metrics[1]
    assert metrics[1]["reward"] < 1.0


@pytest.mark.all
def test_two_replicas_train_as_one_from_the_supervised_start_on(root: Path) -> None:
    given = arguments(root, "dp2", "rollout_mock.mode=mock", "parallel.data_parallel_size=2")
    replayed = run_command(["-m", "mock_scheduler.cli", "launch", "qwen3_tiny_reasoning", *given[4:]])
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    lines = [(root / name / "metrics.jsonl").read_text().splitlines() for name in ("dumped", "dp2")]
    one, two = ([json.loads(line)["metrics"] for line in own] for own in lines)
    assert [step["grad_norm"] for step in two] == pytest.approx([step["grad_norm"] for step in one], rel=1e-4)
    assert two[0]["sft/loss"] == pytest.approx(one[0]["sft/loss"], rel=1e-6)


def test_another_tokenizer_at_the_same_place_is_refused(root: Path) -> None:
    path = root / "tiny" / "tokenizer_config.json"
    before = path.read_text(encoding="utf-8")
    path.write_text(before.replace("assistant", "helper"), encoding="utf-8")
    try:
        refused = run_program("pipelines.agentic", arguments(root, "refused", "rollout_mock.mode=mock"))
    finally:
        path.write_text(before, encoding="utf-8")
    assert refused.returncode == 3, refused.stdout + refused.stderr
    assert "vocabulary: recorded" in refused.stderr
    assert "use the recording run's tokenizer" in refused.stderr


def test_a_run_that_plays_text_without_the_packages_names_the_extra_before_a_model_is_built(root: Path) -> None:
    refused = run_program("pipelines.agentic", arguments(root, "lacking", "rollout_mock.mode=dump"))
    assert refused.returncode == 5
    assert "pip install 'mock-scheduler[text]'" in refused.stderr
    assert not (root / "lacking" / "checkpoints").exists()


def test_a_second_turn_whose_first_would_be_encoded_anew_stops_the_run_by_name(root: Path) -> None:
    """A random policy samples bytes that are no text; a worker process finds the first token that would be another."""
    overrides = ("rollout_mock.enable=false", "sft.steps=0", "custom_envs.Words.max_steps=2")
    stopped = run_with_packages("pipelines.agentic", arguments(root, "second-turn", *overrides))
    assert stopped.returncode == 5, stopped.stdout + stopped.stderr
    assert "environment of slot 0 (tag Words, seed " in stopped.stderr
    assert "the chat template's next prompt does not begin with the " in stopped.stderr
    assert "text.on_template_break=end" in stopped.stderr


def test_recorded_answers_get_the_recorded_rewards_again(root: Path) -> None:
    named = [*arguments(root, "again")[:4], "--recording", f"{root}/recording", *arguments(root, "again")[4:]]
    done = run_with_packages("pipelines.replay_actions", named)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal: every observation, reward and end is as recorded" in done.stdout
    assert "48 rows, 48 turns" in done.stdout


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["actor_infer.only_action_tokens=true"], "actor_infer.only_action_tokens: text has no tokens that are"),
        (["use_kl_loss=true"], "use_kl_loss and kl_in_reward pull towards the weights from before it"),
        (["adv_estimator=gae"], "adv_estimator gae: a critic has none"),
        (
            [
                "custom_envs.Words.env_type=textarena",
                "~custom_envs.Words.env_config",
                "+custom_envs.Words.env_config.game=x",
            ],
            "train_env_manager.tags Words: environments of type reasoning_gym alone know answers to train on",
        ),
        (["~model"], "text.tokenizer: environments of text need a tokenizer; set it, or model.hf_checkpoint"),
        (["~custom_envs.Words.env_config.dataset"], "custom_envs.Words.env_config.dataset"),
        (
            [
                "sft.steps=0",
                "custom_envs.Words.env_type=frozen_lake",
                "~custom_envs.Words.env_config",
                "+text.tokenizer=x",
            ],
            "text.tokenizer has no effect: no tag in use is an environment of text",
        ),
    ],
)
def test_a_wrong_configuration_is_refused(overrides: list[str], message: str, root: Path) -> None:
    given = [item for item in arguments(root, "wrong", *overrides) if "~model" not in overrides or "hf_" not in item]
    refused = run_program("pipelines.agentic", given)
    assert refused.returncode == 5
    assert message in refused.stderr
