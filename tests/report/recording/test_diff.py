"""``diff``: equal recordings are equal however they are stored; the first difference is named to the position."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mock_scheduler import cli
from mock_scheduler.errors import StepNotFoundError
from mock_scheduler.recording.contract import Contract, ContractField, Rule
from tests.recording.builders import make_batch
from tests.report.recordings import (
    IN_PLACE,
    change_contract,
    diff,
    flip_last_byte,
    make_changed,
    make_played,
    record,
    write,
)


def test_equal_recordings_are_identical_however_they_are_stored(tmp_path: Path) -> None:
    a = record(tmp_path / "a", {0: make_batch(), 1: make_batch(seed=1)})
    b = record(tmp_path / "b", {}, run_id="run-2")
    write(b, {0: make_batch()}, run_id="run-2", options=replace(IN_PLACE, compression="zstd"))
    write(b, {1: make_batch(seed=1)}, run_id="run-2")
    assert diff(a, b) == (
        0,
        "A  FOLDER_A\nB  FOLDER_B\nidentical: train 0-1\nidentical: every step is equal to the last bit\n",
    )


def test_the_first_difference_of_recordings_is_named_down_to_the_position(tmp_path: Path) -> None:
    a = record(tmp_path / "a", {step: make_played(0, 1, 0, 1) for step in (0, 2, 3, 4, 9)})
    contract = change_contract(vocab_size=17, layout="tp2")
    b = record(tmp_path / "b", {0: make_played(0, 1, 0, 1), 2: make_changed()}, contract=contract)
    write(b, {3: make_played(0, 1, 0, 1)}, contract=contract, policy_version=5)
    write(b, {4: make_played(0, 1)}, contract=contract)
    code, text = diff(a, b)
    assert code == 1
    assert text == (
        "A  FOLDER_A\n"
        "B  FOLDER_B\n"
        "contract: vocab_size: A 16, B 17\n"
        'contract: layout: A "tp1", B "tp2" (may differ)\n'
        "only in A: train 9\n"
        "identical: train 0\n"
        "\n"
        "train step 2\n"
        "  A and B differ: 1 of 4 rows in both differ\n"
        "  first: default/group 0/episode 0/env 1/turn 0: tokens[3]: A 3, B 9 (1 of 5 positions differ)\n"
        "    rollout_logprobs[1]: A -0.5, B -0.25 (2 of 3 positions differ)\n"
        "  rows by field: tokens 1, rollout_logprobs 1\n"
        "\n"
        "train step 3\n"
        "  policy_version: A 0, B 5\n"
        "\n"
        "train step 4\n"
        "  A and B differ: 0 of 2 rows in both differ; 2 of 4 rows only in A\n"
        "  first: default/group 1/episode 0/env 0/turn 0: only in A\n"
        "  only in A:\n"
        "    default/group 1/episode 0/env 0/turn 0\n"
        "    default/group 1/episode 0/env 1/turn 0\n"
        "different, first in train step 2: default/group 0/episode 0/env 1/turn 0: tokens[3]: A 3, B 9 (1 of 5 "
        "positions differ)\n"
    )


def test_steps_beyond_the_first_three_that_differ_have_one_line_each(tmp_path: Path) -> None:
    a = record(tmp_path / "a", {step: make_played(0, 1, 0, 1) for step in range(26)})
    b = record(tmp_path / "b", {step: make_changed() for step in range(26)})
    lines = diff(a, b)[1].splitlines()
    assert lines[-22:-20] == [
        "train step 3: 1 of 4 rows in both differ",
        "train step 4: 1 of 4 rows in both differ",
    ]
    assert lines[-3:-1] == [
        "train step 22: 1 of 4 rows in both differ",
        "and 3 more steps that differ (all with --json)",
    ]


@pytest.mark.parametrize(("field", "code"), [({"vocab_size": 17}, 1), ({"layout": "tp2"}, 0)])
def test_a_contract_that_must_match_counts_as_a_difference(field: dict[str, object], code: int, tmp_path: Path) -> None:
    a = record(tmp_path / "a", {0: make_batch()})
    b = record(tmp_path / "b", {0: make_batch()}, contract=change_contract(**field))
    found, text = diff(a, b)
    assert found == code
    verdict = (
        "different, in the contract alone: every step in both is equal" if code else "identical: every step is equal"
    )
    assert text.splitlines()[-1] == f"{verdict} to the last bit"


def test_of_many_contract_fields_that_may_differ_the_first_are_shown(tmp_path: Path) -> None:
    contracts = [
        Contract(
            [
                *(
                    ContractField(name=f"field_{number}", value=value, rule=Rule.MAY_DIFFER, advice="")
                    for number in range(12)
                ),
                ContractField(name="seed", value=value, rule=Rule.MUST_MATCH, advice="Set seed."),
            ]
        )
        for value in range(2)
    ]
    a, b = (
        record(tmp_path / name, {0: make_batch()}, contract=contract)
        for name, contract in zip("ab", contracts, strict=True)
    )
    assert diff(a, b)[1].splitlines()[2:14] == [
        "contract: seed: A 0, B 1",
        *(f"contract: field_{number}: A 0, B 1 (may differ)" for number in range(10)),
        "contract: and 2 more that may differ (all with --json)",
    ]


def test_recordings_without_a_common_step_cannot_be_compared(tmp_path: Path) -> None:
    a = record(tmp_path / "a", {0: make_batch(), 1: make_batch()})
    b = record(tmp_path / "b", {1: make_batch(seed=1), 2: make_batch()})
    assert diff(a, b, steps="0,2") == (
        3,
        "A  FOLDER_A\nB  FOLDER_B\nonly in A: train 0\nonly in B: train 2\nnothing to compare: no step is in both\n",
    )
    assert diff(a, b)[0] == 1


def test_steps_that_neither_recording_has_are_refused_with_those_that_are(tmp_path: Path) -> None:
    a = record(tmp_path / "a", {0: make_batch(), 1: make_batch()})
    b = record(tmp_path / "b", {1: make_batch(seed=1), 2: make_batch()})
    with pytest.raises(StepNotFoundError) as caught:
        diff(a, b, steps="7")
    assert str(caught.value) == f"steps 7: there is no such step; {a} has train 0-1; {b} has train 1-2"


def test_differences_are_written_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = record(tmp_path / "a", {0: make_played(0, 1, 0, 1), 1: make_batch()})
    b = record(tmp_path / "b", {0: make_changed(), 1: make_batch()}, contract=change_contract(vocab_size=17))
    assert cli.main(["diff", str(a), str(b), "--json", "-"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "format_version": 1,
        "a": str(a),
        "b": str(b),
        "exit_code": 1,
        "contract": [{"name": "vocab_size", "a": "16", "b": "17", "reason": "", "must_match": True}],
        "only_a": {},
        "only_b": {},
        "identical": {"train": "1"},
        "different": [
            {
                "folder": "train",
                "step": 0,
                "first": "default/group 0/episode 0/env 1/turn 0: tokens[3]: A 3, B 9 (1 of 5 positions differ)",
                "info": [],
                "whole_batch": [],
                "num_rows": [4, 4],
                "only_a": [],
                "only_b": [],
                "num_different_rows": 1,
                "rows_by_field": {"tokens": 1, "rollout_logprobs": 1},
                "rows": [
                    {
                        "identity": "default/group 0/episode 0/env 1/turn 0",
                        "fields": [
                            {
                                "field": "tokens",
                                "where": "[3]",
                                "a": "3",
                                "b": "9",
                                "extent": "1 of 5 positions differ",
                            },
                            {
                                "field": "rollout_logprobs",
                                "where": "[1]",
                                "a": "-0.5",
                                "b": "-0.25",
                                "extent": "2 of 3 positions differ",
                            },
                        ],
                    }
                ],
            }
        ],
    }


def test_a_step_that_cannot_be_read_is_no_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (record(tmp_path / name, {0: make_batch()}) for name in "ab")
    flip_last_byte(b / "train" / "step_000000.safetensors")
    assert cli.main(["diff", str(a), str(b)]) == 5
    assert capsys.readouterr().err.startswith(f"error: {b}/train/step_000000.safetensors: tensor 'terminations'")


def test_a_recording_is_not_compared_with_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = record(tmp_path / "a", {0: make_batch()})
    assert cli.main(["diff", str(a), f"{a}/"]) == 5
    assert capsys.readouterr().err == (f"error: {a} and {a}/ are the same recording; give two different ones\n")
