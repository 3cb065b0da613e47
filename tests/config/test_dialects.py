"""AReaL's and verl's sections become ``rollout_mock``, or are refused with everything that is wrong."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mock_scheduler.config.dialects.areal import from_areal
from mock_scheduler.config.dialects.foreign import NOT_READ
from mock_scheduler.config.dialects.verl import VerlNames, from_verl
from mock_scheduler.config.loading import dump_config
from mock_scheduler.config.rollout_mock import RolloutMockConfig
from mock_scheduler.errors import ConfigError
from pipelines.config.loading import DIALECTS, load_config
from pipelines.config.schema import PipelineConfig

NAMES = VerlNames(experiment="e", project="p", train_batch_size=8, gen_batch_size=4, n=2)
FOLDER = "e_p_TrainGBS8__InferGBS4__N2"
ROLLOUT = "actor_rollout_ref.rollout"
SKIP = f"{ROLLOUT}.skip"

# 16 trajectories in groups of 8: two prompts per step.
BASE = {
    "exp_name": "run",
    "output_dir": "out",
    "save_steps": 5,
    "rollout_batch_size": 16,
    "val_batch_size": 16,
    "training": {"global_batch_size": 16, "micro_batch_size": 16},
    "train_env_manager": {"num_env_groups": 2, "group_size": 8},
    "val_env_manager": {"num_env_groups": 2, "group_size": 8},
}


def load(folder: Path, values: Mapping[str, object], *overrides: str) -> PipelineConfig:
    (folder / "run.yaml").write_text(yaml.safe_dump({**BASE, **values}), encoding="utf-8")
    return load_config("run", config_path=folder, overrides=overrides)


def refused(folder: Path, values: Mapping[str, object], *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, values, *overrides)
    return str(caught.value).replace(f"configuration 'run' ({folder}/run.yaml) ", "")


def verl(rollout: Mapping[str, object], **sections: object) -> dict[str, object]:
    return {"actor_rollout_ref": {"rollout": dict(rollout)}, **sections}


def shown(config: RolloutMockConfig) -> dict[str, object]:
    """What differs from the defaults, without the origin."""
    values, defaults = config.model_dump(mode="json"), RolloutMockConfig().model_dump(mode="json")
    return {key: value for key, value in values.items() if value != defaults[key] and key != "origin"}


# AReaL


def test_areal_dump_becomes_dump_with_steps_and_retention() -> None:
    section = {"dump_rollout_data": True, "path": "/d", "dump_steps": [0, 1, 2, 9], "max_keep": 3, "pin_steps": [0]}
    config = from_areal(section, default_path="unused")
    assert shown(config) == {
        "enable": True,
        "dump_dir": "/d",
        "steps": "0-2, 9",
        "retention": {"keep_last": 3, "pin_steps": "0"},
    }
    assert config.mode == "dump"
    assert config.origin == (
        "AReaL's trajectory_debug became rollout_mock: mode=dump, dump_dir=/d, steps=0-2, 9, retention.keep_last=3, "
        "retention.pin_steps=0"
    )


def test_areal_replay_becomes_mock_in_the_default_folder() -> None:
    config = from_areal({"replay_rollout_data": True}, default_path="out/debug_trajectories", name="debug")
    assert shown(config) == {"enable": True, "mode": "mock", "dump_dir": "out/debug_trajectories"}
    assert config.origin == "AReaL's debug became rollout_mock: mode=mock, dump_dir=out/debug_trajectories"


def test_areal_that_asks_for_nothing_is_not_enabled() -> None:
    config = from_areal({"dump_steps": [1]}, default_path="d")
    assert (config.enable, config.dump_dir, config.origin) == (False, "d", "")


def test_all_problems_of_an_areal_section_are_listed_with_nearest_keys() -> None:
    section = {"dump_rolout_data": True, "dump_steps": [1, -5], "max_keep": 0, "dump_scope": "full"}
    with pytest.raises(ConfigError) as caught:
        from_areal(section, default_path="d")
    assert str(caught.value) == (
        "AReaL's trajectory_debug has 4 problems:\n"
        "  - trajectory_debug.dump_steps.1: is -5, should be greater than or equal to 0\n"
        "  - trajectory_debug.max_keep: is 0, should be greater than 0\n"
        "  - trajectory_debug.dump_scope: 'full' stores what the trainer computes along with the rollout, and a replay "
        "would then train on those numbers and not on what is being tested; use 'rollout', and trace.level=full to "
        "store and compare what the trainer computes\n"
        "  - trajectory_debug.dump_rolout_data: unknown key; nearest known key: trajectory_debug.dump_rollout_data; "
        "known keys of trajectory_debug: dump_rollout_data, dump_scope, dump_steps, max_keep, path, pin_steps, "
        "replay_rollout_data"
    )


def test_areal_cannot_dump_and_replay_at_once(tmp_path: Path) -> None:
    both = {"debug": {"dump_rollout_data": True, "replay_rollout_data": True}}
    assert refused(tmp_path, both) == (
        "has 1 problem:\n  - debug: dump_rollout_data and replay_rollout_data are mutually exclusive: a run records or "
        "replays; set one of them to false"
    )


@pytest.mark.parametrize(("key", "value"), [("dump_steps", []), ("path", " "), ("dump_scope", "all")])
def test_areal_values_that_mean_nothing_are_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"\n  - trajectory_debug.{key}: "):
        from_areal({"dump_rollout_data": True, key: value}, default_path="d")


@pytest.mark.parametrize("name", ["trajectory_debug", "debug"])
def test_areals_section_in_a_configuration_is_resolved(tmp_path: Path, name: str) -> None:
    config = load(tmp_path, {name: {"dump_rollout_data": True, "max_keep": 2}}, "rollout_mock.background=false")
    assert shown(config.rollout_mock) == {
        "enable": True,
        "dump_dir": "out/debug_trajectories",
        "retention": {"keep_last": 2, "pin_steps": None},
        "background": False,
    }
    assert config.rollout_mock.origin.startswith(f"AReaL's {name} became rollout_mock: mode=dump, ")


def test_areals_rotation_without_checkpoints_is_refused(tmp_path: Path) -> None:
    """AReaL's own rotation left recordings whose first steps were gone, and which could not be replayed."""
    text = refused(tmp_path, {"trajectory_debug": {"dump_rollout_data": True, "max_keep": 3}, "save_steps": 0})
    assert text == (
        "has 1 problem:\n  - rollout_mock.retention.keep_last 3 needs save_steps > 0 (AReaL's trajectory_debug became "
        "rollout_mock: mode=dump, dump_dir=out/debug_trajectories, retention.keep_last=3): recorded steps are removed "
        "only where a saved checkpoint lets a replay start after them, and without one none ever would be. Set "
        "save_steps, or leave keep_last out"
    )


