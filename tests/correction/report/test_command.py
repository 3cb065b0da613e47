"""``mock-scheduler correction``: from recordings and traces on disk to its output, and what it refuses."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mock_scheduler import cli
from mock_scheduler.commands.correction import CorrectionOptions, run_correction
from mock_scheduler.correction.report.scored_step import ScoredStep
from mock_scheduler.correction.report.sources import training_of_contract, training_of_run
from mock_scheduler.display import pages
from mock_scheduler.errors import ConfigError
from mock_scheduler.recording.contract import Contract, ContractField, Rule
from tests.correction.report.reports import make_step, record_scored, write_run, write_trace
from tests.report.recordings import make_console, record

LN2 = math.log(2)
CONFIG = """
actor_infer: {only_action_tokens: true, generating_args: {temperature: 0.5}}
algorithm: {rollout_correction: {rollout_is: token, rollout_is_threshold: 1.5}, flat_keys: ''}
trace: {level: full}
"""


def make_steps() -> list[ScoredStep]:
    return [make_step((LN2, 0.0), (0.0,), step=0), make_step((0.0, -LN2), (0.0,), step=2, policy_version=2)]


def run(dump_dir: Path, **options: object) -> str:
    console, text = make_console(120)
    assert run_correction(str(dump_dir), CorrectionOptions(**options), console=console) == 0  # type: ignore[arg-type]
    return text.getvalue()


def refusal(dump_dir: Path, **options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        run(dump_dir, **options)
    assert caught.value.exit_code == 5
    return str(caught.value)


def test_the_json_has_the_numbers_of_a_recording_and_its_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump_dir, run_dir = record_scored(tmp_path, make_steps(), config=CONFIG)
    assert cli.main(["correction", str(dump_dir), "--run", str(run_dir), "--json", "-", "--preset", "aipo"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["format_version"] == 1
    assert [step["kl"] for step in result["steps"]] == pytest.approx([-LN2 / 3, LN2 / 3])
    measured = result["measured"]
    assert measured["mean_ratio"] == pytest.approx((2 + 1 + 1 + 1 + 0.5 + 1) / 6)
    assert measured["worst_tokens"][0]["identity"] == "default/group 0/episode 0/env 0/turn 0"
    assert measured["worst_tokens"][0]["text"] == "Left"
    assert [outcome["name"] for outcome in measured["outcomes"]] == ["configured", "aipo"]
    assert measured["outcomes"][0]["weights"]["largest"] == 1.5
    assert result["training"]["temperature"] == 0.5
    assert result["advice"][0]["condition"].startswith("rollouts were sampled at temperature 1, and training computes")
    assert result["next_command"] == ""


def test_files_are_written_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "get_plotlyjs", lambda: "/* plotly */")
    dump_dir, run_dir = record_scored(tmp_path, make_steps())
    html, json_path = tmp_path / "out" / "page.html", tmp_path / "out.json"
    text = run(dump_dir, run=run_dir, html_path=html, json_path=str(json_path))
    assert text.splitlines()[-2:] == [f"html  {html}", f"json  {json_path}"]
    assert html.read_text().startswith("<!DOCTYPE html>")
    assert json.loads(json_path.read_text())["recording"] == str(dump_dir)


def test_a_trace_folder_is_as_good_as_its_run(tmp_path: Path) -> None:
    dump_dir, run_dir = record_scored(tmp_path, make_steps(), config=CONFIG)
    by_trace = run(dump_dir, run=run_dir / "trace")
    assert "as " + str(run_dir / "config.yaml") in " ".join(by_trace.split())
    assert by_trace.count("weights per token; truncate weights at 1.5") == 2


def test_without_a_run_the_recording_speaks_and_the_next_command_is_there(tmp_path: Path) -> None:
    dump_dir, _ = record_scored(tmp_path, make_steps())
    text = run(dump_dir)
    assert text.splitlines()[0] == "rollout correction: not measured"
    assert (
        "  mock-scheduler launch NAME rollout_mock.enable=true rollout_mock.mode=mock rollout_mock.dump_dir="
        f"{dump_dir} output_dir=OUTPUT_DIR trace.level=full 'trace.kinds=[score]'\n"
    ) in text


def test_steps_that_were_not_traced_are_shown_as_such(tmp_path: Path) -> None:
    first, second = make_steps()
    dump_dir, run_dir = record_scored(tmp_path, [first, replace(second, train_logprobs=None)])
    text = run(dump_dir, run=run_dir)
    assert "rollout_mock.mode=mock" in text
    assert "3 in 2 trajectories" in text
    assert "\ntraining log-probabilities come from" not in run(dump_dir, run=run_dir, steps="0")


def test_a_run_that_traced_none_of_the_steps_is_refused(tmp_path: Path) -> None:
    dump_dir, run_dir = record_scored(tmp_path, make_steps()[:1])
    record(dump_dir, {5: make_step((0.0,), (0.0,)).batch})
    assert refusal(dump_dir, run=run_dir, steps="5") == (
        f"{run_dir} has a trace of none of the recorded steps 5; it has 0"
    )


def test_a_run_of_other_rows_is_refused(tmp_path: Path) -> None:
    dump_dir, _ = record_scored(tmp_path / "a", [make_step((0.0,), (0.0,))])
    _, other = record_scored(tmp_path / "b", [make_step((0.0,), (0.0,), group_size=1)])
    assert refusal(dump_dir, run=other) == (
        f"{other} trained on other rollouts at step 0: default/group 1/episode 0/env 0/turn 0 where "
        "default/group 0/episode 0/env 1/turn 0 is recorded; give a run that replayed this recording"
    )
    _, longer = record_scored(tmp_path / "c", [make_step((0.0,), (0.0, 0.0))])
    assert "at step 0: 2 rows, of other lengths or number;" in refusal(dump_dir, run=longer)


def test_a_run_of_the_same_rows_with_other_tokens_is_refused_by_its_digest(tmp_path: Path) -> None:
    step = make_step((0.0,), (0.0,))
    tokens = step.batch.tokens.clone()
    tokens[-1] += 1
    other = replace(step, batch=replace(step.batch, tokens=tokens))
    dump_dir, _ = record_scored(tmp_path / "a", [step])
    _, run_dir = record_scored(tmp_path / "b", [other])
    message = refusal(dump_dir, run=run_dir)
    assert message.startswith(f"{run_dir} trained on other rollouts at step 0: its batch has digest ")
    (run_dir / "run.json").unlink()
    assert "equal to the last bit" in run(dump_dir, run=run_dir)


def test_a_trace_without_scores_is_refused_with_what_to_set(tmp_path: Path) -> None:
    step = make_step((0.0,), (0.0,))
    assert step.train_logprobs is not None
    dump_dir = record(tmp_path / "recording", {0: step.batch})
    write_trace(write_run(tmp_path / "run"), step.batch, step.train_logprobs, kind="input", name="tokens")
    assert refusal(dump_dir, run=tmp_path / "run") == (
        f"{tmp_path / 'run'}: step 0 was traced without old_logprobs of kind score (its kinds: input); run it again "
        "with trace.level=full 'trace.kinds=[score]'"
    )


def test_sketches_are_refused(tmp_path: Path) -> None:
    step = make_step((0.0,), (0.0,))
    assert step.train_logprobs is not None
    dump_dir = record(tmp_path / "recording", {0: step.batch})
    write_trace(write_run(tmp_path / "run"), step.batch, step.train_logprobs, level="sketch")
    assert "has sketches only, which hold no tokens" in refusal(dump_dir, run=tmp_path / "run")


def test_a_response_token_that_nothing_predicts_is_refused(tmp_path: Path) -> None:
    """The first token of a row has no place before it; that of the row before is another's."""
    step = make_step((0.0,), (0.0,))
    mask, lengths = step.batch.response_mask.clone(), torch.zeros(2, dtype=torch.int32)
    mask[3:] = torch.tensor([True, False, False])
    digest = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    batch = replace(step.batch, response_mask=mask, prompt_lengths=lengths, prompt_digests=(digest, digest))
    dump_dir = record(tmp_path / "recording", {0: batch})
    write_trace(write_run(tmp_path / "run"), batch, torch.zeros(2))
    assert "1 of 2 response tokens of step 0 have no old_logprobs in the trace" in refusal(
        dump_dir, run=tmp_path / "run"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "7"], "holds no training step of --steps 7; steps present: train 0, 2"),
        (["--steps", "x"], "--steps: "),
        (["--preset", "icepopp"], "--preset: there is no icepopp (nearest: icepop)"),
        (["--run", "nowhere"], "nowhere does not exist"),
        (["--config-name", "nothing"], "no configuration 'nothing' in "),
        (["--worst", "-1"], "Invalid value for '--worst'"),
        (["--html", "-"], "--html: - is not a file; name one, as in --html page.html"),
    ],
)
def test_bad_input_is_one_clear_message_and_exit_code_5(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dump_dir, _ = record_scored(tmp_path, make_steps())
    monkeypatch.chdir(tmp_path)
    assert cli.main(["correction", str(dump_dir), *arguments]) == 5
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert not (tmp_path / "-").exists()
    assert cli.main(["correction", str(tmp_path / "absent")]) == 5


def test_a_configuration_of_its_own_comes_first(tmp_path: Path) -> None:
    dump_dir, run_dir = record_scored(tmp_path, make_steps(), config=CONFIG)
    (tmp_path / "own.yaml").write_text(
        "exp_name: own\nalgorithm: {rollout_correction: {preset: icepop}}\n", encoding="utf-8"
    )
    arguments = ["correction", str(dump_dir), "--run", str(run_dir), "--preset", "aipo", "--json", str(tmp_path / "j")]
    assert cli.main([*arguments, "--config-name", "own", "--config-path", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "j").read_text())
    assert result["training"]["source"] == "configuration own"
    assert result["measured"]["outcomes"][0]["computation"] == (
        "weights per token; weight 0 for tokens whose ratio is outside [0.5, 5]"
    )


def test_the_recordings_contract_is_read_where_no_run_says() -> None:
    values = {
        "actor_infer.generating_args.temperature": 0.7,
        "actor_infer.only_action_tokens": False,
        "algorithm.rollout_correction.rollout_is": "sequence",
        "algorithm.rollout_correction.rollout_is_threshold": 3.0,
    }
    fields = [ContractField(name=n, value=v, rule=Rule.MAY_DIFFER, advice="") for n, v in values.items()]
    training = training_of_contract(Contract(fields), dump_dir="dumps/v1")
    assert (training.side.temperature, training.side.restricts_vocabulary) == (0.7, False)
    assert training.section is not None
    assert (training.section.spec.weight, training.section.spec.weight_bounds[1]) == ("sequence", 3.0)
    empty = training_of_contract(Contract([]), dump_dir="dumps/v1")
    assert (empty.section, empty.side.temperature, empty.side.correction) == (None, None, None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[1, 2]", "is not a configuration: it has no keys"),
        ("a: [", "is not YAML: line "),
        ("algorithm: {rollout_correction: {rollout_iss: token}}", "has a rollout correction that cannot be read"),
    ],
)
def test_a_run_whose_configuration_cannot_be_read_is_refused(config: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        training_of_run(write_run(tmp_path, config=config))


def test_help_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert "│ correction " in capsys.readouterr().out
