"""Reads and writes one file of a debug dump: plain containers and tensors, as ``.pt`` or as one line of ``.jsonl``.

Contract: a file appears whole or not at all, and replaces no other one unless asked to. Nothing in a
``.pt`` is run (``pt_files``). In ``.jsonl`` a tensor is ``{"dtype", "shape", "values"}`` with flat
values; floats are written so that they come back exactly, NaN and infinities as the texts ``NaN``, ``Infinity`` and
``-Infinity`` (NaN's payload is lost).
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias, get_args

import torch

from mock_scheduler.adapters.nexrl.config import DumpFormat
from mock_scheduler.adapters.nexrl.names import DumpKind, FileKey
from mock_scheduler.adapters.nexrl.pt_files import MAX_DUMP_BYTES, read_pt
from mock_scheduler.errors import StepExistsError, TraceError
from mock_scheduler.support.files import publish_new, written_aside
from mock_scheduler.support.foreign_files import describe_failure, read_text
from mock_scheduler.support.tensor_bytes import dtype_name, find_dtype

#: What a file holds: a dict of texts, numbers, bools, None, lists, dicts with text keys, and tensors.
Content: TypeAlias = "dict[str, Any]"

_TENSOR_KEYS = {"dtype", "shape", "values"}
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def save_content(
    dump_dir: Path, kind: DumpKind, key: FileKey, content: Content, *, dump_format: DumpFormat, replace: bool = False
) -> Path:
    """Write ``{dump_dir}/{kind}/{key}.{dump_format}``; tensors may be on any device and have a graph.

    Raises ``StepExistsError`` where it is there and ``replace`` is False, ``TraceError`` where it cannot be written.
    """
    path = dump_dir / kind / f"{key.stem}.{dump_format}"
    plain = _as_plain(content, str(path))
    data = _as_pt(plain) if dump_format == "pt" else _as_jsonl(plain)
    try:
        if replace:
            with written_aside(path) as aside:
                aside.write_bytes(data)
        else:
            publish_new(path, data)
    except FileExistsError as error:
        raise StepExistsError(
            f"{path} is there already, from another run: give debug.dump_dir (or WEAVER_DEBUG_DUMP_DIR) a folder of "
            "its own, or remove the old dump"
        ) from error
    except OSError as error:
        raise TraceError(f"{path} cannot be written: {error}") from error
    return path


def load_content(path: Path, *, dump_format: DumpFormat | None = None, inside: Path | None = None) -> Content:
    """Reads a file's content, tensors on the CPU; ``dump_format``: by default that of the file's name.

    ``inside``: the dump's folder, out of which no link is followed; ``None``: the user named this file.

    Raises ``TraceError`` where the file cannot be read, would run code, or holds something else.
    """
    read_as = dump_format or _format_of(path)
    try:
        content = read_pt(path, inside=inside) if read_as == "pt" else _read_jsonl(path, inside)
    except TraceError:  # which is an OSError as well
        raise
    except OSError as error:
        raise TraceError(describe_failure(error, path)) from error
    if not isinstance(content, dict):
        raise TraceError(f"{path} holds a {type(content).__name__}; expected a dict, as a debug dump's files do")
    return content


def _format_of(path: Path) -> DumpFormat:
    suffix = path.suffix.removeprefix(".")
    for known in get_args(DumpFormat):
        if suffix == known:
            return known  # type: ignore[no-any-return]  # get_args is untyped
    raise TraceError(f"{path} is neither .pt nor .jsonl; set rollout_worker.trajectory_format to what it is")


def _read_jsonl(path: Path, inside: Path | None) -> object:
    try:
        text = read_text(path, inside=inside, max_bytes=MAX_DUMP_BYTES, what="a file of a debug dump")
    except ValueError as error:
        raise TraceError(f"{path} is not JSON: {error}") from error
    # Not splitlines, which also cuts at characters that a JSON text may hold.
    numbered = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    decoded = {number: _decode_line(line, f"{path}, line {number}") for number, line in numbered}
    if not decoded:
        raise TraceError(f"{path} is empty")
    if len(decoded) > 1:
        return _join_lines(decoded, path)
    return next(iter(decoded.values()))


def _decode_line(line: str, where: str) -> object:
    try:
        return _from_json(json.loads(line))
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where}: is not JSON: {error}") from error


def _join_lines(lines: Mapping[int, object], path: Path) -> object:
    """Several lines by their numbers, each with some of a step's trajectories, or each one trajectory, as one file.

    All other keys of lines with several trajectories, as the step, must be the same in each.
    """
    trajectories: list[object] = []
    head: Content = {}
    for number, line in lines.items():
        if isinstance(line, dict) and isinstance(line.get("trajectories"), list):
            _check_whole(line, f"{path}, line {number}")
            trajectories += line["trajectories"]
            own = {name: value for name, value in line.items() if name not in ("trajectories", "num_trajectories")}
            if head and own != head:
                raise TraceError(f"{path}, line {number}: is of another step or run than the lines before it")
            head = own
        elif isinstance(line, dict) and "tokens" in line:
            trajectories.append(line)
        else:
            raise TraceError(f"{path}, line {number}: is no trajectory, and several lines hold nothing else")
    return {**head, "trajectories": trajectories}


def _check_whole(line: Content, where: str) -> None:
    said, found = line.get("num_trajectories"), len(line["trajectories"])
    if said is not None and said != found:
        raise TraceError(f"{where}: says that it holds {said} trajectories, and holds {found}")


def _as_plain(value: object, where: str) -> Any:  # noqa: ANN401 - of the same kind as what comes in
    """The value with tensors that stand alone on the CPU; raises ``TraceError`` for a value that no file can hold."""
    if isinstance(value, torch.Tensor):
        # A copy: torch.save writes the whole memory that a view is of.
        return value.detach().to("cpu").clone(memory_format=torch.contiguous_format)
    if isinstance(value, Mapping):
        return {str(name): _as_plain(item, f"{where}, {name}") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_plain(item, where) for item in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TraceError(f"{where}: {type(value).__name__} cannot be written; expected tensors and plain values")


def _as_pt(content: Content) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _as_jsonl(content: Content) -> bytes:
    return (json.dumps(_to_json(content), allow_nan=False) + "\n").encode("ascii")


def _to_json(value: object) -> object:
    if isinstance(value, torch.Tensor):
        if value.is_complex():
            raise TraceError(f"a tensor of {value.dtype} cannot be written as jsonl; set debug.dump_format=pt")
        flat = value.reshape(-1)
        numbers = (flat.double() if flat.is_floating_point() else flat).tolist()
        return {
            "dtype": dtype_name(value.dtype),
            "shape": list(value.shape),
            "values": [_to_json(number) for number in numbers],
        }
    if isinstance(value, dict):
        return {name: _to_json(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _from_json(value: object) -> object:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == _TENSOR_KEYS and isinstance(value["values"], list):
        return _tensor_from_json(value)
    return {name: _from_json(item) for name, item in value.items()}


def _tensor_from_json(value: dict[str, Any]) -> torch.Tensor:
    try:
        dtype = find_dtype(value["dtype"])
    except ValueError as error:
        raise ValueError(f"a tensor {error}") from error
    numbers = [_NON_FINITE.get(number, number) if isinstance(number, str) else number for number in value["values"]]
    through = torch.float64 if dtype.is_floating_point else dtype
    try:
        # Through float64, which holds every value of the narrower floats exactly.
        return torch.tensor(numbers, dtype=through).to(dtype).reshape(value["shape"])
    except (TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"a tensor of {value['dtype']} {value['shape']} has other values: {error}") from error


def as_number(value: object) -> float | None:
    """A number of a file as float: one of Python's, a tensor of one element, or a text like ``NaN``; else None."""
    if isinstance(value, torch.Tensor):
        return float(value.double().item()) if value.numel() == 1 else None
    if isinstance(value, str):
        return _NON_FINITE.get(value)
    return float(value) if isinstance(value, int | float) else None
