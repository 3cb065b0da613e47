"""The section ``rollout_mock``: which mode decides a request, and which keys do not go together."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mock_scheduler.config.rollout_mock import (
    KINDS,
    RolloutMockConfig,
    ScheduleEntry,
    override_problems,
    unreachable_entries,
)
from mock_scheduler.errors import ConfigError
from pipelines.config.loading import load_config
from pipelines.config.schema import PipelineConfig

CONFIGS = Path(__file__).parents[2] / "configs"


ON = "rollout_mock.enable=true"


def refused(*overrides: str, on: bool = True) -> str:
    """The one problem that ``quickstart`` has with these overrides, and the section ``on``."""
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart", config_path=CONFIGS, overrides=[*overrides, *([ON] if on else [])])
    origin = f"configuration 'quickstart' ({CONFIGS}/quickstart.yaml) has 1 problem:\n  - "
    assert str(caught.value).startswith(origin)
    return str(caught.value).removeprefix(origin)


def mock_of(*overrides: str) -> RolloutMockConfig:
    return load_config("quickstart", config_path=CONFIGS, overrides=[*overrides, ON]).rollout_mock


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout_mock.mode=mock"],
        ["rollout_mock.mode=dump"],
        ["rollout_mock.dump_dir=dumps/v1"],
        ["rollout_mock.schedule=[{mode: mock, steps: 0-1}]"],
        ["rollout_mock.compression=zstd"],
        ["rollout_mock.retention.keep_last=3"],
        ["rollout_mock.mode=real", "rollout_mock.dump_dir=dumps/v1"],
        ["+rollout_mock={mode: mock, dump_dir: dumps/v1}"],
    ],
)
def test_a_key_without_enable_is_refused(overrides: list[str]) -> None:
    """Mode mock once ran the real scheduler, and a dump_dir recorded nothing, both without a word."""
    keys = [override.partition("=")[0].removeprefix("rollout_mock.").partition(".")[0] for override in overrides]
    names = ["mode", "dump_dir"] if keys == ["+rollout_mock"] else keys
    found = refused(*overrides, on=False)
    assert found.startswith(f"rollout_mock: {', '.join(names)} would have no effect: enable is not given, so the real")
    assert "set enable=true, or enable=false to keep the section for later" in found


@pytest.mark.parametrize(
    "section",
    [
        {"mode": "real"},
        {"enable": False, "mode": "mock", "dump_dir": "dumps/v1"},
        {"on_duplicate_rows": "error", "on_implausible_rows": "strict", "on_partial_groups": "report"},
        {"origin": "no rollout skip of verl's is on"},
        {},
    ],
)
def test_what_is_real_all_the_same_and_a_section_that_is_off_may_stand(section: dict[str, object]) -> None:
    assert RolloutMockConfig.model_validate(section).modes_in_use == {"real"}


def test_a_section_that_is_off_loads_back_equal() -> None:
    config = RolloutMockConfig()
    assert RolloutMockConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("off", "override"),
    [
        ("enable: false, mode: dump", "rollout_mock.mode=mock"),
        ("enable: false, mode: mock", "rollout_mock.dump_dir=dumps/v1"),
        ("enable: false", "rollout_mock.steps=0-3"),
    ],
)
def test_an_override_of_a_section_that_stays_off_is_refused(tmp_path: Path, off: str, override: str) -> None:
    """ROLL's own files have enable false beside a mode."""
    key = override.partition("=")[0]
    for name in ("base", "quickstart"):
        (tmp_path / f"{name}.yaml").write_text((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "roll.yaml").write_text(f"defaults: [quickstart, _self_]\nrollout_mock: {{{off}}}\n", "utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config("roll", config_path=tmp_path, overrides=[override])
    assert f"{key}: has no effect while enable is false; add rollout_mock.enable=true" in str(caught.value)
    for more in ("rollout_mock.enable=true", "rollout_mock.enable=false"):
        load_config("roll", config_path=tmp_path, overrides=[override, more])


@pytest.mark.parametrize(
    ("mode", "override", "modes"),
    [
        ("mock", "compression=zstd", "dump, cache"),
        ("mock", "steps=0-3", "dump, cache"),
        ("mock", "every=2", "dump, cache"),
        ("dump", "on_difference=warn", "verify"),
        ("cache", "on_mismatch=warn", "mock, verify"),
        ("real", "dump_dir=dumps/v1", "dump, cache, mock, verify"),
        ("mock", "retention.keep_last=2", "dump, cache"),
    ],
)
def test_an_override_without_effect_in_the_mode_is_refused(mode: str, override: str, modes: str) -> None:
    key = override.partition("=")[0]
    found = refused(f"rollout_mock.mode={mode}", f"rollout_mock.{override}")
    assert found.startswith(f"rollout_mock.{key}: has no effect in mode {mode}, only in {modes}; leave it out")


def test_an_override_that_takes_back_a_key_of_the_file_is_none_without_effect() -> None:
    """An alignment sets keep_last to null, also where the file pins steps."""
    section = {"enable": True, "mode": "mock", "retention": {"pin_steps": "0-1"}}
    config = RolloutMockConfig.model_validate(section)
    assert override_problems(config, ["retention.keep_last", "steps", "mode"]) == []
    assert [key for key, _ in override_problems(config, ["retention.pin_steps"])] == ["retention.pin_steps"]


def test_a_key_of_the_file_may_be_meant_for_another_mode_of_the_section() -> None:
    """One section records and replays: only the mode changes."""
    RolloutMockConfig.model_validate({"enable": True, "mode": "mock", "compression": "zstd", "steps": "0-3"})
    mock_of("rollout_mock.mode=mock", "rollout_mock.steps=null", "rollout_mock.every=1")


def test_the_first_entry_that_applies_decides_else_the_mode() -> None:
    config = RolloutMockConfig.model_validate(
        {
            "enable": True,
            "mode": "cache",
            "schedule": [
                {"mode": "real", "kinds": ["val"]},
                {"mode": "mock", "steps": "0-19"},
                {"mode": "verify", "steps": "10-29", "schedulers": ["math"]},
            ],
        }
    )
    requests = [
        (5, "val", "math"),
        (5, "train", "math"),
        (19, "train", "code"),
        (25, "train", "math"),
        (25, "train", ""),
    ]
    modes = [config.mode_of(step=step, kind=kind, scheduler_id=name) for step, kind, name in requests]  # type: ignore[arg-type]
    assert modes == ["real", "mock", "mock", "verify", "cache"]
    assert config.modes_in_use == {"real", "mock", "verify", "cache"}


def test_a_section_that_is_off_is_real_whatever_it_says() -> None:
    section = {"enable": False, "mode": "mock", "schedule": [{"mode": "cache", "steps": 3}]}
    config = RolloutMockConfig.model_validate(section)
    assert config.mode_of(step=3, kind="train", scheduler_id="default") == "real"
    assert config.modes_in_use == {"real"}


@pytest.mark.parametrize(("step", "is_recorded"), [(0, True), (5, False), (10, True), (20, False), (40, True)])
def test_recorded_are_the_listed_steps_that_every_divides(step: int, is_recorded: bool) -> None:
    config = RolloutMockConfig.model_validate({"enable": True, "steps": "0-19, 40", "every": 10})
    assert config.records_step(step) == is_recorded


def test_steps_that_leave_out_planned_steps_are_legal() -> None:
    config = mock_of("rollout_mock.enable=true", "rollout_mock.steps='0, 2'", "rollout_mock.every=2")
    assert str(config.steps) == "0, 2"


@pytest.mark.parametrize("mode", ["mock", "verify", "cache"])
def test_a_run_that_begins_a_recording_cannot_read_it(mode: str) -> None:
    assert refused(f"rollout_mock.schedule=[{{mode: {mode}, steps: 0-1}}]") == (
        "rollout_mock: has keys that do not go together:\n"
        f"    - dump and {mode} in one run: dump begins a new recording, so there would be nothing in it to read. Use "
        "cache in place of dump: it replays what is recorded, and plays and records the rest (given as "
        f"'rollout_mock.schedule=[{{mode: {mode}, steps: 0-1}}]')"
    )


def test_real_steps_beside_dump_and_every_reading_mode_beside_cache_are_legal() -> None:
    mock_of("rollout_mock.schedule=[{mode: real, steps: 3-}]")
    mixed = "[{mode: mock, steps: 0}, {mode: verify, steps: 1}, {mode: real, steps: 2}]"
    mock_of("rollout_mock.mode=cache", f"rollout_mock.schedule={mixed}")


def test_a_missing_step_is_for_mock_alone() -> None:
    assert refused("rollout_mock.missing_step=repeat", "rollout_mock.mode=cache") == (
        "rollout_mock: has keys that do not go together:\n"
        "    - missing_step repeat is for mode mock, and no request is answered in it (modes here: cache); leave "
        "missing_step out, or set mode=mock (given as 'rollout_mock.missing_step=repeat')"
    )
    schedule = "rollout_mock.schedule=[{mode: mock, steps: 1-}]"
    assert mock_of("rollout_mock.missing_step=repeat_last", "rollout_mock.mode=real", schedule).missing_step


def test_an_entry_that_can_never_apply_is_named_with_those_that_decide_it() -> None:
    schedule = "[{mode: mock, steps: 0-9}, {mode: real, steps: 10-}, {mode: real, steps: 5-12, kinds: [val]}]"
    assert refused("rollout_mock.mode=real", f"rollout_mock.schedule={schedule}").startswith(
        "rollout_mock: has keys that do not go together:\n"
        "    - schedule.2 (real for val steps 5-12) can never apply: the first entry that applies wins, and schedule.0 "
        "(mock for steps 0-9), schedule.1 (real for steps 10-) decide all of it; put it before, or leave it out"
    )


def test_all_keys_that_do_not_go_together_are_listed() -> None:
    schedule = "[{mode: verify, steps: 0-9}, {mode: real, steps: 2}]"
    text = refused(f"rollout_mock={{schedule: {schedule}, missing_step: repeat}}")
    assert [line.strip().split(" ")[1] for line in text.splitlines()[1:]] == ["schedule.1", "dump", "missing_step"]


@pytest.mark.parametrize(
    ("schedule", "deciders"),
    [
        ("[{mode: real, steps: 0-}]", "schedule.0 (real for steps 0-) decides"),
        (
            "[{mode: real, steps: 0-4}, {mode: mock, steps: 5-9}, {mode: real, kinds: [val], steps: 10-}, {mode: real, "
            "steps: 10-}]",
            "schedule.0 (real for steps 0-4), schedule.1 (mock for steps 5-9), schedule.2 (real for val steps 10-), "
            "schedule.3 (real for steps 10-) decide",
        ),
    ],
)
def test_a_mode_that_the_schedule_leaves_nothing_to_decide_is_refused(schedule: str, deciders: str) -> None:
    override = f"rollout_mock={{enable: true, mode: mock, schedule: {schedule}}}"
    assert refused(override) == (
        "rollout_mock: has keys that do not go together:\n"
        f"    - mode mock can never apply: {deciders} every request; leave the schedule out and set the mode, or give "
        f"its entries the steps, kinds or schedulers that they are for (given as {override!r})"
    )


def test_a_mode_that_decides_for_any_request_is_legal() -> None:
    mock_of("rollout_mock.mode=mock", "rollout_mock.schedule=[{mode: real, steps: 1-}]")
    mock_of("rollout_mock.mode=mock", "rollout_mock.schedule=[{mode: real, kinds: [val]}]")
    mock_of("rollout_mock.mode=mock", "rollout_mock.schedule=[{mode: real, schedulers: [judge]}]")


@pytest.mark.parametrize(
    ("given", "dump_dir"),
    [
        ("~/dumps/v1", "/home/someone/dumps/v1"),
        ("~", "/home/someone"),
        ("./~/v1", "./~/v1"),
        ("a/~", "a/~"),
        ("S3://Bucket/V1", "s3://Bucket/V1"),
        ("file:///x", "file:///x"),
    ],
)
def test_home_is_expanded_and_protocols_are_in_lower_case(
    given: str, dump_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder named ``~`` was made in the working directory, and S3:// was an unknown protocol."""
    monkeypatch.setenv("HOME", "/home/someone")
    assert RolloutMockConfig(enable=True, dump_dir=given).dump_dir == dump_dir


def test_a_home_folder_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValidationError) as caught:
        RolloutMockConfig(enable=True, dump_dir="~no-such-user/v1")
    assert (
        "'~no-such-user/v1' begins with the home folder of '~no-such-user', which is not known here; give the whole "
        "path, or write ./~no-such-user/v1 for a folder of that name"
    ) in str(caught.value)


ENTRIES = st.builds(
    lambda steps, kinds, schedulers: ScheduleEntry.model_validate(
        {"mode": "real", "steps": steps, "kinds": kinds, "schedulers": schedulers}
    ),
    st.sampled_from(["0-", "0-2", "1-3", "3-", "2", "0-1, 3"]),
    st.sampled_from([None, ["train"], ["val"], ["train", "val"]]),
    st.sampled_from([None, ["a"], ["b"], ["a", "b"]]),
)


@given(st.lists(ENTRIES, max_size=4))
def test_an_entry_is_called_unreachable_exactly_where_no_request_reaches_it(schedule: list[ScheduleEntry]) -> None:
    requests = [(step, kind, name) for step in range(6) for kind in KINDS for name in ("a", "b", "any other")]
    deciding = {
        next((i for i, e in enumerate(schedule) if e.applies_to(step=s, kind=k, scheduler_id=n)), None)
        for s, k, n in requests
    }
    unreachable = sorted(set(range(len(schedule))) - deciding)
    assert [int(line.split(" ")[0].removeprefix("schedule.")) for line in unreachable_entries(schedule)] == unreachable


@pytest.mark.parametrize("mode", ["dump", "cache"])
def test_keeping_the_last_steps_needs_checkpoints(mode: str) -> None:
    keys = ("rollout_mock.enable=true", f"rollout_mock.mode={mode}", "rollout_mock.retention.keep_last=3")
    assert refused(*keys) == (
        "rollout_mock.retention.keep_last 3 needs save_steps > 0: recorded steps are removed only where a saved "
        "checkpoint lets a replay start after them, and without one none ever would be. Set save_steps, or leave "
        "keep_last out"
    )
    assert mock_of(*keys, "save_steps=2").retention.keep_last == 3


@pytest.mark.parametrize("section", [{"enable": False}, {"enable": True, "mode": "mock"}])
def test_retention_asks_for_nothing_where_nothing_is_recorded(section: dict[str, object]) -> None:
    values = {"exp_name": "x", "rollout_mock": {**section, "retention": {"keep_last": 3}}}
    assert PipelineConfig.model_validate(values).rollout_mock.retention.keep_last == 3


@pytest.mark.parametrize("key", ["steps", "retention.pin_steps", "schedule.0.steps"])
def test_a_set_without_a_step_is_refused(key: str) -> None:
    given_as = "schedule=[{mode: real, steps: []}]" if key.startswith("schedule") else f"{key}=[]"
    assert refused(f"rollout_mock.{given_as}") == (
        f"rollout_mock.{key}: names no step; leave the key out, or write steps and ranges such as '0-19, 40, 100-' "
        f"(given as 'rollout_mock.{given_as}')"
    )


@pytest.mark.parametrize("folder", ["''", "' '"])
def test_an_empty_folder_is_refused(folder: str) -> None:
    assert refused(f"rollout_mock.dump_dir={folder}") == (
        "rollout_mock.dump_dir: is empty; give a folder such as ./rollout_mock_dumps, or a URL such as "
        f's3://bucket/path (given as "rollout_mock.dump_dir={folder}")'
    )


@pytest.mark.parametrize("key", ["kinds", "schedulers"])
def test_an_entry_for_nothing_is_refused(key: str) -> None:
    with pytest.raises(ValidationError, match="at least 1 item"):
        ScheduleEntry.model_validate({"mode": "real", key: []})
