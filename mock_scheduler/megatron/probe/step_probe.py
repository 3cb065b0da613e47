"""Hands a training step's tensors to a sink, in the canonical form of the trace.

Contract: reading changes nothing; tensors go to the sink at once, and it copies all it keeps. Nothing is communicated,
except for an earlier gathering of parameters: with ``training.overlap_param_gather``, and where parameters or weights
are selected, every rank gathers them right after each update, also one that writes nothing. Such a rank does nothing
else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mock_scheduler.config.instruments import LEDGER_KINDS, TraceConfig, TraceKind
from mock_scheduler.megatron.observed_model import ObservedModel
from mock_scheduler.megatron.optimizer_state import count_own_updates
from mock_scheduler.megatron.probe.interface import StepRows, TrainingProbe
from mock_scheduler.megatron.probe.ledgers import CallLedger
from mock_scheduler.megatron.probe.module_probe import ModuleProbe
from mock_scheduler.megatron.probe.shares import TokenIndex, TokenPlaces, token_index
from mock_scheduler.megatron.probe.state import read_state
from mock_scheduler.megatron.ranks import ModelRanks
from mock_scheduler.megatron.step_tokens import MetRows, MicroBatchTokens
from mock_scheduler.support.run_output import Clock
from mock_scheduler.trace.begun_calls import BegunCalls
from mock_scheduler.trace.entries import LedgerCall, RankPlace, RowTable, StepFooter, TraceEntry, TraceSink
from mock_scheduler.trace.selection import TraceSelection, open_sink
from mock_scheduler.trace.shards import ShardSpec, whole

_MODULE_KINDS: tuple[TraceKind, ...] = ("activation", "router", "logits", "activation_gradient", "recomputed")
_AFTER_UPDATE: tuple[TraceKind, ...] = ("parameter", "weight")


class StepProbe(TrainingProbe):
    """One rank's trace of one step. Every rank makes its own; ``save`` ends the trace, ``abandon`` drops it.

    As a context manager it saves where the block succeeds and abandons where it raises. ``clock``: gets the seconds of
    tracing, as ``trace``. ``selection``: this rank's kinds and globs, and their matches. ``is_last``: of the run; its
    trace has the state of the optimizer at the end, whatever kinds were chosen beside parameters.
    """

    def __init__(
        self,
        ranks: ModelRanks,
        trace_dir: Path,
        *,
        step: int,
        config: TraceConfig,
        clock: Clock | None = None,
        is_last: bool = False,
    ) -> None:
        # No later update shows what the optimizer's state is at the end of the run.
        self._has_moments = "optimizer" in config.kinds
        if is_last and "parameter" in config.kinds and not self._has_moments:
            config = config.model_copy(update={"kinds": [*config.kinds, "optimizer"]})
        self._ranks = ranks
        self._trace_dir = trace_dir
        self._step = step
        self._config = config
        self._clock = clock or Clock()
        selection = TraceSelection(config)
        self._gathers = selection.wants_kind("parameter") or selection.wants_kind("weight")
        is_writing = selection.writes(ranks.global_rank)
        # A rank that writes nothing selects nothing, of the same globs as all others.
        self.selection = selection if is_writing else _nothing_of(config)
        self._sink: TraceSink | None = self._open_sink() if is_writing else None
        self._module_probe: ModuleProbe | None = None
        if any(self.selection.wants_kind(kind) for kind in _MODULE_KINDS):
            self._module_probe = ModuleProbe(ranks, self.selection, self._emit, aside=self._aside)
        ledgers = [kind for kind in LEDGER_KINDS if self.selection.wants_ledger(kind)]
        self._begun: BegunCalls | None = None
        self._ledger = CallLedger(ledgers, begin=self._begin_collective) if ledgers else None
        self._entered = ExitStack()
        self._rows: StepRows = RowTable()
        self._index: TokenIndex | None = None
        self._places: dict[tuple[int, bool], TokenPlaces] = {}
        self._update_rows: list[tuple[int, ...]] = []
        self._moved: dict[int, tuple[ObservedModel, int]] = {}

    def _open_sink(self) -> TraceSink:
        ranks = self._ranks
        return open_sink(
            self._config,
            self._trace_dir,
            step=self._step,
            place=RankPlace(global_rank=ranks.global_rank, coordinates=ranks.coordinates),
            world_size=ranks.world_size,
        )

    def start_step(self, rows: StepRows, batches: Sequence[MicroBatchTokens], models: Sequence[ObservedModel]) -> None:
        """Begin with the rows, and the parameters before the first update."""
        if self._sink is None:
            return
        with self._aside():
            index = self._index = token_index(rows)
            self._rows = rows
            if self._module_probe is not None:
                self._module_probe.start_step(index)
            for model in models:
                self._add_state(model, 0, ["initial"])
        if self._ledger is not None:
            if self.selection.wants_ledger("collective"):
                self._begun = BegunCalls(self._trace_dir.parent, global_rank=self._ranks.global_rank, step=self._step)
            self._entered.enter_context(self._ledger)

    def _begin_collective(self, call: LedgerCall) -> None:
        if self._begun is not None:
            self._begun.add(call)

    def tokens(
        self,
        kind: TraceKind,
        own: MicroBatchTokens,
        values: Mapping[str, torch.Tensor],
        *,
        update: int = 0,
        prefix: str = "",
        of_responses: bool = True,
    ) -> None:
        """Values of tokens; one of responses is at the place of the token that predicts the response token.

        So position p of a row has the log-probability, advantage or loss of its token p + 1.
        """
        if self._sink is None:
            return
        named = {prefix + name: tensor for name, tensor in values.items()}
        with self._aside():
            self._add_tokens(kind, own, named, update=update, is_masked=of_responses)

    def start_update(self, update: int, micro_batches: Sequence[MicroBatchTokens]) -> None:
        """Notes the rows of the step in this update."""
        if self._sink is None:
            return
        if self._has_moments:
            self._add_moments()
        with self._aside():
            row_ids = torch.cat([micro_batch.row_ids.flatten() for micro_batch in micro_batches]).unique()
            self._update_rows.append(tuple(row_ids[row_ids >= 0].tolist()))

    def watching(self, model: ObservedModel, update: int) -> AbstractContextManager[None]:
        """Watch the model's modules, where anything of them is selected."""
        return nullcontext() if self._module_probe is None else self._module_probe.watching(model, update)

    def computing(self, own: MicroBatchTokens) -> AbstractContextManager[None]:
        """Tells the modules' probe of a forward pass."""
        return nullcontext() if self._module_probe is None else self._module_probe.computing(own)

    def bypassing(self) -> AbstractContextManager[None]:
        """Tells the modules' probe to look away."""
        return nullcontext() if self._module_probe is None else self._module_probe.bypassing()

    def scalars(self, kind: TraceKind, values: Mapping[str, float], *, update: int, prefix: str = "") -> None:
        """float64 ``[]`` each."""
        with self._aside():
            for name, value in values.items():
                if self.selection.wants(kind, prefix + name):
                    number = torch.tensor(value, dtype=torch.float64)
                    self._emit(TraceEntry(update=update, kind=kind, spec=whole(prefix + name, ()), tensor=number))

    def state(self, model: ObservedModel, update: int, kind: TraceKind) -> None:
        """Main gradients after the reduction; or moments, parameters and weights after the update."""
        if kind == "parameter" and self._gathers:
            model.gather_parameters()
        with self._aside():
            self._add_state(model, update, _AFTER_UPDATE if kind == "parameter" else [kind])
        if kind == "parameter":
            self._moved[id(model)] = model, update

    def _add_moments(self) -> None:
        """Reads the moments that the last update left as late as can be, so that what is lost behind it shows."""
        moved, self._moved = self._moved, {}
        with self._aside():
            for model, update in moved.values():
                self._add_state(model, update, ["optimizer"])
                name, count = f"{model.prefix}num_updates", count_own_updates(model)
                # A rank that owns no part counts nothing.
                if count and self.selection.wants("optimizer", name):
                    number = torch.tensor(float(count), dtype=torch.float64)
                    self._emit(TraceEntry(update=update, kind="optimizer", spec=whole(name, ()), tensor=number))

    def _add_state(self, model: ObservedModel, update: int, kinds: Iterable[TraceKind]) -> None:
        for kind in kinds:
            if not self.selection.wants_kind(kind):
                continue
            for piece in read_state(model, kind):
                if self.selection.wants(kind, piece.spec.name):
                    self._emit(
                        TraceEntry(update=update, kind=kind, spec=piece.spec, tensor=piece.tensor, dims=piece.dims)
                    )

    def _add_tokens(
        self,
        kind: TraceKind,
        own: MicroBatchTokens,
        values: Mapping[str, torch.Tensor],
        *,
        update: int = 0,
        is_masked: bool = False,
    ) -> None:
        """A piece of each ``[b, s]`` tensor; none of a share without such tokens."""
        wanted = {name: tensor for name, tensor in values.items() if self.selection.wants(kind, name)}
        if not wanted:
            return
        assert self._index is not None  # a step that has tokens has begun
        places = self._places_of(self._index, own, response_only=is_masked)
        if not places.num_tokens:
            return
        for name, tensor in wanted.items():
            spec = ShardSpec(
                name=name,
                global_shape=(self._index.num_tokens,),
                local_shape=(places.num_tokens,),
                splits=(places.split,),
            )
            kept = tensor.detach().reshape(-1)[places.cells]
            entry = TraceEntry(update=update, kind=kind, spec=spec, tensor=kept, dims=("token",), is_masked=is_masked)
            self._emit(entry)

    def _places_of(self, index: TokenIndex, own: MicroBatchTokens, *, response_only: bool) -> TokenPlaces:
        """Returns the places of a micro-batch's share; they are the same whenever a step computes it."""
        key = (own.index, response_only)
        if key not in self._places:
            places = index.places(own, response_only=response_only)
            self._places[key] = replace(places, cells=places.cells.to(own.row_ids.device))
        return self._places[key]

    def _emit(self, entry: TraceEntry) -> None:
        assert self._sink is not None  # a rank without one selects nothing
        self._sink.add(entry)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Keeps the block out of the step: it is timed, and in no ledger and no log of operations."""
        with self._clock.measure("trace"), _disable_current_modes():
            yield

    def end_step(self) -> None:
        """Ends the step's training: later calls are in no ledger, and the optimizer's state is what it left."""
        self._entered.close()
        self._add_moments()

    def save(self) -> None:
        """End the trace of the step; raises ``TraceError`` where it cannot be written."""
        self.end_step()
        if self._begun is not None:
            self._begun.remove()
        if self._sink is None:
            return
        config, world = self._config, range(self._ranks.world_size)
        footer = StepFooter(
            rows=self._rows.table() if isinstance(self._rows, MetRows) else self._rows,
            update_rows=tuple(self._update_rows),
            ranks=tuple(world if config.ranks is None else sorted(config.ranks)),
            kinds=tuple(config.kinds),
            patterns=tuple(config.patterns),
            exclude=tuple(config.exclude),
            unobserved=() if self._module_probe is None else tuple(self._module_probe.unobserved),
            ledgers={} if self._ledger is None else self._ledger.calls,
        )
        with self._aside():
            self._sink.close(footer)

    def abandon(self) -> None:
        """Leave nothing of this step, neither file nor thread, as its training did not come to its end."""
        self._moved = {}
        self.end_step()
        if self._begun is not None:
            self._begun.close()
        self.selection = _nothing_of(self._config)
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.abandon()

    def __enter__(self) -> StepProbe:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc_type is None:
            self.save()
        else:
            self.abandon()


def _nothing_of(config: TraceConfig) -> TraceSelection:
    """Builds a selection of nothing; its globs are the configuration's, and all ranks check them together."""
    return TraceSelection(config.model_copy(update={"level": "off"}))
