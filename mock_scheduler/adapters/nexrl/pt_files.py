"""Reads a ``.pt`` file of a debug dump: plain containers and tensors, refusing what ``support.pickles`` refuses."""

from __future__ import annotations

from pathlib import Path

from mock_scheduler.errors import ForeignFileError, TraceError
from mock_scheduler.support.pickles.torch_files import MAX_TORCH_BYTES, read_torch_file

#: The limit of one file of a dump.
MAX_DUMP_BYTES = MAX_TORCH_BYTES


def read_pt(path: Path, *, inside: Path | None = None) -> object:
    """Reads the content, tensors on the CPU; ``inside``: no link leads out of this folder.

    Raises:
        TraceError: it is damaged, would run code, or claims more than it holds.
        OSError: it cannot be opened.
    """
    try:
        content: object = read_torch_file(path, inside=inside, what="a file of a debug dump")
    except ForeignFileError as error:
        raise TraceError(str(error)) from error
    return content
