"""Trains a small GPT with plain Megatron-core: torchrun --nproc-per-node 2 train.py --tp 2"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.utils import get_attr_wrapped_model
from model import build_config, build_model, get_batch_on_this_cp_rank

from mock_scheduler import megatron
from mock_scheduler.megatron.host_device import use_host_device

Batch = dict[str, torch.Tensor]


def parse_arguments() -> argparse.Namespace:
    parser, rates = argparse.ArgumentParser(), {"lr": 1e-3, "aux-loss-coeff": 0.01}
    numbers = {"tp": 1, "pp": 1, "vpp": None, "cp": 1, "ep": 1, "experts": None, "steps": 10, "seed": 1234}
    numbers |= {"num-layers": 4, "hidden-size": 64, "num-attention-heads": 8, "seq-length": 32, "vocab-size": 128}
    for name, default in (numbers | {"micro-batch-size": 2, "global-batch-size": 8, **rates}).items():
        parser.add_argument(f"--{name}", type=float if isinstance(default, float) else int, default=default)
    for name in ("sp", "distributed-optimizer", "bf16", "packed", "tied"):
        parser.add_argument(f"--{name}", action="store_true")
    choices = {"recompute": ["full", "selective"], "fp8-recipe": ["delayed", "tensorwise", "blockwise"]}
    for name, values in {**choices, "layers": ["local", "transformer_engine"]}.items():
        parser.add_argument(f"--{name}", choices=values)
    return parser.parse_args()


def start_megatron(args: argparse.Namespace) -> None:
    dist.init_process_group()
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        virtual_pipeline_model_parallel_size=args.vpp,
        context_parallel_size=args.cp,
        expert_model_parallel_size=args.ep,
        expert_tensor_parallel_size=1,
    )
    torch.manual_seed(args.seed)
    model_parallel_cuda_manual_seed(args.seed)


def make_row(args: argparse.Namespace, index: int) -> torch.Tensor:
    """Makes row ``index`` of the data: 8, 16, ... up to seq-length tokens, and the last one's label behind them."""
    generator = torch.Generator().manual_seed(1_000_003 * args.seed + index)
    length = 8 * int(torch.randint(1, args.seq_length // 8 + 1, (1,), generator=generator))
    return torch.randint(1, args.vocab_size, (length + 1,), generator=generator)


def make_batch(args: argparse.Namespace, first: int) -> Batch:
    """Makes the micro-batch of the rows from ``first`` on: one line each, padded with 0, or all packed in one line."""
    rows = [make_row(args, index) for index in range(first, first + args.micro_batch_size)]
    columns = {
        "tokens": [row[:-1] for row in rows],
        "labels": [row[1:] for row in rows],
        "positions": [torch.arange(len(row) - 1 if args.packed else args.seq_length) for row in rows],
    }
    batch = {name: join_rows(args, column) for name, column in columns.items()}
    return {**batch, "loss_mask": batch["labels"] > 0, "lengths": torch.tensor([len(row) - 1 for row in rows])}


def join_rows(args: argparse.Namespace, rows: list[torch.Tensor]) -> torch.Tensor:
    if args.packed:
        return torch.cat(rows)[None]
    return torch.stack([F.pad(row, (0, args.seq_length - len(row))) for row in rows])


def loss_function(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Batch]:
    total, num_tokens = (losses.float() * loss_mask).sum(), loss_mask.sum().int()
    return total, num_tokens, {"loss": torch.stack((total.detach(), num_tokens))}


def forward_step(args: argparse.Namespace, batches: Iterator[Batch], model: torch.nn.Module) -> tuple:
    batch = {name: tensor.cuda() for name, tensor in next(batches).items()}
    lengths, packed = batch.pop("lengths"), None
    if args.packed:
        bounds, longest = F.pad(lengths.cumsum(0), (1, 0)).int(), int(lengths.max())
        packed = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=longest, max_seqlen_kv=longest)
    batch = get_batch_on_this_cp_rank(batch)
    is_first, is_last = (get_attr_wrapped_model(model, name) for name in ("pre_process", "post_process"))
    losses = model(
        input_ids=batch["tokens"] if is_first else None,
        position_ids=batch["positions"] if is_first else None,
        attention_mask=None,
        labels=batch["labels"] if is_last else None,
        loss_mask=batch["loss_mask"] if is_last else None,
        packed_seq_params=packed,
    )
    return losses, partial(loss_function, batch["loss_mask"])


def main() -> None:
    args = parse_arguments()
    use_host_device()  # for a machine without a GPU only: Megatron-core itself asks for CUDA everywhere
    start_megatron(args)
    config = build_config(args)
    model = build_model(args, config)
    adam = OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        weight_decay=0.1,
        clip_grad=1.0,
        bf16=args.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=args.distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(adam, model)
    config.grad_scale_func = optimizer.scale_loss
    megatron.attach(model, optimizer)
    dp_rank, dp_size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()

    for step in range(args.steps):
        firsts = range(step * args.global_batch_size, (step + 1) * args.global_batch_size, args.micro_batch_size)
        batches = [make_batch(args, first) for first in firsts[dp_rank::dp_size]]
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        sums = get_forward_backward_func()(
            forward_step_func=partial(forward_step, args),
            data_iterator=[iter(batches) for _ in model] if args.vpp else iter(batches),
            model=model,
            num_microbatches=len(batches),
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=False,
        )
        _, grad_norm, _ = optimizer.step()
        if mpu.is_pipeline_last_stage() and mpu.get_tensor_model_parallel_rank() == 0:
            total = sum(each["loss"] for each in sums)
            dist.all_reduce(total, group=mpu.get_data_parallel_group(with_context_parallel=True))
            if mpu.get_data_parallel_rank(with_context_parallel=True) == 0:
                print(f"step {step}: loss {total[0] / total[1]:.6f} grad norm {grad_norm:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
