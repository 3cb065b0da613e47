"""What dump promises: written in the background, complete before a checkpoint, no error lost; codecs and shards."""

import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.errors import (
    MockSchedulerError,
    RecordingError,
    SchedulerError,
    StepExistsError,
    StepNotFoundError,
)
from mock_scheduler.proxy.build import build_scheduler
from mock_scheduler.proxy.sync_scheduler import ProxyScheduler
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.scheduler import RolloutRequest, RowShard
from tests.proxy.players import Player, batch_of, config, digests, dump, mock, never, play, request, requests
from tests.recording.builders import SAMPLING, make_contract, make_rows


def test_a_checkpoint_never_claims_more_than_is_on_disk(tmp_path: Path) -> None:
    with build_scheduler(config(tmp_path, "dump"), Player, make_contract()) as scheduler:
        play(scheduler, range(3))
        state = scheduler.state_dict()
        assert state["last_steps"] == {"train": 2}
        assert RecordingReader(str(tmp_path / "x")).steps() == {"train": [0, 1, 2]}


def test_a_batch_that_the_pipeline_changes_is_recorded_as_it_was(tmp_path: Path) -> None:
    with build_scheduler(config(tmp_path, "dump"), Player, make_contract()) as scheduler:
        for step in range(4):
            scheduler.get_batch(request(step)).rewards.zero_()
    assert digests(play(mock(tmp_path), range(4))) == digests(map(batch_of, requests(range(4))))


@pytest.mark.parametrize("background", [True, False])
def test_a_step_that_cannot_be_written_is_an_error_and_nothing_follows_it(tmp_path: Path, background: bool) -> None:
    (tmp_path / "x").mkdir()
    scheduler = build_scheduler(config(tmp_path, "dump", background=background), Player, make_contract())
    scheduler.get_batch(request(0))
    scheduler.state_dict()
    (tmp_path / "x/train/step_000001.safetensors").write_bytes(b"in the way")

    def go_on() -> None:
        scheduler.get_batch(request(1))
        scheduler.state_dict()

    with pytest.raises(MockSchedulerError, match="step_000001"):
        go_on()
    with pytest.raises(RecordingError):
        scheduler.get_batch(request(2))
    assert scheduler.ledger.as_dict()["recording"]["recorded_steps"] == 1
    assert (tmp_path / "x/train/step_000001.safetensors").read_bytes() == b"in the way"
    assert not (tmp_path / "x/train/step_000002.safetensors").exists()


def test_an_error_of_the_last_step_is_raised_by_close(tmp_path: Path) -> None:
    scheduler = build_scheduler(config(tmp_path, "dump"), Player, make_contract())
    scheduler.get_batch(request(0))
    scheduler.state_dict()
    (tmp_path / "x/train/step_000001.safetensors").write_bytes(b"in the way")
    scheduler.get_batch(request(1))
    with pytest.raises(MockSchedulerError, match="step_000001"):
        scheduler.close()
    with pytest.raises(RecordingError, match=r"Nothing more is recorded.*step_000001"):
        scheduler.close()
    assert scheduler.ledger.as_dict()["called"]["close"] == 1


@pytest.mark.parametrize("background", [True, False])
def test_no_call_that_follows_a_failed_write_claims_or_removes_anything(tmp_path: Path, background: bool) -> None:
    """The error was forgotten once raised: a checkpoint then claimed a step that is not on disk, retention removed the
    steps before it, and close told of nothing."""
    settings = config(tmp_path, "dump", background=background, retention={"keep_last": 1})
    scheduler = build_scheduler(settings, Player, make_contract())
    for step in range(3):
        scheduler.get_batch(request(step))
    scheduler.state_dict()
    (tmp_path / "x/train/step_000003.safetensors").write_bytes(b"in the way")

    def go_on() -> None:
        scheduler.get_batch(request(3))
        scheduler.state_dict()

    with pytest.raises(StepExistsError):
        go_on()
    for _ in range(2):
        for call in (
            partial(scheduler.get_batch, request(4)),
            scheduler.state_dict,
            partial(scheduler.checkpoint_saved, 2),
        ):
            with pytest.raises(RecordingError, match=r"Nothing more is recorded.*step_000003"):
                call()
    for _ in range(2):
        with pytest.raises(RecordingError, match=r"Nothing more is recorded.*step_000003"):
            scheduler.close()
    assert sorted(file.name for file in (tmp_path / "x/train").glob("step_*"))[0] == "step_000000.safetensors"
    assert not (tmp_path / "x/retention.json").exists()


