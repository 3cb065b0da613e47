"""Puts a reference's tensors into a run: in one update, the named modules give, or get back, the trace's tensors.

Contract: a ``GraftProbe`` stands before the tracing probe, so the run's trace shows the graft. In the forward pass the
module's output has the reference's bits and the graph of its own (its gradient goes on unchanged); in the backward pass
the gradient arriving at the output is replaced, and everything computed before stays. With recomputation both runs of a
module get the same. Padding keeps its own values. Tokens are found by row identity and position, and each rank cuts its
own part out of the whole tensor by the probe's ``ShardSpec``.

A traced gradient is of the sum over all ranks (``shares.gradient_scale``), so a grafted one is multiplied by dp · cp
where each rank's loss is a mean: exact where dp · cp is a power of two, else within one rounding.

The choice of experts cannot be put in, since experts have built tables from it by then; the router's logits can.
Tensors by chosen expert are put in only where both runs chose the same.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch

from mock_scheduler.config.instruments import GraftConfig, TraceKind
from mock_scheduler.determinism.agreement import RankGroup
from mock_scheduler.errors import TraceError
from mock_scheduler.megatron.observed_model import ObservedModel
from mock_scheduler.megatron.probe.interface import StepRows, TrainingProbe
from mock_scheduler.megatron.probe.observed import ObservedOutput, observed_outputs
from mock_scheduler.megatron.probe.shares import (
    Places,
    Share,
    ShareBook,
    TokenIndex,
    Tokens,
    element_places,
    gradient_scale,
)
from mock_scheduler.megatron.probe.watches import Gather, See
from mock_scheduler.megatron.ranks import ModelRanks
from mock_scheduler.megatron.step_tokens import MetRows, MicroBatchTokens
from mock_scheduler.support.tensor_bytes import dtype_name
from mock_scheduler.support.text import bullet_list, list_some
from mock_scheduler.trace.entries import RowTable, TraceKey
from mock_scheduler.trace.full.reader import TraceReader, open_trace
from mock_scheduler.trace.shards import cut_shard

#: The kinds that a module's output is traced as.
_VALUE_KINDS: tuple[TraceKind, ...] = ("activation", "router", "logits")
_NUM_NEAREST = 3
_NUM_ROWS = 3


class GraftSource:
    """The tensors of a reference's trace that a run is to get. Every rank reads them; nothing is communicated.

    Raises ``TraceError`` where the trace cannot be read or lacks a named tensor at that step and update; lists all.
    """

    def __init__(self, config: GraftConfig) -> None:
        if config.trace_dir is None:
            raise TraceError("graft.trace_dir is not set, so there is nothing to graft")
        self.config = config
        self._trace_dir = Path(config.trace_dir)
        with open_trace(self._trace_dir) as reader:
            self._keys = self._find(reader)

    def index(self, rows: MetRows) -> TokenIndex:
        """Makes the index of rows in the trace's own order of tokens, for rows that forward passes meet."""
        with open_trace(self._trace_dir) as reader:
            return _ReferenceIndex(rows, reader.footer(self.config.step).rows, self._trace_dir)

    def order(self, batch: RowTable) -> torch.Tensor | None:
        """Finds each token of the batch among the trace's, int64 ``[T]``; ``None`` where both are alike.

        Raises:
            TraceError: a row of the batch is not in the trace, or is of another length there.
        """
        with open_trace(self._trace_dir) as reader:
            rows = reader.footer(self.config.step).rows
        identities, lengths = batch.identities, batch.lengths
        if identities == rows.identities and lengths == rows.lengths:
            return None
        starts, start = {}, 0
        for identity, length in zip(rows.identities, rows.lengths, strict=True):
            starts[identity] = (start, length)
            start += length
        problems = []
        for identity, length in zip(identities, lengths, strict=True):
            if identity not in starts:
                problems.append(f"{identity} is not there")
            elif starts[identity][1] != length:
                problems.append(f"{identity} has {length} tokens here, {starts[identity][1]} there")
        if problems:
            raise TraceError(
                f"graft: the batch of step {self.config.step} is not that of {self._trace_dir}: {len(problems)} of "
                f"{len(identities)} rows are others: {list_some(problems, _NUM_ROWS, '; ')}"
            )
        return torch.cat([torch.arange(starts[identity][0], sum(starts[identity])) for identity in identities])

    def load(self, output: ObservedOutput, order: torch.Tensor | None, num_tokens: int) -> _Reference:
        """A named tensor, in the order of the batch's tokens.

        Raises:
            TraceError: it has another shape than the model's.
        """
        key = self._keys[output.name]
        if not output.row.has_gradient:
            raise TraceError(
                f"graft: {output.name} is a choice of experts, which cannot be put in: graft the router's logits"
            )
        with open_trace(self._trace_dir) as reader:
            shape = reader.dtype_and_shape(key)[1]
            if shape[1:] != output.form.shape:
                raise TraceError(
                    f"graft: the {key.describe()} is {list(shape[1:])} for each token in {self._trace_dir}, and "
                    f"{list(output.form.shape)} in this model"
                )
            merged = reader.merge(key)
            tensor, present = merged.tensor.clone(), merged.present
        has_token = torch.ones(len(tensor), dtype=torch.bool) if present is None else present.reshape(len(tensor), -1)
        has_token = has_token if has_token.dim() == 1 else has_token.all(dim=1)
        if order is not None:
            tensor, has_token = tensor[order], has_token[order]
        assert len(tensor) == num_tokens  # of the same rows
        return _Reference(key=key, tensor=tensor, has_token=has_token, trace_dir=self._trace_dir)

    def choice(self, name: str, order: torch.Tensor | None) -> torch.Tensor:
        """int64 ``[T, K]``: the experts that the reference's tokens chose, in the order of the batch's tokens.

        Raises:
            TraceError: the trace does not have them.
        """
        key = TraceKey(step=self.config.step, update=self.config.update, kind="router", name=name)
        with open_trace(self._trace_dir) as reader:
            if not reader.has(key):
                raise TraceError(
                    f"graft: {self._trace_dir} has no {key.describe()}, without which what lies by chosen expert "
                    "cannot be put in: trace it as well"
                )
            chosen = reader.merge(key).tensor.clone()
        return chosen if order is None else chosen[order]

    def _find(self, reader: TraceReader) -> dict[str, TraceKey]:
        config = self.config
        if config.step not in reader.steps:
            steps = list_some([str(step) for step in reader.steps], _NUM_NEAREST, ", ")
            raise TraceError(f"graft.step {config.step} is not in {self._trace_dir}, which has steps {steps}")
        kinds = _VALUE_KINDS if config.kind == "activation" else ("activation_gradient",)
        keys = [key for key in reader.keys(config.step) if key.kind in kinds and key.update == config.update]
        found = {key.name: key for key in keys}
        problems = [
            f"{name}{_describe_nearest(name, found)}" for name in dict.fromkeys(config.names) if name not in found
        ]
        if problems:
            raise TraceError(
                f"graft.names: {self._trace_dir} has no {config.kind.replace('_', ' ')} at step {config.step}, update "
                f"{config.update}, of:{bullet_list(problems)}"
            )
        return {name: found[name] for name in dict.fromkeys(config.names)}


