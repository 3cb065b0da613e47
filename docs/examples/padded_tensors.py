"""Records a scheduler of padded tensors, here verl's, and replays it to the bit: padded_tensors.py --dump-dir DIR"""

import argparse
import hashlib

import torch

from mock_scheduler import RolloutRequest, SamplingParams, build_scheduler
from mock_scheduler.adapters.padded import VERL, PaddedCodec

PROMPT, RESPONSE = 6, 10  # widths
SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed")


class MyPaddedScheduler:
    """Stands for verl's rollout: prompts padded on the left, responses on the right, garbage in the padding."""

    def get_batch(self, request: RolloutRequest) -> dict[str, object]:
        rows = request.batch_size
        prompt_mask = torch.arange(PROMPT) >= PROMPT - torch.randint(1, PROMPT + 1, (rows, 1))
        response_mask = torch.arange(RESPONSE) < torch.randint(1, RESPONSE + 1, (rows, 1))
        input_ids = torch.randint(0, 100, (rows, PROMPT + RESPONSE))
        return {
            "prompts": input_ids[:, :PROMPT],
            "responses": input_ids[:, PROMPT:],
            "input_ids": input_ids,
            "attention_mask": torch.cat([prompt_mask, response_mask], dim=1).long(),
            "response_mask": response_mask.long(),
            "rollout_log_probs": -torch.rand(rows, RESPONSE),
            "token_level_scores": torch.rand(rows, RESPONSE) * response_mask,
            "uid": [f"prompt-{row // 4}" for row in range(rows)],
        }


def train(mode: str, dump_dir: str) -> None:
    config = {"enable": True, "mode": mode, "dump_dir": dump_dir}
    # Adoption, line 1: the codec knows the framework's layout.
    scheduler = build_scheduler(config, MyPaddedScheduler, {"model": "toy"}, codec=PaddedCodec(VERL, sampling=SAMPLING))
    with scheduler:
        # Adoption, line 2: the request names this step; the answer is the framework's own batch.
        batch = scheduler.get_batch(RolloutRequest(global_step=0, batch_size=8, group_size=4))
    print(f"{mode} logprobs {hashlib.sha256(batch['rollout_log_probs'].numpy()).hexdigest()[:16]}, {batch['uid']}")
    print(scheduler.ledger.render())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dump-dir", required=True)
    dump_dir = parser.parse_args(arguments).dump_dir
    train("dump", dump_dir)
    train("mock", dump_dir)


if __name__ == "__main__":
    main()