# verl


def test_verls_first_generation_is_a_cache_per_step_in_the_documented_folder() -> None:
    config = from_verl({"skip_rollout": True}, names=NAMES)
    assert shown(config) == {"enable": True, "mode": "cache", "dump_dir": f"/tmp/rollout_dump/{FOLDER}"}
    assert config.origin == (
        f"verl's actor_rollout_ref.rollout.skip_rollout became rollout_mock: mode=cache, "
        f"dump_dir=/tmp/rollout_dump/{FOLDER}"
    )


@pytest.mark.parametrize("rollout", [{}, {"skip_rollout": False, "n": 4}, {"skip": {"enable": False}}])
def test_verl_that_skips_nothing_is_not_enabled(rollout: dict[str, object]) -> None:
    assert from_verl(rollout, names=NAMES) == RolloutMockConfig()


def modes(config: RolloutMockConfig, *, kind: str = "train", steps: int = 6) -> list[str]:
    return [config.mode_of(step=step, kind=kind, scheduler_id="default") for step in range(steps)]  # type: ignore[arg-type]


def recorded(config: RolloutMockConfig, steps: int = 6) -> list[int]:
    """The steps that would be written where nothing is recorded yet."""
    return [s for s, mode in enumerate(modes(config, steps=steps)) if mode == "cache" and config.records_step(s)]


