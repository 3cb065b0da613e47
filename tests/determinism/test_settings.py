"""The settings table is whole, free of contradictions, and is what the documentation shows."""

from __future__ import annotations

import pytest

from mock_scheduler.determinism.settings import (
    FAMILIES,
    SETTINGS,
    Between,
    Kind,
    ReadAt,
    environment_settings,
    find_setting,
    recorded_names,
    required_lines,
)
from mock_scheduler.layouts.rules.table import render_rules, render_settings


def test_every_recommended_value_is_allowed_and_names_are_unique() -> None:
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS)
    recommended = [setting for setting in SETTINGS if setting.recommended is not None]
    assert [setting.name for setting in recommended if not setting.allows(str(setting.recommended))] == []


def test_what_is_required_or_exported_has_a_value_to_write_and_is_a_variable() -> None:
    needed = [setting for setting in SETTINGS if setting.required or setting.exported]
    assert [setting.name for setting in needed] == [
        *("NCCL_ALGO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "CUBLAS_WORKSPACE_CONFIG", "DETERMINISTIC_MODE"),
        *("PYTHONHASHSEED", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NCCL_NVLS_ENABLE"),
    ]
    assert all(setting.recommended and setting.kind is Kind.ENVIRONMENT for setting in needed)


def test_every_row_says_where_it_is_known_from_and_what_to_do() -> None:
    assert [setting.name for setting in SETTINGS if not (setting.source and setting.remedy and setting.reader)] == []


def test_what_belongs_to_one_node_is_never_compared_between_runs() -> None:
    assert [
        setting.name for setting in SETTINGS if setting.per_node and setting.between_runs is not Between.RECORDED
    ] == []


def test_the_required_lines_are_those_of_the_guide() -> None:
    assert required_lines() == [
        "NCCL_ALGO: 'Ring'",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO: '0'",
        "CUBLAS_WORKSPACE_CONFIG: ':4096:8'",
        "DETERMINISTIC_MODE: '1'",
    ]


def test_unlisted_members_of_a_family_are_recorded() -> None:
    names = recorded_names(["NVTE_UNHEARD_OF", "NCCL_P2P_LEVEL", "TORCH_NCCL_BLOCKING_WAIT", "PATH"])
    assert {"NVTE_UNHEARD_OF", "NCCL_P2P_LEVEL", "TORCH_NCCL_BLOCKING_WAIT", "NCCL_ALGO"} <= set(names)
    assert "PATH" not in names
    assert find_setting("PATH") is None


@pytest.mark.parametrize(
    ("name", "read_at", "between"),
    [
        ("NVTE_UNHEARD_OF", ReadAt.TE_IMPORT, Between.REPORTED),
        ("NCCL_P2P_LEVEL", ReadAt.PROCESS_GROUP, Between.REPORTED),
        ("TORCH_NCCL_AVOID_RECORD_STREAMS", ReadAt.PROCESS_GROUP, Between.RECORDED),
        ("TRITON_AUTOTUNE_BLOCK_M", ReadAt.TORCH_IMPORT, Between.REPORTED),
        ("TRITON_HOME", ReadAt.TORCH_IMPORT, Between.RECORDED),
    ],
)
def test_the_longest_prefix_decides_how_a_member_is_treated(name: str, read_at: ReadAt, between: Between) -> None:
    setting = find_setting(name)
    assert setting is not None
    assert (setting.read_at, setting.between_runs, setting.pattern) == (read_at, between, None)


def test_the_tables_name_every_setting_family_and_rule() -> None:
    tables = render_settings() + render_rules()
    names = [setting.name for setting in SETTINGS] + [f"{family.prefix}*" for family in FAMILIES]
    assert [name for name in names if f"`{name}`" not in tables] == []
    assert len(environment_settings()) > 100
