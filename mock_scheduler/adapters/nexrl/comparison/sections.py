"""The sections of a comparison: NexRL's five, and everything else both dumps hold.

Contract: a section is compared where either dump has its files; a file the other lacks is missing. ``notes``
name the parts left out, and why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from mock_scheduler.adapters.nexrl.comparison.pairing import Files, Item, Wanted, compare_files, missing
from mock_scheduler.adapters.nexrl.comparison.records import compare_datums, compare_trajectories
from mock_scheduler.adapters.nexrl.comparison.tables import DumpFile, SampleNumbers, as_tensor, load_files
from mock_scheduler.adapters.nexrl.comparison.values import Difference, Tolerance, compare_tensors
from mock_scheduler.adapters.nexrl.files import Content, load_content
from mock_scheduler.adapters.nexrl.names import DumpKind, FileKey, find_files
from mock_scheduler.adapters.nexrl.parameters import Piece, merge_pieces, read_piece
from mock_scheduler.errors import TraceError

FORWARD = Wanted(masks=("response_mask",), tensors=("log_probs", "entropy"))
LOSS = Wanted(
    numbers={
        "loss": "elementwise_loss",
        "pg_loss": "elementwise_pg_loss",
        "entropy_loss": "elementwise_entropy_loss",
        "kl_loss": "elementwise_kl_loss",
    },
    optional=frozenset({"kl_loss"}),
)
IS_LOSS = Wanted(
    masks=("effective_valid",),
    tensors=("log_probs", "old_log_probs", "advantages", "prob_ratio", "elementwise_loss"),
    numbers={"loss": "elementwise_loss"},
)
OLD_LOGPROBS = Wanted(masks=("response_mask",), tensors=("old_log_probs",), optional=frozenset({"response_mask"}))
INPUTS = Wanted(
    masks=("response_mask",),
    inputs=("input_ids", "targets"),
    tensors=("rollout_log_probs",),
    optional=frozenset({"targets", "rollout_log_probs"}),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One section's comparisons. ``name``: as in the report; ``title``: in words; ``num_places``: pairs of files."""

    name: str
    title: str
    items: tuple[Item, ...] = ()
    notes: tuple[str, ...] = ()
    num_places: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Dumps:
    """The folders to compare. ``second``: compared with the self-hosted one, for most sections Weaver's."""

    self_hosted: Path
    remote_api: Path | None = None
    weaver: Path | None = None

    def all(self) -> dict[str, Path]:
        """The given folders, by their names in the report."""
        named = {"Self-Hosted": self.self_hosted, "Remote API": self.remote_api, "Weaver": self.weaver}
        return {name: path for name, path in named.items() if path is not None}


