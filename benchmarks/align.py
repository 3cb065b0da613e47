"""Times an alignment of five candidates against five plain runs of the same candidates.

Plain: each candidate in mock on the same recording, started by itself and without a trace, as for a look at its
metrics. Aligned: the same candidates as an alignment, without the runs for proofs; then with every proof that a verdict
needs; then the same command again; then with measured noise (``align.proofs.noise=always``).
Reported: seconds, and ratios to the plain runs (without the baseline's run, which every one of them needs). The bars:
1.3 without proofs, 1.5 with every proof, and 3 seconds for the command given again.

Run: ``python -m benchmarks.align [--json FILE] [--rounds 1] [--config-name quickstart]``.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mock_scheduler.alignment.plan.overrides import quote_override
from mock_scheduler.alignment.plan.plan import plan_alignment
from mock_scheduler.alignment.plan.planned_run import PlannedRun
from mock_scheduler.commands.align import AlignOptions, run_align
from mock_scheduler.config.loading import ConfigSource
from mock_scheduler.launch.launcher import plan_launch, run_plan
from mock_scheduler.support.arguments import ArgumentParser
from pipelines.config.loading import build_loader, load_source
from pipelines.program import PROGRAM

CONFIG_PATH = Path("configs")
CANDIDATES = ("same-layout", "tp2", "tp2-sp", "pp2", "dp2")
#: As ``launch/quickstart.sh`` has it.
AT_ONCE = "align.at_once=2"
WITHOUT_PROOFS = (
    "align.proofs.emulate=false",
    "align.proofs.num_perturbations=0",
    "align.proofs.referee=never",
    "align.proofs.localise=false",
    "align.proofs.consequence=false",
)


def _only(names: tuple[str, ...], config_name: str) -> str:
    """The override that leaves these candidates."""
    config = build_loader(config_name, CONFIG_PATH)([])
    kept = [item for item in config.align.candidates if item.name in names]
    entries = (f"{{name:{item.name},overrides:[{','.join(map(repr, item.overrides))}]}}" for item in kept)
    return f"align.candidates=[{','.join(entries)}]"


def _align(config_name: str, output_dir: Path, *overrides: str) -> dict[str, Any]:
    """The seconds of one alignment, by purpose."""
    code = run_align(
        config_name=config_name,
        config_path=CONFIG_PATH,
        overrides=(_only(CANDIDATES, config_name), *overrides),
        options=AlignOptions(output_dir=output_dir),
        console=Console(file=io.StringIO()),
    )
    if code not in (0, 2):  # without measured noise, rounding may be called suspect
        raise SystemExit(f"the alignment ended with exit code {code}; see {output_dir}")
    times: dict[str, Any] = json.loads((output_dir / "align.json").read_text(encoding="utf-8"))["times"]
    return times


def _plain(run: PlannedRun, config_name: str, output_dir: Path) -> float:
    """The seconds of one candidate by itself, without a trace."""
    overrides = (*run.overrides, "trace.level=off", quote_override("output_dir", str(output_dir)))
    source = ConfigSource(config_name=config_name, config_path=str(CONFIG_PATH), overrides=tuple(overrides))
    config = load_source(source)
    plan = plan_launch(config, PROGRAM.arguments(run.entry, source))
    started_s = time.perf_counter()
    code = run_plan(plan, log_path=output_dir / "run.log")
    if code:
        raise SystemExit(f"{run.name} ended with exit code {code}; see {output_dir / 'run.log'}")
    return time.perf_counter() - started_s


def _round(config_name: str, root: Path) -> dict[str, float]:
    times = _align(config_name, root / "short", *WITHOUT_PROOFS)
    planned = plan_alignment(
        build_loader(config_name, CONFIG_PATH),
        program=PROGRAM,
        overrides=(_only(CANDIDATES, config_name),),
        output_dir=root / "short",
    )
    plain_s = sum(_plain(run, config_name, root / "plain" / run.name) for run in planned.candidates)
    every = _align(config_name, root / "whole", AT_ONCE)
    started_s = time.perf_counter()
    _align(config_name, root / "whole", AT_ONCE)
    again_s = time.perf_counter() - started_s
    noise = _align(config_name, root / "noise", AT_ONCE, "align.proofs.noise=always")
    return {
        "plain runs": plain_s,
        "alignment": times["total_s"] - times["baseline_s"],
        "of it comparisons": times["comparison_s"],
        "baseline": times["baseline_s"],
        "with every proof": every["total_s"] - every["baseline_s"],
        "of it emulation": every["emulation_s"],
        "the same command again": again_s,
        "with measured noise": noise["total_s"] - noise["baseline_s"],
        "of it noise": noise["noise_s"],
    }


def main() -> None:
    """Run the rounds and print the medians."""
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--config-name", default="quickstart")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    rounds = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            rounds.append(_round(options.config_name, Path(folder)))
    medians = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    ratios = {name: medians[name] / medians["plain runs"] for name in ("alignment", "with every proof")}
    table = Table("", "seconds")
    for name, seconds in medians.items():
        table.add_row(name, f"{seconds:.1f}")
    console = Console()
    console.print(table)
    for name, ratio in ratios.items():
        console.print(f"{name} of {len(CANDIDATES)} candidates to as many plain runs: {ratio:.2f}")
    if options.json:
        options.json.write_text(json.dumps({"seconds": medians, "ratios": ratios}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
