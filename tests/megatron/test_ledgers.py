"""What a ledger of random draws and collectives lists, and that it lists nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.nn.functional import dropout, scaled_dot_product_attention

from mock_scheduler.config.instruments import LedgerKind
from mock_scheduler.megatron.probe.ledgers import CallLedger
from mock_scheduler.trace.entries import LedgerCall

Found = list[tuple[str, tuple[int, ...], str, int]]


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def calls_of(kind: LedgerKind, block: Callable[[], object]) -> Found:
    ledger = CallLedger([kind])
    with ledger:
        block()
    assert set(ledger.calls) == {kind}
    return [(call.operation, call.group, call.dtype, call.num_elements) for call in ledger.calls[kind]]


def attention(dropout_p: float) -> torch.Tensor:
    query = torch.ones(1, 2, 3, 4, requires_grad=True)
    output = scaled_dot_product_attention(query, query, query, dropout_p=dropout_p)
    output.sum().backward()
    return output


DRAWS: dict[str, tuple[Callable[[], object], Found]] = {
    "normal_": (lambda: torch.empty(2, 3).normal_(), [("normal_", (), "float32", 6)]),
    "uniform_": (lambda: torch.empty(4, dtype=torch.float64).uniform_(), [("uniform_", (), "float64", 4)]),
    "bernoulli_": (lambda: torch.empty(5).bernoulli_(0.5), [("bernoulli_", (), "float32", 5)]),
    "bernoulli": (lambda: torch.bernoulli(torch.full((3,), 0.5)), [("bernoulli", (), "float32", 3)]),
    "randperm": (lambda: torch.randperm(7), [("randperm", (), "int64", 7)]),
    "multinomial": (lambda: torch.multinomial(torch.ones(2, 4), 3), [("multinomial", (), "int64", 6)]),
    "rand": (lambda: torch.rand(2, dtype=torch.bfloat16), [("rand", (), "bfloat16", 2)]),
    "randint": (lambda: torch.randint(0, 5, (8,)), [("randint", (), "int64", 8)]),
    "randn_like": (lambda: torch.randn_like(torch.zeros(9)), [("randn_like", (), "float32", 9)]),
    "dropout": (lambda: dropout(torch.ones(6), p=0.5), [("bernoulli_", (), "float32", 6)]),
    "a generator of its own": (
        lambda: torch.rand(2, generator=torch.Generator().manual_seed(0)),
        [("rand", (), "float32", 2)],
    ),
}
NO_DRAWS: dict[str, Callable[[], object]] = {
    "arithmetic": lambda: torch.ones(3) @ torch.ones(3),
    "an empty dropout": lambda: dropout(torch.ones(6), p=0.0),
    "dropout in evaluation": lambda: dropout(torch.ones(6), p=0.5, training=False),
    "attention without dropout": lambda: attention(0.0),
    "a native dropout of nothing": lambda: torch.native_dropout(torch.ones(3), 0.0, True),
    "a leaky slope in evaluation": lambda: torch.rrelu(torch.ones(3)),
    "seeding": lambda: torch.Generator().manual_seed(3),
}


@pytest.mark.parametrize("name", DRAWS)
def test_each_draw_is_listed_with_dtype_and_number(name: str) -> None:
    block, expected = DRAWS[name]
    assert calls_of("random", block) == expected


@pytest.mark.parametrize("name", NO_DRAWS)
def test_what_draws_nothing_is_not_listed(name: str) -> None:
    assert calls_of("random", NO_DRAWS[name]) == []


def test_attention_that_drops_is_a_draw() -> None:
    calls = calls_of("random", lambda: attention(0.5))
    assert len(calls) == 1


def test_draws_of_the_backward_pass_are_listed() -> None:
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            return gradient + torch.rand(4)

    calls = calls_of("random", lambda: Noisy.apply(torch.ones(4, requires_grad=True)).sum().backward())
    assert calls == [("rand", (), "float32", 4)]


def test_draws_are_the_same_with_and_without_a_ledger() -> None:
    generator = torch.Generator().manual_seed(11)
    plain = torch.rand(16, generator=generator)
    generator.manual_seed(11)
    with CallLedger(["random", "collective"]):
        watched = torch.rand(16, generator=generator)
    assert torch.equal(plain, watched)


COLLECTIVES: dict[str, tuple[Callable[[], object], Found]] = {
    "all_reduce": (lambda: dist.all_reduce(torch.ones(3)), [("all_reduce", (0,), "float32", 3)]),
    "all_reduce by another name": (
        lambda: dist.distributed_c10d.all_reduce(torch.ones(3)),
        [("all_reduce", (0,), "float32", 3)],
    ),
    "of the group itself": (
        lambda: dist.group.WORLD.allreduce([torch.ones(2)]).wait(),
        [("all_reduce", (0,), "float32", 2)],
    ),
    "all_gather": (
        lambda: dist.all_gather([torch.zeros(4)], torch.ones(4)),
        [("all_gather", (0,), "float32", 4)],
    ),
    "all_gather of one tensor": (
        lambda: dist.group.WORLD._allgather_base(torch.zeros(4), torch.ones(4)).wait(),
        [("all_gather", (0,), "float32", 4)],
    ),
    "reduce_scatter": (
        lambda: dist.reduce_scatter(torch.zeros(4), [torch.ones(4)]),
        [("reduce_scatter", (0,), "float32", 4)],
    ),
    "reduce_scatter of one tensor": (
        lambda: dist.group.WORLD._reduce_scatter_base(torch.zeros(5), torch.ones(5)).wait(),
        [("reduce_scatter", (0,), "float32", 5)],
    ),
    "all_to_all_single": (
        lambda: dist.all_to_all_single(torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.int64)),
        [("all_to_all", (0,), "int64", 4)],
    ),
    "broadcast": (lambda: dist.broadcast(torch.ones(2, 2), src=0), [("broadcast", (0,), "float32", 4)]),
    "reduce": (lambda: dist.reduce(torch.ones(2), dst=0), [("reduce", (0,), "float32", 2)]),
    "gather": (lambda: dist.gather(torch.ones(3), [torch.zeros(3)]), [("gather", (0,), "float32", 3)]),
    "scatter": (lambda: dist.scatter(torch.zeros(3), [torch.ones(3)]), [("scatter", (0,), "float32", 3)]),
    "barrier": (lambda: dist.barrier(), [("barrier", (0,), "", 0)]),
    "asynchronous": (
        lambda: dist.all_reduce(torch.ones(3), async_op=True).wait(),
        [("all_reduce", (0,), "float32", 3)],
    ),
    "functional": (
        lambda: functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD).sum(),
        [("all_reduce", (0,), "float32", 3)],
    ),
    "arithmetic": (lambda: torch.ones(3).sum(), []),
}


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", COLLECTIVES)
def test_each_collective_is_listed_with_group_dtype_and_number(name: str) -> None:
    block, expected = COLLECTIVES[name]
    assert calls_of("collective", block) == expected


@pytest.mark.usefixtures("one_process")
def test_collectives_of_a_backward_pass_are_listed_after_those_of_the_forward_pass() -> None:
    class Copied(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, value: torch.Tensor) -> torch.Tensor:
            dist.broadcast(torch.zeros(1), src=0)
            return value.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            reduced = gradient.clone()
            dist.all_reduce(reduced)
            return reduced

    ledger = CallLedger(["collective", "random"])
    with ledger:
        Copied.apply(torch.ones(2, requires_grad=True)).sum().backward()
        dist.barrier()
    assert [call.operation for call in ledger.calls["collective"]] == ["broadcast", "all_reduce", "barrier"]
    assert ledger.calls["random"] == []
    assert ledger.calls["collective"][1] == LedgerCall(
        operation="all_reduce", group=(0,), dtype="float32", num_elements=2
    )
