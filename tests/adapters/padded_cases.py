"""Padded batches for the tests: arbitrary ones of any layout, and how two are compared."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from mock_scheduler.adapters.padded import AREAL, ROLL_AGENTIC, ROLL_RLVR, VERL, Frame, PaddedCodec, PaddedLayout
from mock_scheduler.batch import SamplingParams
from mock_scheduler.scheduler import RolloutRequest
from mock_scheduler.support.tensor_bytes import as_bytes

SAMPLING = SamplingParams(temperature=0.7, top_p=0.9, top_k=20, logprobs_mode="processed")
REQUEST = RolloutRequest(global_step=3, batch_size=4, policy_version=5)
LAYOUTS = (ROLL_AGENTIC, ROLL_RLVR, VERL, AREAL)

INTEGERS = (torch.int64, torch.int32)
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
ANY = (*INTEGERS, *FLOATS, torch.bool, torch.int16, torch.uint16, torch.float8_e5m2, torch.complex64, torch.complex128)


def codec(layout: PaddedLayout, **options: Any) -> PaddedCodec:
    return PaddedCodec(layout, sampling=SAMPLING, **options)


def assert_same(found: Mapping[str, object], expected: Mapping[str, object]) -> None:
    """Equal field by field, to the bit, with the same types and in the same order."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        other = found[name]
        assert type(other) is type(value), name
        if isinstance(value, torch.Tensor):
            assert isinstance(other, torch.Tensor)
            assert (other.dtype, other.shape) == (value.dtype, value.shape), name
            assert torch.equal(as_bytes(other), as_bytes(value)), name
        elif isinstance(value, np.ndarray):
            assert isinstance(other, np.ndarray)
            assert (other.dtype, other.shape) == (value.dtype, value.shape), name
            assert repr(other.tolist()) == repr(value.tolist()), name
        else:
            assert repr(other) == repr(value), name


