"""Train with TRL's GRPOTrainer twice: with rollouts that are recorded, then on the recording alone.

    pip install trl==1.16.0
    python grpo.py MODEL    # a small model, as launch/make_tiny_qwen3.py makes one

Both trainings end with the same weights, and the second one generates nothing.
"""

from __future__ import annotations

import sys

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from mock_scheduler.adapters.trl import Rollouts, trace_callback


def vowels(completions: list[str], **_columns: object) -> list[float]:
    """A reward function."""
    return [sum(text.count(letter) for letter in "aeiou") / 10 for text in completions]


def train(mode: str, model_name: str) -> dict[str, torch.Tensor]:
    """Train for two steps, and return the weights."""
    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(model_name, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32)
    dataset = Dataset.from_list([{"prompt": prompt} for prompt in ("the quick", "what is 12 plus 30?")] * 4)
    args = GRPOConfig(
        output_dir=f"trl-{mode}",
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        max_steps=2,
        learning_rate=1e-3,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
    )
    rollout_mock = {"enable": True, "mode": mode, "dump_dir": "dumps"}
    with Rollouts(rollout_mock, args=args, processing_class=tokenizer, reward_funcs=vowels) as rollouts:
        trainer = GRPOTrainer(
            model,
            args=args,
            train_dataset=dataset,
            processing_class=tokenizer,
            reward_funcs=rollouts.reward_funcs,
            rollout_func=rollouts,
        )
        trainer.add_callback(trace_callback(f"traces/{mode}"))
        trainer.train()
    print(rollouts.ledger.render())
    return model.state_dict()


if __name__ == "__main__":
    recorded, replayed = train("dump", sys.argv[1]), train("mock", sys.argv[1])
    assert all(torch.equal(recorded[name], replayed[name]) for name in recorded)
    print(f"equal in every bit: {len(recorded)} tensors")
