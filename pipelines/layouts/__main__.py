"""The table of layouts: ``python -m pipelines.layouts``.

Trains two small models, dense and with experts, for two steps of two updates under every layout of up to 8 processes,
in float32 and float64, and shows how far metrics, gradients and parameters are from those of one process. In float64
nothing but rounding may be left: exit code 1 where anything is above its bound or replicas differ.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pipelines.layouts.cases import LAYOUTS, MODELS
from pipelines.layouts.runs import run_cases
from pipelines.layouts.table import PRECISIONS, build_results, render

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def layouts(
    models: Annotated[str, typer.Option("--models", help="dense, moe or both")] = ",".join(MODELS),
    precisions: Annotated[str, typer.Option("--precisions", help="float32, float64 or both")] = ",".join(PRECISIONS),
    max_world_size: Annotated[int, typer.Option("--max-world-size", help="leave larger layouts out")] = 8,
    output_dir: Annotated[Path | None, typer.Option("--output-dir", help="keep metrics and traces here")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="also write all numbers to this file")] = None,
) -> None:
    """Compare the training of all layouts with that of one process."""
    chosen_models, chosen_precisions = _chosen(models, tuple(MODELS)), _chosen(precisions, PRECISIONS)
    with tempfile.TemporaryDirectory() as temporary:
        root = output_dir or Path(temporary)
        console = Console()
        run_cases(root, chosen_models, chosen_precisions, max_world_size=max_world_size, console=Console(stderr=True))
        results = build_results(root, chosen_models, chosen_precisions, max_world_size=max_world_size)
    for model in chosen_models:
        console.print(render(model, LAYOUTS[model], results))
    if json_path is not None:
        json_path.write_text(json.dumps([result.as_json() for result in results], indent=1), encoding="utf-8")
    raise typer.Exit(0 if all(result.is_aligned for result in results) else 1)


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