class Case:
    """One arbitrary batch, made from a seed: any dtypes, any masks, garbage wherever a core field does not look."""

    def __init__(self, layout: PaddedLayout, num_rows: int, seed: int) -> None:
        self.layout, self.num_rows, self.random = layout, num_rows, random.Random(seed)
        self.prompt, self.response = self.random.randint(1, 6), self.random.randint(1, 6)
        self.width = self.prompt + self.response
        self.native: dict[str, object] = {}
        self._make()

    def __repr__(self) -> str:
        return f"Case({self.layout.name}, {self.num_rows} rows, {list(self.native)})"

    def _make(self) -> None:
        layout = self.layout
        attention = self._mask(Frame.FULL)
        self.native[layout.attention_mask] = attention
        self._attended = self._spans(attention != 0)
        response = self._mask(layout.frames[layout.response_mask])
        self.native[layout.response_mask] = response
        self._sampled = self._to_full(response != 0, layout.frames[layout.response_mask]) & self._attended
        self.native[layout.tokens] = self._garbage(Frame.FULL, INTEGERS, self._attended, self._token)
        for name, frame in layout.frames.items():
            if name not in self.native and self.random.random() < 0.8:
                self.native[name] = self._known(name, frame)
        if layout.rewards is not None and layout.rewards not in layout.frames:
            self.native[layout.rewards] = torch.tensor([self._number() for _ in range(self.num_rows)]).to(
                self.random.choice(FLOATS)
            )
        self._add_extras()
        names = list(self.native)
        self.random.shuffle(names)
        self.native = {name: self.native[name] for name in names}

    def _known(self, name: str, frame: Frame) -> torch.Tensor:
        if name == self.layout.rollout_logprobs:
            return self._garbage(frame, FLOATS, self._sampled, self._number)
        if name in (self.layout.rewards, *self.layout.rewards_later):
            return self._garbage(frame, FLOATS, self._attended, self._number)
        if name == self.layout.policy_versions:
            return self._garbage(frame, INTEGERS, self._sampled, self._token)
        if name == self.layout.routed_experts:
            return self._routing()
        if name in ("prompts", "responses") and self.random.random() < 0.5:
            tokens = self.native[self.layout.tokens]
            assert isinstance(tokens, torch.Tensor)
            start = 0 if frame is Frame.PROMPT else self.prompt
            return tokens[:, start : start + self._width_of(frame)].clone()
        if name == "position_ids" and self.random.random() < 0.5:
            return torch.arange(self.width).repeat(self.num_rows, 1)
        return self._bits((self.num_rows, self._width_of(frame)), self.random.choice(ANY))

    def _routing(self) -> torch.Tensor:
        """Two of 300 experts in three layers for each token, or for all but the last; anything in the padding."""
        routing = self._bits((self.num_rows, self.width, 3, 2), torch.int32)
        for row, line in enumerate(self._attended):
            own = [column for column, flag in enumerate(line.tolist()) if flag] or [0]
            for column in own:
                pairs = [self.random.sample(range(300), 2) for _ in range(3)]
                routing[row, column] = torch.tensor(pairs, dtype=torch.int32)
            if self.random.random() < 0.5:
                routing[row, own[-1]] = 0
        return routing

    def _add_extras(self) -> None:
        rows, choice = self.num_rows, self.random.choice
        shapes = [
            (rows,),
            (rows, 3),
            (rows, self.width, 2),
            (rows, self.width - 1),
            (rows, self.response, 1),
            (rows, 0),
        ]
        for index, shape in enumerate(shapes):
            if self.random.random() < 0.4:
                self.native[f"extra.{index}"] = self._bits(shape, choice(ANY))
        values = [None, 1, -0.0, float("nan"), "é", [1.5, {"a": [None]}], (1, "x"), {2: b"\x00"}, np.float32(0.1)]
        self.native["listed"] = [choice(values) for _ in range(rows)]
        objects = np.empty(rows, dtype=object)
        objects[:] = [choice(values) for _ in range(rows)] if rows else []
        self.native["objects"] = objects
        self.native["numbers"] = np.arange(rows).astype(np.dtype(choice(["i2", "f8", ">f4", "M8[s]"])))
        self.native["words"] = np.array([choice(["a", "bc", ""]) for _ in range(rows)], dtype="<U4")
        if self.random.random() < 0.5:
            self.native["meta_info"] = {"metrics": {"x": [1.0, float("inf")]}, "count": np.int64(3), "pair": (1, None)}

    def _mask(self, frame: Frame) -> torch.Tensor:
        """A mask as frameworks have it, or any other."""
        shape = (self.num_rows, self._width_of(frame))
        mask = torch.zeros(shape, dtype=torch.bool)
        for row in range(self.num_rows):
            start, stop = sorted(self.random.choices(range(shape[1] + 1), k=2))
            mask[row, 0 if not self.layout.is_left_padded or frame is not Frame.FULL else start : stop] = True
        if self.random.random() < 0.5:
            mask ^= self._bits(shape, torch.bool)
        return mask.to(self.random.choice((torch.bool, torch.int64, torch.int32, torch.float32)))

    def _garbage(
        self, frame: Frame, dtypes: tuple[torch.dtype, ...], proper: torch.Tensor, value: Callable[[], float]
    ) -> torch.Tensor:
        """Any bits, or a constant, where ``proper`` (by full column) is False, else possible values."""
        shape, dtype = (self.num_rows, self._width_of(frame)), self.random.choice(dtypes)
        out = self._bits(shape, dtype) if self.random.random() < 0.5 else torch.full(shape, self._number()).to(dtype)
        for row in range(shape[0]):
            for column in range(shape[1]):
                if proper[row, self._full_column(frame, column)]:
                    out[row, column] = value()
        return out

    def _bits(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        count = torch.Size(shape).numel()
        if dtype == torch.bool:
            return torch.tensor([self.random.random() < 0.5 for _ in range(count)], dtype=torch.bool).reshape(shape)
        content = torch.tensor(list(self.random.randbytes(count * dtype.itemsize)), dtype=torch.uint8)
        return content.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)

    def _spans(self, attended: torch.Tensor) -> torch.Tensor:
        """From the first to the last marked column; the first column where none is marked."""
        spans = torch.zeros(attended.shape, dtype=torch.bool)
        for row, line in enumerate(attended.tolist()):
            marked = [column for column, flag in enumerate(line) if flag] or [0]
            spans[row, marked[0] : marked[-1] + 1] = True
        return spans

    def _to_full(self, flags: torch.Tensor, frame: Frame) -> torch.Tensor:
        full = torch.zeros(self.num_rows, self.width, dtype=torch.bool)
        start = self._full_column(frame, 0)
        full[:, start : start + flags.shape[1]] = flags
        return full

    def _full_column(self, frame: Frame, column: int) -> int:
        return column + {Frame.FULL: 0, Frame.PROMPT: 0, Frame.SHIFTED: 1, Frame.RESPONSE: self.prompt}[frame]

    def _width_of(self, frame: Frame) -> int:
        widths = {Frame.FULL: self.width, Frame.SHIFTED: self.width - 1}
        return {**widths, Frame.PROMPT: self.prompt, Frame.RESPONSE: self.response}[frame]

    def _number(self) -> float:
        return self.random.choice([0.0, -0.0, -1.5, -0.25, 2.0])

    def _token(self) -> int:
        return self.random.choice([0, 1, 2, 7, 151643, 2**31 - 1])


cases = st.builds(Case, st.sampled_from(LAYOUTS), st.integers(0, 4), st.integers(0, 2**32))
