"""Has the command line: ``mock-scheduler``.

The options of each command are here, its work is in ``mock_scheduler.commands``, in the file of its subject.

Contract: ``mock-scheduler --help`` imports neither torch nor Hydra and answers at once, so each command imports its
work in its own body. A failure in the user's hands is one message on stderr and the exit code of
``errors.ExitCode``; a usage error, or an unreadable file, exits with 5. Anything unforeseen is a traceback and exit
code 70, never 1: 1 is a verdict.
"""

from __future__ import annotations

import gc
import os
import re
import shlex
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer.exceptions import TyperException

from mock_scheduler.adapters.formats import FORMAT_NAMES, WRITTEN_NAMES
from mock_scheduler.errors import ExitCode, MockSchedulerError, redact
from mock_scheduler.support.command_line import noting_command
from mock_scheduler.support.lazy_commands import LazyCommands
from mock_scheduler.support.terminal_streams import guarded_terminal, print_message
from mock_scheduler.support.text import printable, printable_message
from mock_scheduler.support.versions import VERSION

if TYPE_CHECKING:
    from mock_scheduler.config.loading import ConfigSource

_HELP = "Record rollouts once, replay them under any layout, and prove whether training numerics moved."
_EPILOG = f"Exit codes: {', '.join(f'{code} {code.name.lower()}' for code in ExitCode)}, 128 + N ended by signal N."
app = typer.Typer(
    name="mock-scheduler", help=_HELP, epilog=_EPILOG, add_completion=False, pretty_exceptions_enable=False
)


def _complete_config(ctx: typer.Context, incomplete: str) -> list[str]:
    from mock_scheduler.commands.completion import complete_config  # only for a shell that asks

    return complete_config(incomplete, ctx.params.get("config_path"))


def _complete_key(ctx: typer.Context, incomplete: str) -> list[str]:
    from mock_scheduler.commands.completion import complete_key  # only for a shell that asks

    return complete_key(incomplete, ctx.params.get("config_name"), ctx.params.get("config_path"))


ConfigName = Annotated[
    str,
    typer.Argument(help="name of a YAML file in --config-path, or the path of one", autocompletion=_complete_config),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="a.b=c, in Hydra's grammar", show_default=False, autocompletion=_complete_key),
]
ConfigPath = Annotated[str | None, typer.Option("--config-path", help="folder of YAML files; else configs")]

RecordingDir = Annotated[str, typer.Argument(help="rollout_mock.dump_dir of a run: folder or URL", show_default=False)]
Steps = Annotated[str | None, typer.Option("--steps", help="look at these only, as in 0-4,7 or 100-")]
JsonOutput = Annotated[str | None, typer.Option("--json", help="also write all of it to this file; -: JSON instead")]
JsonCopy = Annotated[Path | None, typer.Option("--json", help="also write the result to this file")]
HtmlOutput = Annotated[Path | None, typer.Option("--html", help="also write a page that opens offline to this file")]
OverRay = Annotated[
    bool, typer.Option("--ray", help="tasks of the Ray cluster that RAY_ADDRESS names read the tensors")
]
OutputDir = Annotated[Path | None, typer.Option("--output-dir", help="folder of the runs and the result")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="run everything anew; else finished runs there are taken again")
]
Entry = Annotated[str | None, typer.Option("--entry", help="module that every process runs; else the program's own")]
Kinds = Annotated[
    list[str] | None, typer.Option("--kinds", help="only these kinds of tensors, as in gradient,parameter")
]
Patterns = Annotated[
    list[str] | None, typer.Option("--patterns", help="only names that match one of these, as in 'decoder.layers.3.*'")
]
RunStoredCode = Annotated[
    bool,
    typer.Option("--run-stored-code", help="run the code that a config.yaml left by a run names; shown either way"),
]

FormatName = Annotated[str, typer.Argument(help=f"one of {', '.join(FORMAT_NAMES)}", show_default=False)]

_COMPLETE_VARIABLE = "_MOCK_SCHEDULER_COMPLETE"
#: Commands that take finished runs again.
_GOING_ON = ("align", "minimise")
_INTERRUPTED = 130  # the shells' code for a program that Ctrl-C ended
_BROKEN_PIPE = 141  # and for one whose output nobody reads any more
#: Objects that are made before the first search for garbage, in place of 700.
_GARBAGE_THRESHOLD = 50_000


