"""AReaL's own handles of tensors, joining, and data loader under its adapter: ``python areal_run.py FOLDER MODE``.

A controller stands for the one whose workers need a GPU: it makes trajectories by AReaL's functions and gives handles
to tensors that are in the store of a worker. What was trained on is written to ``FOLDER/MODE.pt``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from areal.infra.rpc import rtensor
from areal.infra.rpc.rtensor import RTensor, TensorShardInfo
from areal.utils.data import concat_padded_tensors, cycle_dataloader
from torchdata.stateful_dataloader import StatefulDataLoader

from mock_scheduler.adapters.areal.rollouts import with_rollouts
from mock_scheduler.ledger import Ledger
from tests.adapters.areal.signatures import Actor, PPOTrainer, config


class Store:
    """The tensors of workers, as AReaL's backends give them."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.num_fetched = 0

    def fetch(self, shards: list[TensorShardInfo]) -> list[torch.Tensor]:
        self.num_fetched += len(shards)
        return [self.tensors[shard.shard_id] for shard in shards]


store = Store()


class Controller:
    """Plays; its answers have AReaL's handles."""

    staleness_manager = None

    def __init__(self) -> None:
        self._draw = torch.Generator().manual_seed(1)

    def prepare_batch(self, dataloader: Any, group_size: int) -> list[Any]:
        if "data" not in vars(self):
            self.data = (item for batch in cycle_dataloader(dataloader) for item in batch)
        return [self._play(int(next(self.data)), group_size) for _ in range(dataloader.batch_size)]

    def _play(self, prompt: int, size: int) -> dict[str, Any]:
        samples = []
        for _ in range(size):
            width = int(torch.randint(3, 8, (), generator=self._draw))
            response = (torch.arange(width) >= 2)[None]
            samples.append(
                {
                    "input_ids": torch.randint(0, 50, (1, width), generator=self._draw).int() + prompt,
                    "loss_mask": response.int(),
                    "logprobs": -torch.rand(1, width, generator=self._draw) * response,
                    "versions": torch.where(response, 0, -1).int(),
                    "attention_mask": torch.ones(1, width, dtype=torch.bool),
                    "rewards": torch.rand(1, generator=self._draw),
                }
            )
        joined = concat_padded_tensors(samples)
        return {name: self._remote(value) for name, value in joined.items()}

    def _remote(self, value: torch.Tensor) -> RTensor:
        name = f"shard{len(store.tensors)}"
        store.tensors[name] = value
        return RTensor(shard=TensorShardInfo(shard_id=name, node_addr="worker"), data=value.to("meta"))

    def __getattr__(self, name: str) -> Any:
        return lambda *_a, **_k: {}


class Trainer(PPOTrainer):
    """As ``PPOTrainer``; its actor trains on handles or on tensors, as AReaL's workers do."""

    def _init_rollout(self, rollout_config: Any, is_eval: bool = False, lora_path: str | None = None) -> Any:
        return Controller()

    def train(self, steps: range) -> None:
        self.were_handles: list[bool] = []
        self.num_buffered: list[int] = []
        for step in steps:
            batch = self.actor.prepare_batch(self.train_dataloader, workflow="w", workflow_kwargs={}, group_size=2)
            values = [value for one in batch for value in one.values()]
            self.were_handles.append(all(isinstance(value, RTensor) and value.data.is_meta for value in values))
            self.num_buffered.append(rtensor.fetch_buffer_stats()["num_entries"])
            self.actor.ppo_update(RTensor.localize(batch))
            rtensor.clear_fetch_buffer()  # as AReaL does behind each step
            self.actor.set_version(step + 1)


def main(folder: Path, mode: str) -> None:
    rtensor.set_backend(store)
    ledger = Ledger()
    settings = {"rollout_mock": {"enable": True, "mode": mode, "dump_dir": str(folder / "dump")}}
    draw = torch.Generator().manual_seed(3)
    loader = StatefulDataLoader(list(range(6)), batch_size=2, shuffle=True, generator=draw)
    made: Any = with_rollouts(Trainer, settings, ledger)
    with made(config(), train_dataset=loader) as trainer:
        trainer.train(range(5))
    assert isinstance(trainer.actor, Actor)
    ahead = next(iter(loader)).tolist()
    found = {
        "trained": trainer.actor.trained,
        "were_handles": trainer.were_handles,
        "ahead": ahead,
        "num_buffered": trainer.num_buffered,
        "fetched": store.num_fetched,
        "counts": ledger.as_dict(),
    }
    torch.save(found, folder / f"{mode}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
