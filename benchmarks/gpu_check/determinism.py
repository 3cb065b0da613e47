"""Reads every setting back, and repeats operations, collectives, attention and a whole step, to the bit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks.gpu_check.context import CheckContext
from benchmarks.gpu_check.findings import FindingsLog
from benchmarks.gpu_check.operations import Operation, build_operations
from benchmarks.gpu_check.processes import ROOT, child_environment
from mock_scheduler.determinism.guard import check_took_effect, read_back, read_node_values
from mock_scheduler.errors import DeterminismError

_NUM_REPEATS = 20
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
    output, errors = doctor.communicate()
    context.log.hold(
        "doctor: a step of the attached example, local layers, run twice",
        is_held=doctor.returncode == 0,
        found=(output.strip() or errors.strip())[:1500],
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

    With the mode on an operation must repeat, or be refused; with it off, whether it repeats is noted.
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
    wrong = [name for name, texts in answers.items() if texts[0].startswith("differs")]
    log.hold(
        "operations repeat in deterministic mode, or are refused",
        is_held=not wrong,
        found=", ".join(wrong) or f"{len(answers)} operations",
        expected="none differs",
    )


def repeat(operation: Operation) -> str:
    """Runs an operation again and again with other memory around it, and says whether its bits are the first ones."""
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
        return f"refused: {str(error).splitlines()[0][:160]}"
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
    command = [sys.executable, "-m", "benchmarks.gpu_check.collectives", backend, context.machine.device, str(folder)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)],
            cwd=ROOT,
            env=dict(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=_WORKER_TIMEOUT_S)[0] for rank in ranks]
    except subprocess.TimeoutExpired:
        outputs = [f"the ranks did not meet within {_WORKER_TIMEOUT_S:.0f} s"]
    finally:
        for rank in ranks:
            rank.kill()
    files = sorted(folder.glob("rank*.json"))
    if len(files) < len(ranks):
        return None, "\n".join(outputs)
    return [json.loads(path.read_text(encoding="utf-8")) for path in files], "\n".join(outputs)


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
    processes = {name: _start_attention(switches) for name, switches in _ATTENTION.items()}
    for name, process in processes.items():
        try:
            output, errors = process.communicate(timeout=_WORKER_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = "", f"it did not answer within {_WORKER_TIMEOUT_S:.0f} s"
        hold_attention(context.log, f"{question}, {name}", output, errors)


def _start_attention(switches: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu_check.attention"],
        cwd=ROOT,
        env=child_environment("cuda", NVTE_DEBUG="1", NVTE_DEBUG_LEVEL="2", **switches),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def hold_attention(log: FindingsLog, question: str, output: str, errors: str) -> None:
    """Holds attention to repeat, by the last line of ``attention``; a backend that is not there is not run."""
    selected = sorted({match[0].strip() for match in _ATTENTION_LINE.finditer(f"{output}\n{errors}")})
    answer = output.strip().splitlines()[-1] if output.strip() else ""
    if answer not in ("repeats",) and not answer.startswith("differs"):
        log.not_run(question, answer or errors.strip()[-300:] or "it said nothing")
        return
    named = "; ".join(selected) or "no line of the log names the backend"
    log.hold(question, is_held=answer == "repeats", found=f"{answer} ({named})", expected="repeats")


def _start_the_doctor(context: CheckContext) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mock_scheduler.cli", "doctor"]
    command += [str(ROOT / "docs" / "examples" / "own_megatron" / "align.yaml"), "options.layers=local"]
    command += ["--output-dir", str(context.folder / "doctor")]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=child_environment(context.machine.device),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


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