def test_a_block_that_ends_with_the_writers_error_raises_it_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()

    def run() -> None:
        with build_scheduler(config(tmp_path, "dump", background=False), Player, make_contract()) as scheduler:
            scheduler.get_batch(request(0))
            (tmp_path / "x/train/step_000001.safetensors").write_bytes(b"in the way")
            scheduler.get_batch(request(1))

    with pytest.raises(StepExistsError, match="step_000001"):
        run()


def test_retention_is_told_of_checkpoints_and_what_it_removes_is_counted_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="mock_scheduler.rollout_mock")
    settings = config(tmp_path, "dump", retention={"keep_last": 1})
    with build_scheduler(settings, Player, make_contract(), plan=requests(range(4))) as scheduler:
        play(scheduler, range(4))
        scheduler.checkpoint_saved(3)
    assert RecordingReader(str(tmp_path / "x")).steps() == {"train": [3]}
    assert scheduler.ledger.as_dict()["recording"]["removed_steps"] == 3
    assert (
        "[Rollout Mock] Removed 3 recorded steps, which the checkpoint of step 3 makes superfluous "
        "(rollout_mock.retention): train 0-2"
    ) in caplog.messages


def test_a_cache_that_only_replays_removes_nothing_under_other_readers(tmp_path: Path) -> None:
    """Another run, whose plan had been checked, then found no step."""
    dump(tmp_path, range(6))
    other = mock(tmp_path, plan=requests(range(6)))
    settings = config(tmp_path, "cache", retention={"keep_last": 2})
    with build_scheduler(settings, never, make_contract()) as scheduler:
        play(scheduler, range(4))
        scheduler.checkpoint_saved(4)
    assert "removed_steps" not in scheduler.ledger.as_dict()["recording"]
    assert digests(play(other, range(6))) == digests(map(batch_of, requests(range(6))))


def test_a_metric_that_is_no_finite_number_is_left_out_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """JSON has none: the first NaN ended the recording."""

    class Empty(Player):
        def collect_metrics(self) -> dict[str, float]:
            return {"reward/mean": float("nan"), "time/rollout_s": 0.5, "ratio": float("inf")}

    with build_scheduler(config(tmp_path, "dump"), Empty, make_contract()) as scheduler:
        play(scheduler, range(2))
        assert list(scheduler.collect_metrics()) == ["reward/mean", "time/rollout_s", "ratio"]
    assert RecordingReader(str(tmp_path / "x")).load_step(request(1)).info.metrics == {"time/rollout_s": 0.5}
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sorted(said) == [
        "[Rollout Mock] Metric 'ratio' is not recorded where it is no finite number, as at train step 0 (inf)",
        "[Rollout Mock] Metric 'reward/mean' is not recorded where it is no finite number, as at train step 0 (nan)",
    ]


def test_a_metric_that_is_no_number_is_named(tmp_path: Path) -> None:
    class Named(Player):
        def collect_metrics(self) -> dict[str, float]:
            return {"reward": 1.0, "engine": "vllm", "none": None}  # type: ignore[dict-item]

    scheduler = build_scheduler(config(tmp_path, "dump"), Named, make_contract())
    with scheduler, pytest.raises(SchedulerError) as caught:
        scheduler.get_batch(request(0))
    assert str(caught.value) == (
        "train step 0: Named.collect_metrics gave what is no number: 'engine' is 'vllm'; 'none' is None; expected a "
        "dict of names and numbers"
    )


@dataclass
class Padded:
    """A framework's own batch."""

    tokens: torch.Tensor
    identities: list[str]


class PaddedCodec:
    """Records the padded tensor as an extra beside rows."""

    def encode(self, native: object, item: RolloutRequest) -> RolloutBatch:
        assert isinstance(native, Padded)
        rows = make_rows(2, 2, seed=item.global_step)
        extras = [{"padded": native.tokens[index], "uid": native.identities[index]} for index in range(4)]
        with_extras = [replace(row, extras=extra) for row, extra in zip(rows, extras, strict=True)]
        return RolloutBatch.from_trajectories(with_extras, sampling=SAMPLING, group_size=2)

    def decode(self, batch: RolloutBatch) -> object:
        rows = batch.rows()
        return Padded(
            tokens=torch.stack([row.extras["padded"] for row in rows]), identities=[row.extras["uid"] for row in rows]
        )


