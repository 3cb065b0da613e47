"""Records a training loop with its own scheduler, then replays it without: single_controller.py --dump-dir DIR"""

import argparse

import torch

import mock_scheduler as ms

SAMPLING = ms.SamplingParams(temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed")


class MyScheduler:
    """Stands for an engine with environments: it never plays the same batch twice."""

    def get_batch(self, request: ms.RolloutRequest) -> ms.RolloutBatch:
        rows = [play(divmod(index, 4), request.policy_version) for index in range(request.batch_size)]
        return ms.RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=4)


def play(place: tuple[int, int], policy_version: int) -> ms.Trajectory:
    group_id, env_id = place
    num_sampled = int(torch.randint(3, 9, ()))
    return ms.Trajectory(
        identity=ms.SampleIdentity(scheduler_id="default", group_id=group_id, episode_id=0, env_id=env_id, turn=0),
        tokens=torch.randint(0, 100, (2 + num_sampled,), dtype=torch.int32),
        response_mask=torch.tensor([False] * 2 + [True] * num_sampled),
        rollout_logprobs=-torch.rand(num_sampled),
        turn_rewards=torch.rand(1),
        policy_versions=torch.tensor([policy_version], dtype=torch.int32),
        termination=ms.Termination.TERMINATED,
        prompt_length=2,
        tag="toy",
    )


def train(mode: str, dump_dir: str) -> None:
    config = {"enable": True, "mode": mode, "dump_dir": dump_dir}
    # Adoption, line 1: in place of MyScheduler(). The mapping names the facts that a replay must share.
    with ms.build_scheduler(config, MyScheduler, {"model": "toy", "vocab_size": 100}) as scheduler:
        for step in range(3):
            # Adoption, line 2: the request names this step.
            batch = scheduler.get_batch(ms.RolloutRequest(global_step=step, batch_size=8, policy_version=step))
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
