"""The proxy before megatron/rl's rollouts records and replays; a replay collects, evaluates and serves nothing."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mock_scheduler import read_recording
from mock_scheduler.adapters.megatron_rl import rollouts as seam
from mock_scheduler.adapters.megatron_rl.rollouts import Rollouts, attach_rollouts, read_sampling
from mock_scheduler.errors import ConfigError, ContractError, StepNotFoundError
from tests.adapters.bits import bits
from tests.adapters.imports.importing import imported
from tests.adapters.megatron_rl import rl_utils
from tests.adapters.megatron_rl.test_codec import taken_apart

ARGUMENTS = {
    "curr_iteration": 0,
    "grpo_prompts_per_step": 2,
    "grpo_group_size": 2,
    "rl_default_temperature": 1.0,
    "rl_default_top_p": 0,
    "rl_default_top_k": -1,
    "seq_length": 16,
}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rl_utils.calls.clear()
    environments = tmp_path / "environments.yaml"
    environments.write_text("- agent: math\n", encoding="utf-8")
    vars(rl_utils.args).clear()
    vars(rl_utils.args).update(ARGUMENTS, langrl_env_config=str(environments))
    monkeypatch.setattr(seam, "MODULE", rl_utils.__name__)


def run(folder: Path, mode: str, iterations: range, *, evaluate: bool = True, **options: Any) -> tuple[Rollouts, Any]:
    """Collects as the training loop does, and ends as it ends."""
    section = {"enable": True, "mode": mode, "dump_dir": str(folder / "dump"), **options.pop("mock", {})}
    rollouts = attach_rollouts(section, **options)
    try:
        found = []
        for rl_utils.args.curr_iteration in iterations:
            found.append(rl_utils.get_grpo_data_iterator("model", options.get("inference_model"), "optimizer"))
            if evaluate:
                rl_utils.evaluate_and_print_results_rl(None, "model", "optimizer", rl_utils.args.curr_iteration)
        rl_utils.rl_inference_interface_shutdown()
    finally:
        rollouts.restore()
        rollouts.close()
    return rollouts, found


def test_a_replay_gives_the_same_groups_and_collects_nothing(tmp_path: Path) -> None:
    _, live = run(tmp_path, "dump", range(0, 6, 2))
    assert rl_utils.calls == [
        *(f"{name} {step}" for step in (0, 2, 4) for name in ("collect", "evaluate")),
        "shutdown",
    ]
    assert read_recording(tmp_path / "dump").steps == {"train": [0, 2, 4]}
    rl_utils.calls.clear()
    rollouts, replayed = run(tmp_path, "mock", range(0, 6, 2))
    assert rl_utils.calls == ["shutdown"]
    assert bits(taken_apart(replayed)) == bits(taken_apart(live))
    assert isinstance(replayed[0][0][0], rl_utils.RolloutGroup)
    counts = rollouts.ledger.as_dict()
    assert counts["built"] == {"engine": 0, "environment": 0, "scheduler": 0}
    assert counts["suppressed"]["evaluation"] == 3


def test_every_function_is_put_back(tmp_path: Path) -> None:
    before = {name: getattr(rl_utils, name) for name in (seam._SEAM, seam._EVALUATION, seam._SHUTDOWN)}
    run(tmp_path, "dump", range(1))
    assert {name: getattr(rl_utils, name) for name in before} == before


def test_weights_for_a_model_of_its_own_are_not_sent_in_a_replay(tmp_path: Path) -> None:
    run(tmp_path, "dump", range(1))
    rollouts = attach_rollouts({"enable": True, "mode": "mock", "dump_dir": str(tmp_path / "dump")})
    try:
        rl_utils.get_grpo_data_iterator("model", ["inference model"], "optimizer")
        assert rollouts.ledger.as_dict()["suppressed"]["weight_updates"] == 1
    finally:
        rollouts.restore()
        rollouts.close()


def test_live_steps_follow_replayed_ones_and_are_evaluated(tmp_path: Path) -> None:
    _, live = run(tmp_path, "dump", range(3))
    rl_utils.calls.clear()
    schedule = {"schedule": [{"mode": "mock", "steps": "0-1"}]}
    _, found = run(tmp_path, "real", range(3), mock=schedule)
    assert rl_utils.calls == ["collect 2", "evaluate 2", "shutdown"]
    assert bits(taken_apart(found)) == bits(taken_apart(live))


def test_rank_0_writes_and_every_rank_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks play with rank 0, and move generators of their own: its states must not be set for them."""
    barriers: list[int] = []

    def be(rank: int) -> None:
        group = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: rank)
        group.barrier = lambda: barriers.append(rank)
        monkeypatch.setattr(seam, "dist", group)

    be(1)
    run(tmp_path, "dump", range(2))
    assert not (tmp_path / "dump" / "recording.json").exists()
    be(0)
    _, live = run(tmp_path, "dump", range(2))
    rl_utils.calls.clear()
    for rank in (0, 1):
        be(rank)
        rollouts, replayed = run(tmp_path, "mock", range(2))
        assert bits(taken_apart(replayed)) == bits(taken_apart(live))
        assert rollouts.ledger.as_dict()["answered"]["get_batch"] == 2
    assert rl_utils.calls == ["shutdown", "shutdown"]
    assert barriers == [1, 0, 0, 1]


