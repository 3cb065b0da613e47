"""Trains a small GPT with plain Megatron-core. Put your own training here; it needs one line of ours, `attach`."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from mock_scheduler import megatron
from mock_scheduler.megatron.host_device import use_host_device

VOCAB, LENGTH, ROWS, MICRO_ROWS = 128, 32, 8, 2

#: my_kernel.py puts its own function here before the model is built.
activation = F.silu


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name, default in {"tp": 1, "pp": 1, "steps": 10}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    return parser.parse_args()


def build_model(args: argparse.Namespace) -> list[torch.nn.Module]:
    has_gpu = torch.cuda.is_available()
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        ffn_hidden_size=128,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=activation,
        add_bias_linear=False,
        hidden_dropout=0.0,  # random masks differ in every layout: leave dropout off while you compare layouts
        attention_dropout=0.0,
        transformer_impl="transformer_engine" if has_gpu else "local",
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        pipeline_dtype=torch.float32,
        finalize_model_grads_func=finalize_model_grads,
    )
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_with_transformer_engine_spec()
        if has_gpu
        else get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
        position_embedding_type="rope",
    ).cuda()
    return [DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), gpt)]


def forward_step(batches, model):
    tokens = next(batches)
    positions = torch.arange(LENGTH, device=tokens.device).expand(MICRO_ROWS, -1)
    losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
    return losses, lambda values: (values.float().mean(), {"loss": values.detach().float().mean()})


def main() -> None:
    args = parse_arguments()
    use_host_device()  # for a machine without a GPU only, since Megatron-core asks for CUDA everywhere
    dist.init_process_group()
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    mpu.initialize_model_parallel(args.tp, args.pp)
    model_parallel_cuda_manual_seed(1234)
    torch.manual_seed(1234)

    model = build_model(args)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=args.lr, clip_grad=1.0), model)
    megatron.attach(model, optimizer)  # the line: it does nothing unless `mock-scheduler align` started this process

    dp_rank, dp_size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    for step in range(args.steps):
        # The rows of a step are the same in every layout; each replica takes its share.
        rows = torch.randint(1, VOCAB, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step)).cuda()
        batches = rows.split(MICRO_ROWS)[dp_rank::dp_size]
        model[0].zero_grad_buffer()
        optimizer.zero_grad()
        done = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=model,
            num_microbatches=len(batches),
            seq_length=LENGTH,
            micro_batch_size=MICRO_ROWS,
            forward_only=False,
        )
        _, grad_norm, _ = optimizer.step()
        if done and dist.get_rank() == dist.get_world_size() - 1:
            loss = sum(each["loss"] for each in done) / len(done)
            print(f"step {step}: loss {loss:.5f} of this replica, gradient norm {grad_norm:.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
