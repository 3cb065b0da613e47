"""A training on Megatron-core as somebody else would write it, with one line of ours; knows nothing of pipelines.

``python -m tests.megatron.attach.own_training FOLDER CASE ...`` under any launcher; each case is written to
``FOLDER/CASE``, and how it ended to ``FOLDER/CASE.exit.RANK``. Nothing is judged here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from mock_scheduler import megatron
from mock_scheduler.config.instruments import AttachedRun
from mock_scheduler.launch.process_group import join_process_group
from mock_scheduler.megatron.host_device import use_host_device
from pipelines.megatron.process_of_rank import leave_layout
from tests.megatron.callback_loops import FILE_VARIABLE, start_loop

VOCAB, WIDTH, NUM_ROWS, NUM_STEPS = 64, 32, 4, 2
LENGTHS = (16, 8, 12, 16)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run. ``run``: keys of its run file, beside those of all. ``loop``: whose callbacks attach; none: a line."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    packed: bool = False
    evaluates: bool = False
    groups: bool = False
    num_ids: int | None = None
    recompute: bool = False
    distributed_optimizer: bool = False
    resumed: bool = False
    fault: str = ""
    loop: str = ""
    start: str | None = "one"
    num_steps: int = NUM_STEPS
    worker: str = ""
    run: dict[str, Any] = field(default_factory=dict)


SKETCH = {"level": "sketch", "kinds": "all"}
#: ``one`` stands for the folder of this case.
GRAFT = {"trace_dir": "one", "names": ["decoder.layers.1.mlp"], "step": 0}

CASES = {
    "one": Case(start=None),
    "again": Case(),
    "packed": Case(packed=True),
    "evaluated": Case(evaluates=True),
    "recomputed": Case(recompute=True),
    "grouped": Case(groups=True),
    "sparse": Case(run={"trace": {"level": "full", "kinds": "all", "steps": "1"}}),
    "pp2": Case(pp=2),
    "pp2-vpp2": Case(pp=2, vpp=2),
    "tp2": Case(tp=2),
    "dp2": Case(),
    "dp2-do": Case(distributed_optimizer=True),
    "sketched": Case(run={"trace": SKETCH}),
    "sketched-tp2": Case(tp=2, run={"trace": SKETCH}),
    "partial": Case(run={"trace": {"level": "full", "patterns": ["output_layer.*"]}}),
    "recorded": Case(run={"trace": {"level": "full", "kinds": ["parameter"], "operations": True}}),
    "scaled": Case(fault="scale"),
    "grafted": Case(fault="scale", run={"graft": GRAFT}),
    "grafted-packed": Case(packed=True, fault="scale", run={"graft": GRAFT}),
    "grafted-pp2": Case(pp=2, fault="scale", run={"graft": GRAFT}),
    "perturbed": Case(run={"perturbation": {"seed": 3}}),
    "perturbed-tp2": Case(tp=2, run={"perturbation": {"seed": 3}}),
    "named": Case(num_ids=NUM_ROWS),
    "named-dp2": Case(num_ids=NUM_ROWS),
    "too-few-ids": Case(num_ids=3),
    "too-many-ids": Case(num_ids=5),
    "other-row": Case(tp=2, fault="row"),
    "equal-rows": Case(fault="equal"),
    "equal-rows-dp2": Case(fault="equal", start="equal-rows"),
    "extra-pass": Case(pp=2, fault="pass"),
    "stepped-twice": Case(fault="step"),
    "wrong-layout": Case(run={"parallel": {"tensor_model_parallel_size": 4}}),
    # Observed from step 1 on: its start is the state behind step 0, with its moments.
    "later": Case(start=None, run={"first_step": 1}),
    "later-again": Case(start="later", run={"first_step": 1}),
    # Begins at step 1 with fresh weights, in place of a checkpoint's: the start of "later" is set.
    "resumed": Case(start="later", resumed=True, run={"begins_at": 1, "first_step": 1}),
    # The line is an adapter's, around a framework's worker.
    **{name: Case(worker=name) for name in ("skyrl", "areal", "roll", "nemo_rl")},
    "skyrl-dp2": Case(worker="skyrl", start="dp2"),
    "unreduced-dp2": Case(worker="skyrl", start="dp2", fault="unreduced"),
    "ended-early": Case(run={"last_step": 7}),
    "called-lm": Case(loop="Megatron-LM"),
    "called-bridge": Case(loop="Megatron-Bridge"),
    "called-lm-pp2": Case(loop="Megatron-LM", pp=2),
    "called-early": Case(loop="Megatron-LM", run={"last_step": 7}),
    # Megatron-Bridge's own callbacks, where its file is.
    "called-real": Case(loop=os.environ.get(FILE_VARIABLE, "")),
    "called-real-pp2": Case(loop=os.environ.get(FILE_VARIABLE, ""), pp=2),
}


class Norm:
    """Builds torch's norm, marked as Megatron sums its gradients."""

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: object
    ) -> torch.nn.Module:
        norm = torch.nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


