"""What is refused of an answer before it is trained on or recorded."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.batch.trajectory import Trajectory
from mock_scheduler.config.rollout_mock import RolloutMockConfig
from mock_scheduler.errors import BatchError, RecordingError, SchedulerError
from mock_scheduler.proxy.build import build_scheduler
from mock_scheduler.proxy.sync_scheduler import ProxyScheduler
from mock_scheduler.scheduler import RolloutRequest, RowShard
from tests.proxy.players import Player, batch_of, config, dump, mock, never, request
from tests.recording.builders import SAMPLING, make_contract, make_identity, make_row, make_rows


def plays(rows: Sequence[Trajectory], *, group_size: int | None = None) -> type:
    """A scheduler that always gives these rows."""
    batch = RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=group_size)

    class Given:
        def get_batch(self, request: RolloutRequest) -> RolloutBatch:
            return batch

    return Given


def live(tmp_path: Path, make_real: type, **changes: object) -> ProxyScheduler:
    return build_scheduler(config(tmp_path, "dump", **changes), make_real, make_contract())


def test_another_number_of_trajectories_is_refused_and_not_recorded(tmp_path: Path) -> None:
    scheduler = live(tmp_path, Player)
    with pytest.raises(BatchError) as caught:
        scheduler.get_batch(request(0, batch_size=8))
    assert str(caught.value) == "train step 0: the scheduler returned 4 trajectories; 8 were asked for"
    scheduler.close()
    assert not (tmp_path / "x/train").exists()


def test_what_is_no_batch_is_refused() -> None:
    class Wrong:
        def get_batch(self, request: RolloutRequest) -> list[int]:
            return [1, 2]

    with pytest.raises(SchedulerError) as caught:
        build_scheduler(RolloutMockConfig(), Wrong, make_contract()).get_batch(request(0))
    assert str(caught.value) == (
        "train step 0: get_batch returned list; expected RolloutBatch (a framework's own batch needs "
        "build_scheduler(codec=...))"
    )


def test_rows_of_another_scheduler_are_refused(tmp_path: Path) -> None:
    scheduler = live(tmp_path, plays(make_rows(2, 2)))
    with pytest.raises(BatchError) as caught:
        scheduler.get_batch(request(0, scheduler_id="math"))
    assert str(caught.value) == (
        "train step 0: rows of scheduler 'default' (4 rows) came for a request of scheduler 'math'"
    )


def test_groups_that_are_not_whole_are_refused_and_reported_where_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = make_rows(2, 3)
    cut = plays([rows[0], rows[1], rows[2], rows[4]])
    with pytest.raises(BatchError) as caught:
        live(tmp_path / "refused", cut).get_batch(request(0, group_size=3))
    assert str(caught.value) == (
        "train step 0: 1 groups are not whole (group_size 3): default/group 1/episode 0: 1 of 3 trajectories; "
        "rollout_mock.on_partial_groups=report accepts them"
    )
    caplog.set_level(logging.INFO, logger="mock_scheduler.rollout_mock")
    with live(tmp_path, cut, on_partial_groups="report") as scheduler:
        scheduler.get_batch(request(0, group_size=3))
    assert (
        "[Rollout Mock] Step 0: 1 groups are not whole (group_size 3): default/group 1/episode 0: 1 of 3 trajectories"
    ) in caplog.messages
    with pytest.raises(BatchError, match="1 groups are not whole"):
        mock(tmp_path).get_batch(request(0, group_size=3))


def repeating() -> type:
    rows = make_rows(2, 2)
    return plays([*rows[:3], replace(rows[0], identity=rows[3].identity)])


def test_repeated_rows_are_reported_refused_or_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="mock_scheduler.rollout_mock")
    with live(tmp_path / "a", repeating(), on_duplicate_rows="ignore") as scheduler:
        scheduler.get_batch(request(0))
    assert "content of another row" not in caplog.text
    with live(tmp_path / "b", repeating()) as scheduler:
        scheduler.get_batch(request(0))
    assert "[Rollout Mock] Step 0: 1 of 4 rows have the content of another row" in caplog.messages
    with pytest.raises(BatchError) as caught:
        live(tmp_path / "c", repeating(), on_duplicate_rows="error").get_batch(request(0))
    assert str(caught.value) == (
        "train step 0: 1 of 4 rows have the content of another row: default/group 1/episode 0/env 1/turn 0 repeats "
        "default/group 0/episode 0/env 0/turn 0; rollout_mock.on_duplicate_rows=report accepts them"
    )


def test_prompts_that_the_pipeline_did_not_ask_for_are_refused_live_and_replayed(tmp_path: Path) -> None:
    """Recorded responses were once judged by the answers to fresh prompts."""
    own = batch_of(request(0)).prompt_digests
    other = (*own[:3], "f" * 64)
    with live(tmp_path, Player) as scheduler:
        with pytest.raises(BatchError) as caught:
            scheduler.get_batch(request(0, prompt_digests=other))
        assert str(caught.value) == (
            "train step 0: its prompts are not those of the pipeline: 1 of 4 asked for are absent, 1 others are there "
            "(one counted per trajectory; first digest ffffffffffffffff…)"
        )
        scheduler.get_batch(request(0, prompt_digests=tuple(reversed(own))))
    with pytest.raises(RecordingError, match="prompt"):
        mock(tmp_path).get_batch(request(0, prompt_digests=other))
    mock(tmp_path).get_batch(request(0, prompt_digests=tuple(reversed(own))))


def turns(num_turns: int) -> type:
    """Two groups of two trajectories with one prompt each, whose rows are turns."""
    rows = [
        replace(make_row(group, env, tokens=(1 + group, 5 + turn, 3, 4)), identity=make_identity(group, env, turn=turn))
        for group in range(2)
        for env in range(2)
        for turn in range(num_turns)
    ]
    return plays(rows, group_size=2)


@pytest.mark.parametrize("num_turns", [1, 2])
def test_prompts_are_asked_for_once_per_trajectory_or_group_alike_live_and_replayed(
    tmp_path: Path, num_turns: int
) -> None:
    """A live answer was compared row by row, a recorded one by trajectory or group: no request passed both."""
    make_real = turns(num_turns)
    batch = make_real().get_batch(request(0))
    rows = dict(zip(batch.identities, batch.prompt_digests, strict=True))
    by_trajectory = tuple(digest for identity, digest in rows.items() if identity.turn == 0)
    by_group = (by_trajectory[0], by_trajectory[2])
    assert len(set(by_trajectory)) == 2
    for number, asked in enumerate((by_trajectory, by_group, by_group[::-1])):
        folder = tmp_path / str(number)
        with live(folder, make_real) as scheduler:
            scheduler.get_batch(request(0, prompt_digests=asked))
        mock(folder, plan=[request(0, prompt_digests=asked)]).get_batch(request(0, prompt_digests=asked))
    others = ((by_group[0],), (by_group[0], "f" * 64), (*by_trajectory[:3], "f" * 64), (*by_trajectory, "f" * 64))
    for number, wrong in enumerate(others):
        with pytest.raises(BatchError, match="its prompts are not those of the pipeline"):
            live(tmp_path / f"wrong-{number}", make_real).get_batch(request(0, prompt_digests=wrong))
        with pytest.raises(RecordingError, match="holds other prompts than the run asks for"):
            mock(tmp_path / "0").get_batch(request(0, prompt_digests=wrong))


def test_a_process_with_a_part_of_the_batch_has_a_part_of_its_prompts(tmp_path: Path) -> None:
    dump(tmp_path, [0])
    shard, own = RowShard(index=1, count=2), batch_of(request(0)).prompt_digests
    mock(tmp_path, shard=shard).get_batch(request(0, prompt_digests=own))

    class Second:
        def get_batch(self, item: RolloutRequest) -> RolloutBatch:
            return batch_of(item).select([2, 3])

    scheduler = build_scheduler(RolloutMockConfig(), Second, make_contract(), shard=shard)
    scheduler.get_batch(request(0, prompt_digests=own))
    with pytest.raises(BatchError, match="0 of 4 asked for are absent, 1 others are there"):
        scheduler.get_batch(request(1, prompt_digests=(*batch_of(request(1)).prompt_digests[:3], "f" * 64)))


def test_a_recording_of_another_data_cursor_is_refused(tmp_path: Path) -> None:
    with live(tmp_path, Player) as scheduler:
        scheduler.get_batch(request(0, data_cursor={"epoch": 0}))
    mock(tmp_path).get_batch(request(0))
    mock(tmp_path).get_batch(request(0, data_cursor={"epoch": 0}))
    with pytest.raises(RecordingError, match="cursor"):
        mock(tmp_path).get_batch(request(0, data_cursor={"epoch": 1}))


def test_all_problems_of_an_answer_are_listed(tmp_path: Path) -> None:
    with pytest.raises(BatchError) as caught:
        live(tmp_path, plays([make_row()])).get_batch(request(0, scheduler_id="math", group_size=2))
    assert str(caught.value) == (
        "train step 0: the answer has 3 problems:\n"
        "  - the scheduler returned 1 trajectories; 4 were asked for\n"
        "  - rows of scheduler 'default' (1 rows) came for a request of scheduler 'math'\n"
        "  - 1 groups are not whole (group_size 2): default/group 0/episode 0: 1 of 2 trajectories; "
        "rollout_mock.on_partial_groups=report accepts them"
    )


def test_a_batch_that_cannot_be_dealt_to_the_shards_is_refused_before_any_rollout(tmp_path: Path) -> None:
    with pytest.raises(SchedulerError) as caught:
        build_scheduler(
            config(tmp_path, "dump"),
            never,
            make_contract(),
            plan=[request(0)],
            shard=RowShard(index=0, count=3),
            run_id="r",
        )
    assert str(caught.value) == (
        "train step 0: 4 trajectories cannot be dealt to 3 row shards: give a batch_size that is a multiple of 3"
    )


def test_two_domains_of_one_run_replay_their_own_rows(tmp_path: Path) -> None:
    """In ROLL every domain wrote train/step_N.pkl: the last one won, and all replayed its rows."""
    domains = ("math", "code")
    asked = {domain: request(0, scheduler_id=domain) for domain in domains}
    schedulers = {
        domain: build_scheduler(config(tmp_path, "dump"), Player, make_contract(), run_id="run-7", plan=[asked[domain]])
        for domain in domains
    }
    for domain, scheduler in schedulers.items():
        scheduler.get_batch(asked[domain])
    for scheduler in schedulers.values():
        scheduler.close()
    for domain in domains:
        replayed = mock(tmp_path, plan=[asked[domain]]).get_batch(asked[domain])
        assert replayed.is_identical(batch_of(asked[domain]))
        assert {identity.scheduler_id for identity in replayed.identities} == {domain}


def test_an_answer_from_the_other_domains_recording_is_found(tmp_path: Path) -> None:
    """Planted: the file of one domain in the place of the other's."""
    dump(tmp_path, [0])
    with build_scheduler(config(tmp_path / "m", "dump"), Player, make_contract()) as scheduler:
        scheduler.get_batch(request(0, scheduler_id="math"))
    source = tmp_path / "m/x/train.math/step_000000.safetensors"
    (tmp_path / "x/train/step_000000.safetensors").write_bytes(source.read_bytes())
    with pytest.raises(RecordingError, match="scheduler_id 'math' instead of 'default'"):
        mock(tmp_path, plan=[request(0)])


