"""``mock-scheduler replicas``: checks that all copies within one run agree to the last bit.

Contract: reads a trace of whole tensors; starts nothing and writes only the file asked for.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from mock_scheduler.commands.common import STDOUT
from mock_scheduler.compare.pairing.selection import Selection
from mock_scheduler.display.console import build_console
from mock_scheduler.display.progress_bar import show_progress
from mock_scheduler.report.comparison.text import print_replicas
from mock_scheduler.report.json_file import replicas_to_json, save_replicas
from mock_scheduler.support.files import encode_json
from mock_scheduler.verdict.compare_paths import check_replicas_at


def run_replicas(
    path: Path,
    selection: Selection,
    *,
    json_path: str | None = None,
    console: Console | None = None,
    verify: bool = False,
) -> int:
    """Check all copies within one run or trace: 0 equal, 1 different, 3 nothing is held twice.

    ``verify``: first read all of the trace, whatever is selected, and check every SHA-256. Raises ``ConfigError`` where
    there is no trace of whole tensors, ``TraceError`` where a file cannot be read or was changed.
    """
    with show_progress("checking copies") as on_key:
        result = check_replicas_at(path, selection=selection, verify=verify, on_key=on_key)
    if json_path == STDOUT:
        print(encode_json(replicas_to_json(result), sort_keys=False).decode(), end="")
        return int(result.exit_code)
    files = {}
    if json_path is not None:
        files["json"] = Path(json_path)
        save_replicas(result, files["json"])
    print_replicas(result, console or build_console(), files=files)
    return int(result.exit_code)
