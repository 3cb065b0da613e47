"""The ``parallel`` section, whose degrees are named as in Megatron's arguments; importing this imports no torch.

``mock_scheduler.layouts.layout`` has the rules for layouts.
"""

from __future__ import annotations

import re
from typing import Annotated, ClassVar

from pydantic import Field

from mock_scheduler.config.base import ConfigSection, Decides, PositiveInt
from mock_scheduler.errors import LayoutError
from mock_scheduler.support.text import count_of

#: The axes of a layout, as its text names them, and the key of each one's degree.
LAYOUT_AXES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "dp": "data_parallel_size",
}
_SEQUENCE_PARALLEL = "sp"


class ParallelConfig(ConfigSection):
    """The layout: tp × pp × cp × dp processes, with experts over ep of the tp × cp × dp ranks of a pipeline stage.

    ``virtual_pipeline_model_parallel_size``: model chunks per stage, run by the interleaved schedule.
    ``overlap_p2p_comm``: how the interleaved schedule sends between stages; false is Megatron's default, batched.
    ``allow_known_wrong``: names of rules about wrong values of the installed Megatron (``docs/layouts.md``); a run that
    breaks one of them goes on with a warning, to show or to study it.
    """

    decides: ClassVar = Decides.ORDER

    tensor_model_parallel_size: PositiveInt = 1
    """tp: ranks that share each layer's matrices."""
    pipeline_model_parallel_size: PositiveInt = 1
    """pp: stages of layers."""
    virtual_pipeline_model_parallel_size: PositiveInt | None = None
    context_parallel_size: PositiveInt = 1
    """cp: ranks that share a sequence's tokens."""
    expert_model_parallel_size: PositiveInt = 1
    """ep: ranks that share the experts."""
    expert_tensor_parallel_size: PositiveInt = 1
    """etp: ranks that share each expert's matrices."""
    data_parallel_size: PositiveInt = 1
    """dp: replicas, which share the micro-batches."""
    sequence_parallel: bool = False
    """sp: the tp ranks share the tokens of norms and residuals."""
    overlap_p2p_comm: Annotated[bool, Decides.EXECUTION] = True
    allow_known_wrong: Annotated[list[str], Decides.EXECUTION] = Field(default=[])

    @property
    def num_chunks(self) -> int:
        """Counts model chunks per pipeline stage."""
        return self.virtual_pipeline_model_parallel_size or 1

    @property
    def world_size(self) -> int:
        """Returns the number of processes of this layout."""
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
            * self.data_parallel_size
        )

    def describe(self) -> str:
        """One phrase for logs and messages: ``tp2 pp1 dp1 sp``; other degrees where they are not 1."""
        further = {
            "vpp": self.num_chunks,
            "cp": self.context_parallel_size,
            "ep": self.expert_model_parallel_size,
            "etp": self.expert_tensor_parallel_size,
        }
        parts = [
            f"tp{self.tensor_model_parallel_size}",
            f"pp{self.pipeline_model_parallel_size}",
            *(f"{axis}{size}" for axis, size in further.items() if size > 1),
            f"dp{self.data_parallel_size}",
        ]
        return " ".join([*parts, "sp"] if self.sequence_parallel else parts)

    def describe_degrees(self) -> str:
        """Returns every degree with its value, 1 included, for messages that refuse a layout."""
        degrees = {
            "tp": self.tensor_model_parallel_size,
            "pp": self.pipeline_model_parallel_size,
            "vpp": self.num_chunks,
            "cp": self.context_parallel_size,
            "ep": self.expert_model_parallel_size,
            "etp": self.expert_tensor_parallel_size,
            "dp": self.data_parallel_size,
        }
        text = " ".join(f"{axis} {size}," for axis, size in degrees.items())
        return f"{text} sequence parallelism {'on' if self.sequence_parallel else 'off'}"

    def describe_in_full(self) -> str:
        """Returns ``tp2 pp1 dp1 (2 processes: tp 2, pp 1, ...)``: the layout, its size and every degree."""
        processes = count_of(self.world_size, "process", "processes")
        return f"{self.describe()} ({processes}: {self.describe_degrees()})"


def parse_layout(text: str) -> dict[str, int | bool | None]:
    """Returns ``tp2-sp-pp2`` as keys of the ``parallel`` section, every degree and ``sequence_parallel`` among them.

    A degree without a name in the text is 1, of virtual stages ``None``. Raises ``LayoutError`` with every part that is
    no degree or is there twice.
    """
    keys: dict[str, int | bool | None] = dict.fromkeys(LAYOUT_AXES.values(), 1)
    keys |= {LAYOUT_AXES["vpp"]: None, "sequence_parallel": False}
    named: set[str] = set()
    problems = []
    for part in text.split("-"):
        match = re.fullmatch(r"([a-z]+)([1-9][0-9]*)", part)
        axis = match[1] if match is not None and match[1] in LAYOUT_AXES else None
        if axis is None and part != _SEQUENCE_PARALLEL:
            problems.append(f"{part!r} is no axis with a degree, as in tp2, nor sp")
            continue
        if (axis or part) in named:
            problems.append(f"{axis or part} is there more than once")
        named.add(axis or part)
        if match is not None and axis is not None:
            keys[LAYOUT_AXES[axis]] = int(match[2])
        else:
            keys["sequence_parallel"] = True
    if problems:
        raise LayoutError(
            f"{text!r} is no layout: {'; '.join(problems)}; write it as tp2-sp-pp2; axes are {', '.join(LAYOUT_AXES)}"
        )
    return keys