class _ReferenceIndex(TokenIndex):
    """The indices of met rows among a reference's tokens."""

    def __init__(self, rows: MetRows, reference: RowTable, trace_dir: Path) -> None:
        super().__init__(reference.lengths)
        places = zip(reference.first_places, reference.lengths, strict=True)
        self._rows, self._trace_dir = rows, trace_dir
        self._known = dict(zip(reference.identities, places, strict=True))

    def first_places(self) -> Places:
        """As of every index; raises ``TraceError`` where the reference lacks a row, or has another length of it."""
        missing = [
            identity
            for identity, length in zip(self._rows.identities, self._rows.lengths, strict=True)
            if self._known.get(identity, (0, -1))[1] != length
        ]
        if missing:
            raise TraceError(
                f"graft: {len(missing)} of {len(self._rows)} rows are not in {self._trace_dir}, or are of another "
                f"length there: {list_some(missing, _NUM_ROWS, ', ')}"
            )
        return np.asarray([self._known[identity][0] for identity in self._rows.identities], dtype=np.int64)


class _Reference:
    """One tensor ``[T, ...]`` of the reference, on the host; ``has_token``: bool ``[T]``."""

    def __init__(self, *, key: TraceKey, tensor: torch.Tensor, has_token: torch.Tensor, trace_dir: Path) -> None:
        self._key = key
        self._tensor = tensor
        self._has_token = has_token
        self._trace_dir = trace_dir
        self._cut: dict[int, torch.Tensor] = {}

    def cut(self, book: ShareBook, output: ObservedOutput, tokens: Tokens, like: torch.Tensor) -> torch.Tensor:
        """The rank's part of it for these tokens; ``like``: the tensor that it goes into.

        Raises:
            TraceError: it is of another dtype, or has no value for a token.
        """
        if self._tensor.dtype != like.dtype:
            raise TraceError(
                f"graft: the {self._key.describe()} is {dtype_name(self._tensor.dtype)} in {self._trace_dir}, and "
                f"{dtype_name(like.dtype)} in this run: a graft must have its bits"
            )
        if id(tokens) not in self._cut:
            blocks = tokens.split.blocks
            num_absent = sum(
                int((~self._has_token[block.global_start : block.global_start + block.length]).sum())
                for block in blocks
            )
            if num_absent:
                raise TraceError(
                    f"graft: {self._trace_dir} has no {self._key.describe()} for {num_absent} of {len(tokens.places)} "
                    "tokens of a micro-batch: its update trained on other rows, or some of its ranks wrote no trace"
                )
            local = cut_shard(self._tensor, book.spec(output, tokens))
            self._cut[id(tokens)] = local.to(like.device)
        return self._cut[id(tokens)]


