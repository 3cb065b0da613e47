"""Records every operation dispatched by torch in a block, with digests of its inputs and outputs, in order.

Contract: observing changes no bit of the run: nothing is drawn from a generator, no tensor of the run is written, kept
alive or moved, compiled code stays compiled, and a communication is waited for only where the program waits for it in
the same call. On a GPU digests stay there until some hundreds are read back at once. A kernel outside torch's
dispatcher (an extension of TransformerEngine or apex, a compiled or Triton kernel, NumPy) is not seen itself; its
effect is seen in the digests of the next operation on its memory.

Backward on a GPU runs in other threads: autograd carries the mode there with the rest of the calling thread's state
(torch 2.13, ``GraphTask.thread_locals_``, an ``at::ThreadLocalState``). Records of such a thread have their own lane.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from mock_scheduler.determinism.operations.log import OperationLogHeader, operation_log_path
from mock_scheduler.determinism.operations.operators import (
    UNINITIALISED,
    WAIT,
    Communication,
    OperatorFacts,
    PendingResults,
    argument_of,
    facts_of,
    flatten_tensors,
    has_tensors,
    is_scratch,
    read_communication,
)
from mock_scheduler.determinism.operations.watching import ProgramPlace, WatchingMode
from mock_scheduler.determinism.operations.writer import (
    OpenRecord,
    OperationLogWriter,
    TensorEntry,
    device_digest,
    host_digest,
)
from mock_scheduler.support.files import written_aside
from mock_scheduler.support.tensor_bytes import dtype_name
from mock_scheduler.support.text import shorten

_LONGEST_TEXT = 300
_NamedTensors = list[tuple[str, torch.Tensor]]


@contextmanager
def record_operations(
    output_dir: Path, header: OperationLogHeader, *, modules: Mapping[str, torch.nn.Module]
) -> Iterator[None]:
    """Writes the block's operation log to ``operation_log_path(output_dir, ...)`` at its end; nothing where it raises.

    ``modules``: the roots of named submodules, by name. Does not communicate. Raises ``OSError`` where it cannot write.
    """
    path = operation_log_path(output_dir, step=header.step, global_rank=header.global_rank)
    with written_aside(path) as aside, aside.open("w", encoding="ascii") as lines:
        writer = OperationLogWriter(lines, header)
        with ProgramPlace(modules) as place, OperationRecorder(writer, place):
            yield
        writer.finish()


class OperationRecorder(WatchingMode):
    """The mode that sees each operation; its records go to ``writer``."""

    def __init__(self, writer: OperationLogWriter, place: ProgramPlace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._writer = writer
        self._place = place
        self._storages: dict[int, int] = {}
        self._num_storages = 0
        self._uninitialised: set[int] = set()
        self._pending = PendingResults()
        self._lanes = {threading.get_ident(): "main"}

    def watch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """Runs the operation, and records its inputs and outputs."""
        facts = facts_of(func)
        bound = facts.bind(args, kwargs)
        tensors = [pair for name, value in bound.items() for pair in flatten_tensors(name, value)]
        # Making a view uses nothing, so a pending result stays pending.
        if facts.has_digests and facts.name != WAIT:
            self._record_completed(tensors)
        communication = read_communication(facts, bound)
        record = self._begin(facts, bound, tensors, communication)
        try:
            result = func(*args, **kwargs)
            if communication is not None and not communication.is_async:
                _wait(result)
        except BaseException as error:
            record |= {"outputs": [], "values": [f"raised {type(error).__name__}"]}
            raise
        self._end(record, facts, tensors, result, communication)
        if facts.name == WAIT:
            self._record_completed(list(flatten_tensors("result", result)))
        return result

    def _begin(
        self,
        facts: OperatorFacts,
        bound: Mapping[str, Any],
        tensors: _NamedTensors,
        communication: Communication | None,
    ) -> OpenRecord:
        """Begins the record of an operation before it runs; it is open until ``_end``."""
        unread = facts.unread(bound) if communication is None else communication.unread
        record = self._start_record(facts.name)
        record |= {
            "device": tensors[0][1].device.type if tensors else "",
            "arguments": _describe_arguments(bound),
            "inputs": [
                self._describe(name, tensor, facts, is_input=True)
                for name, tensor in tensors
                if argument_of(name) not in unread
            ],
        }
        if communication is not None:
            record |= {"group": communication.group, "peer": communication.peer}
        self._writer.begin(record)
        return record

    def _start_record(self, operator: str) -> OpenRecord:
        phase, module, node, where = self._place.now()
        return {
            "operator": operator,
            "lane": self._lane(),
            "phase": phase,
            "module": module,
            "node": node,
            "place": where,
        }

    def _end(
        self,
        record: OpenRecord,
        facts: OperatorFacts,
        tensors: _NamedTensors,
        result: Any,  # noqa: ANN401 - whatever the operation returns
        communication: Communication | None,
    ) -> None:
        undefined = frozenset[str]() if communication is None else communication.undefined
        returned = list(_returned(facts, result))
        results = [pair for name, value in returned for pair in flatten_tensors(name, value)]
        self._number_new_memory(tensors, results)
        written = [(name, tensor) for name, tensor in tensors if argument_of(name) in facts.written - undefined]
        written += results
        if communication is not None and communication.is_async:
            self._pending.add(record["number"], facts.name, communication, written)
            record["outputs"] = []
            return
        if not record["device"] and results:
            record["device"] = results[0][1].device.type
        values = [repr(value) for _, value in returned if _is_plain(value)]
        if values:
            record["values"] = values
        self._note_writes(facts, written)
        record["outputs"] = [self._describe(name, tensor, facts) for name, tensor in written]

    def _number_new_memory(self, tensors: _NamedTensors, results: _NamedTensors) -> None:
        known = {self._storage_key(tensor) for _, tensor in tensors}
        for _, tensor in results:
            if (key := self._storage_key(tensor)) not in known:
                self._forget(key)

    def _note_writes(self, facts: OperatorFacts, written: _NamedTensors) -> None:
        for _, tensor in written:
            if facts.note == UNINITIALISED:
                self._uninitialised.add(self._storage_key(tensor))
            elif facts.has_digests:
                self._uninitialised.discard(self._storage_key(tensor))

    def _record_completed(self, tensors: _NamedTensors) -> None:
        """Records each asynchronous communication whose results are now used for the first time."""
        for done in self._pending.take(tensor for _, tensor in tensors):
            for _, tensor in done.results:
                self._uninitialised.discard(self._storage_key(tensor))
            record = self._start_record(done.operator) | {
                "group": done.communication.group,
                "peer": done.communication.peer,
                "completes": done.number,
                "outputs": [self._describe(name, tensor, None) for name, tensor in done.results],
            }
            self._writer.begin(record)

    def _describe(
        self, name: str, tensor: torch.Tensor, facts: OperatorFacts | None, *, is_input: bool = False
    ) -> TensorEntry:
        key = self._storage_key(tensor)
        if key not in self._storages:
            self._forget(key)
        digest, note = self._digest(name, tensor, facts)
        if is_input and facts is not None and key in self._uninitialised and _may_only_write(facts, name):
            digest, note = None, UNINITIALISED
        dtype = dtype_name(tensor.dtype)
        return TensorEntry(
            name=name, dtype=dtype, shape=list(tensor.shape), storage=self._storages[key], digest=digest, note=note
        )

    def _digest(
        self, name: str, tensor: torch.Tensor, facts: OperatorFacts | None
    ) -> tuple[str | torch.Tensor | None, str]:
        if facts is not None and not facts.has_digests:
            return None, facts.note
        if is_scratch(name):
            return None, "scratch"
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return None, f"layout {tensor.layout}"
        if tensor.device.type == "cpu":
            return host_digest(tensor), ""
        if tensor.device.type == "meta":
            return None, "meta"
        if tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None, "captured into a CUDA graph"
        return device_digest(tensor), ""

    def _storage_key(self, tensor: torch.Tensor) -> int:
        return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else id(tensor)

    def _forget(self, key: int) -> None:
        """Numbers the memory anew: an address may be used again for other memory."""
        self._storages[key] = self._num_storages
        self._num_storages += 1
        self._uninitialised.discard(key)

    def _lane(self) -> str:
        thread = threading.get_ident()
        if thread not in self._lanes:
            self._lanes[thread] = f"backward-{len(self._lanes)}"
        return self._lanes[thread]


def _returned(facts: OperatorFacts, result: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
    """Yields results beside the arguments, by name."""
    if not facts.results:
        if result is not None and not facts.written:
            yield "result", result
        return
    values = result if len(facts.results) > 1 else (result,)
    for name, value in zip(facts.results, values, strict=True):
        if name is not None:
            yield name, value


def _may_only_write(facts: OperatorFacts, name: str) -> bool:
    """Says whether an operator of another library may only fill this argument, as a buffer."""
    return argument_of(name) in facts.written and not facts.name.startswith("aten.")


def _is_plain(value: object) -> bool:
    return isinstance(value, bool | int | float | complex | str)


def _describe_arguments(bound: Mapping[str, Any]) -> str:
    """Describes all arguments but tensors, as ``dim=[0], keepdim=False``."""
    text = ", ".join(
        f"{name}={_describe_value(value)}"
        for name, value in bound.items()
        if value is not None and not has_tensors(value)
    )
    return shorten(text, _LONGEST_TEXT)


def _describe_value(value: object) -> str:
    if isinstance(value, torch.Generator):
        return "a generator of its own"
    if isinstance(value, torch.ScriptObject):
        return str(value._type()).rpartition(".")[2]
    if isinstance(value, list | tuple) or _is_plain(value):
        return repr(value)
    return str(value) if isinstance(value, torch.dtype | torch.device | torch.layout) else type(value).__name__


def _wait(result: Any) -> None:  # noqa: ANN401 - whatever the communication returns
    """Waits for a communication whose caller waits for it next."""
    work = result[-1] if isinstance(result, tuple) else result
    if isinstance(work, torch.ScriptObject):
        # None: NCCL gives no work where the caller is not asynchronous; the stream keeps the order (torch 2.11).
        handle = Work.unbox(work)
        if handle is not None:
            handle.wait()