def _source(config_name: str, config_path: str | None, overrides: list[str] | None) -> ConfigSource:
    from mock_scheduler.config.loading import ConfigSource  # imports Hydra: not for --help
    from mock_scheduler.config.locating import locate_config

    name, folder = locate_config(config_name, config_path)
    return ConfigSource(config_name=name, config_path=folder, overrides=tuple(overrides or ()))


@app.command()
def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="folder to make", show_default=False)],
) -> None:
    """Write a folder to start from: a small training, a kernel of your own, and a configuration that aligns them."""
    from mock_scheduler.commands.new import run_new  # imports rich: not for --help

    raise typer.Exit(run_new(folder))


@app.command(epilog="Exit code: the run's own; of several ranks, that of the one that failed first.")
def launch(
    config_name: ConfigName,
    overrides: Overrides = None,
    config_path: ConfigPath = None,
    nnodes: Annotated[int, typer.Option("--nnodes", help="number of machines")] = 1,
    node_rank: Annotated[int, typer.Option("--node-rank", help="this machine, from 0")] = 0,
    rdzv_endpoint: Annotated[str | None, typer.Option("--rdzv-endpoint", help="HOST:PORT on machine 0")] = None,
    entry: Entry = None,
    run_stored_code: RunStoredCode = False,
) -> None:
    """Run a configuration on as many processes as its layout needs."""
    from mock_scheduler.commands.launch import run_launch  # imports pydantic: not for --help

    source = _source(config_name, config_path, overrides)
    code = run_launch(
        source,
        entry=entry,
        nnodes=nnodes,
        node_rank=node_rank,
        rdzv_endpoint=rdzv_endpoint,
        run_stored_code=run_stored_code,
    )
    raise typer.Exit(code)


@app.command(epilog="Exit code: that of the gravest verdict; the baseline's own where its run fails.")
def align(
    config_name: ConfigName,
    overrides: Overrides = None,
    config_path: ConfigPath = None,
    output_dir: OutputDir = None,
    overwrite: Overwrite = False,
    recording: Annotated[
        Path | None, typer.Option("--recording", help="a recording for the baseline to replay too; else it records")
    ] = None,
    is_ci: Annotated[bool, typer.Option("--ci", help="print a short summary, and write JUnit XML")] = False,
    json_path: JsonCopy = None,
    html_path: HtmlOutput = None,
    run_stored_code: RunStoredCode = False,
) -> None:
    """Run a baseline, replay it under every candidate, and give a verdict for each, with its proofs."""
    from mock_scheduler.commands.align import AlignOptions, run_align  # imports torch: not for --help

    source = _source(config_name, config_path, overrides)
    options = AlignOptions(
        output_dir=output_dir,
        overwrite=overwrite,
        recording_dir=recording,
        is_ci=is_ci,
        json_path=json_path,
        html_path=html_path,
        run_stored_code=run_stored_code,
    )
    code = run_align(
        config_name=source.config_name,
        config_path=Path(source.config_path),
        overrides=source.overrides,
        options=options,
    )
    raise typer.Exit(code)


@app.command(epilog="Exit codes: 0 made; 3 the divergence does not show again.")
def extract(
    align_dir: Annotated[Path, typer.Argument(help="folder of a finished alignment", show_default=False)],
    candidate: Annotated[str, typer.Argument(help="one of its candidates that diverged", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="folder to make", show_default=False)],
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="step to reproduce; else that of the first divergence")
    ] = None,
    groups: Annotated[
        int | None,
        typer.Option("--groups", min=1, help="groups to begin with; else that of the largest difference, or all"),
    ] = None,
    is_checked: Annotated[bool, typer.Option(" /--no-check", help="do not run it to see whether it diverges")] = True,
    json_path: JsonCopy = None,
    run_stored_code: RunStoredCode = False,
) -> None:
    """Cut a diverged candidate down to a small folder that shows the divergence with one command."""
    from mock_scheduler.commands.extract import run_extract  # imports torch: not for --help

    code = run_extract(
        align_dir,
        candidate,
        output=output,
        step=step,
        num_groups=groups,
        is_checked=is_checked,
        run_stored_code=run_stored_code,
        json_path=json_path,
    )
    raise typer.Exit(code)


