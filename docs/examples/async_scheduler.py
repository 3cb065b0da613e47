"""Gathers train and validation batches in an asynchronous loop: async_scheduler.py --dump-dir DIR"""

import argparse
import asyncio

from single_controller import MyScheduler

from mock_scheduler import RolloutBatch, RolloutRequest, build_async_scheduler


class MyAsyncScheduler:
    """Stands for an engine that generates beside the training loop."""

    def __init__(self) -> None:
        self._engine = MyScheduler()

    async def get_batch(self, request: RolloutRequest) -> RolloutBatch:
        await asyncio.sleep(0)
        return self._engine.get_batch(request)

    async def suspend(self) -> None:
        await asyncio.sleep(0)

    async def update_weights(self, policy_version: int) -> None:
        await asyncio.sleep(0)


async def train(mode: str, dump_dir: str) -> None:
    config = {"enable": True, "mode": mode, "dump_dir": dump_dir}
    # Adoption, line 1: in place of MyAsyncScheduler(). Files are read and written off the event loop.
    async with build_async_scheduler(config, MyAsyncScheduler, {"model": "toy", "vocab_size": 100}) as scheduler:
        for step in range(2):
            await scheduler.update_weights(step)
            # Adoption, line 2: the requests name step and kind.
            train_batch, val_batch = await asyncio.gather(
                scheduler.get_batch(RolloutRequest(global_step=step, batch_size=8)),
                scheduler.get_batch(RolloutRequest(global_step=step, batch_size=4, mode="val")),
            )
            await scheduler.suspend()
            print(f"{mode} step {step}: train {train_batch.digest()[:12]}, val {val_batch.digest()[:12]}")
    print(scheduler.ledger.render())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dump-dir", required=True)
    options = parser.parse_args(arguments)
    asyncio.run(train("dump", options.dump_dir))
    asyncio.run(train("mock", options.dump_dir))


if __name__ == "__main__":
    main()
