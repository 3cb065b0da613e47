"""Aligns the example's clean layouts and its planted faults with the one process, and judges what was found where."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml

from mock_scheduler import align
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.config.layout import parse_layout
from mock_scheduler.verdict.results import CandidateResult
from mock_scheduler.verdict.verdict import VerdictKind
from mock_scheduler.verdict.wording.verdicts import describe_reason, write_headline
from tests.faults.fault import Precision
from tests.faults.matrix.judging import describe_place, is_placed
from tests.faults.own.catalogue import MODELS, OWN_FAULTS, Model, OwnFault, find_own_fault
from tests.faults.own.example import FOLDER
from tests.faults.own.forking import COMMAND, SOCKET_VARIABLE, serving
from tests.faults.own.train_with_fault import count_fired

_CLEAN = "clean."
_SCRIPT = Path(__file__).with_name("train_with_fault.py")
_PLAIN = "tp1"

#: By model, layouts and options that must pass.
CLEAN: Mapping[Model, Sequence[tuple[str, Sequence[str]]]] = {
    "dense": (
        ("tp1", ()),
        *((layout, ()) for layout in ("tp2", "tp2-sp", "pp2", "pp2-vpp2", "dp2", "cp2", "tp2-pp2")),
        ("dp2", ("options.distributed_optimizer=true",)),
        ("tp1", ("options.packed=true",)),
        ("tp2-sp", ("options.packed=true",)),
        ("pp2-vpp2", ("options.packed=true",)),
        ("tp1", ("options.recompute=full",)),
        ("tp1", ("options.micro_batch_size=4",)),
    ),
    "tied": (("tp2", ()), ("pp2", ())),
    "experts": (
        ("tp1", ()),
        *((layout, ()) for layout in ("dp2-ep2", "pp2", "pp2-vpp2", "dp2", "tp2-sp-ep2")),
        ("dp2-ep2", ("options.distributed_optimizer=true",)),
    ),
    "balanced": tuple((layout, ()) for layout in ("dp2-ep2", "pp2", "dp2")),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnJudgement:
    """What an alignment said of one candidate.

    fault: its id; empty for a clean layout. run: model, layout and options. place: of the first divergence. sentence:
    the verdict in one line. fired: how often the fault did, over all ranks. failure: why the run made no test.
    """

    precision: Precision
    model: Model
    run: str
    fault: str
    verdict: str
    place: str
    is_placed: bool
    sentence: str
    fired: int
    failure: str = ""

    @property
    def is_found(self) -> bool:
        """Whether the candidate does not pass, and ran to its end; other data are incomparable."""
        found = (VerdictKind.DIVERGED.value, VerdictKind.SUSPECT.value, VerdictKind.INCOMPARABLE.value)
        return not self.failure and self.verdict in found

    @property
    def is_wrong(self) -> bool:
        """Whether a fault was missed, or a clean layout did not pass."""
        passes = (VerdictKind.IDENTICAL.value, VerdictKind.EMULATED.value, VerdictKind.ROUNDING.value)
        return bool(self.failure) or (not self.is_found if self.fault else self.verdict not in passes)


def write_config(
    folder: Path, *, model: Model, precision: Precision, candidates: Sequence[Mapping[str, Any]], **proofs: object
) -> Path:
    """Writes the example's configuration with other candidates, and a command that plants faults."""
    config: dict[str, Any] = yaml.safe_load((FOLDER / "align.yaml").read_text(encoding="utf-8"))
    start = COMMAND if SOCKET_VARIABLE in os.environ else config["command"][:-1]
    config["command"] = [*start, str(_SCRIPT)]
    config["options"] |= MODELS[model]
    config |= {"exp_name": f"own_{model}_{precision}", "precision": precision, "sources": [str(FOLDER)]}
    config |= {"output_dir": str(folder / "runs"), "trace": {"level": "full", "kinds": [*get_args(TraceKind)]}}
    config["align"] = {
        "output_dir": str(folder / "alignment"),
        "candidates": [*candidates],
        "proofs": {"localise": False, "consequence": False, **proofs},
        "at_once": 2,
    }
    path = folder / "own.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return path


def clean_candidate(layout: str, options: Sequence[str]) -> dict[str, Any]:
    """A candidate of ``align``, for a layout with options."""
    return {"name": _CLEAN + _label(layout, options), "overrides": [*_layout_overrides(layout), *options]}


def faulty_candidate(fault: OwnFault) -> dict[str, Any]:
    """A candidate of ``align``, for a fault: it has the fault because of its name, and says nothing of it."""
    return {"name": fault.id, "overrides": [*_layout_overrides(fault.layout), *fault.options]}


def run_campaign(
    root: Path, *, model: Model, precision: Precision, faults: Iterable[OwnFault] = OWN_FAULTS, **proofs: object
) -> list[OwnJudgement]:
    """Aligns one model in one precision under its clean layouts and with its faults; ``proofs``: keys of theirs."""
    clean = [clean_candidate(layout, options) for layout, options in CLEAN[model]]
    faulty = [faulty_candidate(fault) for fault in faults if fault.model == model]
    candidates = [*clean, *faulty]
    with serving():
        path = write_config(
            root / f"{model}-{precision}", model=model, precision=precision, candidates=candidates, **proofs
        )
        alignment = align(path.stem, config_path=path.parent)
    return [judge(item, model=model, precision=precision) for item in alignment.result.candidates]


def judge(candidate: CandidateResult, *, model: Model, precision: Precision) -> OwnJudgement:
    """Holds the verdict on a candidate to what its fault expects."""
    is_clean = candidate.name.startswith(_CLEAN)
    fault = None if is_clean else find_own_fault(candidate.name)
    log = "" if candidate.log_path is None else candidate.log_path.read_text(encoding="utf-8", errors="replace")
    fired = count_fired(log)
    failure = "the run failed" if candidate.run is None else "" if is_clean or fired else "the fault never fired"
    options = [text for text in candidate.overrides if text.startswith("options.")]
    return OwnJudgement(
        precision=precision,
        model=model,
        run=" ".join([model, candidate.layout, *(text.removeprefix("options.") for text in options)]),
        fault="" if fault is None else fault.id,
        verdict=candidate.verdict.kind.value,
        place=describe_place(candidate.verdict.first),
        is_placed=fault is not None and _is_placed(candidate, fault),
        sentence=write_headline(candidate.verdict),
        fired=fired,
        failure=failure,
    )


def _is_placed(candidate: CandidateResult, fault: OwnFault) -> bool:
    if candidate.verdict.kind is VerdictKind.INCOMPARABLE:  # other data, of which the reason says where
        words = fault.expected.kind.split("|") if fault.expected.phase == "data" else []
        return any(word in describe_reason(candidate.verdict) for word in words)
    return is_placed(candidate.verdict.first, fault.expected)


def _label(layout: str, options: Sequence[str]) -> str:
    named = [text.removeprefix("options.").replace("=", "-") for text in options]
    return ".".join([layout, *named])


def _layout_overrides(layout: str) -> Iterator[str]:
    if layout == _PLAIN:
        return
    for key, value in parse_layout(layout).items():
        if value is True or (value is not None and value > 1):
            yield f"parallel.{key}={str(value).lower()}"