class GraftProbe(TrainingProbe):
    """Puts the tensors into the steps' one update. Every rank makes one for that step."""

    def __init__(self, ranks: ModelRanks, source: GraftSource) -> None:
        self._ranks = ranks
        self._source = source
        self._config = source.config
        self._book: ShareBook | None = None
        self._order: torch.Tensor | None = None
        self._current: Share | None = None
        self._is_watching = False
        self._is_bypassed = False
        self._open: Counter[str] = Counter()
        #: How many passes of a module got the reference's tensor, by name.
        self.fired: Counter[str] = Counter()

    def start_step(self, rows: StepRows, batches: Sequence[MicroBatchTokens], models: Sequence[ObservedModel]) -> None:
        """Find the batch's tokens in the trace. Raises ``TraceError`` where it has other rows."""
        if isinstance(rows, MetRows):
            self.start_rows(self._source.index(rows), None)
        else:
            self.start_rows(TokenIndex(rows.lengths), self._source.order(rows))

    def start_rows(self, index: TokenIndex, order: torch.Tensor | None) -> None:
        """A step with these tokens begins; ``order``: where they are among the trace's tokens."""
        self._book, self._order = ShareBook(self._ranks, index), order

    @contextmanager
    def watching(self, model: ObservedModel, update: int) -> Iterator[None]:
        """Grafts the model's tensors in the block, where it is the configured update.

        Raises:
            TraceError: a tensor cannot be put in, or an awaited gradient did not arrive.
        """
        if update != self._config.update:
            yield
            return
        if self._book is None:
            raise TraceError("an update was announced before its step: call start_step first")
        wanted = [output for output in observed_outputs(model) if output.name in self._config.names]
        scale = gradient_scale(model)
        with ExitStack() as stack:
            for output in wanted:
                reference = self._source.load(output, self._order, self._book.num_tokens)
                if "slot" in output.form.dims:
                    self._check_choices(model, output, stack)
                stack.enter_context(output.row.watch(output.watched, self._see(output, reference, scale)))
            self._is_watching = True
            try:
                yield
            finally:
                self._is_watching = False
        lost = sorted(name for name, count in self._open.items() if count)
        if lost:
            raise TraceError(f"graft: no gradient arrived in some passes through these modules:{bullet_list(lost)}")

    @contextmanager
    def computing(self, own: MicroBatchTokens) -> Iterator[None]:
        """The block is one forward pass of one chunk over this share."""
        if self._is_watching:
            assert self._book is not None  # watching has asked for it
            self._current = self._book.share(own)
        try:
            yield
        finally:
            self._current = None

    @contextmanager
    def bypassing(self) -> Iterator[None]:
        """The block is a forward pass that no update trains on: nothing is put in."""
        self._is_bypassed = True
        try:
            yield
        finally:
            self._is_bypassed = False

    def check_fired(self, ranks: RankGroup) -> None:
        """Refuses a step without a graft of some named tensor on any rank. Collective, over all ranks.

        Raises:
            TraceError: on every rank, with all such names.
        """
        payloads = ranks.gather(json.dumps(dict(self.fired)).encode())
        fired: Counter[str] = Counter()
        for payload in payloads:
            fired.update(json.loads(payload))
        config = self._config
        silent = [name for name in config.names if not fired[name]]
        if silent:
            raise TraceError(
                f"graft: nothing was put in at step {config.step}, update {config.update}, for these names, since no "
                f"module that ran there shows them:{bullet_list(silent)}"
            )

    def _see(self, output: ObservedOutput, reference: _Reference, scale: float) -> See:
        """Builds the receiver of a module's tensors, of a first pass and of one that recomputes it."""
        waiting: deque[Share] = deque()
        is_value = self._config.kind == "activation"

        def see(tensor: torch.Tensor, gather: Gather | None) -> torch.Tensor | None:
            if self._is_bypassed:
                return None
            has_graph = tensor.requires_grad and torch.is_grad_enabled()
            share = self._current
            if share is None:  # the backward pass runs the module again
                if not has_graph or not waiting:
                    return None
                share = waiting.popleft()
            elif not has_graph:
                waiting.append(share)
            places = self._element_places(output, share, tensor, gather)
            if places is None:
                return None
            book = self._book
            assert book is not None
            values = reference.cut(book, output, share.of(output.form), tensor)
            if is_value:
                self.fired[output.name] += 1
                grafted: torch.Tensor = _Grafted.apply(tensor, places, values)
                return grafted
            if has_graph:
                self._await_gradient(output.name, tensor, places, values if scale == 1.0 else values / scale)
            return None

        return see

    def _await_gradient(
        self, name: str, tensor: torch.Tensor, places: tuple[torch.Tensor, ...], values: torch.Tensor
    ) -> None:
        self._open[name] += 1

        def replace(gradient: torch.Tensor) -> torch.Tensor:
            self._open[name] -= 1
            self.fired[name] += 1
            return put_elements(gradient, places, values)

        tensor.register_hook(replace)

    def _element_places(
        self, output: ObservedOutput, share: Share, tensor: torch.Tensor, gather: Gather | None
    ) -> tuple[torch.Tensor, ...] | None:
        """The indices, one tensor for each dimension, of the share's elements; ``None`` where it has none."""
        with torch.no_grad():
            places = element_places(output, tensor, gather, share.of(output.form))
            return None if places is None else torch.unravel_index(places, tensor.shape)

    def _check_choices(self, model: ObservedModel, output: ObservedOutput, stack: ExitStack) -> None:
        """Refuses a tensor by chosen expert where a token chose other experts than in the reference."""
        name = f"{output.name.partition('.mlp.')[0]}.mlp.router.chosen_experts"
        choice = next(item for item in observed_outputs(model) if item.name == name)
        expected = self._source.choice(name, self._order)

        def see(routing_map: torch.Tensor, gather: Gather | None) -> None:
            share, book = self._current, self._book
            if share is None or gather is None or book is None:
                return
            tokens = share.of(choice.form)
            chosen = gather(routing_map, tokens.places).cpu()
            differs = (chosen != cut_shard(expected, book.spec(choice, tokens))).any(dim=1)
            if bool(differs.any()):
                raise TraceError(
                    f"graft: {int(differs.sum())} of {len(chosen)} tokens of a micro-batch chose other experts than in "
                    f"the reference, so {output.name} cannot be put in: graft {name.rpartition('.')[0]}.logits"
                )

        stack.enter_context(choice.row.watch(choice.watched, see))


def put_elements(tensor: torch.Tensor, places: tuple[torch.Tensor, ...], values: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor, laid out in memory as it is, with these values at these indices."""
    result = tensor.detach().clone()
    return result.index_put_(places, values)


class _Grafted(torch.autograd.Function):
    """The tensor with the reference's elements; its gradient goes on as that of the tensor, unchanged."""

    @staticmethod
    def forward(
        ctx: object, tensor: torch.Tensor, places: tuple[torch.Tensor, ...], values: torch.Tensor
    ) -> torch.Tensor:
        """Returns ``put_elements``, bit for bit."""
        return put_elements(tensor, places, values)

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """The gradient itself."""
        return gradients[0], None, None


def _describe_nearest(name: str, found: Mapping[str, object]) -> str:
    nearest = difflib.get_close_matches(name, sorted(found), n=_NUM_NEAREST, cutoff=0.5)
    return f" (nearest: {', '.join(nearest)})" if nearest else ""
