"""Writes tensors as the safetensors files that they were read from: the same headers, and so the same bytes for the
same values.

One tensor is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from mock_scheduler.adapters.huggingface.files import parse_header
from mock_scheduler.support.files import written_aside
from mock_scheduler.support.tensor_bytes import as_bytes


def write_weights(folder: Path, headers: Mapping[str, str], read: Callable[[str], torch.Tensor]) -> None:
    """Writes a file for each header, with the tensors in their order there.

    Args:
        folder: there already.
        headers: the text of each file's header.
        read: gives a tensor of the name, dtype and shape that a header says.

    Raises:
        ValueError: a header is none, or a tensor has not its bytes.
    """
    for name, text in headers.items():
        header = parse_header(text)
        with written_aside(folder / name) as aside, aside.open("xb") as stream:
            encoded = text.encode("utf-8")
            stream.write(len(encoded).to_bytes(8, "little") + encoded)
            for tensor in header.in_order:
                start, stop = header.tensors[tensor]["data_offsets"]
                values = read(tensor)
                if values.nbytes != stop - start:
                    raise ValueError(f"{tensor} has {values.nbytes} bytes, and its header says {stop - start}")
                stream.write(as_bytes(values.contiguous()).numpy().data)