class Attention(DotProductAttention):
    """Megatron's attention, over packed rows too."""

    def forward(
        self, query: Any, key: Any, value: Any, attention_mask: Any, packed_seq_params: Any = None, **rest: Any
    ) -> Any:
        if packed_seq_params is not None:
            bounds = packed_seq_params.cu_seqlens_q
            query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
            rows = torch.repeat_interleave(torch.arange(len(bounds) - 1), bounds.diff())
            later = torch.ones(len(rows), len(rows), dtype=torch.bool).triu(1)
            attention_mask = ((rows[:, None] != rows[None, :]) | later)[None, None]
        return super().forward(query, key, value, attention_mask, **rest)


def build_chunks(case: Case) -> tuple[TransformerConfig, list[Any]]:
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    config = TransformerConfig(
        num_layers=4,
        hidden_size=16,
        num_attention_heads=4,
        ffn_hidden_size=32,
        normalization="RMSNorm",
        transformer_impl="local",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp,
        overlap_p2p_comm=case.vpp is not None,
        batch_p2p_comm=case.vpp is None,
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
        **(recompute if case.recompute else {}),
    )
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=case.distributed_optimizer)
    chunks = []
    for stage in [None] if case.vpp is None else range(case.vpp):
        layer = get_gpt_layer_local_spec(normalization="RMSNorm")
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
        layer.submodules.self_attention.submodules.core_attention = Attention
        layers = [layer] * get_num_layers_to_build(config, vp_stage=stage)
        gpt = GPTModel(
            config=config,
            transformer_layer_spec=TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm),
            vocab_size=VOCAB,
            max_sequence_length=WIDTH,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            vp_stage=stage,
        )
        if case.fault == "scale":
            plant_scale(gpt)
        chunks.append(DistributedDataParallel(config, ddp_config, gpt))
    return config, chunks


def plant_scale(gpt: GPTModel) -> None:
    """Scales the output of the second layer's MLP, where this stage has it."""

    def scale(module: torch.nn.Module, args: Any, output: Any) -> Any:
        return (output[0] * 1.5, output[1])

    for layer in gpt.decoder.layers:
        if layer.layer_number == 2:
            layer.mlp.register_forward_hook(scale)


def micro_batches(case: Case, step: int) -> list[dict[str, Any]]:
    """This replica's: two rows each, padded with 0, or packed."""
    generator = torch.Generator().manual_seed(step)
    rows = [torch.randint(1, VOCAB, (length + 1,), generator=generator) for length in LENGTHS]
    if case.fault == "equal":
        rows[2] = rows[0]
    if case.fault == "row" and parallel_state.get_tensor_model_parallel_rank() == 1:
        rows[3][5] = VOCAB - 1 - rows[3][5]
    replica, num_replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    own = [rows[first : first + 2] for first in range(0, NUM_ROWS, 2)][replica::num_replicas]
    return [_pack(pair) if case.packed else _pad(pair) for pair in own]


