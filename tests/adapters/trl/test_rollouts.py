"""The seam of TRL's GRPOTrainer, with a trainer of its signatures (TRL 1.16.0): what a replay calls and refuses."""

import asyncio
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mock_scheduler import read_recording
from mock_scheduler.adapters.trl import Rollouts
from mock_scheduler.commands.foreign import run_export
from mock_scheduler.errors import BatchError, ConfigError, ContractError, SchedulerError
from mock_scheduler.recording.inspection.description import RecordingStatistics
from mock_scheduler.recording.inspection.diff import compare_batches
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.recording.step.step_file import decode_step
from mock_scheduler.support.pickles.torch_files import read_torch_file

ARGUMENTS = {
    "num_generations": 2,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 1,
    "num_iterations": 1,
    "max_completion_length": 4,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "token_budget": 0,
    "use_vllm": False,
}


class Tokenizer:
    eos_token_id = 2
    chat_template = None

    def __init__(self, words: tuple[str, ...] = ("a", "b")) -> None:
        self.special_tokens_map = {"eos_token": "</s>"}
        self.words = words

    def get_vocab(self) -> dict[str, int]:
        return {word: index for index, word in enumerate(self.words)}


class Trainer:
    """Asks as GRPOTrainer does: a rollout, then rewards of its texts, then a shuffle by torch's global generator."""

    tools: tuple[Any, ...] = ()
    environment_factories = None
    num_generations = num_generations_eval = 2

    def __init__(self, rollouts: Rollouts, prompts: list[Any] | None = None) -> None:
        self.rollouts = rollouts
        self.prompts = ["x", "x", "y", "y"] if prompts is None else prompts
        self.state = SimpleNamespace(global_step=0)
        self.model = SimpleNamespace(training=True, config=SimpleNamespace(model_type="toy", hidden_size=8))
        self.reward_funcs = rollouts.reward_funcs
        self.logged: list[Any] = []
        self._step = 0

    def train(self, num_steps: int = 2) -> list[Any]:
        results = []
        for _ in range(num_steps):
            output = self.rollouts(self.prompts, self)
            options = {
                "completions": output["completion_ids"],
                "log_extra": lambda key, value: self.logged.append((key, value)),
                "log_metric": lambda key, value: self.logged.append((key, value)),
            }
            rewards = []
            for function in self.reward_funcs:
                values = function(prompts=self.prompts, **options)
                rewards.append(asyncio.run(values) if asyncio.iscoroutine(values) else values)
            results.append((output, rewards, torch.randperm(4).tolist()))
            self.state.global_step += 1
            self._step += 1
        return results


