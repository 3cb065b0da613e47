"""Prints the table of layouts: ``python -m benchmarks.layouts``, or of computation options: ``... --options``.

Trains small models, dense and with experts, for two steps of two updates under every layout of up to 8 processes, in
float32 and float64, and shows how far metrics, gradients and parameters are from one process. In float64 nothing but
rounding may be left: exit code 1 where anything is above its bound or replicas differ.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.layouts.cases import LAYOUTS, OPTION_CASES, PRECISIONS, layout_cases, option_cases, refused_cases
from benchmarks.layouts.comparison import build_results, render
from benchmarks.layouts.training import run_cases
from mock_scheduler.layouts.rules.known_wrong import MEGATRON, installed_megatron

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_WIDTH_OF_FILES = 160


@app.command()
def layouts(
    options: Annotated[bool, typer.Option("--options", help="computation options in place of layouts")] = False,
    models: Annotated[str | None, typer.Option("--models", help="one or several; all if not given")] = None,
    precisions: Annotated[str, typer.Option("--precisions", help="float32, float64 or both")] = ",".join(PRECISIONS),
    max_world_size: Annotated[int, typer.Option("--max-world-size", help="leave what needs more processes out")] = 8,
    output_dir: Annotated[Path | None, typer.Option("--output-dir", help="keep metrics and traces here")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="also write all numbers to this file")] = None,
) -> None:
    """Compare the training of all layouts, or of all computation options, with that of one process."""
    known = tuple(OPTION_CASES if options else LAYOUTS)
    chosen_models, chosen_precisions = _chosen(models or ",".join(known), known), _chosen(precisions, PRECISIONS)
    every_case = (option_cases if options else layout_cases)(chosen_models, chosen_precisions)
    cases = [case for case in every_case if case.world_size <= max_world_size]
    if output_dir is not None and output_dir.exists() and any(output_dir.iterdir()):
        raise typer.BadParameter(f"--output-dir {output_dir} is not empty; name a new folder")
    with tempfile.TemporaryDirectory() as temporary:
        root = output_dir or Path(temporary)
        run_cases(root, cases, Console(stderr=True))
        results = build_results(root, cases)
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH_OF_FILES
    for model in chosen_models:
        console.print(render(model, results))
        _print_refused(model, console)
    if json_path is not None:
        json_path.write_text(json.dumps([result.as_json() for result in results], indent=1), encoding="utf-8")
    raise typer.Exit(0 if all(result.is_aligned for result in results) else 1)


def _print_refused(model: str, console: Console) -> None:
    """Print the cases left out of the table, since Megatron computes them wrongly."""
    refused = [f"{case.label} ({rule})" for rule, case in refused_cases(model)]
    if refused:
        text = f"Refused, as {MEGATRON} {installed_megatron()} computes it wrongly: {', '.join(refused)}"
        console.print(text, markup=False, highlight=False)


def _chosen(text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise typer.BadParameter(
            f"{', '.join(unknown) or 'nothing'} given; expected one or several of {', '.join(known)}"
        )
    return names


if __name__ == "__main__":
    sys.exit(app())
