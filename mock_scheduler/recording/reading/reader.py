"""Reads a recording; any number of processes may read at once, without communication.

Contract: nothing is invented. An absent, damaged or misplaced step, one of another run or other than the one asked for,
is an error naming it. The first load of rows verifies every digest of theirs; later loads of them by the same
reader verify the header only. Steps verified by a check of the plan are verified again by the first load, since a
training may lie between.

Of a thousand processes each asks for little: a plan takes one listing of a folder however long it is, its steps are
then opened by the names that were listed, and all but one process may leave their headers to be read with the steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.errors import RecordingError, StepNotFoundError, redact
from mock_scheduler.recording.manifest import load_manifest
from mock_scheduler.recording.paths import (
    file_name,
    find_step,
    format_present,
    list_steps,
    locate_steps,
    request_name,
    step_folder,
    step_stem,
)
from mock_scheduler.recording.reading.at_once import map_steps
from mock_scheduler.recording.reading.open_step import OpenStep, compare_prompts, open_step
from mock_scheduler.recording.retention import RetentionRecord, load_retention, replay_starts
from mock_scheduler.recording.step.step_info import StepInfo
from mock_scheduler.recording.storage import open_storage
from mock_scheduler.scheduler import RolloutRequest, RowShard
from mock_scheduler.support.digests import canonical_json

#: How many steps of a plan are checked before a run begins: all of a shorter plan, half of them from either end of a
#: longer one, so that a run over 100,000 steps begins as soon as one over 1,000.
MOST_CHECKED = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedStep:
    """Holds a step, or one process's part of it, as read.

    ``is_as_recorded``: one process recorded these very rows, so ``info.scheduler_state`` is its scheduler's.
    """

    path: str
    batch: RolloutBatch
    info: StepInfo
    is_as_recorded: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadStep:
    """A step that was read before it is asked for, for one call of ``load_step``."""

    step: OpenStep
    batch: RolloutBatch


class RecordingReader:
    """An opened recording; opening raises ``StepNotFoundError`` where ``dump_dir`` (a folder or URL) holds none.

    ``is_kept``: what is read of a remote one is kept on this node, as ``open_storage`` says.
    """

    def __init__(self, dump_dir: str, *, is_kept: bool = False) -> None:
        #: As it was given, to open it again; ``dump_dir`` is for messages.
        self.source = dump_dir
        self.dump_dir = redact(dump_dir)
        self.storage = open_storage(dump_dir, is_kept=is_kept)
        self.manifest = load_manifest(self.storage)
        self._verified: set[tuple[str, str, RowShard | None]] = set()
        #: Step, as in ``request_name`` -> where it lay when it was listed.
        self._located: dict[str, str] = {}
        self._is_unlisted = False

    def steps(self) -> dict[str, list[int]]:
        """Returns the folder name (``train``, ``val``, ``train.{scheduler_id}``) -> steps present."""
        return list_steps(self.storage)

    def has_step(self, request: RolloutRequest) -> bool:
        """Whether the step for ``request`` is recorded."""
        return find_step(self.storage, request_name(request)) is not None

    def open_step(self, request: RolloutRequest) -> OpenStep:
        """Open the step for ``request``; its number, mode, scheduler and run are checked.

        Raises ``StepNotFoundError`` with the steps present and the likely causes, ``CorruptRecordingError`` for a
        damaged header, ``RecordingError`` where the file holds another step than its name says.
        """
        for name in self._possible_names(request):
            try:
                step = open_step(self.storage, name)
            except FileNotFoundError:  # removed since it was found
                continue
            self._check_place(step, request)
            return step
        raise StepNotFoundError(self._missing_text([request]))

    def read_step(self, request: RolloutRequest, *, shard: RowShard | None = None, max_bytes: int) -> ReadStep | None:
        """The step for ``request``, or one process's part of it, read whatever the run will ask for.

        None where its files, decompressed, have more than ``max_bytes``; by then a compressed one of a remote recording
        was fetched as a whole. Raises as ``open_step`` and ``StepFile.load``.
        """
        step = self.open_step(request)
        return None if step.size_of(shard) > max_bytes else self._read(step, shard)

    def load_step(
        self,
        request: RolloutRequest,
        *,
        shard: RowShard | None = None,
        is_stand_in: bool = False,
        read: ReadStep | None = None,
    ) -> RecordedStep:
        """The recorded answer to ``request``, or one process's part of it; its tensors are private views.

        ``is_stand_in``: it stands for another step, so it may be of another policy version and data cursor.
        ``read``: the step as ``read_step`` gave it for this request and ``shard``, else it is read now. Raises as
        ``open_step`` and ``StepFile.load``, and ``RecordingError`` where the step holds another number of trajectories
        or other prompts, or was recorded with another policy version or at another data cursor.
        """
        step = self.open_step(request) if read is None else read.step
        _check_answer(step, request, is_stand_in=is_stand_in)
        read = read or self._read(step, shard)
        return RecordedStep(
            path=step.path, batch=read.batch, info=step.info_of(shard), is_as_recorded=step.is_recorded_as(shard)
        )

    def check_plan(
        self,
        plan: Sequence[RolloutRequest],
        *,
        stand_ins: Sequence[RolloutRequest] = (),
        verify: bool = False,
        shard: RowShard | None = None,
        has_headers: bool = True,
    ) -> int:
        """Check that every step that will be asked for is there, and by its header whole and the one asked for.

        ``stand_ins``: further steps in the place of others, as in ``load_step``. ``verify``: check every digest too, of
        all rows or of the part ``shard``. ``has_headers`` False: look at names alone, for a process beside which
        another one reads the same files; a load reads and checks the header anyway. Of more than ``MOST_CHECKED``
        steps only the first and the last ones, of the plan and of the stand-ins, are checked: give all of them to
        ``check_present`` then, which may be called beside the run. Returns the number of bytes read. Raises
        ``StepNotFoundError`` listing all absent ones that are checked, of more than ``MOST_CHECKED`` steps with headers
        the first; and else as ``load_step``.
        """
        num_stand_ins = min(len(stand_ins), max(MOST_CHECKED // 2, MOST_CHECKED - len(plan)))
        ends = _ends(plan, MOST_CHECKED - num_stand_ins), _ends(stand_ins, num_stand_ins)
        # Stand-ins may be of another policy version and data cursor.
        checked = [(request, is_stand_in) for is_stand_in, end in enumerate(ends) for request in end]
        self._is_unlisted = len(plan) + len(stand_ins) > MOST_CHECKED
        if not self._is_unlisted:
            self.check_present([request for request, _ in checked])
        elif not has_headers:
            self._look_for([request for request, _ in checked])
        if not has_headers:
            return 0

        def check(item: tuple[RolloutRequest, int]) -> int:
            request, is_stand_in = item
            step = self.open_step(request)
            _check_answer(step, request, is_stand_in=bool(is_stand_in))
            if verify and shard is None:
                step.verify()
            elif verify:
                step.load(shard)
            return step.num_bytes_read

        return sum(map_steps(self.storage, check, checked))

    def check_present(self, requests: Sequence[RolloutRequest]) -> None:
        """Look, with one listing per folder, whether all steps are there, each in one form; remember where they lie.

        Raises ``StepNotFoundError`` listing all absent ones, and ``StepInTwoFormsError`` for a step in two forms.
        """
        folders = dict.fromkeys(step_folder(request.mode, request.scheduler_id) for request in requests)
        present = self.storage.list_names("")
        for folder in folders:
            located = locate_steps(self.storage, folder) if folder in present else {}
            self._located.update({f"{folder}/{step_stem(step)}": name for step, name in located.items()})
        missing = [request for request in requests if request_name(request) not in self._located]
        if missing:
            raise StepNotFoundError(self._missing_text(missing))

    def _look_for(self, requests: Sequence[RolloutRequest]) -> None:
        """Look for steps one by one, without a listing; raises ``StepNotFoundError`` listing all absent ones."""

        def is_present(request: RolloutRequest) -> bool:
            # As most lie; the listing to come finds those that lie there in two forms.
            return self.storage.exists(file_name(request_name(request))) or self.has_step(request)

        found = list(map_steps(self.storage, is_present, requests))
        missing = [request for request, is_there in zip(requests, found, strict=True) if not is_there]
        if missing:
            raise StepNotFoundError(self._missing_text(missing))

    def _possible_names(self, request: RolloutRequest) -> Iterator[str]:
        """Gives where the step was when it was listed, and then where it is now."""
        step = request_name(request)
        if step in self._located:
            yield self._located[step]
        elif self._is_unlisted and self.storage.is_remote:
            yield file_name(step)  # as most lie; the listing to come finds those that lie there in two forms
        found = find_step(self.storage, step)
        if found is not None:
            yield found

    def _read(self, step: OpenStep, shard: RowShard | None) -> ReadStep:
        # With the digest: a file that was replaced since is verified again.
        key = (step.path, step.digest, shard)
        batch = step.load(shard, verify=key not in self._verified)
        self._verified.add(key)
        return ReadStep(step=step, batch=batch)

    def _check_place(self, step: OpenStep, request: RolloutRequest) -> None:
        info = step.info
        values = (
            ("step", info.step, request.global_step),
            ("mode", info.mode, request.mode),
            ("scheduler_id", info.scheduler_id, request.scheduler_id),
            ("run_id", info.run_id, self.manifest.run_id),
        )
        wrong = [f"{name} {found!r} instead of {expected!r}" for name, found, expected in values if found != expected]
        if wrong:
            raise RecordingError(
                f"[Rollout Mock] {step.path} holds another step than its name says: {', '.join(wrong)}. "
                "It was renamed, moved or copied from another recording: restore it or record again."
            )

    def _missing_text(self, missing: Sequence[RolloutRequest]) -> str:
        by_folder: dict[str, list[int]] = {}
        for request in missing:
            by_folder.setdefault(step_folder(request.mode, request.scheduler_id), []).append(request.global_step)
        record, present = load_retention(self.storage), self.steps()
        gone = _removed_steps(by_folder, record)
        modes = ", ".join(dict.fromkeys(request.mode for request in missing))
        first = self.storage.path(file_name(request_name(missing[0])))
        if len(missing) == 1:
            head, reason = first, f"Step {missing[0].global_step} was not run in dump mode"
        else:
            head = f"{first} (and {len(missing) - 1} more)"
            reason = f"Steps {format_present(by_folder)} were not run in dump mode"
        if gone == by_folder:
            starts = ", ".join(map(str, replay_starts(record, present))) or "none"
            return (
                f"[Rollout Mock] Mock file not found: {head}\n"
                "All missing steps were recorded, and then removed as rollout_mock.retention says.\n"
                f"Steps present: {format_present(present)}\n"
                f"Steps removed by retention: {format_present(gone)}\n"
                f"Steps from which a replay can start, with the checkpoint of the recording run: {starts}\n"
                "Start the replay there, or record again and keep more (rollout_mock.retention.keep_last, pin_steps)."
            )
        removed = f"Steps removed by retention: {format_present(gone)}\n" if gone else ""
        return (
            f"[Rollout Mock] Mock file not found: {head}\n"
            "Possible reasons:\n"
            f"  1. {reason}\n"
            f"  2. dump_dir configuration is incorrect: {self.dump_dir}\n"
            f"  3. mode mismatch (current: {modes})\n"
            f"Steps present: {format_present(present)}\n"
            f"{removed}"
            "Please run in dump mode first to ensure all step data is generated."
        )


def _ends(requests: Sequence[RolloutRequest], number: int) -> Sequence[RolloutRequest]:
    """Gives the first and the last requests, ``number`` in all; all where they are no more."""
    if len(requests) <= number:
        return requests
    return [*requests[: number - number // 2], *requests[len(requests) - number // 2 :]]


def _removed_steps(missing: Mapping[str, Sequence[int]], record: RetentionRecord) -> dict[str, list[int]]:
    """Folder -> missing steps that were recorded and then removed."""
    removed = record.removed
    gone = {folder: [step for step in steps if step in removed.get(folder, ())] for folder, steps in missing.items()}
    return {folder: steps for folder, steps in gone.items() if steps}


def _check_answer(step: OpenStep, request: RolloutRequest, *, is_stand_in: bool) -> None:
    """Refuse a step of another size, policy version, data cursor or other prompts than the run asks for."""
    if step.num_trajectories != request.batch_size and not request.has_open_size:
        raise RecordingError(
            f"[Rollout Mock] {step.path} holds {step.num_trajectories} trajectories; the run asks for "
            f"{request.batch_size}. Use the batch size of the recording, or record again."
        )
    if not is_stand_in:
        _check_progress(step, request)
    prompts = None if request.prompt_digests is None else compare_prompts(step.prompt_digests(), request)
    if prompts is not None:
        example = f" (the first: {prompts.example})" if prompts.absent else ""
        raise RecordingError(
            f"[Rollout Mock] {step.path} holds other prompts than the run asks for: {prompts.absent.total()} of "
            f"{prompts.num_asked} asked for are not recorded{example}, {prompts.not_asked.total()} recorded ones are "
            "not asked for. Use the data, their order and the tokenizer of the recording, or record again."
        )


def _check_progress(step: OpenStep, request: RolloutRequest) -> None:
    """Refuse a step played when the weights or the data stood elsewhere than in the run."""
    version = step.info.policy_version
    if version != request.policy_version:
        raise RecordingError(
            f"[Rollout Mock] {step.path} was recorded with policy version {version}; the run asks for policy version "
            f"{request.policy_version}. Start from the checkpoint of the recording, with as many optimizer updates per "
            "step as it has, or record again."
        )
    recorded = step.info.data_cursor
    if None not in (recorded, request.data_cursor) and canonical_json(recorded) != canonical_json(request.data_cursor):
        raise RecordingError(
            f"[Rollout Mock] {step.path} was recorded at data cursor {canonical_json(recorded)}; the run is at "
            f"{canonical_json(request.data_cursor)}. Start from the checkpoint and data order of the recording, or "
            "record again."
        )
