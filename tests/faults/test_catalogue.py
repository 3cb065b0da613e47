"""The catalogue as data: complete, consistent, and every fault put in and taken back without a trace."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer import optimizer as megatron_optimizer
from megatron.core.tensor_parallel import RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_layer import TransformerLayer

from benchmarks.layouts.cases import RULES_OF_OTHER_MODELS
from mock_scheduler.layouts.rules.known_wrong import KNOWN_WRONG
from mock_scheduler.megatron import parameters
from pipelines.algorithm import losses
from pipelines.megatron import learner, logprobs, passes, places, trained_model, trainer, weights
from pipelines.megatron.execution import Execution
from pipelines.megatron.layers import attention, expert_router
from pipelines.megatron.layers.attention import RowRotaryEmbedding
from pipelines.megatron.layers.expert_router import LayoutInvariantRouter
from pipelines.megatron.trained_model import TrainedModel
from tests.faults.cases import build_config, reference_of, world_size
from tests.faults.catalogue import FAULTS, MEASURED, find_fault
from tests.faults.counting import Fired
from tests.faults.fault import Fault, Run
from tests.faults.injectors import gradients
from tests.faults.runs import without_allowance

#: Everything that an injector may reach into.
_OWNERS: tuple[Any, ...] = (
    *(attention, learner, logprobs, parameters, places, trained_model, trainer, weights),
    *(gradients._finalize, moe_utils, clip_grads, megatron_optimizer, megatron_random),
    *(learner.Learner, trainer.PolicyTrainer, DotProductAttention, LayoutInvariantRouter, MLP, torch.optim.AdamW),
    *(DistributedDataParallel, _ParamAndGradBucketGroup, megatron_random.CheckpointFunction),
    *(GPTModel, SelfAttention, VocabParallelEmbedding, RowParallelLinear, RowRotaryEmbedding),
    *(torch.nn.LayerNorm, torch.nn.RMSNorm, TopKRouter, SequentialMLP, SharedExpertMLP, TransformerLayer),
    *(Execution, TrainedModel, expert_router, losses, passes),
)
#: Of the reference's list those that it asks for and that run here.
_ASKED_FOR = ("20", "21", "22", "24", "25", "27", "28", "29", "30", "31", "32", "33", "35", "39", "41", "42", "44")
_REAL = ("R1", "R2", "R3", "R4")


def test_catalogue_has_enough_faults_and_all_of_the_reference() -> None:
    numbers = {fault.number for fault in FAULTS}
    assert len(FAULTS) >= 35
    assert {*MEASURED, *_ASKED_FOR, *_REAL} <= numbers
    assert len({fault.id for fault in FAULTS}) == len(FAULTS)
    # 3 %, 1 %, 0.3 % and 0.05 %.
    assert sum(fault.number == "17" for fault in FAULTS) == 4


def test_every_known_bug_of_the_library_is_a_fault() -> None:
    allowed = {name for fault in FAULTS for name in fault.shows.option.split("+") if name.startswith("allow-")}
    assert allowed == {f"allow-{rule.name}" for rule in KNOWN_WRONG if rule.name not in RULES_OF_OTHER_MODELS}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_fault_says_where_it_shows_and_where_it_is_silent(fault: Fault) -> None:
    assert fault.description
    assert fault.expected.names
    assert fault.precisions
    assert fault.silent != fault.shows
    assert fault.expected.update in (0, 1)
    for run in (fault.shows, fault.silent, reference_of(fault.shows), reference_of(fault.silent)):
        assert build_config(run, "float32").parallel.world_size == world_size(run) <= 4


def test_real_bug_is_refused_without_permission() -> None:
    crossing = find_fault("pipeline-crossing")
    assert without_allowance(crossing.shows) == Run(model="deep", layout="pp2-vpp2", option="batched-p2p+micro-batch-2")
    with pytest.raises(ValueError, match="is known to compute wrong values with megatron-core"):
        build_config(without_allowance(crossing.shows), "float32")
    assert build_config(crossing.shows, "float32").parallel.allow_known_wrong == ["pipeline-crossing"]


def test_unknown_fault_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no fault is named 'scale-2'; known: wrong-shard, .*, expert-bias-under-tp"):
        find_fault("scale-2")


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.inject], ids=lambda fault: fault.id)
def test_every_injector_is_taken_back(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 1)
    before = [dict(vars(owner)) for owner in _OWNERS]
    assert fault.inject is not None
    with fault.inject(Fired()):
        during = [dict(vars(owner)) for owner in _OWNERS]
    after = [dict(vars(owner)) for owner in _OWNERS]
    assert _differing(before, during)
    assert not _differing(before, after)


def test_faults_are_taken_back_from_within_each_other() -> None:
    before = [dict(vars(owner)) for owner in _OWNERS]
    with ExitStack() as stack:
        for name in ("head-dropped", "queries-scaled", "norms-not-summed", "norms-averaged"):
            inject = find_fault(name).inject
            assert inject is not None
            stack.enter_context(inject(Fired()))
    assert not _differing(before, [dict(vars(owner)) for owner in _OWNERS])


def _differing(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[str]:
    return [
        f"{owner.__name__}.{name}"
        for owner, left, right in zip(_OWNERS, one, other, strict=True)
        for name in left.keys() | right.keys()
        if left.get(name) is not right.get(name)
    ]