@app.command(epilog="Exit code: that of the verdict on the smallest case.")
def minimise(
    config_name: ConfigName,
    candidate: Annotated[str, typer.Argument(help="name of a candidate that diverges", show_default=False)],
    overrides: Overrides = None,
    config_path: ConfigPath = None,
    output_dir: OutputDir = None,
    max_runs: Annotated[int, typer.Option("--max-runs", min=1, help="alignments to spend at most")] = 60,
    overwrite: Overwrite = False,
    json_path: JsonCopy = None,
    run_stored_code: RunStoredCode = False,
) -> None:
    """Shrink a diverged candidate, its layout, changes, model and data, while it still diverges."""
    from mock_scheduler.commands.minimise import MinimiseOptions, run_minimise  # imports torch: not for --help

    source = _source(config_name, config_path, overrides)
    options = MinimiseOptions(
        output_dir=output_dir,
        max_runs=max_runs,
        overwrite=overwrite,
        json_path=json_path,
        run_stored_code=run_stored_code,
    )
    code = run_minimise(
        source.config_name,
        candidate,
        options,
        config_path=Path(source.config_path),
        overrides=source.overrides,
    )
    raise typer.Exit(code)


@app.command(epilog="Exit code: that of the verdict; 3 also where nothing could be compared.")
def compare(
    baseline: Annotated[
        str, typer.Argument(help="the reference: a run's output_dir, a trace, metrics.jsonl or a recording; or its URL")
    ],
    candidate: Annotated[str, typer.Argument(help="the side to judge: one of the same kind")],
    steps: Steps = None,
    kinds: Kinds = None,
    patterns: Patterns = None,
    tolerance: Annotated[
        list[str] | None,
        typer.Option("--tolerance", help="a stated bound, as in activation=1e-5; may be given several times"),
    ] = None,
    noise: Annotated[
        list[str] | None,
        typer.Option(
            "--noise",
            help="noise.json of the baseline, or a perturbed run of it, repeatable; else one beside the baseline",
        ),
    ] = None,
    json_path: JsonOutput = None,
    html_path: HtmlOutput = None,
    has_metrics: Annotated[bool, typer.Option(" /--no-metrics", help="leave the runs' metrics out")] = True,
    over_ray: OverRay = False,
) -> None:
    """Compare two finished runs, traces, metrics or recordings, and name the first place where they part."""
    from mock_scheduler.commands.compare import CompareOptions, run_compare  # imports torch: not for --help
    from mock_scheduler.config.steps import parse_steps
    from mock_scheduler.run_folder.inputs import parse_selection

    options = CompareOptions(
        selection=parse_selection(steps=parse_steps(steps), kinds=kinds or (), patterns=patterns or ()),
        tolerance=tuple(tolerance or ()),
        noise=tuple(noise or ()),
        has_metrics=has_metrics,
        json_path=json_path,
        html_path=html_path,
        over_ray=over_ray,
    )
    raise typer.Exit(run_compare(baseline, candidate, options))


@app.command(epilog="Exit codes: 0 all copies agree; 1 some do not; 3 nothing is held twice, or a choice is empty.")
def replicas(
    run: Annotated[
        str, typer.Argument(help="output_dir of a run with trace.level=full, or its trace folder; or a URL")
    ],
    steps: Steps = None,
    kinds: Kinds = None,
    patterns: Patterns = None,
    json_path: JsonOutput = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="first read all of the trace and check every SHA-256")
    ] = False,
    over_ray: OverRay = False,
) -> None:
    """Check that all copies within one run agree to the last bit."""
    from mock_scheduler.commands.compare import run_replicas  # imports torch: not for --help
    from mock_scheduler.config.steps import parse_steps
    from mock_scheduler.run_folder.inputs import parse_selection

    selection = parse_selection(steps=parse_steps(steps), kinds=kinds or (), patterns=patterns or ())
    raise typer.Exit(run_replicas(run, selection, json_path=json_path, verify=verify, over_ray=over_ray))


