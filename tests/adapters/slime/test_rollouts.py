"""The rollout function of slime's family records and replays, builds nothing in a replay, and leaves the data where a
live rollout does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mock_scheduler import read_recording
from mock_scheduler.adapters.settings import load_settings
from mock_scheduler.adapters.slime import rollouts, trace
from mock_scheduler.adapters.slime.rollouts import RolloutFunction, generate_rollout
from mock_scheduler.adapters.slime.settings import SlimeSettings
from mock_scheduler.errors import ConfigError, ContractError, RecordingError, SchedulerError, StepNotFoundError
from tests.adapters.slime.family import playing
from tests.adapters.slime.family.playing import DataSource

FAMILY = "tests.adapters.slime.family"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No call is counted yet, and every function that a test makes is closed in its end."""
    playing.calls.clear()
    made: list[RolloutFunction] = []
    init = RolloutFunction.__init__

    def noted(self: RolloutFunction, *arguments: Any, **options: Any) -> None:
        made.append(self)
        init(self, *arguments, **options)

    monkeypatch.setattr(RolloutFunction, "__init__", noted)
    rollouts._function_of_process.cache_clear()
    yield
    rollouts._function_of_process.cache_clear()
    for function in made:
        if hasattr(function, "ledger"):
            function.close()


def arguments(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"rollout_batch_size": 2, "n_samples_per_prompt": 2, "reward_key": None, **fields})


def settings(folder: Path, mode: str, *, real: str = "play", **fields: Any) -> SlimeSettings:
    mock = {"enable": True, "mode": mode, "dump_dir": str(folder / "dump"), **fields.pop("mock", {})}
    return SlimeSettings(rollout_mock=mock, real=f"{FAMILY}.playing.{real}", framework=FAMILY, **fields)


def run(folder: Path, mode: str, steps: range, source: DataSource, args: Any, **fields: Any) -> list[Any]:
    """What a run of slime's form gets."""
    function = RolloutFunction(settings=settings(folder, mode, **fields))
    outputs = [function.generate(args, step, source, evaluation=False) for step in steps]
    function.close()
    return outputs


def dicts(output: Any) -> list[list[dict[str, Any]]]:
    return [[sample.to_dict() for sample in group] for group in output.samples]


def test_a_replay_gives_the_samples_and_leaves_the_data_where_they_were(tmp_path: Path) -> None:
    live, replayed = DataSource(), DataSource()
    first = run(tmp_path, "dump", range(3), live, arguments())
    assert playing.calls == ["train 0", "train 1", "train 2"]
    playing.calls.clear()
    second = run(tmp_path, "mock", range(3), replayed, arguments(debug_train_only=True))
    assert playing.calls == []
    assert [dicts(output) for output in second] == [dicts(output) for output in first]
    assert [output.metrics for output in second] == [{"rollout/seconds": 1.5}] * 3
    assert vars(replayed) | {"_prompts": 0} == vars(live) | {"_prompts": 0}
    assert live.epoch_id == 2  # twelve groups of five prompts were drawn


def test_live_the_function_gives_its_own_output(tmp_path: Path) -> None:
    function = RolloutFunction(settings=settings(tmp_path, "dump"))
    output = function.generate(arguments(), 0, DataSource(), evaluation=False)
    assert output.metrics == {"rollout/seconds": 1.5, "rollout/name": "x"}
    # On disk at once: nobody closes a function of slime.
    assert read_recording(tmp_path / "dump").steps == {"train": [0]}


def test_a_recorded_step_says_the_samples(tmp_path: Path) -> None:
    (output,) = run(tmp_path, "dump", range(1), DataSource(), arguments(rollout_top_k=-1, rollout_temperature=0.5))
    batch = read_recording(tmp_path / "dump").batch(0)
    assert (len(batch), batch.num_groups, batch.group_size, batch.sampling.temperature) == (4, 2, 2, 0.5)
    assert batch.rewards.tolist() == [torch.tensor(s.reward).item() for group in output.samples for s in group]