def test_another_run_is_refused(tmp_path: Path) -> None:
    run(tmp_path, "dump", range(1), contract={"weights": "a"})
    with pytest.raises(StepNotFoundError):
        run(tmp_path, "mock", range(1, 2), contract={"weights": "a"})
    for change in ({"grpo_group_size": 4}, {"rl_default_temperature": 0.5}):
        vars(rl_utils.args).update(ARGUMENTS, **change)
        with pytest.raises(ContractError, match=rf"megatron_rl\.{next(iter(change))}"):
            run(tmp_path, "mock", range(1), contract={"weights": "a"})
    vars(rl_utils.args).update(ARGUMENTS)
    Path(rl_utils.args.langrl_env_config).write_text("- agent: code\n", encoding="utf-8")
    with pytest.raises(ContractError, match=r"megatron_rl\.environments"):
        run(tmp_path, "mock", range(1), contract={"weights": "a"})


def test_a_second_call_and_another_form_of_the_seam_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = {"enable": True, "mode": "dump", "dump_dir": str(tmp_path / "dump")}
    rollouts = attach_rollouts(section)
    try:
        with pytest.raises(ConfigError, match="attach_rollouts was called twice: call it once, before pretrain"):
            attach_rollouts(section)
    finally:
        rollouts.restore()
    monkeypatch.setattr(rl_utils, "get_environment_rollouts", lambda model, request: None)
    with pytest.raises(ConfigError, match=r"has no \['n_prompts', 'samples_per_group'\]: this release of Megatron-LM"):
        attach_rollouts(section)
    monkeypatch.setattr(seam, "MODULE", "megatron.rl_of_another_name")
    with pytest.raises(ConfigError, match="megatron/rl is in Megatron-LM's sources, and in no wheel of megatron-core"):
        attach_rollouts(section)


def test_sampling_is_read_as_megatron_means_it() -> None:
    sampling = read_sampling(rl_utils.args)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.logprobs_mode) == (1.0, 1.0, 0, "raw")
    asked = SimpleNamespace(
        rl_default_temperature=0.5,
        rl_default_top_p=0.9,
        rl_default_top_k=20,
        inference_dynamic_batching_logprobs_mode="processed_logprobs",
    )
    sampling = read_sampling(asked)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.logprobs_mode) == (0.5, 0.9, 20, "processed")


def test_its_json_is_imported_from_the_lowest_rank_with_all_bits(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    groups, _ = rl_utils.play(5, 2, 2)
    content = [[item.model_dump() for item in group] for group in groups]
    for item in content[0]:
        item["policy_epoch"] = [[(0, 3), (3, 4)], [(0, 4)]]
    (folder / "rollouts_rank0_iteration5_math.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "rollouts_rank1_iteration5_math.json").write_text("[]", encoding="utf-8")
    (folder / "rollouts_rank0_iteration7_math.json").write_text(json.dumps(content), encoding="utf-8")
    found = imported("megatron-rl", folder)
    assert sorted(found) == [5, 7]
    batch = found[5]
    assert (len(batch), batch.num_groups, batch.group_size) == (8, 2, 2)
    assert batch.rollout_logprobs.tolist()[:4] == [-0.5, -0.25, -0.125, 0.0]
    assert batch.policy_versions.tolist()[:4] == [3, 4, 3, 4]
    assert "policy_versions" in batch.meta["not_in_source"]