def _pad(rows: list[torch.Tensor]) -> dict[str, Any]:
    tokens = torch.stack([torch.nn.functional.pad(row[:-1], (0, 16 - len(row) + 1)) for row in rows])
    labels = torch.stack([torch.nn.functional.pad(row[1:], (0, 16 - len(row) + 1)) for row in rows])
    return {"tokens": tokens, "labels": labels, "positions": torch.arange(16).repeat(len(rows), 1), "packed": None}


def _pack(rows: list[torch.Tensor]) -> dict[str, Any]:
    lengths = torch.tensor([0, *(len(row) - 1 for row in rows)])
    bounds, longest = lengths.cumsum(0).int(), int(lengths.max())
    packed = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=longest, max_seqlen_kv=longest)
    positions = torch.cat([torch.arange(len(row) - 1) for row in rows])[None]
    return {
        "tokens": torch.cat([row[:-1] for row in rows])[None],
        "labels": torch.cat([row[1:] for row in rows])[None],
        "positions": positions,
        "packed": packed,
    }


def forward_step(case: Case, batches: Iterator[dict[str, Any]], chunk: Any) -> tuple[Any, Any]:
    batch = next(batches)
    gpt = chunk.module
    is_first, is_last = gpt.pre_process, gpt.post_process
    inputs = {
        "attention_mask": None,
        "labels": batch["labels"] if is_last else None,
        "packed_seq_params": batch["packed"],
    }
    tokens, positions = (batch["tokens"], batch["positions"]) if is_first else (None, None)
    if case.fault == "pass" and is_first:
        chunk(tokens, positions, **inputs)
    losses = chunk(tokens, positions, **inputs)

    def reduce(output: torch.Tensor) -> tuple[Any, ...]:
        mask = batch["labels"] > 0
        total, count = (output * mask).sum(), mask.sum().int()
        return total, count, {"loss": total.detach()}

    return losses, reduce


def run_passes(case: Case, chunks: list[torch.nn.Module], batches: list[Any], *, forward_only: bool = False) -> None:
    get_forward_backward_func()(
        forward_step_func=partial(forward_step, case),
        data_iterator=[iter(batches) for _ in chunks] if case.vpp else iter(batches),
        model=chunks,
        num_microbatches=len(batches),
        seq_length=16,
        micro_batch_size=2,
        forward_only=forward_only,
    )


def own_ids(case: Case) -> list[str]:
    """Names this replica's rows, two of each micro-batch; empty where nobody is to be told."""
    if not case.groups and case.num_ids is None:
        return []
    ids = [f"row{index}" for index in range(case.num_ids or NUM_ROWS)]
    replica, num_replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    return [name for index, name in enumerate(ids) if index // 2 % num_replicas == replica]


def evaluate(case: Case, chunks: list[torch.nn.Module], batches: list[Any]) -> None:
    """Old log-probabilities in training mode without gradients, and an evaluation that forgot ``no_grad``."""
    with torch.no_grad():
        run_passes(case, chunks, batches[:1], forward_only=True)
    for chunk in chunks:
        chunk.eval()
        batch = batches[0]
        chunk(batch["tokens"], batch["positions"], None, labels=batch["labels"])
        chunk.train()


def train(case: Case, run_file: AttachedRun) -> None:
    config, chunks = build_chunks(case)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-2, params_dtype=torch.float32, use_distributed_optimizer=case.distributed_optimizer
        ),
        chunks,
    )
    config.grad_scale_func = optimizer.scale_loss
    if case.loop:
        train_with_callbacks(case, run_file, chunks, optimizer)
        return
    if case.worker:
        train_in_worker(case, run_file, chunks, optimizer)
        return
    run = megatron.attach(chunks, optimizer, vocab_size=VOCAB, run=run_file)
    for step in range(int(case.resumed), case.num_steps):
        batches = micro_batches(case, step)
        ids = own_ids(case)
        with run.step(step, rows=ids) if ids else nullcontext():
            for part in [batches[:1], batches[1:]] if case.groups else [batches]:
                for chunk in chunks:
                    chunk.zero_grad_buffer()
                optimizer.zero_grad()
                if case.evaluates:
                    evaluate(case, chunks, batches)
                run_passes(case, chunks, part)
                if case.evaluates:
                    evaluate(case, chunks, batches)
                optimizer.step()
                if case.fault == "step":
                    optimizer.step()
        run.log({"reward": float(step)})


