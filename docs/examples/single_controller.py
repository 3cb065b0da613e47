"""A training loop with its own scheduler, recorded, then replayed without it: single_controller.py --dump-dir DIR"""

import argparse

import torch

from mock_scheduler import build_scheduler
from mock_scheduler.batch import RolloutBatch, SampleIdentity, SamplingParams, Termination, Trajectory
from mock_scheduler.scheduler import RolloutRequest

SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed")


class MyScheduler:
    """Stands for an engine with environments: it never plays the same batch twice."""

    def get_batch(self, request: RolloutRequest) -> RolloutBatch:
        rows = [play(divmod(index, 4), request.policy_version) for index in range(request.batch_size)]
        return RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=4)


def play(place: tuple[int, int], policy_version: int) -> Trajectory:
    group_id, env_id = place
    num_sampled = int(torch.randint(3, 9, ()))
    return Trajectory(
        identity=SampleIdentity(scheduler_id="default", group_id=group_id, episode_id=0, env_id=env_id, turn=0),
        tokens=torch.randint(0, 100, (2 + num_sampled,), dtype=torch.int32),
        response_mask=torch.tensor([False] * 2 + [True] * num_sampled),
        rollout_logprobs=-torch.rand(num_sampled),
        turn_rewards=torch.rand(1),
        policy_versions=torch.tensor([policy_version], dtype=torch.int32),
        termination=Termination.TERMINATED,
        prompt_length=2,
        tag="toy",
    )


def train(mode: str, dump_dir: str) -> None:
    config = {"enable": True, "mode": mode, "dump_dir": dump_dir}
    # Adoption, line 1: in place of MyScheduler(). The mapping names what must be the same when it is replayed.
    with build_scheduler(config, MyScheduler, {"model": "toy", "vocab_size": 100}) as scheduler:
        for step in range(3):
            # Adoption, line 2: the request says which step this is.
            batch = scheduler.get_batch(RolloutRequest(global_step=step, batch_size=8, policy_version=step))
            print(f"{mode} step {step}: {len(batch)} rows, mean reward {float(batch.rewards.mean()):.6f}")
    print(scheduler.ledger.render())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dump-dir", required=True)
    dump_dir = parser.parse_args(arguments).dump_dir
    for mode in ("dump", "mock"):
        train(mode, dump_dir)


if __name__ == "__main__":
    main()
