"""Records with four ranks that own their rows, and replays with two: one_per_rank.py --dump-dir DIR"""

import argparse
import multiprocessing

from single_controller import MyScheduler

from mock_scheduler import RolloutBatch, RolloutRequest, RowShard, build_scheduler

Work = tuple[str, str, RowShard]


class MyRankScheduler:
    """Stands for the engine of one rank: it plays only this rank's rows of the batch."""

    def __init__(self, shard: RowShard) -> None:
        self._engine = MyScheduler()
        self._shard = shard

    def get_batch(self, request: RolloutRequest) -> RolloutBatch:
        share = request.batch_size // self._shard.count
        first = share * self._shard.index
        return self._engine.get_batch(request).select(range(first, first + share))


def train_rank(work: Work) -> str:
    mode, dump_dir, shard = work
    config = {"enable": True, "mode": mode, "dump_dir": dump_dir}
    # Adoption, line 1: each rank names its own part; one run id makes their shards one recording.
    scheduler = build_scheduler(config, lambda: MyRankScheduler(shard), {"model": "toy"}, shard=shard, run_id="example")
    with scheduler:
        # Adoption, line 2: the request counts the whole batch.
        batch = scheduler.get_batch(RolloutRequest(global_step=0, batch_size=16))
    built = scheduler.ledger.as_dict()["built"]["scheduler"]
    reward = float(batch.rewards.double().sum())
    return (
        f"{mode} rank {shard.index} of {shard.count}: {len(batch)} rows, reward {reward:.9f}, schedulers built {built}"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dump-dir", required=True)
    options = parser.parse_args(arguments)
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["mock_scheduler.proxy"])  # imported once, for all ranks
    for mode, num_ranks in (("dump", 4), ("mock", 2)):
        ranks: list[Work] = [(mode, options.dump_dir, RowShard(index=i, count=num_ranks)) for i in range(num_ranks)]
        with processes.Pool(num_ranks) as pool:
            print("\n".join(pool.map(train_rank, ranks, chunksize=1)))


if __name__ == "__main__":
    main()