def train_with_callbacks(case: Case, run_file: AttachedRun, chunks: list[Any], optimizer: Any) -> None:
    """Trains as the loops with callbacks do, and notes which files are there when their training ends."""
    # Megatron-LM's tokenizer says the vocabulary, which is not there; Megatron-Bridge's state does.
    vocab_size = VOCAB if case.loop == "Megatron-LM" else None
    callback = megatron.AttachCallback(vocab_size=vocab_size, run=run_file)
    fire = start_loop(case.loop, callback, chunks, optimizer, VOCAB)
    for event in ("on_data_init_start", "on_train_start"):
        fire(event)
    for step in range(case.num_steps):
        batches = micro_batches(case, step)
        fire("on_train_step_start")
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        run_passes(case, chunks, batches)
        optimizer.step()
        fire("on_train_step_end")
        fire("on_eval_start")
        evaluate(case, chunks, batches) if case.pp == 1 else None
        fire("on_eval_end")
    fire("on_train_end")
    folder = Path(run_file.output_dir)
    left = sorted(path.name for path in folder.iterdir())
    folder.with_name(f"{folder.name}.left.{dist.get_rank()}").write_text("\n".join(left), encoding="utf-8")
    run_passes(case, chunks, batches)  # a loop may go on, unobserved


def train_in_worker(case: Case, run_file: AttachedRun, chunks: list[Any], optimizer: Any) -> None:
    """The same training by the calls of a framework, whose worker was made by its adapter."""
    from tests.adapters.workers import traced_worker

    path = Path(f"{run_file.output_dir}.run.json")
    if dist.get_rank() == 0:
        path.write_text(run_file.model_dump_json(), encoding="utf-8")
    dist.barrier()
    os.environ["MOCK_SCHEDULER_RUN"] = str(path)
    try:
        worker = traced_worker(case.worker)(chunks, optimizer, partial(run_passes, case))
        for chunk in chunks:
            chunk.zero_grad_buffer()
        if case.fault == "unreduced":
            worker.forgets = True
        for step in range(case.num_steps):
            worker.train(micro_batches(case, step))
    finally:
        del os.environ["MOCK_SCHEDULER_RUN"]


def main(folder: Path, names: list[str]) -> None:
    use_host_device()
    join_process_group("gloo", timeout=timedelta(minutes=2))
    for name in names:
        case = CASES[name]
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=case.tp,
            pipeline_model_parallel_size=case.pp,
            virtual_pipeline_model_parallel_size=case.vpp,
        )
        torch.manual_seed(1)
        model_parallel_cuda_manual_seed(1)
        graft = case.run.get("graft")
        placed = {"graft": {**graft, "trace_dir": str(folder / graft["trace_dir"] / "trace")}} if graft else {}
        keys = {"last_step": NUM_STEPS - 1, "trace": {"level": "full", "kinds": "all"}, **case.run, **placed}
        start = None if case.start is None else str(folder / case.start / "trace")
        run = AttachedRun(output_dir=str(folder / name), pad_token_id=0, initial_state=start, **keys)
        code: object = "none"
        try:
            train(case, run)
        except SystemExit as end:
            code = end.code
        (folder / f"{name}.exit.{dist.get_rank()}").write_text(str(code), encoding="utf-8")
        if keys["last_step"] >= case.num_steps:  # it says so when the process ends, and has its model until then
            parallel_state.destroy_model_parallel()
        else:
            leave_layout()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(Path(sys.argv[1]), sys.argv[2:])
