"""Reads every setting back, and repeats operations, collectives, attention and a whole step, to the bit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.context import CheckContext
from benchmarks.gpu_check.findings import FindingsLog
from benchmarks.gpu_check.operations import Operation, build_operations
from benchmarks.gpu_check.processes import ROOT, child_environment
from mock_scheduler.determinism.guard import check_took_effect, read_back, read_node_values
from mock_scheduler.errors import DeterminismError

_NUM_REPEATS = 20
#: How torch says that it has no deterministic kernel of an operation, or no kernel at all (of attention).
_REFUSALS = ("deterministic", "No available kernel", "No viable backend")
#: How TransformerEngine says that no attention backend is left (2.8 to 2.20).
_NO_ATTENTION = "No dot product attention"
_WORKER_TIMEOUT_S = 40.0
#: What TransformerEngine is told, by the name of the backend that is left.
_ATTENTION: Mapping[str, Mapping[str, str]] = {
    "as it chooses": {},
    "flash": {"NVTE_FUSED_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"},
    "fused": {"NVTE_FLASH_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"},
    "unfused": {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0"},
}
_ATTENTION_LINE = re.compile(r"(Selected backend = .*|.*[Rr]unning with .*[Bb]ackend.*)")
_NCCL_LINE = re.compile(
    r"NCCL (?:INFO )?(.*(?:NCCL_\w+ set by environment to|NCCL version|coll channels|Duplicate GPU|Multiple Ranks).*)"
)


def check(context: CheckContext) -> None:
    """Asks in the order of what is answered soonest; the doctor runs beside the rest."""
    doctor = _start_the_doctor(context)
    _read_settings(context)
    repeat_operations(context.log, build_operations(context.device, scale=16 if context.is_gpu else 1))
    _repeat_on_two_streams(context)
    _repeat_collectives(context)
    _select_attention(context)
    code = doctor.wait()
    context.log.hold(
        "doctor: a step of the attached example, local layers, run twice",
        is_held=code == 0,
        found=_read(context.folder / "doctor.txt").partition("\nresult ")[0][-1500:] or f"exit code {code}",
        expected="equal in both runs",
    )


def _read_settings(context: CheckContext) -> None:
    if context.machine.has_transformer_engine:
        import transformer_engine.pytorch  # noqa: F401 - reads NVTE_* when it is imported
    values = read_back(os.environ)
    hold_settings(context.log, values)
    rows = {**values, **read_node_values(os.environ)}
    context.log.table("settings in effect", ("setting", "value"), [row for row in rows.items() if row[1] != "unset"])


def hold_settings(log: FindingsLog, values: Mapping[str, str]) -> None:
    """Holds what was read back to the table of settings."""
    try:
        check_took_effect(values, deterministic=True)
    except DeterminismError as error:
        log.hold("settings of a deterministic run", is_held=False, found=error, expected="all take effect")
    else:
        log.hold(
            "settings of a deterministic run",
            is_held=True,
            found=f"{len(values)} read back",
            expected="all take effect",
        )


def repeat_operations(log: FindingsLog, operations: Mapping[str, Operation]) -> None:
    """Repeats each operation with torch's deterministic mode on and off, and writes the table.

    With the mode on an operation must repeat, or be refused, or lack a kernel here; with it off, whether it repeats is
    noted. An error of another kind, as of too little memory, fails in both.
    """
    answers: dict[str, list[str]] = {name: [] for name in operations}
    for is_on in (True, False):
        torch.use_deterministic_algorithms(is_on)
        try:
            for name, operation in operations.items():
                answers[name].append(repeat(operation))
        finally:
            torch.use_deterministic_algorithms(True)
    log.table(
        f"operations, {_NUM_REPEATS} times each",
        ("operation", "deterministic mode", "without it"),
        [(name, *texts) for name, texts in answers.items()],
    )
    wrong = [
        name
        for name, (strict, free) in answers.items()
        if strict.startswith("differs") or any(text.startswith("failed") for text in (strict, free))
    ]
    num_repeating = sum(texts[0] == "repeats" for texts in answers.values())
    log.hold(
        "operations repeat in deterministic mode, or are refused",
        is_held=not wrong and num_repeating > 0,
        found=", ".join(wrong) or f"{num_repeating} of {len(answers)} operations repeat",
        expected="none differs or fails",
    )


def repeat(operation: Operation) -> str:
    """Runs an operation again and again with other memory around it, and says whether its bits are the first ones.

    It ``repeats``, ``differs``, is ``refused`` by torch's deterministic mode or for want of a kernel, or ``failed``.
    """
    try:
        first = [tensor.clone() for tensor in operation()]
        kept: list[torch.Tensor] = []
        for number in range(1, _NUM_REPEATS):
            kept.append(torch.empty(1 + 7919 * number, device=first[0].device))
            if number % 5 == 0:
                kept.clear()
            found = operation()
            if not all(torch.equal(old, new) for old, new in zip(first, found, strict=True)):
                return f"differs at repetition {number}"
    except RuntimeError as error:
        words = str(error).strip().partition("\n")[0]
        kind = "refused" if any(told in words for told in _REFUSALS) else "failed"
        return f"{kind}: {words[:160]}"
    return "repeats"


def _repeat_on_two_streams(context: CheckContext) -> None:
    question = "products on two streams at once"
    if not context.is_gpu:
        context.log.not_run(question, "streams need a GPU")
        return
    generator = torch.Generator("cuda").manual_seed(1)
    left, right = (torch.randn(4096, 4096, device="cuda", generator=generator).bfloat16() for _ in range(2))
    streams = [torch.cuda.Stream() for _ in range(2)]

    def multiply() -> tuple[torch.Tensor, ...]:
        found = []
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found.append(left @ right)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        return (*found, found[0] - found[1])

    text = repeat(multiply)
    is_same = text == "repeats" and not multiply()[-1].any()
    context.log.hold(question, is_held=is_same, found=text, expected="equal bits, with CUBLAS_WORKSPACE_CONFIG")


def _repeat_collectives(context: CheckContext) -> None:
    device, num_gpus = context.machine.device, len(context.machine.gpus)
    backends = ["gloo", *(["nccl"] if context.is_gpu else [])]
    for backend in backends:
        more = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,TUNING"} if backend == "nccl" else {}
        if backend == "nccl" and num_gpus == 1:
            more["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # NCCL 2.30 and later; older ones refuse two ranks on a GPU
        found, output = _run_ranks(context, backend, child_environment(device, **more))
        lines = sorted({match[1] for match in _NCCL_LINE.finditer(output)})
        if lines:
            context.log.table("what NCCL says of its settings", ("line",), [(line,) for line in lines[:40]])
        if found is None:
            context.log.not_run(f"collectives over {backend}, two processes", _end_of(output, lines))
        else:
            hold_collectives(context.log, f"{backend}, two processes on {num_gpus or 'no'} GPU(s)", found)
    if not context.is_gpu:
        context.log.not_run("collectives over nccl, two processes", "NCCL needs a GPU")
    elif num_gpus == 1:
        context.log.not_run("collectives over nccl between two GPUs", "one GPU is visible")


def _run_ranks(
    context: CheckContext, backend: str, environment: Mapping[str, str]
) -> tuple[list[dict[str, Any]] | None, str]:
    """Starts two ranks; what they found, or ``None`` where they failed, and their output."""
    folder = context.folder / backend
    folder.mkdir()
    words = ["benchmarks.gpu_check.collectives", backend, context.machine.device, str(folder)]
    logs = [folder / f"rank{rank}.txt" for rank in range(2)]
    ranks = [_start([*words, str(rank)], log, environment) for rank, log in enumerate(logs)]
    ended_s = time.monotonic() + _WORKER_TIMEOUT_S
    late = [f"rank {number} did not end" for number, rank in enumerate(ranks) if not _ends(rank, ended_s)]
    output = "\n".join([*map(_read, logs), *late])
    files = sorted(folder.glob("rank*.json"))
    if len(files) < len(ranks):
        return None, output
    return [json.loads(path.read_text(encoding="utf-8")) for path in files], output


def _start(words: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts a module with its arguments; its output goes to a file, since nobody reads a pipe meanwhile."""
    with log.open("wb") as output:
        command = [sys.executable, "-m", *words]
        return subprocess.Popen(command, cwd=ROOT, env=dict(environment), stdout=output, stderr=subprocess.STDOUT)