@app.command(
    epilog=(
        "Exit codes: 0 the step repeats itself; 1 it does, and ranks that must agree do not; 4 "
        "something differs, or nothing could be compared; else that of a run that failed."
    )
)
def doctor(
    config_name: ConfigName,
    overrides: Overrides = None,
    config_path: ConfigPath = None,
    step: Annotated[int, typer.Option("--step", help="the training step to replay; those before it run as well")] = 0,
    recording: Annotated[
        Path | None, typer.Option("--recording", help="the recording to replay; else a new one is made")
    ] = None,
    entry: Entry = None,
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", help="the runs go to doctor in this folder")
    ] = None,
    json_path: JsonCopy = None,
    run_stored_code: RunStoredCode = False,
) -> None:
    """Replay one step twice and name the first operation that differs, and the setting responsible."""
    from mock_scheduler.commands.doctor import run_doctor  # imports torch: not for --help

    source = _source(config_name, config_path, overrides)
    code = run_doctor(
        source.config_name,
        config_path=Path(source.config_path),
        overrides=source.overrides,
        output_dir=output_dir,
        step=step,
        recording=recording,
        entry=entry,
        json_path=json_path,
        run_stored_code=run_stored_code,
    )
    raise typer.Exit(code)


@app.command()
def env(
    config_name: ConfigName,
    overrides: Overrides = None,
    config_path: ConfigPath = None,
    is_plain: Annotated[bool, typer.Option("--plain", help="NAME=VALUE, as docker's --env-file takes it")] = False,
    json_path: JsonOutput = None,
    run_stored_code: RunStoredCode = False,
) -> None:
    """Print the environment of a run's processes as lines for a shell: export NAME=VALUE."""
    from mock_scheduler.config.stored_code import Use
    from mock_scheduler.determinism.environment import check_settings, launch_environment
    from mock_scheduler.program import check_stored_code, load_config
    from mock_scheduler.support.documents import STDOUT, write_json

    source = _source(config_name, config_path, overrides)
    # The shell that reads these lines runs under them.
    check_stored_code(source.config_name, source.config_path, use=Use.RUN, run_stored_code=run_stored_code)
    config = load_config(source, run_stored_code=run_stored_code)
    check_settings(config.system_envs)
    found = dict(sorted(launch_environment(config.system_envs).items()))
    for name, value in found.items() if json_path != STDOUT else ():
        # Names are identifiers by now; they are quoted all the same, since a shell may read this line by eval.
        typer.echo(f"{name}={value}" if is_plain else f"export {shlex.quote(name)}={shlex.quote(value)}")
    write_json(found, json_path)


@app.command()
def config(
    config_name: ConfigName,
    overrides: Overrides = None,
    config_path: ConfigPath = None,
    json_path: JsonOutput = None,
    run_stored_code: RunStoredCode = False,
) -> None:
    """Print the whole checked configuration as YAML."""
    from mock_scheduler.config.loading import dump_config  # imports Hydra: not for --help
    from mock_scheduler.program import load_config
    from mock_scheduler.support.documents import STDOUT, write_json
    from mock_scheduler.support.yaml_text import load_yaml

    loaded = load_config(_source(config_name, config_path, overrides), run_stored_code=run_stored_code)
    text = dump_config(loaded)
    if json_path != STDOUT:
        typer.echo(text, nl=False)
    if json_path is not None:
        write_json(load_yaml(text), json_path)


@app.command()
def inspect(dump_dir: RecordingDir, steps: Steps = None, json_path: JsonOutput = None) -> None:
    """Describe a recording and its steps."""
    from mock_scheduler.commands.recordings import run_inspect  # imports NumPy: not for --help

    raise typer.Exit(run_inspect(dump_dir, steps=steps, json_path=json_path))


@app.command(epilog="Exit codes: 0 whole; 5 not.")
def verify(dump_dir: RecordingDir, steps: Steps = None, json_path: JsonOutput = None) -> None:
    """Read all of a recording and check every digest."""
    from mock_scheduler.commands.recordings import run_verify  # imports NumPy: not for --help

    raise typer.Exit(run_verify(dump_dir, steps=steps, json_path=json_path))


@app.command(epilog="Exit codes: 0 equal; 1 different; 3 no step is in both.")
def diff(
    dump_dir_a: RecordingDir,
    dump_dir_b: RecordingDir,
    steps: Steps = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="differing rows to show of each step")] = 5,
    json_path: JsonOutput = None,
) -> None:
    """Compare two recordings to the last bit."""
    from mock_scheduler.commands.recorded_rows import run_diff  # imports torch: not for --help

    raise typer.Exit(run_diff((dump_dir_a, dump_dir_b), steps=steps, limit=limit, json_path=json_path))


