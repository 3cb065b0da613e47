"""Alignments for tests of their reports: real tiny traces, metrics and a recording, one candidate of each verdict.

Two layers, one update in each of two steps, four rows. The diverged candidate's log-probability of one response token
is 0.25 higher, the gradient of one weight is doubled, and one metric is 0.75 instead of 0.5.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.comparison.bounds.bounds import UNBOUNDED, Bounds, StatedBounds
from mock_scheduler.comparison.noise.suspicions import ScaledGradients, Suspicion
from mock_scheduler.comparison.walk.metrics import compare_metrics, load_metrics
from mock_scheduler.comparison.walk.traces import compare_trace_folders
from mock_scheduler.config.align import ToleranceConfig
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.recording.contract import Contract, ContractField, Rule
from mock_scheduler.recording.manifest import Manifest, save_manifest
from mock_scheduler.recording.storage import open_storage
from mock_scheduler.run_folder.finished_run import RunSummary
from mock_scheduler.trace.entries import DimName, RowTable, StepFooter, TraceEntry
from mock_scheduler.trace.shards import whole
from mock_scheduler.verdict.consequence.figures import Consequence
from mock_scheduler.verdict.direct_verdict import decide
from mock_scheduler.verdict.localisation import DifferingTensor, GraftedModule, Localisation
from mock_scheduler.verdict.reasons import (
    EqualToReference,
    NotDeterministic,
    NotExplainedByNoise,
    ProofName,
    Reason,
    RunFailed,
)
from mock_scheduler.verdict.results import AlignmentResult, AlignmentTimes, CandidateResult
from mock_scheduler.verdict.verdict import (
    EmulationFacts,
    EqualityFacts,
    Outcome,
    OwnChanges,
    Proof,
    ProofFacts,
    Verdict,
    VerdictKind,
)
from tests.batches import SAMPLING, make_row
from tests.report.recordings import PROVENANCE, write
from tests.trace.builders import entry, save

BOUNDS: Bounds = StatedBounds(
    tolerance=ToleranceConfig(metric=1e-4, metric_floor=1e-3, activation=1e-4, gradient=1e-4, update=5e-3),
    otherwise=UNBOUNDED,
)
STEPS = (0, 1)
VOCABULARY = ["<pad>", "<bos>", "wall", "Left", "Right", "\n", "open"]
#: Prompt, a turn, what the environment answered, a second turn.
TOKENS = (1, 2, 3, 4, 6, 5, 4)
RESPONSE = (False, False, True, True, False, False, True)
NUM_ROWS = 4
WORST_ROW, WORST_TOKEN = 2, 3
WORST_SAMPLE = "default/group 1/episode 0/env 0/turn 0"
WRONG = "decoder.layers.1.mlp.linear_fc1.weight"
SENTENCE = (
    f"step 1, backward, {WRONG} gradient: candidate is 2.000 times the baseline; "
    "the 21 tensors before it are equal; "
    "nothing else of the pass differs"
)
SUSPICION = Suspicion(
    test="slope",
    step=0,
    update=0,
    name="",
    value=9e-4,
    limit=1e-4,
    fact=ScaledGradients(ratio=0.9991, factor=None, num_tensors=12, z=9.0, noise_z=1.5),
)
SUSPECT = (
    "within its bounds, and yet step 0, update 0: the candidate's gradients together are 0.9991 times the baseline's "
    "(median of 12 slopes; z 9.0, of perturbed runs at most 1.5), where noise makes at most 1.0e-04 of it"
)
WEIGHTS = tuple(f"decoder.layers.{layer}.mlp.linear_fc{number}.weight" for layer in (0, 1) for number in (1, 2))
TP = OwnChanges(keys=("parallel.tensor_model_parallel_size",))
OTHER_ORDER = EqualityFacts(changes=TP, may_round=False, is_same_order=False)
#: What the text of a run must never do to a page.
EVIL = "</script><script>alert('1')</script><b>&"


def command(result: AlignmentResult) -> str:
    """The command that opens the traces of the diverged candidate."""
    folder = result.output_dir
    return f"mock-scheduler compare {folder}/baseline/trace {folder}/tp2.clip/trace --steps 1"


def make_result(folder: Path) -> AlignmentResult:
    """The whole alignment, with all its folders under ``folder``."""
    recording = _record(folder / "recording")
    baseline = _write_run(folder, "baseline", {})
    tp2, dp2 = {"parallel.tensor_model_parallel_size": 2}, {"parallel.data_parallel_size": 2}
    same = _aligned(baseline, _write_run(folder, "pp2.plain", {"parallel.pipeline_model_parallel_size": 2}))
    rounded = _aligned(baseline, _write_run(folder, "dp2.plain", dp2, noise=1e-6))
    emulated = _aligned(baseline, _write_run(folder, "tp2.plain", tp2, noise=1e-6))
    diverged = _aligned(baseline, _write_run(folder, "tp2.clip", {**tp2, "pg_clip": 0.1}, is_wrong=True))
    suspect = _aligned(baseline, _write_run(folder, "dp2.clip", {**dp2, "pg_clip": 0.1}, noise=1e-6))
    loose = _aligned(baseline, _write_run(folder, "loose", {"system_envs.DETERMINISTIC_MODE": "0"}, noise=1e-6))
    candidates = (
        _candidate(
            folder,
            "tp2.plain",
            _judged(
                emulated,
                VerdictKind.EMULATED,
                EqualToReference(vouched_by="noise"),
                _proof("replicas", "proved", None),
                _proof("bit-equality", "open", emulated, OTHER_ORDER),
                _proof("emulation", "proved", same, EmulationFacts(layout="tp2 pp1 dp1", may_round=False)),
                _proof("noise", "proved", emulated),
            ),
            emulated=same,
        ),
        _candidate(
            folder,
            "tp2.clip",
            _judged(
                diverged, VerdictKind.DIVERGED, diverged.why,
                _proof("replicas", "proved", None), _proof("noise", "refuted", diverged),
            ),
            localisation=_localisation(folder, diverged),
            consequence=_consequence(),
        ),
        _candidate(
            folder,
            "pp2.plain",
            _judged(
                same,
                VerdictKind.IDENTICAL,
                same.why,
                _proof("replicas", "proved", None),
                _proof("bit-equality", "proved", same, OTHER_ORDER),
            ),
        ),
        _candidate(
            folder,
            "dp2.plain",
            _judged(rounded, VerdictKind.ROUNDING, rounded.why, _proof("noise", "proved", rounded)),
        ),
        _candidate(
            folder,
            "dp2.clip",
            replace(
                _judged(suspect, VerdictKind.SUSPECT, NotExplainedByNoise(), _proof("noise", "open", suspect)),
                suspicions=(SUSPICION,),
            ),
        ),
        replace(_candidate(folder, "broken", no_run(f"the run failed: {EVIL}")), run=None),
        _candidate(
            folder,
            "loose",
            replace(loose, kind=VerdictKind.UNVERIFIED, why=NotDeterministic(otherwise=loose.why)),
            versions=("torch 2.12.0 instead of 2.13.0",),
        ),
    )  # fmt: skip
    return AlignmentResult(
        config_name="lake",
        output_dir=folder,
        recording_dir=recording,
        bounds=BOUNDS,
        baseline=_summary(baseline),
        candidates=candidates,
        times=AlignmentTimes(
            baseline_s=10.0, candidates_s=60.0, comparison_s=5.0, emulation_s=8.0, noise_s=30.0, referee_s=0.0,
            localisation_s=12.0, total_s=128.0,
        ),
    )  # fmt: skip


def no_run(error: str) -> Verdict:
    """The verdict on a candidate whose run failed with this error."""
    return Verdict(kind=VerdictKind.INCOMPARABLE, why=RunFailed(exit_code=0, error=error))


def _candidate(
    folder: Path,
    name: str,
    verdict: Verdict,
    *,
    emulated: Verdict | None = None,
    localisation: Localisation | None = None,
    consequence: Consequence | None = None,
    versions: tuple[str, ...] = (),
) -> CandidateResult:
    return CandidateResult(
        name=name,
        overrides=(f"exp_name={name}",),
        layout=f"{name.partition('.')[0]} of 2 processes",
        log_path=folder / name / "run.log",
        run=_summary(folder / name),
        verdict=verdict,
        changes=TP.keys,
        emulated=emulated,
        localisation=localisation,
        consequence=consequence,
        versions=versions,
    )


def _judged(direct: Verdict, kind: VerdictKind, why: Reason, *proofs: Proof) -> Verdict:
    return replace(direct, kind=kind, why=why, proofs=proofs)


def _proof(name: ProofName, outcome: Outcome, compared: Verdict | None, facts: ProofFacts | None = None) -> Proof:
    differences = () if compared is None or compared.tensors is None else compared.tensors.differences
    return Proof(
        name=name,
        outcome=outcome,
        facts=facts,
        compared=compared,
        num_compared=len(differences),
        num_equal=sum(item.bit_equal for item in differences),
        seconds=1.5,
    )


def _localisation(folder: Path, diverged: Verdict) -> Localisation:
    assert diverged.tensors is not None
    difference = next(item for item in diverged.tensors.differences if item.key.name == WRONG and item.exceeds)
    origin = DifferingTensor(key=difference.key, difference=difference)
    return Localisation(
        step=1,
        update=0,
        phase="backward",
        name=WRONG,
        origin=origin,
        is_exact=True,
        num_before=21,
        causes=(
            GraftedModule(
                name="decoder.layers.1.mlp", kind="activation_gradient", is_cause=True, tensor=origin, num_healed=1
            ),
        ),
        amplifiers=(
            GraftedModule(
                name="decoder.layers.0.mlp", kind="activation_gradient", is_cause=False, relative=0.31,
                cause="decoder.layers.1.mlp", growth=3.1,
            ),
        ),
        trace_dirs=(folder / "baseline" / "trace", folder / "tp2.clip" / "trace"),
        seconds=12.0,
    )  # fmt: skip


def with_amplifiers(result: AlignmentResult, number: int) -> AlignmentResult:
    """The diverged candidate alone, with so many modules that only pass its cause on: ``module.0``, ``module.1``, …"""
    diverged = result.candidates[1]
    assert diverged.localisation is not None
    modules = tuple(
        GraftedModule(
            name=f"module.{place}", kind="activation", is_cause=False, relative=0.1, cause="decoder.layers.1.mlp",
            growth=1.0,
        )
        for place in range(number)
    )  # fmt: skip
    localisation = replace(diverged.localisation, amplifiers=modules)
    return replace(result, candidates=(replace(diverged, localisation=localisation),))


def _consequence() -> Consequence:
    return Consequence(
        num_tokens=24, num_clipped=2, num_clip_flips=3, kl_to="reference", kl_baseline=0.0125,
        kl_candidate=0.025, max_advantage_change=0.0, max_advantage=1.5, update_cosine=(0.75,),
        updates=((1, 0),), update_ratio=(0.5,),
    )  # fmt: skip


def _aligned(baseline: Path, candidate: Path) -> Verdict:
    logs = [load_metrics(folder / "metrics.jsonl") for folder in (baseline, candidate)]
    tensors = compare_trace_folders(baseline / "trace", candidate / "trace", bounds=BOUNDS)
    return decide(compare_metrics(*logs, bounds=BOUNDS), tensors, bounds=BOUNDS)


def _summary(folder: Path) -> RunSummary:
    return RunSummary(
        name=folder.name, output_dir=folder, layout="tp1 pp1 dp1", wall_s=9.0, rollout_s=1.25, elapsed_s=10.0,
        built={"engine": 0, "environment": 0}, batches={"0": "a", "1": "b"},
    )  # fmt: skip


def make_batch() -> RolloutBatch:
    """Four rows of the same tokens, in two groups of two."""
    rows = [
        make_row(
            group, env, tokens=TOKENS, response=RESPONSE, rollout_logprobs=(-0.5,) * sum(RESPONSE), prompt_length=2
        )
        for group in (0, 1)
        for env in (0, 1)
    ]
    return RolloutBatch.from_trajectories(rows, group_size=2, sampling=SAMPLING)


def _record(folder: Path) -> Path:
    values: dict[str, Any] = {"sequence_length": 64, "determinism.OMP_NUM_THREADS": "1"}
    fields = [ContractField(name=name, value=value, rule=Rule.MUST_MATCH, advice="") for name, value in values.items()]
    may: dict[str, Any] = {"parallel.tensor_model_parallel_size": 1, "parallel.data_parallel_size": 1, "pg_clip": 0.2}
    fields += [ContractField(name=name, value=value, rule=Rule.MAY_DIFFER, advice="") for name, value in may.items()]
    contract = Contract(fields)
    provenance: dict[str, Any] = {
        **PROVENANCE,
        "vocabulary": VOCABULARY,
        "settings": {"OMP_NUM_THREADS": "1", "NCCL_ALGO": "Ring", "MKL_CBWR": "unset"},
        "facts": ["attention_backend is 'auto'"],
    }
    manifest = Manifest(run_id="run-1", contract=contract, provenance=provenance)
    save_manifest(open_storage(str(folder)), manifest)
    write(folder, dict.fromkeys(STEPS, make_batch()), contract=contract)
    return folder


def _write_run(
    folder: Path, name: str, overrides: Mapping[str, object], *, noise: float = 0.0, is_wrong: bool = False
) -> Path:
    run = folder / name
    run.mkdir()
    config: dict[str, Any] = {
        "exp_name": name, "sequence_length": 64, "pg_clip": 0.2, "system_envs": {"DETERMINISTIC_MODE": "1"},
        "parallel": {
            "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "data_parallel_size": 1,
        },
    }  # fmt: skip
    for key, value in overrides.items():
        section, _, last = key.rpartition(".")
        target = config[section] if section else config
        assert isinstance(target, dict)
        target[last] = value
    (run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    stated: dict[str, Any] = {"wall_s": 9.0, "rollout_s": 1.25, "train_s": 7.5, "validation_s": 0.25}
    threads = "2" if name == "loose" else "1"
    stated["settings"] = {"OMP_NUM_THREADS": threads, "NCCL_ALGO": "Ring", "MKL_CBWR": "unset"}
    (run / "run.json").write_text(json.dumps(stated), encoding="utf-8")
    counts = {"built": {"engine": 0, "environment": 0}, "answered": {"get_batch": 2}, "suppressed": {"suspend": 4}}
    (run / "ledger.json").write_text(json.dumps(counts), encoding="utf-8")
    lines = []
    for step in STEPS:
        wrong = 0.25 if is_wrong and step == 1 else noise
        metrics = {"pg_loss": 0.5 + wrong, "entropy": 2.0, "time/train": 1.0}
        lines.append(json.dumps({"step": step, "metrics": metrics}))
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for step in STEPS:
        _write_trace(run / "trace", step, noise=noise, is_wrong=is_wrong and step == 1)
    return run


def _write_trace(folder: Path, step: int, *, noise: float, is_wrong: bool) -> None:
    batch = make_batch()
    rows = RowTable(identities=tuple(map(str, batch.identities)), lengths=(len(TOKENS),) * NUM_ROWS)
    tokens = rows.num_tokens
    logprobs = torch.full((tokens,), -0.5)
    if is_wrong:  # a value lies at the token before the one that it is about
        logprobs[WORST_ROW * len(TOKENS) + WORST_TOKEN - 1] += 0.25
    entries = [_entry("output", "logprobs", logprobs, ("token",))]
    for layer in (0, 1):
        name = f"decoder.layers.{layer}.mlp"
        for kind in ("activation", "activation_gradient"):
            entries.append(_entry(kind, name, _values(name, tokens, 4, noise=noise), ("token", "channel")))
    for name in WEIGHTS:
        gradient = _values(f"{name}.gradient", 8, 4, noise=noise)
        if is_wrong and name == WRONG:
            gradient = 2 * gradient
        before = _values(name, 8, 4, noise=0.0)
        entries += [
            _entry("initial", name, before, ("row", "column")),
            _entry("gradient", name, gradient, ("row", "column")),
            _entry("parameter", name, before - 0.125 * gradient, ("row", "column")),
        ]
    footer = StepFooter(rows=rows, update_rows=(tuple(range(NUM_ROWS)),), ranks=(0,))
    save(folder, 0, 1, entries, step=step, footer=footer)


def _entry(kind: TraceKind, name: str, tensor: torch.Tensor, dims: tuple[DimName, ...]) -> TraceEntry:
    return entry(whole(name, tuple(tensor.shape)), tensor, kind=kind, dims=dims)


def _values(name: str, *shape: int, noise: float) -> torch.Tensor:
    """The same for the same name, times 1 + ``noise`` in every second element."""
    generator = torch.Generator().manual_seed(sum(ord(letter) * (place + 1) for place, letter in enumerate(name)))
    values = torch.randn(shape, generator=generator)
    values.view(-1)[::2] *= 1 + noise
    return values