def _ends(process: subprocess.Popen[bytes], end_s: float) -> bool:
    """Waits until a moment of the monotonic clock; kills the process that has not ended then."""
    try:
        process.wait(timeout=max(0.0, end_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    return True


def _read(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace").strip()


def _end_of(output: str, lines: Sequence[str]) -> str:
    told = [line for line in lines if "Duplicate" in line or "Multiple Ranks" in line]
    return told[0] if told else output.strip()[-400:]


def hold_collectives(log: FindingsLog, where: str, ranks: Sequence[Mapping[str, Any]]) -> None:
    """Holds collectives of two ranks to repeat, and to give both ranks the same bits; notes the order of their sums."""
    for name in ranks[0]:
        found = [rank[name] for rank in ranks]
        repeats = all(item["num_digests"] == 1 for item in found)
        agrees = len({item["digest"] for item in found}) == 1
        words = "repeats" if repeats else "does not repeat"
        log.hold(
            f"{name} over {where}",
            is_held=repeats and agrees,
            found=f"{words}, {'equal' if agrees else 'other'} bits on both ranks, order: {found[0]['order']}",
            expected="repeats, equal bits on both ranks",
        )


def _select_attention(context: CheckContext) -> None:
    question = "TransformerEngine's attention"
    if not context.machine.has_transformer_engine:
        context.log.not_run(question, context.machine.transformer_engine)
        return
    logs = {name: context.folder / f"attention, {name}.txt" for name in _ATTENTION}
    told = {"NVTE_DEBUG": "1", "NVTE_DEBUG_LEVEL": "2"}
    processes = {
        name: _start(["benchmarks.gpu_check.attention"], logs[name], child_environment("cuda", **told, **switches))
        for name, switches in _ATTENTION.items()
    }
    ended_s = time.monotonic() + _WORKER_TIMEOUT_S
    for name, process in processes.items():
        late = "" if _ends(process, ended_s) else f"\nit did not answer within {_WORKER_TIMEOUT_S:.0f} s"
        hold_attention(context.log, f"{question}, {name}", _read(logs[name]) + late)


def hold_attention(log: FindingsLog, question: str, output: str) -> None:
    """Holds attention to repeat, by the line of ``attention``; a backend that is not there is not run."""
    lines = output.strip().splitlines()
    answer = next((line for line in reversed(lines) if line.startswith(("repeats", "differs"))), "")
    if not answer and (_NO_ATTENTION in output or any(line.startswith("refused") for line in lines)):
        log.not_run(question, lines[-1][-300:])
        return
    named = "; ".join(sorted({match[0].strip() for match in _ATTENTION_LINE.finditer(output)}))
    log.hold(
        question,
        is_held=answer == "repeats",
        found=f"{answer} ({named or 'no line of the log names the backend'})" if answer else output.strip()[-400:],
        expected="repeats",
    )


def _start_the_doctor(context: CheckContext) -> subprocess.Popen[bytes]:
    words = ["mock_scheduler.cli", "doctor"]
    words += [str(ROOT / "docs" / "examples" / "own_megatron" / "align.yaml"), "options.layers=local"]
    words += ["--output-dir", str(context.folder / "doctor")]
    return _start(words, context.folder / "doctor.txt", child_environment(context.machine.device))


def describe_order(found: torch.Tensor, parts: Sequence[torch.Tensor], add: Callable[..., torch.Tensor]) -> str:
    """Says in which order a reduction of the ranks' parts added, as far as two simple orders tell."""
    ascending = parts[0]
    for part in parts[1:]:
        ascending = add(ascending, part)
    if torch.equal(found, ascending):
        return "by rank"
    descending = parts[-1]
    for part in reversed(parts[:-1]):
        descending = add(descending, part)
    return "by rank, from the last" if torch.equal(found, descending) else "another"