@app.command()
def show(
    dump_dir: RecordingDir,
    step: Annotated[int, typer.Option("--step", min=0)] = 0,
    row: Annotated[
        str,
        typer.Option("--row", help="number (-1: last), 'best', 'worst', or 'default/group 1/episode 0/env 9/turn 0'"),
    ] = "0",
    mode: Annotated[Literal["train", "val"], typer.Option("--mode")] = "train",
    scheduler_id: Annotated[str, typer.Option("--scheduler", help="scheduler_id of the step")] = "default",
    vocabulary: Annotated[
        Path | None, typer.Option("--vocabulary", help="JSON list, {id: text} or tokenizer.json; else the recording's")
    ] = None,
    json_path: JsonOutput = None,
) -> None:
    """Print one recorded trajectory, turn by turn, as a person reads it."""
    from mock_scheduler.commands.recorded_rows import run_show  # imports torch: not for --help

    code = run_show(
        dump_dir,
        step=step,
        row=row,
        mode=mode,
        scheduler_id=scheduler_id,
        vocabulary_path=vocabulary,
        json_path=json_path,
    )
    raise typer.Exit(code)


@app.command(epilog="Exit code: 0 whatever is found, since nothing is judged.")
def correction(
    recording: RecordingDir,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run", help="output_dir of the recording run or a replay, with trace.level=full trace.kinds=[score]"
        ),
    ] = None,
    steps: Steps = None,
    preset: Annotated[
        list[str] | None, typer.Option("--preset", help="only this preset; may be given several times")
    ] = None,
    config_name: Annotated[
        str | None,
        typer.Option("--config-name", help="configuration whose rollout_correction comes first; else the run's"),
    ] = None,
    config_path: ConfigPath = None,
    num_worst: Annotated[int, typer.Option("--worst", min=0, help="tokens and trajectories to name")] = 10,
    json_path: JsonOutput = None,
    html_path: HtmlOutput = None,
    run_stored_code: RunStoredCode = False,
) -> None:
    """Show how far rollout and training policy are apart, and the effect of each kind of rollout correction."""
    from mock_scheduler.commands.correction import CorrectionOptions, run_correction  # imports torch

    options = CorrectionOptions(
        run=run,
        steps=steps,
        presets=tuple(preset or ()),
        source=None if config_name is None else _source(config_name, config_path, None),
        num_worst=num_worst,
        json_path=json_path,
        html_path=html_path,
        run_stored_code=run_stored_code,
    )
    raise typer.Exit(run_correction(recording, options))


@app.command(name="replay-actions", epilog="Exit codes: 0 equal; 1 something differs; 3 nothing was played.")
def replay_actions(
    config_name: ConfigName,
    recording: RecordingDir,
    overrides: Overrides = None,
    config_path: ConfigPath = None,
    steps: Steps = None,
    json_path: JsonCopy = None,
    entry: Annotated[
        str | None, typer.Option("--entry", help="module that plays the actions; else the program's own")
    ] = None,
    run_stored_code: RunStoredCode = False,
) -> None:
    """Play the recorded actions through the environments again and name the first answer that differs."""
    from mock_scheduler.commands.launch import run_replay_actions  # imports Hydra: not for --help

    source = _source(config_name, config_path, overrides)
    code = run_replay_actions(
        source, recording, steps=steps, json_path=json_path, entry=entry, run_stored_code=run_stored_code
    )
    raise typer.Exit(code)


@app.command(name="export-hf")
def export_hf(
    checkpoint: Annotated[Path, typer.Argument(help="a checkpoint, such as step_000010", show_default=False)],
    folder: Annotated[Path, typer.Argument(help="folder to make", show_default=False)],
) -> None:
    """Write a trained checkpoint as the Hugging Face checkpoint that its run began with."""
    from mock_scheduler.commands.launch import run_export_hf  # imports Hydra: not for --help

    raise typer.Exit(run_export_hf(checkpoint, folder))