# --- Rows that cannot be true, or seldom are ---


def versioned(*versions: int, **changes: object) -> type:
    """A scheduler whose rows of step n are of the n-th version."""

    class Versioned:
        def get_batch(self, request: RolloutRequest) -> RolloutBatch:
            number = torch.tensor([versions[request.global_step]], dtype=torch.int32)
            rows = [
                replace(row, turn_rewards=row.turn_rewards[:1], policy_versions=number, **changes)  # type: ignore[arg-type]
                for row in make_rows(2, 2, seed=request.global_step)
            ]
            return RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=None)

    return Versioned


AHEAD = (
    "train step 1: 4 turns of 4 with a policy version ahead of the policy: default/group 0/episode 0/env 0/turn 0: "
    "version 57, and the newest policy is 1"
)


def test_versions_ahead_of_the_policy_are_refused_with_the_way_out(tmp_path: Path) -> None:
    scheduler = live(tmp_path, versioned(0, 57))
    scheduler.get_batch(request(0))
    with pytest.raises(BatchError) as caught:
        scheduler.get_batch(request(1, policy_version=1))
    assert str(caught.value) == (
        f"{AHEAD}; stamp each turn with the version of the weights that sampled it, counted as the trainer counts them "
        "(policy_version of the request, and of update_weights); rollout_mock.on_implausible_rows=report accepts them"
    )
    scheduler.close()
    assert [path.name for path in (tmp_path / "x/train").iterdir()] == ["step_000000.safetensors"]