class Real:
    """The rollout function and the reward functions of a run; each counts its calls, and draws."""

    def __init__(self) -> None:
        self.calls = {"rollout": 0, "reward": 0}

    def rollout(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        self.calls["rollout"] += 1
        ids = torch.randint(3, 99, (len(prompts), 3)).tolist()
        return {"prompt_ids": [[7]] * len(prompts), "completion_ids": ids, "logprobs": None, "source": ["toy"] * 4}

    def length(self, completions: list[Any], log_metric: Any, **_columns: Any) -> list[float | None]:
        self.calls["reward"] += 1
        log_metric("length", 3.0)
        return [None, random.random(), torch.rand(()).item(), 1]

    async def slow(self, completions: list[Any], **_columns: Any) -> Any:
        self.calls["reward"] += 1
        return np.array([float("nan"), 0.5, 1.0, 2.0])


def open_rollouts(tmp_path: Path, mode: str, real: Real, **changes: Any) -> Rollouts:
    given: dict[str, Any] = {
        "args": SimpleNamespace(**{**ARGUMENTS, **changes.pop("arguments", {})}),
        "processing_class": Tokenizer(),
        "reward_funcs": [real.length, real.slow],
        "rollout_func": real.rollout,
        **changes,
    }
    return Rollouts({"enable": True, "mode": mode, "dump_dir": str(tmp_path / "dumps")}, **given)


@pytest.fixture
def trl(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module in the place of TRL's, with the class that starts its engine."""
    module: Any = ModuleType("trl.trainer.grpo_trainer")
    module.VLLMGeneration = lambda **_options: pytest.fail("an engine was started")
    for name in ("trl", "trl.trainer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "trl.trainer.grpo_trainer", module)
    return module


def train(tmp_path: Path, mode: str, **changes: Any) -> tuple[list[Any], Real, Rollouts, Trainer]:
    torch.manual_seed(1)
    random.seed(1)
    real = Real()
    prompts, size = changes.pop("prompts", None), changes.pop("hidden_size", 8)
    with open_rollouts(tmp_path, mode, real, **changes) as rollouts:
        trainer = Trainer(rollouts, prompts)
        trainer.model.config.hidden_size = size
        results = trainer.train()
    return results, real, rollouts, trainer


def test_a_replay_calls_nothing_and_trains_on_the_same(tmp_path: Path, trl: Any) -> None:
    live, real, _, trainer = train(tmp_path, "dump")
    replayed, unused, rollouts, again = train(tmp_path, "mock")
    assert repr(replayed) == repr([(output, [one, list(two)], order) for output, (one, two), order in live])
    assert real.calls == {"rollout": 2, "reward": 4}
    assert unused.calls == {"rollout": 0, "reward": 0}
    assert rollouts.ledger.as_dict()["answered"] == {"get_batch": 2, "late_values": 4}
    assert again.logged == trainer.logged == [("length", 3.0)] * 2
    assert repr(train(tmp_path, "verify")[0]) == repr(live)


def totals_of(results: list[Any], weights: tuple[float, float]) -> list[list[float]]:
    """What TRL adds up: weighted, and without the values that a function does not have."""
    return [
        [
            sum(w * value for w, value in zip(weights, row, strict=True) if value is not None and not np.isnan(value))
            for row in zip(*rewards, strict=True)
        ]
        for _, rewards, _ in results
    ]


def test_rewards_are_those_of_the_rows_for_who_looks_at_the_recording(tmp_path: Path, trl: Any) -> None:
    live = train(tmp_path, "dump", arguments={"reward_weights": [2.0, -1.0]})[0]
    recording = read_recording(tmp_path / "dumps")
    for step, total in enumerate(totals_of(live, (2.0, -1.0))):
        assert recording.batch(step).rewards.tolist() == pytest.approx(total, rel=1e-6)
        assert total[0] == 0.0  # no function has a value
        assert total[3] == 0.0 == 2.0 * 1 - 2.0
    statistics = RecordingStatistics()
    for step in range(2):
        statistics.add("train", recording.batch(step), recording.info(step), size_bytes=0)
    assert statistics.totals().reward.maximum == pytest.approx(max(map(max, totals_of(live, (2.0, -1.0)))))
    run_export("slime", str(tmp_path / "dumps"), tmp_path / "slime", steps=None)
    exported = read_torch_file(tmp_path / "slime" / "1.pt")["samples"]
    assert [sample["reward"] for sample in exported] == recording.batch(1).rewards.tolist()
    train(tmp_path / "other", "dump", arguments={"reward_weights": [2.0, 1.0]})
    other = read_recording(tmp_path / "other" / "dumps")
    assert set(compare_batches(recording.batch(0), other.batch(0)).field_counts) == {"reward"}


def test_a_reward_keeps_its_name_and_whether_it_is_awaited(tmp_path: Path) -> None:
    real = Real()
    with open_rollouts(tmp_path, "dump", real) as rollouts:
        assert [function.__name__ for function in rollouts.reward_funcs] == ["length", "slow"]
        assert [asyncio.iscoroutinefunction(function) for function in rollouts.reward_funcs] == [False, True]
    model = torch.nn.Linear(2, 1)
    with open_rollouts(tmp_path, "dump", real, reward_funcs=model) as rollouts:
        assert rollouts.reward_funcs == [model]
    with (
        open_rollouts(tmp_path, "dump", real) as rollouts,
        pytest.raises(SchedulerError, match="called before any rollout"),
    ):
        rollouts.reward_funcs[0](completions=[], log_metric=print)


def test_the_engine_is_not_started_and_comes_back(tmp_path: Path, trl: Any) -> None:
    train(tmp_path, "dump")
    original = trl.VLLMGeneration
    with open_rollouts(tmp_path, "mock", Real()) as rollouts:
        engine = trl.VLLMGeneration(model="m", mode="server")
        engine.sync_weights()
        assert engine.vllm_client.get_server_info()["model_config"] == {"logprobs_mode": "processed_logprobs"}
        with pytest.raises(SchedulerError, match="asked its engine to generate in a run that only replays"):
            engine.generate(prompts=[])
    assert rollouts.ledger.as_dict()["suppressed"] == {"engine": 1, "sync_weights": 1, "close": 1}
    assert trl.VLLMGeneration is original
    with open_rollouts(tmp_path / "other", "dump", Real()):
        assert trl.VLLMGeneration is original
    del trl.VLLMGeneration
    with pytest.raises(ConfigError, match="has no VLLMGeneration: this release of TRL starts its engine elsewhere"):
        open_rollouts(tmp_path, "mock", Real())


@pytest.mark.parametrize(
    ("changes", "kind", "problem"),
    [
        ({"arguments": {"num_generations": 4}}, ContractError, "trl.num_generations: recorded 2, current 4"),
        (
            {"arguments": {"use_vllm": True}},
            ContractError,
            "trl.use_vllm: recorded false, current true. Set trl.use_vllm",
        ),
        (
            {"hidden_size": 16},
            ContractError,
            "trl.model.hidden_size: recorded 8, current 16. Set trl.model.hidden_size",
        ),
        ({"processing_class": Tokenizer(("a", "c"))}, ContractError, "trl.tokenizer: recorded"),
        ({"contract": {"model": "other"}}, ContractError, 'model: recorded "m", current "other"'),
        ({"reward_funcs": [Real().slow]}, ContractError, r"trl.reward_functions: recorded \["),
        ({"prompts": ["x", "x", "z", "z"]}, BatchError, "2 of 4 prompts are not the recorded ones: row 2 is now 'z'"),
    ],
)
def test_another_run_is_refused_with_reasons(
    tmp_path: Path, trl: Any, changes: dict[str, Any], kind: type[Exception], problem: str
) -> None:
    train(tmp_path, "dump", contract={"model": "m"})
    with pytest.raises(kind, match=problem):
        train(tmp_path, "mock", **{"contract": {"model": "m"}, **changes})


@pytest.mark.parametrize("mode", ["dump", "mock", "verify"])
@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_trainer_with_reward_functions_of_its_own_is_refused(
    tmp_path: Path, trl: Any, mode: str, num_steps: int
) -> None:
    if mode != "dump":
        train(tmp_path, "dump")
    real = Real()
    rollouts = open_rollouts(tmp_path, mode, real)
    trainer = Trainer(rollouts)
    # One of two is given: the other's values would be live in the replay, too.
    trainer.reward_funcs = [rollouts.reward_funcs[0], real.slow]
    words = (
        r"train step 0: its rewards were not asked of Rollouts \(reward/1/slow\).*reward_funcs=rollouts.reward_funcs$"
    )
    if num_steps == 2:
        with pytest.raises(SchedulerError, match=words):
            trainer.train(2)
    else:
        trainer.train(1)
    with pytest.raises(SchedulerError, match=words):
        rollouts.close()
    engine = trl.VLLMGeneration
    assert getattr(engine, "__name__", "") == "<lambda>"  # TRL's own is back


def fail(tmp_path: Path, mode: str) -> None:
    """Train with a reward function that fails."""
    with open_rollouts(tmp_path, mode, Real()) as rollouts:
        trainer = Trainer(rollouts)
        trainer.reward_funcs = [lambda **_options: 1 // 0]
        trainer.train()


def test_a_failed_training_tells_its_own_error_and_a_disabled_mock_asks_nothing(tmp_path: Path, trl: Any) -> None:
    train(tmp_path, "dump")
    for mode in ("dump", "mock"):
        place = tmp_path / "other" if mode == "dump" else tmp_path
        with pytest.raises(ZeroDivisionError):
            fail(place, mode)
    real = Real()
    with Rollouts(
        {"enable": False},
        args=SimpleNamespace(**ARGUMENTS),
        processing_class=Tokenizer(),
        reward_funcs=real.slow,
        rollout_func=real.rollout,
    ) as rollouts:
        trainer = Trainer(rollouts)
        trainer.reward_funcs = [real.slow]
        trainer.train(2)
    assert real.calls == {"rollout": 2, "reward": 2}


def test_a_run_that_was_killed_goes_on_in_its_recording(tmp_path: Path, trl: Any) -> None:
    torch.manual_seed(1)
    with open_rollouts(tmp_path, "dump", Real(), run_id="r1") as rollouts:
        Trainer(rollouts).train(2)
    with open_rollouts(tmp_path, "dump", Real(), run_id="r1", resume=True) as rollouts:
        trainer = Trainer(rollouts)
        trainer.state.global_step = 2  # of the checkpoint
        live = trainer.train(1)
    assert RecordingReader(str(tmp_path / "dumps")).steps() == {"train": [0, 1, 2]}
    with open_rollouts(tmp_path, "mock", Real()) as rollouts:
        replayed = Trainer(rollouts).train(3)
    assert replayed[2][0] == live[0][0]


def test_a_trainer_with_tools_is_refused(tmp_path: Path) -> None:
    with open_rollouts(tmp_path, "dump", Real()) as rollouts:
        trainer = Trainer(rollouts)
        trainer.tools = (print,)
        with pytest.raises(ConfigError, match="tools and environment_factory play after rollout_func, with the engine"):
            trainer.train()


def test_steps_are_numbered_by_the_weights_and_evaluations_apart(tmp_path: Path) -> None:
    arguments = {"gradient_accumulation_steps": 4, "steps_per_generation": 2}
    real = Real()
    with open_rollouts(tmp_path, "dump", real, arguments=arguments, reward_funcs=torch.nn.Linear(1, 1)) as rollouts:
        trainer = Trainer(rollouts)
        for micro_step in range(0, 8, 2):
            trainer._step, trainer.state.global_step = micro_step, micro_step // 4
            rollouts(trainer.prompts, trainer)
        trainer.model.training = False
        rollouts(trainer.prompts, trainer)
        rollouts(trainer.prompts, trainer)
    steps = RecordingReader(str(tmp_path / "dumps")).steps()
    assert steps == {"train": [0, 1, 2, 3], "val": [0, 1]}


def test_several_processes_have_rows_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match="shard needs run_id, the same on every rank"):
        open_rollouts(tmp_path, "dump", Real())
    with open_rollouts(tmp_path, "dump", Real(), run_id="r", reward_funcs=torch.nn.Linear(1, 1)) as rollouts:
        rollouts(["x", "x", "y", "y"], Trainer(rollouts))
    (path,) = (tmp_path / "dumps" / "train").rglob("*.safetensors")
    batch, info = decode_step(path.read_bytes())
    assert [identity.group_id for identity in batch.identities] == [2, 2, 3, 3]
    assert info.shard == (1, 2)
    monkeypatch.delenv("RANK")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 2 and RANK is not set"):
        open_rollouts(tmp_path, "dump", Real(), run_id="r")
