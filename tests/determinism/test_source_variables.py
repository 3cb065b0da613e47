"""Every variable that TransformerEngine, NCCL and apex read is in the table, or stored with the reason why not."""

from pathlib import Path

import pytest

from mock_scheduler.determinism.settings import is_documented
from tests.determinism.source_variables import find_unknown, find_variables, read_stored

STORED = read_stored()


@pytest.mark.parametrize("library", STORED)
def test_every_stored_variable_is_in_the_table_or_has_a_reason(library: str) -> None:
    stored = STORED[library]
    assert sorted(name for name in stored.in_table if not is_documented(name)) == []
    for reason, names in stored.others.items():
        assert sorted(name for name in names if is_documented(name)) == [], reason
    assert len(stored.names) == len(stored.in_table) + sum(map(len, stored.others.values()))


def test_variables_that_the_table_did_not_know_are_in_it() -> None:
    for name in ("NVTE_UnfusedDPA_Emulate_FP8", "NVTE_FUSED_ATTN_USE_FAv2_BWD", "NVTE_PLUGIN", "NCCL_SYM_KERNEL"):
        assert is_documented(name)


def test_a_new_variable_of_a_release_is_named(tmp_path: Path) -> None:
    """In every way in which the three libraries read one."""
    (tmp_path / "a.py").write_text('import os\nos.getenv("NVTE_NEW_A", "0")\nos.environ.get(\n    "NVTE_NEW_b")\n')
    (tmp_path / "b.cpp").write_text(
        'auto x = transformer_engine::getenv<bool>("NVTE_NEW_C");\nstd::getenv("NVTE_DEBUG");'
    )
    (tmp_path / "c.cc").write_text('NCCL_PARAM(NewOrder, "NEW_ORDER", 0);\nncclGetEnv("NCCL_NEW_D");')
    (tmp_path / "d.txt").write_text('getenv("NVTE_NOT_CODE")')
    unknown = find_unknown(find_variables(tmp_path), STORED["nccl"])
    assert unknown == ["NCCL_NEW_D", "NCCL_NEW_ORDER", "NVTE_NEW_A", "NVTE_NEW_C", "NVTE_NEW_b"]