@dataclass(kw_only=True, slots=True)
class SectionMaker:
    """Compares one step, section by section."""

    dumps: Dumps
    step: int
    tolerance: Tolerance
    _samples: SampleNumbers = field(default_factory=SampleNumbers)

    def sections(self) -> Iterator[Section]:
        """Yields NexRL's five in their order, and between them the sections NexRL does not compare."""
        yield self._trajectories()
        yield from self._of_both("old_log_probs", "OLD_LOG_PROBS", "Old log-probability", OLD_LOGPROBS)
        yield from self._of_both("batch_inputs", "BATCH_INPUTS_ALL", "Input", INPUTS)
        yield self._of_files("forward_data", "FORWARD_DATA_ALL", "Forward data", FORWARD)
        yield self._of_files("loss", "LOSS_DATA_ALL", "Loss", LOSS)
        yield self._is_loss()
        yield self._datums()
        yield from self._parameters("gradient", "GRADIENT_ALL", "Gradient")
        yield from self._parameters("param", "PARAM_ALL", "Parameter")

    def _files(self, dump_dir: Path | None, kind: DumpKind) -> dict[FileKey, DumpFile]:
        return {} if dump_dir is None else load_files(dump_dir, kind, self.step, self._samples)

    def _content(self, dump_dir: Path | None, *kinds: DumpKind) -> Content | None:
        """The step's file of the whole batch of the first of these kinds a dump has."""
        if dump_dir is None:
            return None
        for kind in kinds:
            path = find_files(dump_dir, kind).get(FileKey(step=self.step))
            if path is not None:
                return load_content(path, inside=dump_dir)
        return None

    def _trajectories(self) -> Section:
        items: list[Item] = []
        notes: list[str] = []
        num_places = 0
        first = self._content(self.dumps.self_hosted, "trajectory", "prepared_trajectories")
        others = {"Remote API": self.dumps.remote_api, "Weaver": self.dumps.weaver}
        for name, folder in others.items():
            second = self._content(folder, "prepared_trajectories", "trajectory")
            if first is None and second is None:
                continue
            if folder is None or (second is None and name == "Weaver"):
                # The trainer's own mode dumps no trajectories.
                continue
            if first is None or second is None:
                side = "Self-Hosted" if first is None else name
                items.append(missing(side, "trajectories", in_first=first is None, detail=f"none of step {self.step}"))
                continue
            found, of_pair = compare_trajectories(first, second, self.tolerance)
            items += found
            notes += [f"{name}: {note}" for note in of_pair]
            num_places += len({item.place for item in found})
        return Section(
            name="TRAJECTORIES",
            title="Trajectory",
            items=tuple(items),
            notes=tuple(notes) or self._note(items),
            num_places=num_places,
        )

    def _note(self, items: list[Item]) -> tuple[str, ...]:
        return () if items else ("not compared: no two of these dumps hold it",)

    def _of_files(self, kind: DumpKind, name: str, title: str, wanted: Wanted) -> Section:
        return self._pair(
            name, title, wanted, self._files(self.dumps.self_hosted, kind), self._files(self.dumps.weaver, kind)
        )

    def _pair(self, name: str, title: str, wanted: Wanted, first: Files, second: Files) -> Section:
        if self.dumps.weaver is None or not (first or second):
            return Section(name=name, title=title, notes=self._note([]))
        items = compare_files(first, second, wanted, self._samples, self.tolerance)
        return Section(name=name, title=title, items=tuple(items), num_places=len(first) or len(second))

    def _of_both(self, kind: DumpKind, name: str, title: str, wanted: Wanted) -> Iterator[Section]:
        """Both must have it: the trainer's own mode has not."""
        first, second = self._files(self.dumps.self_hosted, kind), self._files(self.dumps.weaver, kind)
        if first and second:
            yield self._pair(name, title, wanted, first, second)

    def _is_loss(self) -> Section:
        """Compares Weaver's ``is_loss_debug`` with the self-hosted run's own record of its loss."""
        second = self._files(self.dumps.weaver, "is_loss_debug")
        if not second:
            losses = self._files(self.dumps.weaver, "loss")
            second = losses if any("prob_ratio" in file.content for file in losses.values()) else {}
        if not second:
            note = "not compared: Weaver holds no is_loss_debug"
            return Section(name="IS_LOSS_DEBUG_ALL", title="IS loss", notes=(note,))
        first = self._files(self.dumps.self_hosted, "is_loss_debug") or self._losses_with_outputs()
        return self._pair("IS_LOSS_DEBUG_ALL", "IS loss", IS_LOSS, first, second)

    def _losses_with_outputs(self) -> dict[FileKey, DumpFile]:
        """The self-hosted losses; another system's are completed from its forward data of the same micro-batch."""
        outputs = self._files(self.dumps.self_hosted, "forward_data")
        losses = self._files(self.dumps.self_hosted, "loss")
        for key, file in losses.items():
            if key not in outputs or "log_probs" in file.content:
                continue
            forward = outputs[key].content
            taken: Content = {name: forward[name] for name in ("log_probs", "response_mask") if name in forward}
            mask: Content = {"effective_valid": forward["response_mask"]} if "response_mask" in forward else {}
            losses[key] = replace(file, content={**taken, **mask, **file.content})
        return losses

    def _datums(self) -> Section:
        datums = self._content(self.dumps.remote_api, "datums")
        if datums is None:
            return Section(name="DATUMS_ANALYSIS", title="Datum", notes=("not compared: Remote API holds no datums",))
        trajectories = self._content(self.dumps.self_hosted, "trajectory", "prepared_trajectories")
        items, notes = compare_datums(datums, trajectories, self.tolerance)
        if trajectories is None:
            notes.append("not compared: Self-Hosted holds no trajectories to compare them with")
        places = len({item.place for item in items})
        return Section(name="DATUMS_ANALYSIS", title="Datum", items=tuple(items), notes=tuple(notes), num_places=places)

    def _parameters(self, kind: Literal["param", "gradient"], name: str, title: str) -> Iterator[Section]:
        first, second = self._files(self.dumps.self_hosted, kind), self._files(self.dumps.weaver, kind)
        if not first or not second:
            # Only where both have any: which parameters are dumped is each run's own choice.
            return
        ones, own_items = _merge(first, kind, "first")
        others, their_items = _merge(second, kind, "second")
        items = own_items + their_items
        for label in [*ones, *(label for label in others if label not in ones)]:
            place, _, tensor_name = label.partition(" ")
            if label not in ones or label not in others:
                items.append(missing(place, tensor_name, in_first=label not in ones, detail="no such tensor"))
                continue
            difference = compare_tensors(ones[label], others[label], self.tolerance)
            items.append(Item(place=place, name=tensor_name, difference=difference))
        in_order = (replace(item, update=int(item.place.removeprefix("update"))) for item in items)
        yield Section(name=name, title=title, items=tuple(in_order), num_places=len({*ones, *others}))