@app.command(name="import")
def import_rollouts(
    format_name: FormatName,
    source: Annotated[Path, typer.Argument(help="a file, or the folder of files", show_default=False)],
    dump_dir: Annotated[Path, typer.Argument(help="folder to make: a recording, or a trace", show_default=False)],
    temperature: Annotated[float | None, typer.Option("--temperature", help="state how tokens were sampled")] = None,
    top_p: Annotated[float | None, typer.Option("--top-p")] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", help="0: off")] = None,
    logprobs_mode: Annotated[
        Literal["processed", "raw"] | None,
        typer.Option("--logprobs-mode", help="processed: of the sampled distribution; raw: of the logits"),
    ] = None,
    group_size: Annotated[
        int | None, typer.Option("--group-size", min=1, help="rows of a group, where files have no groups")
    ] = None,
    reward_key: Annotated[str | None, typer.Option("--reward-key", help="entry of a dict of rewards")] = None,
    contract: Annotated[
        Path | None, typer.Option("--contract", help="JSON of names and values that a replay must match")
    ] = None,
    shift: Annotated[int, typer.Option("--shift", help="added to each step, as in -1 where steps count from 1")] = 0,
    json_path: JsonOutput = None,
) -> None:
    """Make an ordinary recording, or trace, of files that another framework wrote; no code in them is run."""
    from mock_scheduler.adapters.imports.steps import ImportOptions, state_sampling  # imports torch: not for --help
    from mock_scheduler.commands.foreign import ImportCommand, run_import

    sampling, stated = state_sampling(temperature=temperature, top_p=top_p, top_k=top_k, logprobs_mode=logprobs_mode)
    rollouts = ImportOptions(sampling=sampling, stated=stated, group_size=group_size, reward_key=reward_key)
    command = ImportCommand(rollouts=rollouts, contract=contract, shift=shift, json_path=json_path)
    raise typer.Exit(run_import(format_name, source, dump_dir, command))


@app.command(name="export")
def export_rollouts(
    format_name: Annotated[str, typer.Argument(help=f"one of {', '.join(WRITTEN_NAMES)}", show_default=False)],
    recording: RecordingDir,
    folder: Annotated[Path, typer.Argument(help="folder for the files", show_default=False)],
    steps: Steps = None,
    json_path: JsonOutput = None,
) -> None:
    """Write a recording as files that another framework replays: slime, for --load-debug-rollout-data."""
    from mock_scheduler.commands.foreign import run_export  # imports torch: not for --help

    raise typer.Exit(run_export(format_name, recording, folder, steps=steps, json_path=json_path))


@app.command()
def plot(
    run_dirs: Annotated[list[Path], typer.Argument(help="output_dir of each run", show_default=False)],
    metric: Annotated[list[str] | None, typer.Option("--metric", help="may be given several times")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write")] = Path("curves.html"),
) -> None:
    """Plot logged metrics of one or several runs as an HTML page that opens offline."""
    from mock_scheduler.report.curves import plot_runs  # imports plotly: not for --help

    plot_runs(run_dirs, metric, output)
    typer.echo(f"wrote {printable(str(output))}")


@app.command()
def frameworks(json_path: JsonOutput = None) -> None:
    """List the training frameworks with an adapter: what is installed, what was tried, what is missing."""
    from mock_scheduler.commands.frameworks import list_frameworks  # imports rich: not for --help

    raise typer.Exit(list_frameworks(json_path=json_path))


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(VERSION)


@app.command()
def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="the shell", show_default=False)],
) -> None:
    """Print what completes commands, options, configurations and keys: eval "$(mock-scheduler completion bash)"."""
    from typer.completion import get_completion_script  # type: ignore[attr-defined] # it imports it for others

    script = get_completion_script(prog_name="mock-scheduler", complete_var=_COMPLETE_VARIABLE, shell=shell)
    typer.echo(script)


def print_error(message: str) -> None:
    """Write one failure to stderr: only its first line begins a line, and no foreign text in it acts or is hidden."""
    from rich.text import Text

    from mock_scheduler.display.console import Console  # imports rich's progress bars: not for --help

    console, label = Console(stderr=True), "error: "
    text = Text(printable_message(redact(f"{label}{message}")))
    text.stylize("bold red", 0, len(label))
    for line in text.split(allow_blank=True):
        console.print(line, soft_wrap=True)


