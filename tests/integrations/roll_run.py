"""ROLL's schedulers as Ray's actors, with its own DataProto: ``python roll_run.py FOLDER MODE``.

The pipeline stands for ROLL's, and makes its actors as ROLL does of the class that the adapter puts in ROLL's place.
What came of them is written to ``FOLDER/MODE.pt``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import ray
import torch
from roll.distributed.scheduler.protocol import DataProto
from roll.distributed.scheduler.transfer_backend import init_transfer_backend
from tensordict import TensorDict

from mock_scheduler.adapters.roll.codec import LEFT_AT
from mock_scheduler.adapters.roll.rollouts import with_rollouts
from tests.adapters.roll import signatures
from tests.adapters.roll.signatures import BasePipeline, agentic_batch, config
from tests.adapters.roll.signatures import Cluster as Cluster


class RolloutScheduler(signatures.RolloutScheduler):
    """ROLL's, as far as the adapter meets it, which answers with ROLL's own class."""

    async def get_batch(self, data: Any, batch_size: int) -> Any:
        step = data.meta_info["global_step"]
        drawn = agentic_batch(step, rows=max(batch_size, 2), seed=int(self.mode == "val"))
        batch = DataProto(
            batch=TensorDict(drawn.batch, batch_size=[len(drawn.batch["input_ids"])]),
            non_tensor_batch=drawn.non_tensor_batch,
            meta_info={**drawn.meta_info, LEFT_AT: time.time()},
        )
        await self._maybe_dump_batch(batch, step)
        return DataProto.to_remote(batch)


class Pipeline(BasePipeline):
    """As ``AgenticPipeline`` makes and asks its schedulers."""

    def __init__(self, pipeline_config: Any) -> None:
        super().__init__(pipeline_config)
        init_transfer_backend(None)  # ROLL's default: data stay in the answer
        infer = Cluster(name="actor_infer", worker_cls=None, resource_manager=None, worker_config=None)
        self.schedulers = {
            mode: ray.remote(RolloutScheduler)
            .options(name=f"RolloutScheduler-{mode}", num_cpus=0)
            .remote(
                config=pipeline_config,
                env_manager_config=None,
                resource_manager=None,
                infer_cluster=infer,
                mode=mode,
            )
            for mode in ("train", "val")
        }
        ray.get([scheduler.initialize.remote() for scheduler in self.schedulers.values()])
        self.set_model_update_pair(src_cluster=None, tgt_cluster=infer)

    def run(self) -> list[Any]:
        found = []
        for step in range(3):
            question = DataProto(meta_info={"global_step": step})
            ray.get(self.schedulers["train"].suspend.remote())
            asked = [self.schedulers["val"].get_batch.remote(question, -1)] if step == 0 else []
            asked.append(self.schedulers["train"].get_batch.remote(question, 4))
            found += [_plain(batch) for batch in ray.get(asked)]
        self.counts = {mode: ray.get(scheduler.counts.remote()) for mode, scheduler in self.schedulers.items()}
        ray.get([scheduler.shutdown.remote() for scheduler in self.schedulers.values()])
        return found


def _plain(batch: Any) -> Any:
    assert type(batch) is DataProto
    meta = {name: value for name, value in batch.meta_info.items() if name != LEFT_AT}
    tensors = {name: batch.batch[name] for name in sorted(batch.batch.keys())}
    arrays = {name: batch.non_tensor_batch[name].tolist() for name in sorted(batch.non_tensor_batch.keys())}
    return [tensors, arrays, meta]


def main(folder: Path, mode: str) -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    # Relative to the driver's folder, where the actors are not.
    os.chdir(folder)
    settings = {"rollout_mock": {"enable": True, "mode": mode, "dump_dir": "dump"}}
    pipeline: Any = with_rollouts(Pipeline, settings)(pipeline_config=config())
    found = pipeline.run()
    torch.save({"found": found, "counts": pipeline.counts, "driver": pipeline.ledger.as_dict()}, folder / f"{mode}.pt")
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2])
