"""Trains with TRL's AsyncGRPOTrainer and recorded samples, several times in one process.

``python -m tests.integrations.trl_async_run FOLDER NAME:MODE[:KEY=VALUE]…`` runs in ``.venv-engines``; the files are as
those of ``trl_run``. The live worker is in this process, and plays by transformers when the trainer takes a sample.
"""

from __future__ import annotations

import copy
import json
import queue
import sys
import threading
import time
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.chat_template_utils import qwen3_template
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, RolloutSample

from mock_scheduler.adapters.trl import AsyncRollouts
from mock_scheduler.errors import MockSchedulerError
from tests.integrations.trl_run import CALLS, PROMPTS, count_generation, digest_weights, lasting_logs

NUM_GENERATIONS = 4


class LiveWorker:
    """Plays a group of samples whenever its queue is empty; every ninth sample is too old to be trained on."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.rollout_buffer: Any = self
        self.model = model
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self._tokenizer = tokenizer
        self._ready: deque[RolloutSample] = deque()
        self._version = self._num_groups = self._num_samples = 0

    def get(self, timeout: float | None = None) -> RolloutSample:
        if not self._ready:
            self._play(PROMPTS[self._num_groups % len(PROMPTS)])
        return self._ready.popleft()

    def qsize(self) -> int:
        return len(self._ready)

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def update_model_version(self, model_version: int) -> None:
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None: ...

    def _play(self, prompt: str) -> None:
        ids = self._tokenizer(prompt, return_tensors="pt")["input_ids"].repeat(NUM_GENERATIONS, 1)
        played = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=8,
            return_dict_in_generate=True,
            output_scores=True,
            pad_token_id=self._tokenizer.pad_token_id,
        )
        completions = played.sequences[:, ids.shape[1] :]
        logprobs = torch.stack(played.scores, 1).log_softmax(-1).gather(-1, completions[..., None])[..., 0]
        rewards = [float(row.sum()) / 1000 for row in completions]
        mean = sum(rewards) / len(rewards)
        for row, reward in enumerate(rewards):
            self._num_samples += 1
            is_old = self._num_samples % 9 == 0
            self._ready.append(
                RolloutSample(
                    prompt=[{"role": "user", "content": prompt}],
                    completion=[{"role": "assistant", "content": self._tokenizer.decode(completions[row])}],
                    input_ids=np.concatenate([ids[row].numpy(), completions[row].numpy()]).astype(np.int64),
                    completion_mask=np.array([0] * ids.shape[1] + [1] * completions.shape[1], dtype=np.int64),
                    old_log_probs=np.concatenate([np.zeros(ids.shape[1]), logprobs[row].numpy()]).astype(np.float32),
                    advantage=reward - mean,
                    model_version=0 if is_old else self._version,
                    group_id=self._num_groups,
                    metrics={"reward": reward, "reward_std": 0.1, "rewards/size": reward},
                    enqueued_at=time.time(),
                )
            )
        self._num_groups += 1


def count_letters(completions: list[Any], **_columns: Any) -> list[float]:
    """A reward that the worker's own process computes."""
    return [len({letter for message in completion for letter in message["content"]}) / 10 for completion in completions]