class PaddedPlayer:
    def __init__(self, given: list[Padded]) -> None:
        self.given = given

    def get_batch(self, item: RolloutRequest) -> Padded:
        tokens = torch.full((4, 6), item.global_step, dtype=torch.int64)
        self.given.append(Padded(tokens=tokens, identities=[f"uid-{item.global_step}-{index}" for index in range(4)]))
        return self.given[-1]


@pytest.mark.parametrize("mode", ["real", "dump", "verify"])
def test_a_codec_leaves_the_frameworks_batch_untouched_where_it_is_played(tmp_path: Path, mode: str) -> None:
    given: list[Padded] = []
    if mode == "verify":
        dump_padded(tmp_path)
    settings = config(tmp_path, mode)
    with build_scheduler(settings, lambda: PaddedPlayer(given), make_contract(), codec=PaddedCodec()) as scheduler:
        assert scheduler.get_batch(request(3)) is given[0]
    assert scheduler.ledger.as_dict()["recording"].get("verified_steps", 0) == (mode == "verify")


def dump_padded(tmp_path: Path) -> Padded:
    settings = config(tmp_path, "dump")
    with build_scheduler(settings, lambda: PaddedPlayer([]), make_contract(), codec=PaddedCodec()) as scheduler:
        batch = scheduler.get_batch(request(3))
    assert isinstance(batch, Padded)
    return batch


def test_a_codec_gives_the_frameworks_batch_back_where_it_is_replayed(tmp_path: Path) -> None:
    dumped = dump_padded(tmp_path)
    replayed = mock(tmp_path, codec=PaddedCodec()).get_batch(request(3))
    assert isinstance(replayed, Padded)
    assert torch.equal(replayed.tokens, dumped.tokens)
    assert replayed.identities == dumped.identities


class ShardPlayer(Player):
    """Plays this process's own rows of the batch."""

    def __init__(self, shard: RowShard) -> None:
        super().__init__()
        self.shard = shard

    def get_batch(self, item: RolloutRequest) -> RolloutBatch:
        share = item.batch_size // self.shard.count
        first = share * self.shard.index
        return batch_of(item).select(range(first, first + share))


def sharded(tmp_path: Path, mode: str, shard: RowShard, **options: object) -> ProxyScheduler:
    make_real = never if mode == "mock" else lambda: ShardPlayer(shard)
    return build_scheduler(
        config(tmp_path, mode),
        make_real,
        make_contract(),
        shard=shard,
        run_id="run-1",
        plan=requests(range(2)),
        **options,
    )


def shards(count: int) -> list[RowShard]:
    return [RowShard(index=index, count=count) for index in range(count)]


def dump_shards(tmp_path: Path, count: int) -> None:
    schedulers = [sharded(tmp_path, "dump", shard) for shard in shards(count)]
    for step in range(2):
        for scheduler in reversed(schedulers):
            scheduler.get_batch(request(step))
    for scheduler in schedulers:
        scheduler.close()


@pytest.mark.parametrize("count", [1, 2, 4])
def test_what_four_processes_recorded_is_replayed_by_any_number(tmp_path: Path, count: int) -> None:
    dump_shards(tmp_path, 4)
    for step in range(2):
        replayed = [sharded(tmp_path, "mock", shard).get_batch(request(step)) for shard in shards(count)]
        assert [len(batch) for batch in replayed] == [4 // count] * count
        rows = [row for batch in replayed for row in batch.rows()]
        whole = RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=2)
        assert whole.is_identical(batch_of(request(step)))


def test_one_file_is_replayed_by_several_processes(tmp_path: Path) -> None:
    dump(tmp_path, range(2))
    halves = [sharded(tmp_path, "mock", shard).get_batch(request(1)) for shard in shards(2)]
    assert [list(half.identities) for half in halves] == [
        list(batch_of(request(1)).identities[:2]),
        list(batch_of(request(1)).identities[2:]),
    ]


def test_a_step_of_which_a_process_recorded_nothing_is_not_there(tmp_path: Path) -> None:
    _, second = (sharded(tmp_path, "dump", shard) for shard in shards(2))
    second.get_batch(request(0))
    second.close()
    assert [file.name for file in (tmp_path / "x/train/step_000000").glob("shard_*")] == [
        "shard_00001-of-00002.safetensors"
    ]
    with pytest.raises(StepNotFoundError, match="Steps train 0-1 were not run in dump mode"):
        sharded(tmp_path, "mock", RowShard(index=1, count=2))
