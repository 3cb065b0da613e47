"""Renders the report as a page that opens offline, on top of the pages' common base."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.checks import find_check
from benchmarks.gpu_check.findings import Outcome
from mock_scheduler.display.pages import render_page, write_page
from mock_scheduler.errors import AlignmentError

TONES: Mapping[str, str] = {
    Outcome.HELD: "identical",
    Outcome.FAILED: "diverged",
    Outcome.NOTED: "tolerance",
    Outcome.NOT_RUN: "undecided",
}
_SHOWN = ("megatron-core", "transformer-engine-torch", "flash-attn", "apex", "triton", "numpy")
_SENTENCES = {
    0: ("held", "Every check ran on the GPU, and held."),
    1: ("failed", "A check found what must not be; it is named below."),
    4: ("not all was run", "What ran held; what was not run is named below, with the reason."),
}


def write_report_page(path: Path, content: Mapping[str, Any]) -> None:
    """Writes the page of a report's JSON; raises ``AlignmentError`` where it cannot be written."""
    word, sentence = _SENTENCES[content["exit_code"]]
    if not any(
        row["outcome"] in (Outcome.HELD, Outcome.FAILED) for item in content["checks"] for row in item["findings"]
    ):
        word, sentence = "nothing was run", "The reasons are below."
    if content["is_rehearsal"]:
        sentence = f"A rehearsal on the CPU: nothing here says anything about a GPU. {sentence}"
    page = render_page(
        "benchmarks.gpu_check",
        "gpu_check.html",
        title="GPU check",
        heading="GPU check",
        footer=f"launch/gpu_check.sh, started {content['started']}",
        tone={0: "good", 1: "bad"}.get(content["exit_code"], "warn"),
        word=word,
        sentence=sentence,
        facts=[
            *_describe_machine(content["machine"]),
            *(("carried wheel", text) for text in content["wheel_problems"]),
        ],
        checks=[
            {**item, "check": find_check(item["name"]), "tone": TONES[item["outcome"]]} for item in content["checks"]
        ],
        tones=TONES,
    )
    write_page(page, path, AlignmentError)


def _describe_machine(machine: Mapping[str, Any]) -> list[tuple[str, str]]:
    gpus = ", ".join(machine["gpus"]) or machine["cuda_problem"] or "none was looked for"
    torch = f"{machine['torch'] or 'not installed'}, CUDA {machine['cuda'] or 'none'}, NCCL {machine['nccl'] or 'none'}"
    rows = [
        ("GPUs", gpus),
        ("Python", machine["python"]),
        ("torch", torch),
        (
            "TransformerEngine",
            machine["transformer_engine"] or machine["versions"].get("transformer-engine", "present"),
        ),
    ]
    rows.append(("CUDA MPS", "can be started" if machine["mps"] else "not there"))
    others = [f"{name} {machine['versions'][name]}" for name in _SHOWN if name in machine["versions"]]
    rows.append(("beside them", ", ".join(others)))
    rows.append(("lacks", ", ".join(machine["lacking"])))
    return [(label, text) for label, text in rows if text]