def test_verls_cache_plays_what_comes_after_the_dumped_steps() -> None:
    config = from_verl({"skip": {"enable": True, "dump_dir": "/d", "max_dump_step": 2, "action": "cache"}}, names=NAMES)
    assert modes(config) == ["cache"] * 6
    assert recorded(config) == [0, 1]
    assert (config.missing_step, config.schedule) == ("error", [])


@pytest.mark.parametrize("action", ["repeat", "repeat_last"])
def test_verls_repeat_reuses_the_dumped_steps_for_all_later_ones(action: str) -> None:
    config = from_verl({"skip": {"enable": True, "dump_dir": "/d", "max_dump_step": 2, "action": action}}, names=NAMES)
    assert modes(config) == ["cache", "cache", "mock", "mock", "mock", "mock"]
    assert modes(config, kind="val") == ["cache"] * 6
    assert (recorded(config), config.missing_step) == ([0, 1], action)


def test_verls_defaults_of_the_second_generation_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    config = from_verl({"skip": {"enable": True}}, names=NAMES)
    assert config.dump_dir == f"/home/someone/.verl/rollout_dump/{FOLDER}"
    assert (recorded(config), config.missing_step) == ([0], "repeat")


@pytest.mark.parametrize("role", ["rollout", "async_rollout", "rollout_tq"])
def test_verls_roles_count_steps_from_one(role: str) -> None:
    section = {role: {"enable": True, "dump_dir": "/d", "steps": [1, 2, 5]}}
    config = from_verl({"skip": section}, names=NAMES)
    assert shown(config) == {"enable": True, "mode": "cache", "dump_dir": f"/d/{FOLDER}", "steps": "0-1, 4"}
    assert config.origin.startswith(f"verl's {SKIP}.{role} became rollout_mock: mode=cache, ")


def test_verls_repeat_of_a_role_plays_one_listed_step_and_all_that_are_not_listed() -> None:
    section = {"rollout": {"enable": True, "dump_dir": "/d", "steps": [5, 2, 3], "action": "repeat"}}
    config = from_verl({"skip": section}, names=NAMES)
    assert modes(config) == ["real", "cache", "mock", "real", "mock", "real"]
    assert modes(config, kind="val") == ["real"] * 6
    assert config.missing_step == "repeat"
    alone = from_verl({"skip": {"rollout": {**section["rollout"], "steps": [2]}}}, names=NAMES)
    assert modes(alone) == ["real", "cache", "real", "real", "real", "real"]


@pytest.mark.parametrize(
    ("rollout", "key"),
    [
        ({"skip_rollout": True, "skip_dump_dir": "DIR"}, "actor_rollout_ref.rollout.skip_dump_dir"),
        ({"skip": {"enable": True, "dump_dir": "DIR"}}, f"{SKIP}.dump_dir"),
        ({"skip": {"rollout": {"enable": True, "dump_dir": "DIR", "steps": [1]}}}, f"{SKIP}.rollout.dump_dir"),
    ],
)
@pytest.mark.parametrize(
    ("location", "reason"),
    [
        (
            "dumps/x",
            "is a relative path: Ray starts workers in folders of its own, so that each would look in another place; "
            "give an absolute path, or a URL such as s3://bucket/path",
        ),
        (
            "/tmp/../tmp/ray/session_2026/dump",
            "is in the folder of a Ray session, which no later run finds again; give a path outside /tmp/ray",
        ),
    ],
)
def test_folders_that_rays_workers_do_not_share_are_refused(
    rollout: dict[str, object], key: str, location: str, reason: str
) -> None:
    placed = yaml.safe_load(yaml.safe_dump(rollout).replace("DIR", location))
    with pytest.raises(ConfigError) as caught:
        from_verl(placed, names=NAMES)
    assert str(caught.value) == f"verl's actor_rollout_ref.rollout has 1 problem:\n  - {key}: {location!r} {reason}"
    off = yaml.safe_load(yaml.safe_dump(placed).replace("true", "false"))
    assert not from_verl(off, names=NAMES).enable


def test_a_url_is_a_folder() -> None:
    config = from_verl({"skip_rollout": True, "skip_dump_dir": "s3://bucket/dump/"}, names=NAMES)
    assert config.dump_dir == f"s3://bucket/dump/{FOLDER}"