def test_what_was_accepted_when_recorded_is_reported_when_replayed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with live(tmp_path, versioned(0, 57), on_implausible_rows="report") as scheduler:
        scheduler.get_batch(request(0))
        scheduler.get_batch(request(1, policy_version=1))
    assert [record.levelname for record in caplog.records if "ahead of the policy" in record.message] == ["WARNING"]
    caplog.clear()
    replaying = mock(tmp_path)
    replaying.get_batch(request(0))
    replaying.get_batch(request(1, policy_version=1))
    assert [record.message for record in caplog.records if "ahead of the policy" in record.message] == [
        f"[Rollout Mock] Step 1: {AHEAD.removeprefix('train step 1: ')}; stamp each turn with the version of the "
        "weights that sampled it, counted as the trainer counts them (policy_version of the request, and of "
        "update_weights)"
    ]


def test_a_version_of_weights_that_came_while_rows_were_played_is_not_ahead(tmp_path: Path) -> None:
    scheduler = live(tmp_path, versioned(0, 2))
    scheduler.get_batch(request(0))
    scheduler.update_weights(2)
    assert len(scheduler.get_batch(request(1, policy_version=1))) == 4
    scheduler.close()


@pytest.mark.parametrize(
    ("make_real", "found"),
    [
        (
            versioned(-3),
            "4 turns of 4 with a negative policy version: default/group 0/episode 0/env 0/turn 0: version -3",
        ),
        (plays([make_row(rollout_logprobs=(-0.5, 0.25))]), "1 response token of 2 with a log-probability above 0"),
    ],
)
def test_what_cannot_be_true_is_refused_reported_or_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make_real: type, found: str
) -> None:
    size = 4 if "turns" in found else 1
    for level in ("error", "strict"):
        with pytest.raises(BatchError, match=found):
            live(tmp_path / level, make_real, on_implausible_rows=level).get_batch(request(0, batch_size=size))
    with live(tmp_path / "report", make_real, on_implausible_rows="report") as scheduler:
        scheduler.get_batch(request(0, batch_size=size))
    assert found in caplog.text
    caplog.clear()
    with live(tmp_path / "ignore", make_real, on_implausible_rows="ignore") as scheduler:
        scheduler.get_batch(request(0, batch_size=size))
    assert found not in caplog.text


