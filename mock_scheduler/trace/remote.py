"""Opens runs and traces of a bucket as local folders, of which tensors are fetched when they are read.

Contract: a location without a protocol is a local path, and is given back as it is. Of a run come the documents in its
folder and its trace; of a trace the headers of all parts of the wanted steps, by a few requests at once; sketches come
whole. A place with nothing in it becomes a path that does not exist, so that it is refused as a local one is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from mock_scheduler.errors import ConfigError, MockSchedulerError
from mock_scheduler.support.fetched_folders import FetchedFile, FetchedFolder, name_locations
from mock_scheduler.support.foreign_files import MAX_DOCUMENT_BYTES
from mock_scheduler.support.locations import find_path, find_protocol, normalize_location
from mock_scheduler.support.run_files import CODE_FOLDER, METRICS_FILE, NOISE_FILE, RUN_FILE, TRACE_FOLDER
from mock_scheduler.trace.full.files import PART_FILE, SKETCH_FILE, STEP_FOLDER

HasStep = Callable[[int], bool]
"""Whether a step is wanted."""

_DOCUMENT_ENDINGS = (".yaml", ".json", ".jsonl")


@contextmanager
def open_location(location: str | Path, *, has_step: HasStep | None = None, has_trace: bool = True) -> Iterator[Path]:
    """Gives a run, a trace or a file of metrics as a local path, for as long as the block runs.

    Args:
        location: A path, a ``file://`` URL, or a URL such as ``s3://bucket/runs/tp2``.
        has_step: The steps of a trace that are read; others are passed over where any of these is there. ``None``: all.
        has_trace: Whether a run is compared; else its documents alone are there, such as metrics for a page.

    Raises:
        ConfigError: The URL cannot be opened here.
        TraceError: The store does not answer, or refuses.

    Errors of the block name URLs in the place of local paths.
    """
    try:
        path = find_path(str(location))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if path is not None:
        yield Path(path)
        return
    text = normalize_location(str(location)).rstrip("/")
    run, _, name = text.rpartition("/")
    is_trace = name == TRACE_FOLDER
    with _fetching(run if is_trace else text) as folder:
        _Opening(folder, has_step).fetch(has_trace=has_trace)
        yield folder.root / name if is_trace else folder.root


@contextmanager
def open_trace_location(location: str, *, steps: Collection[int]) -> Iterator[Path]:
    """Gives a trace that is there as a local folder with these steps alone; raises as ``open_location``."""
    if find_protocol(location) is None:
        yield Path(location)
        return
    with _fetching(location) as folder:
        _Opening(folder, lambda step: step in steps).fetch_trace("")
        yield folder.root


@contextmanager
def _fetching(location: str) -> Iterator[FetchedFolder]:
    # Both import fsspec, which takes a quarter of a second.
    from mock_scheduler.support.node_cache import NodeCache, find_folder, find_limit
    from mock_scheduler.support.object_stores import connect

    files = connect(location)
    try:
        parent = find_folder()
        cache = NodeCache(parent, limit_bytes=find_limit())
        folder = FetchedFolder(location, files, cache, parent=parent / "folders")
    except OSError as error:
        raise ConfigError(f"{location} is read by way of a folder on this node: {error}") from error
    with folder:
        try:
            yield folder
        except MockSchedulerError as error:
            # Here, since nobody outside knows the folder: the message of a task goes to another machine.
            error.args = (name_locations(str(error)),)
            raise


class _Opening:
    """Fetches what a comparison may read of a run or a trace, but for tensors."""

    def __init__(self, folder: FetchedFolder, has_step: HasStep | None) -> None:
        self._folder = folder
        self._has_step = has_step

    def fetch(self, *, has_trace: bool) -> None:
        """Fetches whatever there is at the location."""
        found = self._folder.look_into("")
        if not found.files and not found.folders:
            # Nothing, or one file, such as metrics.jsonl.
            self._folder.fetch([file for file in [self._folder.find_file()] if file is not None])
            return
        documents = [file for file in found.files if _is_document(file)]
        if not has_trace:
            self._folder.fetch(documents)
            return
        code = self._folder.look_into(CODE_FOLDER).files if CODE_FOLDER in found.folders else ()
        self._folder.fetch([*documents, *filter(_is_document, code), *self._folder.find_around(NOISE_FILE)])
        if TRACE_FOLDER in found.folders:
            self.fetch_trace(TRACE_FOLDER)
        elif any(STEP_FOLDER.fullmatch(name) for name in found.folders):
            self.fetch_trace("")
        elif not any(file.name in (RUN_FILE, METRICS_FILE) for file in documents):
            self._name_runs()

    def fetch_trace(self, name: str) -> None:
        """Fetches the headers of a trace in a folder of this name; empty: the location itself."""
        named = {folder: STEP_FOLDER.fullmatch(folder) for folder in self._folder.look_into(name).folders}
        steps = {folder: int(match[1]) for folder, match in named.items() if match is not None}
        wanted = [folder for folder, step in steps.items() if self._has_step is None or self._has_step(step)]
        whole, headers, other = [], [], []
        for found in self._folder.look_into_all([f"{name}/{folder}".strip("/") for folder in wanted or steps]):
            for file in found.files:
                base = file.name.rpartition("/")[2]
                part = PART_FILE.fullmatch(base)
                if part is not None:
                    # A tensor mostly lies in the same part of every rank.
                    headers.append(replace(file, group=f"{file.name.rpartition('/')[0]}/{part[2]}"))
                elif SKETCH_FILE.fullmatch(base):
                    whole.append(file)
                else:
                    other.append(file.name)
        self._folder.fetch(whole, headers)
        self._folder.show_names(other)

    def _name_runs(self) -> None:
        """Shows the names of runs below, so that the folder of an alignment can be told, and its runs named."""
        names = self._folder.find_below(depth=3)
        self._folder.show_names(name for name in names if name.endswith(f"/{RUN_FILE}"))


def _is_document(file: FetchedFile) -> bool:
    is_small = file.stored.size_bytes <= MAX_DOCUMENT_BYTES
    return file.name == METRICS_FILE or (is_small and file.name.endswith(_DOCUMENT_ENDINGS))