class OwnWorker(AsyncRolloutWorker):
    """TRL's own worker: a process that asks a server, and that server is a thread here, which plays by transformers."""

    def __init__(self, model: Any, tokenizer: Any, name: str) -> None:
        self.model = model
        self._lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = json.dumps(owner.complete(asked)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_arguments: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        data = [{"prompt": [{"role": "user", "content": prompt}]} for prompt in PROMPTS] * 8
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.response_template = qwen3_template  # else TRL looks for the chat template among those that it knows
        super().__init__(
            model_name=name,
            dataset=Dataset.from_list(data),
            reward_funcs=[count_letters],
            processing_class=tokenizer,
            eos_token_ids=[tokenizer.eos_token_id],
            num_generations=NUM_GENERATIONS,
            max_inflight_tasks=NUM_GENERATIONS,
            queue_maxsize=8,
            vllm_server_url=f"http://127.0.0.1:{self._server.server_port}",
            max_tokens=8,
        )

    def complete(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Answer as vLLM's ``/v1/completions`` does."""
        with self._lock, torch.no_grad():
            torch.manual_seed(asked["seed"])
            ids = torch.tensor([asked["prompt"]])
            played = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                max_new_tokens=asked["max_tokens"],
                return_dict_in_generate=True,
                output_scores=True,
                pad_token_id=0,
            )
        tokens = played.sequences[0, ids.shape[1] :]
        logprobs = torch.stack(played.scores, 1)[0].log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        return {"choices": [{"token_ids": tokens.tolist(), "logprobs": {"token_logprobs": logprobs.tolist()}}]}

    def stop(self) -> None:
        super().stop()
        self._server.shutdown()


class LiveTransfer:
    """Puts the trainer's weights into the worker's model."""

    def __init__(self, worker: LiveWorker | OwnWorker) -> None:
        self._worker = worker

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Any) -> None:
        self._worker.model.load_state_dict(dict(iterator))

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


def attend(  # as flash_attn_varlen_func of FlashAttention 3
    query: Any,
    key: Any,
    value: Any,
    starts_q: Any,
    starts_k: Any,
    *_lengths: int,
    softmax_scale: float,
    **_options: Any,
) -> Any:
    """Causal attention of segments one after another, each query at the end of its keys, in plain torch."""
    outputs = []
    bounds = zip(starts_q.tolist(), starts_q.tolist()[1:], starts_k.tolist(), starts_k.tolist()[1:], strict=False)
    for q0, q1, k0, k1 in bounds:
        q, k, v = query[q0:q1], key[k0:k1], value[k0:k1]
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * softmax_scale
        hidden = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).triu(1 + (k1 - k0) - (q1 - q0))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v))
    return torch.cat(outputs)


def main(folder: Path, name: str, mode: str, given: dict[str, str]) -> dict[str, Any]:
    """Train for three steps."""
    torch.set_num_threads(1)
    CALLS.update(engine=0, generate=0, reward=0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    args = AsyncGRPOConfig(
        output_dir=str(folder / name),
        per_device_train_batch_size=int(given.get("batch", 4)),
        gradient_accumulation_steps=2,
        num_generations=NUM_GENERATIONS,
        max_completion_length=8,
        max_steps=3,
        max_staleness=1,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        seed=7,
        disable_tqdm=True,
        lr_scheduler_type="constant",
        token_budget=0,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
    )

    is_own = "own" in given

    def make_worker() -> LiveWorker | OwnWorker:
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        made.append(OwnWorker(model, tokenizer, str(folder / "model")) if is_own else LiveWorker(model, tokenizer))
        return made[0]

    made: list[LiveWorker | OwnWorker] = []
    with AsyncRollouts(
        {"enable": True, "mode": mode, "dump_dir": str(folder / ("own_dumps" if is_own else "async_dumps"))},
        args=args,
        processing_class=tokenizer,
        contract={"model": "tiny"},
        rollout_worker=make_worker,
        weight_transfer=lambda: LiveTransfer(made[0]),
    ) as rollouts:
        trainer = AsyncGRPOTrainer(
            str(folder / "model"),
            reward_funcs=[lambda completions, **_columns: [0.0] * len(completions)],
            args=args,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
            processing_class=tokenizer,
            **rollouts.arguments(),
        )
        rollouts.attach(trainer)
        trainer.train()
    return {
        "logs": lasting_logs(trainer),
        "weights": digest_weights(trainer.model),
        "calls": dict(CALLS),
        "ledger": rollouts.ledger.as_dict(),
        "model_version": trainer.model_version,
    }


if __name__ == "__main__":
    count_generation()
    # Its kernels are for GPUs alone.
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attend)
    torch.cuda.get_device_name = lambda *_device: "a processor"  # asked for without a look whether there is a device
    place = Path(sys.argv[1])
    for word in sys.argv[2:]:
        name, mode, *pairs = word.split(":")
        try:
            result = main(place, name, mode, dict(pair.split("=", 1) for pair in pairs))
        except MockSchedulerError as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        (place / f"{name}.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
