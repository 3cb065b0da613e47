"""Writes pickles that name classes of packages that are not installed, as these packages' own objects are written."""

from __future__ import annotations

import io
import pickle
from types import SimpleNamespace
from typing import Any

import torch


class Global:
    """A class or function of another package; pickled by its name alone."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __call__(self) -> None:
        """Pickle wants it callable."""


class Described:
    """An object as pickles have it: what it is made of, its arguments and its state."""

    def __init__(self, kind: Global, *arguments: object, state: object = None) -> None:
        self.kind, self.arguments, self.state = kind, arguments, state


class ForgingPickler(pickle._Pickler):
    """Pickles the two classes above as what they stand for."""

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, Global):
            return obj.name
        if isinstance(obj, Described):
            return (obj.kind, obj.arguments) if obj.state is None else (obj.kind, obj.arguments, obj.state)
        return NotImplemented

    def save_global(self, obj: object, name: str | None = None) -> None:
        """Writes a name; of any other object as pickle does."""
        if isinstance(obj, Global):
            self.write(b"c" + f"{obj.module}\n{obj.name}\n".encode())  # type: ignore[attr-defined]
            self.memoize(obj)  # type: ignore[attr-defined]
        else:
            super().save_global(obj, name)  # type: ignore[misc]


def dumps(value: object, protocol: int = 4) -> bytes:
    """Pickles a value."""
    out = io.BytesIO()
    ForgingPickler(out, protocol).dump(value)
    return out.getvalue()


def torch_bytes(value: object) -> bytes:
    """Saves a value as ``torch.save`` does."""
    out = io.BytesIO()
    torch.save(value, out, pickle_module=SimpleNamespace(Pickler=ForgingPickler, __name__="pickle"))
    return out.getvalue()


_TENSORDICT = "tensordict._reductions"


def consolidated(fields: dict[str, torch.Tensor], **changes: Any) -> Described:
    """A consolidated TensorDict, as tensordict 0.12.1 writes it; ``changes``: of the description."""
    leaves, content = {}, b""
    for name, tensor in fields.items():
        data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        leaves[name] = (str(tensor.dtype), list(tensor.shape), len(content), len(content) + len(data), 0)
        content += data
    about = {
        "cls": "TensorDict",
        "non_tensors": {},
        "leaves": leaves,
        "cls_metadata": {"device": None, "batch_size": [len(next(iter(fields.values())))]},
        **changes,
    }
    storage = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return Described(Global(_TENSORDICT, "_rebuild_tensordict_files_consolidated"), about, storage)


def plain_tensordict(fields: dict[str, object], num_rows: int) -> Described:
    """A TensorDict of tensors; lists stand for values per row, other values for one of all rows."""

    def written(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, list):
            stack = Global("tensordict.tensorclass", "NonTensorStack")
            return Described(stack, state={"stack_dim": 0, "tensordicts": [non_tensor(item) for item in value]})
        return non_tensor(value)

    state = {
        "_tensordict": {name: written(value) for name, value in fields.items()},
        "_batch_size": torch.Size([num_rows]),
        "_device": None,
        "_td_dim_names": None,
    }
    return Described(Global(_TENSORDICT, "_make_td"), Global("tensordict._td", "TensorDict"), state)


def non_tensor(value: object) -> Described:
    state = {"tensordict": None, "non_tensordict": {"data": value, "_metadata": None, "_is_non_tensor": True}}
    return Described(Global("tensordict.tensorclass", "NonTensorData"), state=state)


def verl_proto(batch: object, arrays: dict[str, Any], meta: dict[str, Any]) -> bytes:
    """A pickled DataProto of verl."""
    return dumps(Described(Global("verl.protocol", "DataProto"), state=(batch, arrays, meta)))


def roll_proto(batch: bytes, arrays: dict[str, Any], meta: dict[str, Any]) -> bytes:
    """A pickled DataProto of ROLL, whose bytes lie in a stream."""
    stream = Described(Global("_io", "BytesIO"), state=(batch, len(batch), None))
    kind = Global("roll.distributed.scheduler.protocol", "DataProto")
    return dumps(Described(kind, state=(stream, arrays, None, meta)), pickle.HIGHEST_PROTOCOL)