def _merge(files: Mapping[FileKey, DumpFile], kind: str, side: str) -> tuple[dict[str, torch.Tensor], list[Item]]:
    """Merges a dump's tensors by update and name, and lists problems with them."""
    pieces: dict[str, list[Piece]] = {}
    for key, file in files.items():
        for piece in _pieces(file, kind):
            pieces.setdefault(f"update{key.update} {piece.name}", []).append(piece)
    tensors: dict[str, torch.Tensor] = {}
    items: list[Item] = []
    for label, parts in pieces.items():
        place, _, name = label.partition(" ")
        merged = merge_pieces(parts, where=f"{side} dump, {name}")
        if bool(merged.absent.any()):
            detail = f"{int(merged.absent.sum())} of {merged.absent.numel()} elements are in no rank's file"
            items.append(missing(place, name, in_first=side == "first", detail=detail))
        if merged.num_conflicts:
            detail = f"ranks of the {side} dump hold {merged.num_conflicts} elements differently"
            items.append(Item(place=place, name=name, difference=Difference(status="different", detail=detail)))
        tensors[label] = merged.tensor
    return tensors, items


def _pieces(file: DumpFile, kind: str) -> list[Piece]:
    """The parts of a file; NexRL's own has one tensor, a whole one of its rank."""
    listed = file.content.get("parameters")
    if isinstance(listed, list):
        return [read_piece(item, str(file.path)) for item in listed]
    tensor = as_tensor(file.content.get(kind))
    if tensor is None:
        raise TraceError(f"{file.path} holds neither parameters nor {kind}")
    name = f"{file.content.get('param_name', 'parameter')} of rank {file.key.global_rank}"
    whole = tuple(tensor.shape)
    return [Piece(name=name, global_shape=whole, tensor=tensor, indices=(None,) * tensor.dim())]


def find_place_counts(dumps: Dumps, step: int) -> tuple[int, int]:
    """Counts ranks, and micro-batches per rank, with a file of a step in any dump."""
    kinds: tuple[DumpKind, ...] = ("forward_data", "loss", "is_loss_debug")
    keys = [
        key
        for folder in (dumps.self_hosted, dumps.weaver)
        if folder
        for kind in kinds
        for key in find_files(folder, kind)
    ]
    of_step = [key for key in keys if key.step == step]
    return len({key.global_rank for key in of_step}), len({key.micro for key in of_step})