@pytest.mark.parametrize(
    ("rollout", "text"),
    [
        (
            {"skip_rolout": True},
            "skip_rolout: unknown key; nearest known key: actor_rollout_ref.rollout.skip_rollout; ",
        ),
        (
            {"skip": {"enable": True, "max_dump_step": 0}},
            "skip.max_dump_step: is 0: no step is dumped, and there is nothing to skip with; set the number of",
        ),
        (
            {"skip": {"rollout": {"enable": True}}},
            "skip.rollout.steps: is empty, and an enabled skip is for these only",
        ),
        ({"skip": {"rollout": {"steps": [0]}}}, "skip.rollout.steps.0: is 0, should be greater than or equal to 1"),
        ({"skip": {"rollout": {"action": "repeat_last"}}}, "skip.rollout.action: unknown value 'repeat_last'; known "),
        (
            {"skip": {"action": "random"}},
            "skip.action: unknown value 'random'; known values: cache, repeat, repeat_last",
        ),
        (
            {"skip": {"rolout": {}}},
            "skip.rolout: unknown key; nearest known key: actor_rollout_ref.rollout.skip.rollout; ",
        ),
    ],
)
def test_what_verl_would_not_do_is_refused(rollout: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_verl(rollout, names=NAMES)
    assert f"\n  - actor_rollout_ref.rollout.{text}" in str(caught.value)


def test_two_generations_at_once_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        from_verl({"skip_rollout": True, "skip": {"enable": True, "dump_dir": "/d"}}, names=NAMES)
    assert str(caught.value) == (
        "verl's actor_rollout_ref.rollout has 1 problem:\n"
        "  - actor_rollout_ref.rollout.skip_rollout and actor_rollout_ref.rollout.skip are both on, and each says what "
        "is recorded and replayed; keep one of them"
    )


def test_every_problem_of_a_block_is_listed() -> None:
    """A block that dumped no step hid that its folder was in a Ray session."""
    block = {"enable": True, "max_dump_step": 0, "dump_dir": "/tmp/ray/session_x/y", "action": "random"}
    with pytest.raises(ConfigError) as caught:
        from_verl({"skip": block}, names=NAMES)
    assert str(caught.value) == (
        "verl's actor_rollout_ref.rollout has 3 problems:\n"
        f"  - {SKIP}.dump_dir: '/tmp/ray/session_x/y' is in the folder of a Ray session, which no later run finds "
        "again; give a path outside /tmp/ray\n"
        f"  - {SKIP}.max_dump_step: is 0: no step is dumped, and there is nothing to skip with; set the number of "
        f"steps\n  - {SKIP}.action: unknown value 'random'; known values: cache, repeat, repeat_last"
    )


# verl's other keys

REAL_ROLLOUT = {
    "name": "vllm",
    "mode": "async",
    "temperature": 1.0,
    "val_kwargs": {"top_k": -1, "n": 1},
    "skip_tokenizer_init": True,
    "a_key_of_a_later_release": 1,
}


def test_what_else_verl_has_there_is_not_read_and_is_named(tmp_path: Path) -> None:
    values = {
        "actor_rollout_ref": {
            "actor": {"ppo_epochs": 1},
            "model": {"path": "x"},
            "rollout": {**REAL_ROLLOUT, "skip_rollout": True, "skip_dump_dir": "/d"},
        },
        "trainer": {"project_name": "p", "nnodes": 1},
        "data": {"train_batch_size": 6, "val_batch_size": 5},
    }
    config = load(tmp_path, values)
    assert config.rollout_mock.dump_dir == "/d/run_p_TrainGBS6__InferGBS6__N8"
    assert config.rollout_mock.origin == (
        "verl's actor_rollout_ref.rollout.skip_rollout became rollout_mock: mode=cache, "
        "dump_dir=/d/run_p_TrainGBS6__InferGBS6__N8; not read: actor_rollout_ref.actor, model; "
        "actor_rollout_ref.rollout.a_key_of_a_later_release, mode, name, skip_tokenizer_init, temperature, val_kwargs; "
        "trainer.nnodes; data.val_batch_size"
    )


def test_what_is_not_read_is_named_where_no_skip_is_on_too(tmp_path: Path) -> None:
    mock = load(tmp_path, verl({"skip_rollout": False, "name": "vllm"})).rollout_mock
    assert mock == RolloutMockConfig(origin="no rollout skip of verl's is on; not read: actor_rollout_ref.rollout.name")


def test_many_keys_that_are_not_read_are_counted() -> None:
    origin = from_verl({"skip_rollout": True, **{f"key_{number}": 0 for number in range(15)}}, names=NAMES).origin
    assert origin.endswith(
        "; not read: " + ROLLOUT + ".key_0, " + ", ".join(f"key_{n}" for n in range(1, 12)) + ", and 3 more"
    )


@pytest.mark.parametrize(("section", "keys"), NOT_READ.items())
def test_no_key_that_verl_has_is_taken_for_a_mistake(section: str, keys: frozenset[str], tmp_path: Path) -> None:
    values: dict[str, object] = {"skip": {}}
    place = values
    for name in section.split("."):
        place = place.setdefault(name, {})  # type: ignore[assignment]
    place.update(dict.fromkeys(sorted(keys), 1))
    assert load(tmp_path, values).rollout_mock.origin.startswith(
        f"no rollout skip of verl's is on; not read: {section}."
    )


@pytest.mark.parametrize(
    ("values", "nearest"),
    [
        (
            verl({"skip_rolout": True}),
            f"{ROLLOUT}.skip_rolout: unknown key; nearest known key: {ROLLOUT}.skip_rollout",
        ),
        (
            verl({"skip_dir": "/d"}),
            f"{ROLLOUT}.skip_dir: unknown key; nearest known key: {ROLLOUT}.skip_dump_dir",
        ),
        (
            {"actor_rollout_ref": {"rolout": {}}},
            "actor_rollout_ref.rolout: unknown key; nearest known key: actor_rollout_ref.rollout",
        ),
        (
            {"skip": {}, "data": {"train_batchsize": 4}},
            "data.train_batchsize: unknown key; nearest known key: data.train_batch_size",
        ),
    ],
)
def test_a_key_that_looks_like_one_that_is_read_is_refused(
    values: dict[str, object], nearest: str, tmp_path: Path
) -> None:
    assert f"\n  - {nearest}; " in refused(tmp_path, values)


# verl's folder

TEXTS = st.text(max_size=6) | st.text("ab_/%. -", max_size=6)
COUNTS = st.integers(1, 30)
ALL_NAMES = st.builds(
    VerlNames, experiment=TEXTS, project=TEXTS, train_batch_size=COUNTS, gen_batch_size=COUNTS, n=COUNTS
)


@given(ALL_NAMES, ALL_NAMES)
def test_two_names_never_share_a_folder(a: VerlNames, b: VerlNames) -> None:
    assert (a.folder == b.folder) == (a == b)
    assert "/" not in a.folder
    assert a.folder.isascii()
    assert a.folder not in (".", "..")


@pytest.mark.parametrize(
    ("experiment", "project", "start"),
    [
        ("qwen2_7b", "lake", "qwen2_7b_lake_"),
        ("a_b", "c", "a_b_c_"),
        ("a", "b_c", "a_b%5Fc_"),
        ("a/b", "../c d", "a%2Fb_..%2Fc%20d_"),
        ("实验", "p", "%E5%AE%9E%E9%AA%8C_p_"),
    ],
)
def test_names_are_made_safe_for_a_folder(experiment: str, project: str, start: str) -> None:
    names = VerlNames(experiment=experiment, project=project, train_batch_size=1, gen_batch_size=2, n=3)
    assert names.folder == f"{start}TrainGBS1__InferGBS2__N3"


def test_a_name_that_is_too_long_for_a_folder_is_refused() -> None:
    names = VerlNames(experiment="x" * 230, project="p", train_batch_size=1, gen_batch_size=2, n=3)
    with pytest.raises(ConfigError, match=r"would have a name of 257 bytes; file systems take 255\. Use shorter"):
        _ = names.folder


def test_the_folder_is_named_after_our_keys_where_verls_are_not_given(tmp_path: Path) -> None:
    config = load(tmp_path, verl({"skip_rollout": True, "skip_dump_dir": "/d"}))
    assert config.rollout_mock.dump_dir == "/d/run_mock-scheduler_TrainGBS2__InferGBS2__N8"


@pytest.mark.parametrize(
    ("key", "folder"),
    [
        ("trainer.experiment_name=other", "other_mock-scheduler_TrainGBS2__InferGBS2__N8"),
        ("trainer.project_name=other", "run_other_TrainGBS2__InferGBS2__N8"),
        ("data.train_batch_size=6", "run_mock-scheduler_TrainGBS6__InferGBS6__N8"),
        ("data.gen_batch_size=6", "run_mock-scheduler_TrainGBS2__InferGBS6__N8"),
        ("actor_rollout_ref.rollout.n=6", "run_mock-scheduler_TrainGBS2__InferGBS2__N6"),
        ("exp_name=other", "other_mock-scheduler_TrainGBS2__InferGBS2__N8"),
        ("train_env_manager={num_env_groups: 4, group_size: 4}", "run_mock-scheduler_TrainGBS4__InferGBS4__N4"),
    ],
)
def test_a_change_of_any_part_is_a_new_folder(tmp_path: Path, key: str, folder: str) -> None:
    config = load(tmp_path, verl({"skip_rollout": True, "skip_dump_dir": "/d"}), key)
    assert config.rollout_mock.dump_dir == f"/d/{folder}"


def test_verls_lengths_are_accepted_and_name_nothing(tmp_path: Path) -> None:
    data = {"max_prompt_length": 64, "max_response_length": 128}
    config = load(tmp_path, verl({"skip_rollout": True, "skip_dump_dir": "/d"}, data=data))
    assert config.rollout_mock.dump_dir == "/d/run_mock-scheduler_TrainGBS2__InferGBS2__N8"


# In a configuration of ours


@pytest.mark.parametrize("name", ["trajectory_debug", "debug", "actor_rollout_ref", "skip"])
def test_an_empty_section_asks_for_nothing(tmp_path: Path, name: str) -> None:
    """``trajectory_debug:`` with nothing below it is null in YAML, and was an error in pydantic's words."""
    assert load(tmp_path, {name: None}) == load(tmp_path, {})
    assert load(tmp_path, {"actor_rollout_ref": {"rollout": None}, "trainer": None}) == load(tmp_path, {})
    assert load(tmp_path, verl({"skip": None})) == load(tmp_path, {})


@pytest.mark.parametrize("value", [5, [1], "on"])
def test_a_value_in_place_of_a_section_is_refused(tmp_path: Path, value: object) -> None:
    assert refused(tmp_path, {"trajectory_debug": value}) == (
        f"has 1 problem:\n  - trajectory_debug: is {value!r}, should be a section: keys with their values"
    )
    assert refused(tmp_path, {"actor_rollout_ref": {"rollout": value}}) == (
        f"has 1 problem:\n  - actor_rollout_ref.rollout: is {value!r}, should be a section: keys with their values"
    )


def test_home_is_expanded_in_every_dialect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert load(tmp_path, {"debug": {"dump_rollout_data": True, "path": "~/d"}}).rollout_mock.dump_dir == (
        "/home/someone/d"
    )
    config = from_verl({"skip_rollout": True, "skip_dump_dir": "~/d"}, names=NAMES)
    assert config.dump_dir == f"/home/someone/d/{FOLDER}"


def test_verls_third_generation_may_stand_at_the_top_level(tmp_path: Path) -> None:
    skip = {"rollout": {"enable": True, "dump_dir": "/d", "steps": [1, 2]}}
    config = load(tmp_path, {"skip": skip, "trainer": {"project_name": "p"}})
    assert config.rollout_mock.origin == (
        "verl's skip.rollout became rollout_mock: mode=cache, dump_dir=/d/run_p_TrainGBS2__InferGBS2__N8, steps=0-1"
    )


@pytest.mark.parametrize(
    ("values", "keys"),
    [
        ({"trajectory_debug": {"dump_rollout_data": True}}, "trajectory_debug"),
        (verl({"skip_rollout": True}), "actor_rollout_ref.rollout.skip_rollout"),
        ({"skip": {"rollout_tq": {"enable": True, "dump_dir": "/d", "steps": [1]}}}, "skip.rollout_tq"),
    ],
)
def test_a_foreign_section_beside_an_enabled_rollout_mock_is_refused(
    tmp_path: Path, values: dict[str, object], keys: str
) -> None:
    assert refused(tmp_path, values, "rollout_mock.enable=true") == (
        f"has 1 problem:\n  - rollout_mock and {keys} are both on, and each says what is recorded and replayed; "
        "keep one of them"
    )
    assert load(tmp_path, values, "rollout_mock.enable=false").rollout_mock.enable


def test_two_foreign_sections_that_are_on_are_refused(tmp_path: Path) -> None:
    values = {**verl({"skip_rollout": True}), "debug": {"dump_rollout_data": True}}
    assert refused(tmp_path, values) == (
        "has 1 problem:\n  - debug and actor_rollout_ref.rollout.skip_rollout are both on, and each says what is "
        "recorded and replayed; keep one of them"
    )


def test_a_foreign_section_that_is_off_leaves_rollout_mock_as_it_is(tmp_path: Path) -> None:
    values = {**verl({"n": 4}), "debug": {"path": "/d"}, "rollout_mock": {"enable": True, "mode": "mock"}}
    assert shown(load(tmp_path, values).rollout_mock) == {"enable": True, "mode": "mock"}


def test_problems_of_the_section_and_of_the_rest_are_listed_together(tmp_path: Path) -> None:
    values = verl({"skip_rollout": True, "skip_dump": "/d"}, trainer={"experiment": "e"}, debug={"max_keep": -1})
    assert refused(tmp_path, values, "seed=-1", "debug.max_keep=-2") == (
        "has 4 problems:\n"
        "  - seed: is -1, should be greater than or equal to 0 (given as 'seed=-1')\n"
        "  - debug.max_keep: is -2, should be greater than 0 (given as 'debug.max_keep=-2')\n"
        "  - actor_rollout_ref.rollout.skip_dump: unknown key; nearest known key: "
        "actor_rollout_ref.rollout.skip_dump_dir; known keys of actor_rollout_ref.rollout: n, skip, skip_dump_dir, "
        "skip_rollout\n"
        "  - trainer.experiment: unknown key; nearest known key: trainer.experiment_name; known keys of trainer: "
        "experiment_name, project_name"
    )


@pytest.mark.parametrize("name", ["trainer", "data"])
def test_verls_naming_keys_alone_are_unknown_keys(tmp_path: Path, name: str) -> None:
    assert f"  - {name}: unknown key; " in refused(tmp_path, {name: {}})


def test_a_resolved_configuration_loads_back_equal_from_its_dump(tmp_path: Path) -> None:
    config = load(tmp_path, verl({"skip": {"enable": True, "dump_dir": "/d", "max_dump_step": 3}}))
    (tmp_path / "run.yaml").write_text(dump_config(config), encoding="utf-8")
    assert load_config("run", config_path=tmp_path) == config


def test_resolving_changes_nothing_it_was_given() -> None:
    values = {**BASE, "debug": {"dump_rollout_data": True}, "rollout_mock": {"on_mismatch": "warn"}}
    before = copy.deepcopy(values)
    assert "debug" not in DIALECTS.resolve(values).values
    assert values == before
    assert DIALECTS.resolve(BASE).values == BASE


def test_a_key_beside_a_foreign_section_that_is_off_has_no_effect_and_is_refused(tmp_path: Path) -> None:
    section = {"actor_rollout_ref": {"rollout": {"skip_rollout": False, "name": "vllm"}}}
    with pytest.raises(ConfigError, match="on_mismatch would have no effect: enable is not given"):
        load(tmp_path, {**section, "rollout_mock": {"on_mismatch": "warn"}})
    load(tmp_path, {**section, "rollout_mock": {"enable": False, "on_mismatch": "warn"}})
