"""The public names: pinned, loaded when they are used, and described by docstrings that stand alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import mock_scheduler as ms
from mock_scheduler.api.page import render_page

ROOT = Path(__file__).parents[2]
NAMES = (
    "build_scheduler", "build_async_scheduler", "RolloutRequest", "RolloutScheduler", "AsyncRolloutScheduler",
    "RowShard", "BatchCodec", "Ledger",
    "RolloutBatch", "Trajectory", "SampleIdentity", "SamplingParams", "Termination",
    "read_recording", "Recording", "Contract", "ContractField", "Rule",
    "open_trace", "Trace", "TraceKey",
    "compare", "check_replicas", "align", "Verdict", "VerdictKind", "Divergence", "Proof", "Suspicion",
    "Localisation", "Consequence", "Alignment", "ReplicaResult",
    "correct", "Correction",
    "MockSchedulerError", "ConfigError", "LayoutError", "BatchError", "CorrectionError", "RecordingError",
    "StepNotFoundError", "StepExistsError", "CorruptRecordingError", "ContractError", "SchedulerError",
    "DeterminismError", "RankDisagreementError", "TraceError", "ServiceError", "AlignmentError", "ExitCode",
)  # fmt: skip


def test_the_public_names_are_these() -> None:
    assert [name for names in ms.PUBLIC_NAMES.values() for name in names] == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_each_name_has_a_docstring_that_stands_alone(name: str) -> None:
    doc = getattr(ms, name).__doc__
    assert doc is not None
    first = doc.strip().partition("\n\n")[0]
    assert len(first.split()) >= 4, first
    assert not first.startswith(("Of ", "As ", f"{name}(")), first


def test_importing_the_package_imports_no_torch_and_lists_its_names() -> None:
    code = (
        "import sys, mock_scheduler as ms\n"
        "assert 'compare' in dir(ms)\n"
        "heavy = [name for name in ('torch', 'hydra', 'pydantic', 'numpy', 'ray') if name in sys.modules]\n"
        "ms.ConfigError, ms.ExitCode\n"
        "print(heavy, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] False\n"


def test_a_name_that_is_not_public_says_where_the_others_are() -> None:
    with pytest.raises(AttributeError) as caught:
        ms.compare_runs  # type: ignore[attr-defined]  # noqa: B018
    assert str(caught.value) == (
        "module 'mock_scheduler' has no name 'compare_runs'; docs/api.md lists those that it has"
    )


def test_the_page_is_made_of_the_docstrings() -> None:
    assert (ROOT / "docs" / "api.md").read_text(encoding="utf-8") == render_page(), (
        "run: python -m mock_scheduler.api.page docs/api.md"
    )


def test_a_room_of_the_same_name_does_not_hide_a_function() -> None:
    """``ms.compare`` was the folder once ``ms.align`` had been used: a module is not callable.

    Each in a process of its own, which is forked where nothing of ours has been imported.
    """
    code = (
        "import os, sys, torch\n"
        "for first in sys.argv[1:]:\n"
        "    if os.fork() == 0:\n"
        "        import mock_scheduler as ms\n"
        "        exec(first)\n"
        "        print(type(ms.compare).__name__, type(ms.align).__name__)\n"
        "        break\n"
        "    assert os.wait()[1] == 0\n"
    )
    firsts = ("ms.align", "import mock_scheduler.alignment; ms.open_trace")
    command = [sys.executable, "-c", code, *firsts]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["function", "function"] * len(firsts)