def _quote_arguments(message: str, given: list[str]) -> str:
    """Puts an argument that a message repeats into one line: a name of a folder may hold line breaks."""
    for argument in given:
        if argument:
            message = message.replace(argument, printable(argument))
    return message


def _describe_os_error(error: OSError) -> str:
    """Describe as ``FILE: No such file or directory``, or with the error's own text where it names no file."""
    if error.filename is None or error.strerror is None:
        return str(error) or type(error).__name__
    return f"{error.filename}: {error.strerror}"


def _describe_interrupt(given: list[str]) -> str:
    is_going_on = bool(given) and given[0] in _GOING_ON
    return "interrupted" + ("; the same command goes on, and takes finished runs again" if is_going_on else "")


def _installed_apart() -> set[str]:
    """Names of modules that this project requires and does not bring."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        names = [re.split(r"[^\w-]", text, maxsplit=1)[0] for text in requires("mock-scheduler") or ()]
    except PackageNotFoundError:
        return set()
    modules = {"pyyaml": "yaml", "hydra-core": "hydra", "megatron-core": "megatron"}
    return {modules.get(name.lower(), name.replace("-", "_")) for name in names}


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code; ``None``: the process's own arguments; none at all: ``--help``."""
    if arguments is None:
        # What a command imports is in use until the process ends: to search it for garbage takes a tenth of its start.
        gc.set_threshold(_GARBAGE_THRESHOLD)
    with guarded_terminal():
        code = _run(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        gc.freeze()  # or Python, as it ends, searches all of it: half a second where torch was imported
    return code


def _complete() -> int:
    """Answers a shell that asks what a line may go on with."""
    from typer.completion import completion_init  # type: ignore[attr-defined] # it imports it for others

    completion_init()
    with suppress(SystemExit):
        LazyCommands(app, help=_HELP, epilog=_EPILOG)(prog_name="mock-scheduler")
    return int(ExitCode.ALIGNED)


def _run(given: list[str]) -> int:
    if _COMPLETE_VARIABLE in os.environ:
        return _complete()
    try:
        commands = LazyCommands(app, help=_HELP, epilog=_EPILOG)
        with noting_command(given):
            code: object = commands(given or ["--help"], prog_name="mock-scheduler", standalone_mode=False)
    except MockSchedulerError as error:
        page = f"\n{error.page} explains it" if error.page else ""
        print_error(_quote_arguments(str(error), given) + page)
        return int(error.exit_code)
    except TyperException as error:
        # typer 0.29 leaves pydantic's prefix in the message for a value that is none of a list.
        message = error.format_message().replace(": Value error, ", ": ")
        context = vars(error).get("ctx")
        if context is not None and message.startswith("Missing argument"):  # a recording taken for a configuration
            message += f"\n{' '.join(context.get_usage().split())}"
        print_error(
            f"{_quote_arguments(message, given)}\nTry 'mock-scheduler --help' or 'mock-scheduler COMMAND --help'."
        )
        return int(ExitCode.USAGE)
    except KeyboardInterrupt:
        print_error(_describe_interrupt(given))
        return _INTERRUPTED
    except SystemExit as ended:
        if ended.code == 1:  # of typer 0.29 itself, where stdout or stderr was closed
            return _BROKEN_PIPE
        print_error(_describe_interrupt(given))
        return int(ended.code or 0)
    except OSError as error:
        print_error(_quote_arguments(_describe_os_error(error), given))
        return int(ExitCode.USAGE)
    except Exception as error:  # noqa: BLE001 - the edge of the process
        if isinstance(error, ModuleNotFoundError) and error.name in _installed_apart():
            print_error(f"the package {error.name} is not installed in {sys.prefix}: pip install it (docs/install.md)")
            return int(ExitCode.USAGE)
        print_message(traceback.format_exc())
        print_error("this is a fault of mock-scheduler, or of what it runs; the traceback above says where")
        return int(ExitCode.INTERNAL)
    if code == _INTERRUPTED:  # typer 0.29 makes this code of KeyboardInterrupt, and says nothing
        print_error(_describe_interrupt(given))
    return code if isinstance(code, int) else int(ExitCode.ALIGNED)


if __name__ == "__main__":
    sys.exit(main())