@pytest.mark.parametrize(
    ("mode", "args", "problem"),
    [
        ("mock", arguments(), "mode=mock needs no engine, and engines were started: give --debug-train-only"),
        ("dump", arguments(debug_train_only=True), "--debug-train-only starts no engine, and rollout_mock.mode=dump"),
    ],
)
def test_the_switch_must_fit_the_mode(tmp_path: Path, mode: str, args: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        run(tmp_path, mode, range(1), DataSource(), args)


def test_other_arguments_are_refused(tmp_path: Path) -> None:
    run(tmp_path, "dump", range(1), DataSource(), arguments(rollout_seed=1))
    with pytest.raises(ContractError, match=r"slime\.rollout_seed: recorded 1, current 2"):
        run(tmp_path, "mock", range(1), DataSource(), arguments(rollout_seed=2, debug_train_only=True))


def test_other_data_are_refused(tmp_path: Path) -> None:
    run(tmp_path, "dump", range(2), DataSource(size=5), arguments())
    with pytest.raises(SchedulerError, match="its replay drew 4 groups of prompts, and the data source is at"):
        run(tmp_path, "mock", range(2), DataSource(size=3), arguments(debug_train_only=True))


def test_a_replay_from_the_middle_needs_the_data_there(tmp_path: Path) -> None:
    run(tmp_path, "dump", range(2), DataSource(), arguments())
    with pytest.raises(RecordingError, match="was recorded at data cursor"):
        run(tmp_path, "mock", range(1, 2), DataSource(), arguments(debug_train_only=True))


def test_a_missing_step_is_refused(tmp_path: Path) -> None:
    run(tmp_path, "dump", range(1), DataSource(), arguments())
    source = DataSource()
    source.get_samples(4)
    with pytest.raises(StepNotFoundError):
        run(tmp_path, "mock", range(1, 2), source, arguments(debug_train_only=True))


def evaluations(folder: Path, mode: str, args: Any, **fields: Any) -> tuple[list[Any], dict[str, dict[str, int]]]:
    """What evaluations before the first rollout and after each of two give, and the ledger."""
    function = RolloutFunction(settings=settings(folder, mode, **fields))
    source, found = DataSource(), [function.generate(args, 0, DataSource(), evaluation=True)]
    for step in range(2):
        function.generate(args, step, source, evaluation=False)
        found.append(function.generate(args, step, source, evaluation=True))
    function.close()
    return found, function.ledger.as_dict()


def comparable(output: Any) -> dict[str, Any]:
    return {
        name: {**about, "samples": [sample.to_dict() for sample in about["samples"]]}
        for name, about in output.data.items()
    }


def test_evaluations_are_replayed(tmp_path: Path) -> None:
    args = arguments(eval_reward_key="acc", eval_temperature=0.25)
    live, _ = evaluations(tmp_path, "dump", args)
    assert playing.calls == ["eval 0", "train 0", "eval 0", "train 1", "eval 1"]
    playing.calls.clear()
    replayed, ledger = evaluations(tmp_path, "mock", args, with_engines=True)
    assert playing.calls == []
    assert ledger["built"].get("rollout_function", 0) == 0
    assert [comparable(output) for output in replayed] == [comparable(output) for output in live]
    assert [list(output.data) for output in replayed] == [["gsm", "none", "math"]] * 3
    assert [output.metrics for output in replayed] == [{"eval/seconds": 0.5}] * 3


def test_a_recorded_evaluation_says_its_samples(tmp_path: Path) -> None:
    live, _ = evaluations(tmp_path, "dump", arguments(eval_reward_key="acc", eval_temperature=0.25))
    recording = read_recording(tmp_path / "dump")
    assert recording.steps == {"train": [0, 1], "val": [0, 1, 2]}
    batch = recording.batch(1, mode="val")
    assert (len(batch), batch.sampling.temperature, recording.batch(0).sampling.temperature) == (5, 0.25, 1.0)
    rewards = [torch.tensor(reward).item() for name in ("gsm", "math") for reward in live[1].data[name]["rewards"]]
    assert batch.rewards.tolist() == rewards
    assert [(row.identity.group_id, row.identity.env_id) for row in batch.rows()] == [
        *((0, 0), (0, 1), (0, 2)),
        *((2, 0), (2, 1)),
    ]


def test_evaluations_may_be_left_out(tmp_path: Path) -> None:
    evaluations(tmp_path, "dump", arguments(), record_evaluation=False)
    assert read_recording(tmp_path / "dump").steps == {"train": [0, 1]}
    playing.calls.clear()
    replayed, ledger = evaluations(tmp_path, "mock", arguments(), with_engines=True, record_evaluation=False)
    assert ([output.data for output in replayed], playing.calls) == ([{}] * 3, [])
    assert ledger["suppressed"]["evaluation"] == 3


def test_an_evaluation_without_samples_goes_on_without_a_record(tmp_path: Path) -> None:
    live, ledger = evaluations(tmp_path, "dump", arguments(eval_datasets={"none": 0}))
    assert [output.data for output in live] == [{"none": {"rewards": [], "truncated": [], "samples": []}}] * 3
    assert playing.calls == ["eval 0", "train 0", "eval 0", "train 1", "eval 1"]
    assert ledger["called"]["evaluation_without_record"] == 3
    assert read_recording(tmp_path / "dump").steps == {"train": [0, 1]}


def test_live_rollouts_follow_replayed_ones(tmp_path: Path) -> None:
    expected = run(tmp_path, "dump", range(3), DataSource(), arguments())
    playing.calls.clear()
    schedule = {"schedule": [{"mode": "mock", "steps": "0-1"}]}
    found = run(tmp_path, "real", range(3), DataSource(), arguments(), mock=schedule)
    assert playing.calls == ["train 2"]
    assert [dicts(output) for output in found] == [dicts(output) for output in expected]


def miles_input(step: int, version: int | None) -> SimpleNamespace:
    return SimpleNamespace(rollout_id=step, weight_version=version, evaluation=False)


@pytest.mark.parametrize(("present", "stated"), [(3, ["3"]), (1, ["1"]), (None, ["3"])])
def test_the_class_form_states_the_present_version(tmp_path: Path, present: int | None, stated: list[str]) -> None:
    made = SimpleNamespace(args=arguments(), data_source=DataSource())
    live = RolloutFunction(made, settings=settings(tmp_path, "dump", real="Playing"))
    first = live(miles_input(0, 3))
    live.close()
    assert playing.calls == ["made", "train 0"]
    playing.calls.clear()
    again = SimpleNamespace(args=arguments(debug_train_only=True), data_source=DataSource())
    replay = RolloutFunction(again, settings=settings(tmp_path, "mock", real="Playing"))
    second = replay(miles_input(0, present))
    assert playing.calls == []
    assert dicts(second) == [[{**one, "weight_versions": stated} for one in group] for group in dicts(first)]


def test_the_settings_are_read_from_the_named_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mock.yaml"
    path.write_text(
        f"rollout_mock: {{enable: true, mode: dump, dump_dir: {tmp_path / 'dump'}}}\n"
        f"real: {FAMILY}.playing.play\nframework: {FAMILY}\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("MOCK_SCHEDULER_SLIME", str(path))
    output = generate_rollout(arguments(), 0, DataSource())
    assert len(output.samples) == 2
    assert read_recording(tmp_path / "dump").steps == {"train": [0]}
    path.write_text("rollout_mock: {}\nreal: x.y\nreel: 1\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="reel"):
        load_settings(SlimeSettings)
    monkeypatch.delenv("MOCK_SCHEDULER_SLIME")
    with pytest.raises(ConfigError, match="MOCK_SCHEDULER_SLIME is not set: name a YAML file"):
        load_settings(SlimeSettings)


def test_a_function_of_no_framework_names_its_package() -> None:
    assert SlimeSettings(rollout_mock={}, real="vime.rollout.vllm_rollout.generate_rollout").package == "vime"
    with pytest.raises(ConfigError, match="set framework to the package of its samples"):
        SlimeSettings(rollout_mock={}, real="mine.play").package  # noqa: B018 - a property


def test_the_hook_attaches_once_for_each_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    attached: list[tuple[object, ...]] = []
    # By its name alone: looking it up would import Megatron.
    monkeypatch.setitem(vars(trace.megatron), "attach", lambda *a, **k: attached.append((*a, k)))
    model, optimizers = [torch.nn.Linear(1, 1)], [object(), object()]
    for step in range(3):
        for optimizer in optimizers:
            trace.before_train_step(SimpleNamespace(vocab_size=50), 0, step, model, optimizer, None)
    assert attached == [(model, optimizer, {"vocab_size": 50}) for optimizer in optimizers]


def test_a_stand_in_is_refused_where_prompts_are_drawn(tmp_path: Path) -> None:
    run(tmp_path, "dump", range(2), DataSource(), arguments())
    with pytest.raises(ConfigError, match=r"missing_step=repeat has no rollout that draws prompts .* set it to error"):
        run(tmp_path, "mock", range(3), DataSource(), arguments(debug_train_only=True), mock={"missing_step": "repeat"})
