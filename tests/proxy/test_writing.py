"""What dump promises: written in the background, complete before a checkpoint, no error lost; codecs and shards."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.errors import MockSchedulerError, RecordingError, StepNotFoundError
from mock_scheduler.proxy import ProxyScheduler, build_scheduler
from mock_scheduler.recording import RecordingReader
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
    assert scheduler.ledger.as_dict()["called"]["close"] == 1
    scheduler.close()


def test_retention_is_told_of_checkpoints(tmp_path: Path) -> None:
    settings = config(tmp_path, "dump", retention={"keep_last": 1})
    with build_scheduler(settings, Player, make_contract(), plan=requests(range(4))) as scheduler:
        play(scheduler, range(4))
        scheduler.checkpoint_saved(3)
    assert RecordingReader(str(tmp_path / "x")).steps() == {"train": [3]}


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
