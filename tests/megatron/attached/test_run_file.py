"""The file that says what is attached to a training is read, or refused with one clear error."""

from __future__ import annotations

from pathlib import Path

import pytest

from mock_scheduler.errors import ConfigError
from mock_scheduler.megatron.attached.attach import load_run


def test_a_run_file_that_nests_too_deep_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "attached.json"
    path.write_text("[" * 200_000)
    with pytest.raises(ConfigError, match=r"attached\.json is no run file: "):
        load_run(path)