def test_another_history_is_reported_and_with_strict_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [make_row(), make_row(tokens=(1, 2, 9, 4, 5), response=[False] * 3 + [True] * 2, turn=1)]
    words = "1 trajectory of 1 with a turn whose tokens do not begin with those of the turn before"
    with live(tmp_path / "a", plays(rows)) as scheduler:
        scheduler.get_batch(request(0, batch_size=1))
    assert [record.levelname for record in caplog.records if words in record.message] == ["WARNING"]
    with pytest.raises(BatchError, match="token 2 was 3, it is 9 now"):
        live(tmp_path / "b", plays(rows), on_implausible_rows="strict").get_batch(request(0, batch_size=1))


def test_a_trainers_counter_that_falls_back_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scheduler = live(tmp_path / "a", versioned(0, 1, 1))
    scheduler.get_batch(request(0, policy_version=57))
    scheduler.get_batch(request(1, policy_version=58))
    with pytest.raises(SchedulerError) as caught:
        scheduler.get_batch(request(2, policy_version=1))
    assert str(caught.value) == (
        "train step 2: policy_version is 1, and train step 1 had 58: the trainer's counter of updates fell back. Go on "
        "from a checkpoint with load_state_dict, and count on from its version; "
        "rollout_mock.on_implausible_rows=report accepts them"
    )
    with live(tmp_path / "b", versioned(0, 1), on_implausible_rows="report") as reporting:
        reporting.get_batch(request(0, policy_version=57))
        reporting.get_batch(request(1, policy_version=1))
    assert "[Rollout Mock] train step 1: policy_version is 1, and train step 0 had 57" in caplog.text


def test_an_update_of_weights_that_falls_back_is_refused(tmp_path: Path) -> None:
    scheduler = live(tmp_path, versioned(0, 1))
    scheduler.update_weights(5)
    with pytest.raises(SchedulerError, match="update_weights: policy_version is 4, and the update before had 5"):
        scheduler.update_weights(4)
    scheduler.update_weights(5)
    scheduler.close()


def test_requests_that_overlap_and_a_resume_have_no_counter_that_fell(tmp_path: Path) -> None:
    """One-step-off training asks for a later step with older weights than those of a validation, or out of order."""
    scheduler = live(tmp_path, versioned(0, 0, 0, 0))
    scheduler.get_batch(request(2, policy_version=2))
    scheduler.get_batch(request(1, policy_version=1))
    scheduler.get_batch(request(3, mode="val", policy_version=4))
    scheduler.get_batch(request(3, policy_version=3))
    state = scheduler.state_dict()
    scheduler.close()
    resumed = build_scheduler(config(tmp_path / "y", "dump"), versioned(0, 0), make_contract())
    resumed.get_batch(request(0, policy_version=9))
    resumed.load_state_dict({**state, "scheduler": {}})
    resumed.get_batch(request(1, policy_version=1))
    resumed.close()
