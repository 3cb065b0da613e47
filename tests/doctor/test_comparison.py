"""Which record of two logs differs first, what that means, and which setting is responsible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest

from mock_scheduler.determinism.operations import OperationLogHeader, OperationRecord, Phase, TensorRecord
from mock_scheduler.doctor.causes import State, find_cause
from mock_scheduler.doctor.comparison import compare_rank, compare_step
from mock_scheduler.doctor.differences import Difference, DifferenceKind
from mock_scheduler.errors import TraceError


@dataclass
class Memory:
    """A log in memory."""

    made: Sequence[OperationRecord]
    global_rank: int = 0
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def header(self) -> OperationLogHeader:
        return OperationLogHeader(step=0, global_rank=self.global_rank, world_size=4, settings=self.settings)

    def records(self) -> Sequence[OperationRecord]:
        return self.made


def tensor(name: str, digest: str | None, *, storage: int = 0, note: str = "") -> TensorRecord:
    return TensorRecord(name=name, dtype="float32", shape=(2, 3), storage=storage, digest=digest, note=note)


def op(number: int, operator: str, inputs: str = "", outputs: str = "", **fields: object) -> OperationRecord:
    """``inputs``, ``outputs``: one digest per word, ``3:abc`` for one in memory 3."""

    def tensors(words: str, name: str) -> tuple[TensorRecord, ...]:
        parts = [word.rpartition(":") for word in words.split()]
        return tuple(
            tensor(f"{name}{position}", digest, storage=int(storage or 0))
            for position, (storage, _, digest) in enumerate(parts)
        )

    given = {"phase": Phase.FORWARD, "module": "policy.mlp", "place": "mlp.py:7", "device": "cpu"} | fields
    return OperationRecord(
        number=number, operator=operator, inputs=tensors(inputs, "in"), outputs=tensors(outputs, "out"), **given
    )


BEFORE = op(0, "aten.mul.Tensor", "1:a", "2:b")


def first_difference(first: Sequence[OperationRecord], second: Sequence[OperationRecord]) -> Difference:
    difference = compare_rank(Memory(first), Memory(second)).difference
    assert difference is not None
    return difference


def test_equal_logs_have_no_difference_and_say_how_much_was_compared() -> None:
    records = [BEFORE, op(1, "aten.mm.default", "2:b 1:a", "3:c")]
    compared = compare_rank(Memory(records), Memory(records))
    assert (compared.num_operations, compared.num_digests, compared.difference) == (2, 5, None)


def test_views_in_another_order_are_no_difference() -> None:
    """A clean run on megatron-core 0.19.2 was unverified: it detaches parameters in the order of a set of objects."""
    views = [replace(op(n, "aten.detach.default"), inputs=(tensor(name, None),)) for n, name in ((1, "a"), (2, "b"))]
    compared = compare_rank(Memory([BEFORE, *views]), Memory([BEFORE, *reversed(views)]))
    assert (compared.num_operations, compared.difference) == (1, None)


def test_other_outputs_from_equal_inputs_are_the_operations_own() -> None:
    difference = first_difference(
        [BEFORE, op(1, "aten.mm.default", "2:b", "3:c"), op(2, "aten.exp.default", "3:c", "4:d")],
        [BEFORE, op(1, "aten.mm.default", "2:b", "3:X"), op(2, "aten.exp.default", "3:X", "4:Y")],
    )
    assert difference.kind is DifferenceKind.NOT_REPEATABLE
    assert difference.describe() == (
        "operation 1, aten.mm.default, in policy.mlp (forward, at mlp.py:7): the same inputs gave another out0 "
        "float32[2, 3]"
    )


def test_a_number_that_was_returned_counts_as_an_output() -> None:
    difference = first_difference(
        [op(0, "aten._local_scalar_dense.default", "1:a", values=("1.0",))],
        [op(0, "aten._local_scalar_dense.default", "1:a", values=("2.0",))],
    )
    assert (difference.kind, difference.tensors) == (DifferenceKind.NOT_REPEATABLE, ("returned value",))


def test_an_input_that_changed_by_itself_was_written_past_torch() -> None:
    """The window begins with the last operation that had that memory, not with the last operation."""
    unrelated = op(1, "aten.exp.default", "5:e", "6:f")
    difference = first_difference(
        [BEFORE, unrelated, op(2, "aten.add.Tensor", "2:b", "3:c")],
        [BEFORE, unrelated, op(2, "aten.add.Tensor", "2:X", "3:Y")],
    )
    assert difference.kind is DifferenceKind.NOT_DISPATCHED
    assert (difference.previous, difference.writer) == (unrelated, BEFORE)
    assert difference.describe() == (
        "operation 2, aten.add.Tensor, in policy.mlp (forward, at mlp.py:7): in0 float32[2, 3] differs, though no "
        "operation before it did; it was changed between operation 0, aten.mul.Tensor, in policy.mlp (forward, at "
        "mlp.py:7) and this one by something that torch does not dispatch: a kernel of TransformerEngine, apex or "
        "Triton, compiled code, an extension, or NumPy"
    )


def test_an_input_that_differs_at_its_first_use_differed_before_the_step() -> None:
    difference = first_difference(
        [BEFORE, op(1, "aten.mm.default", "7:w", "3:c")], [BEFORE, op(1, "aten.mm.default", "7:X", "3:Y")]
    )
    assert difference.kind is DifferenceKind.DIFFERED_BEFORE
    assert "in0 float32[2, 3] differs at its first use in this step" in difference.describe()


def test_taking_tensors_in_another_order_is_told_from_a_changed_tensor() -> None:
    made = [op(0, "aten.mul.Tensor", "1:a", "2:b"), op(1, "aten.exp.default", "1:a", "3:c")]
    difference = first_difference(
        [*made, op(2, "aten.add_.Tensor", "4:z 2:b", "4:y")], [*made, op(2, "aten.add_.Tensor", "4:z 3:c", "4:x")]
    )
    assert difference.kind is DifferenceKind.OTHER_TENSOR
    assert "for in1 float32[2, 3] the two runs used different tensors, each computed earlier" in difference.describe()


@pytest.mark.parametrize(
    "change", [{"operator": "aten.exp.default"}, {"module": "other"}, {"place": "mlp.py:9"}, {"arguments": "dim=1"}]
)
def test_another_operation_module_line_or_argument_is_another_path(change: dict[str, str]) -> None:
    record = op(1, "aten.mm.default", "2:b", "3:c")
    difference = first_difference([BEFORE, record], [BEFORE, replace(record, **change)])
    assert difference.kind is DifferenceKind.OTHER_PATH


def test_another_path_names_both_operations() -> None:
    difference = first_difference(
        [BEFORE, op(1, "aten.mm.default", "2:b", "3:c", arguments="dim=0")],
        [BEFORE, op(1, "aten.exp.default", "2:b", "3:c")],
    )
    assert difference.describe() == (
        "after operation 0, aten.mul.Tensor, in policy.mlp (forward, at mlp.py:7) the first run went on with operation "
        "1, aten.mm.default, in policy.mlp (forward, at mlp.py:7) on (in0 float32[2, 3], dim=0), the second with "
        "operation 1, aten.exp.default, in policy.mlp (forward, at mlp.py:7) on (in0 float32[2, 3])"
    )


def test_a_run_that_ended_earlier_is_named() -> None:
    difference = first_difference([BEFORE], [BEFORE, op(1, "aten.mm.default", "2:b", "3:c")])
    assert difference.kind is DifferenceKind.ENDED_EARLIER
    assert difference.describe() == (
        "after operation 0, aten.mul.Tensor, in policy.mlp (forward, at mlp.py:7) the first run had ended; the other "
        "went on with operation 1, aten.mm.default, in policy.mlp (forward, at mlp.py:7)"
    )


def test_memory_is_numbered_per_run_and_not_compared() -> None:
    records = [BEFORE, op(1, "aten.mm.default", "2:b", "3:c")]
    renumbered = [op(0, "aten.mul.Tensor", "8:a", "9:b"), op(1, "aten.mm.default", "9:b", "4:c")]
    assert compare_rank(Memory(records), Memory(renumbered)).difference is None


def test_threads_may_interleave_in_another_way() -> None:
    one, other = op(0, "aten.mm.default", "1:a", "2:b"), op(1, "aten.exp.default", "1:a", "3:c", lane="backward-1")
    swapped = [replace(other, number=0), replace(one, number=1)]
    assert compare_rank(Memory([one, other]), Memory(swapped)).difference is None


def test_a_difference_in_a_second_thread_is_found() -> None:
    one, other = op(0, "aten.mm.default", "1:a", "2:b"), op(1, "aten.exp.default", "1:a", "3:c", lane="backward-1")
    difference = first_difference([one, other], [one, op(1, "aten.exp.default", "1:a", "3:X", lane="backward-1")])
    assert difference.record == other


def test_what_an_operation_of_another_library_found_in_a_buffer_is_said_to_be_unknown() -> None:
    def fill(digest: str) -> OperationRecord:
        unseen = (tensor("buffer", None, note="uninitialised"),)
        return replace(op(0, "vendor.fill.default", "", f"1:{digest}"), inputs=unseen)

    text = first_difference([fill("a")], [fill("X")]).describe()
    assert text.endswith("another out0 float32[2, 3] (what buffer held before could not be compared)")


def reduce_over(number: int, inputs: str, outputs: str, **fields: object) -> OperationRecord:
    return op(number, "c10d.allreduce_.default", inputs, outputs, group=(0, 1), **fields)


def ranks(*made: Sequence[OperationRecord]) -> dict[int, Memory]:
    return {global_rank: Memory(records, global_rank=global_rank) for global_rank, records in enumerate(made)}


def test_the_rank_whose_operation_differs_is_named_not_those_that_received_it() -> None:
    """Rank 0 notices first by its number, at the reduction; rank 1's product is the cause."""
    padding = [op(number, "aten.exp.default", "1:a", "2:b") for number in range(2)]
    first = ranks(
        [reduce_over(0, "1:a", "1:s")], [*padding, op(2, "aten.mm.default", "1:a", "3:p"), reduce_over(3, "3:p", "3:s")]
    )
    second = ranks(
        [reduce_over(0, "1:a", "1:X")], [*padding, op(2, "aten.mm.default", "1:a", "3:Q"), reduce_over(3, "3:Q", "3:X")]
    )
    compared = compare_step(0, first, second)
    assert [each.difference is not None for each in compared.ranks] == [True, True]
    assert compared.origin is not None
    assert (compared.origin.global_rank, compared.origin.record.operator) == (1, "aten.mm.default")


def test_a_reduction_of_equal_inputs_with_another_sum_is_the_origin_itself() -> None:
    first = ranks([reduce_over(0, "1:a", "1:s")], [reduce_over(0, "1:b", "1:s")])
    second = ranks([reduce_over(0, "1:a", "1:X")], [reduce_over(0, "1:b", "1:X")])
    origin = compare_step(0, first, second).origin
    assert origin is not None
    assert (origin.global_rank, origin.record.operator) == (0, "c10d.allreduce_.default")
    assert origin.kind is DifferenceKind.NOT_REPEATABLE


def test_the_n_th_reduction_of_a_group_is_matched_with_the_n_th_of_the_other_ranks() -> None:
    """Rank 1's own operation differs after the reduction from which rank 0 differs: it cannot be its cause."""
    earlier = reduce_over(0, "1:a", "1:r")
    first = ranks(
        [earlier, reduce_over(1, "1:a", "1:s")],
        [earlier, reduce_over(1, "1:b", "1:s"), op(2, "aten.mm.default", "5:m", "6:n")],
    )
    second = ranks(
        [earlier, reduce_over(1, "1:a", "1:X")],
        [earlier, reduce_over(1, "1:b", "1:s"), op(2, "aten.mm.default", "5:m", "6:Y")],
    )
    origin = compare_step(0, first, second).origin
    assert origin is not None
    assert (origin.global_rank, origin.record.operator) == (0, "c10d.allreduce_.default")


def test_what_was_received_is_traced_to_the_sender() -> None:
    """The results of a receive are in a record of their own, at their first use."""

    def run(made: str) -> dict[int, Memory]:
        group = {"group": (0, 1)}
        return ranks(
            [
                op(0, "c10d.recv_.default", peer=1, **group),
                op(1, "c10d.recv_.default", "", f"1:{made}", peer=1, completes=0, **group),
            ],
            [
                op(0, "aten.exp.default", "1:a", "2:b"),
                op(1, "aten.mm.default", "2:b", f"3:{made}"),
                op(2, "c10d.send.default", f"3:{made}", "", peer=0, **group),
            ],
        )

    origin = compare_step(0, run("p"), run("Q")).origin
    assert origin is not None
    assert (origin.global_rank, origin.record.operator) == (1, "aten.mm.default")


def test_logs_of_other_ranks_are_refused() -> None:
    with pytest.raises(TraceError) as caught:
        compare_step(3, ranks([BEFORE]), ranks([BEFORE], [BEFORE]))
    assert str(caught.value) == (
        "step 3: the first run has operation logs of ranks [0], the second of [0, 1]; both must have those of all ranks"
    )


# What a deterministic run on a GPU reads back, as far as it bears on these tests.
IN_EFFECT = {
    "torch.deterministic_algorithms": "True",
    "torch.deterministic_warn_only": "False",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_NVLS_ENABLE": "0",
    "OMP_NUM_THREADS": "1",
    "torch.num_threads": "1",
    "torch.cudnn.deterministic": "True",
    "torch.cudnn.benchmark": "False",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "torch.inductor.max_autotune": "not imported",
    "torch.inductor.coordinate_descent_tuning": "False",
    "PYTHONHASHSEED": "0",
    "version.cuda": "13.0",
    "version.nccl": "2.28",
    "version.transformer-engine": "2.9",
}


def varying(operator: str, device: str) -> Difference:
    return first_difference(
        [op(0, operator, "1:a", "2:b", device=device)], [op(0, operator, "1:a", "2:X", device=device)]
    )


@pytest.mark.parametrize(
    ("operator", "device", "setting", "value"),
    [
        ("aten.index_add_.default", "cuda", "torch.deterministic_algorithms", "False"),
        ("aten.index_put_.default", "cuda", "torch.deterministic_algorithms", "False"),
        ("aten.scatter_add.default", "cuda", "torch.deterministic_warn_only", "True"),
        ("aten.cumsum.default", "cuda", "torch.deterministic_algorithms", "False"),
        ("aten.embedding_dense_backward.default", "cuda", "torch.deterministic_algorithms", "False"),
        ("aten.avg_pool2d_backward.default", "cuda", "torch.deterministic_algorithms", "False"),
        ("aten.mm.default", "cuda", "CUBLAS_WORKSPACE_CONFIG", "unset"),
        ("aten.baddbmm.default", "cuda", "CUBLAS_WORKSPACE_CONFIG", ":16:16"),
        ("aten._scaled_dot_product_flash_attention_backward.default", "cuda", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1"),
        ("aten.convolution_backward.default", "cuda", "torch.cudnn.benchmark", "True"),
        ("c10d.allreduce_.default", "cuda", "NCCL_ALGO", "Tree"),
        ("_c10d_functional.reduce_scatter_tensor.default", "cuda", "NCCL_NVLS_ENABLE", "unset"),
        ("aten.native_layer_norm_backward.default", "cpu", "OMP_NUM_THREADS", "unset"),
        ("vendor.norm.default", "cuda", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1"),
    ],
)
def test_a_setting_that_is_not_as_required_is_responsible(operator: str, device: str, setting: str, value: str) -> None:
    settings = IN_EFFECT | {setting: value}
    cause = find_cause(varying(operator, device), settings, settings)
    assert setting in [found.name for found in cause.responsible]
    in_effect = find_cause(varying(operator, device), IN_EFFECT, IN_EFFECT)
    assert setting not in [found.name for found in in_effect.responsible]


def test_a_setting_that_differs_is_named_before_one_that_is_not_as_required() -> None:
    difference = varying("aten.native_layer_norm_backward.default", "cpu")
    cause = find_cause(difference, IN_EFFECT, IN_EFFECT | {"torch.num_threads": "4", "OMP_NUM_THREADS": "unset"})
    assert cause.describe() == (
        "responsible:\n"
        "  - OMP_NUM_THREADS was 1 in the first run and unset in the second: a sum is split over the threads, so their "
        "number must be fixed\n"
        "  - torch.num_threads was 1 in the first run and 4 in the second: a sum is split over the threads, so their "
        "number must be fixed"
    )


def test_where_all_is_in_effect_the_operation_itself_is_to_blame() -> None:
    cause = find_cause(varying("aten.index_add_.default", "cuda"), IN_EFFECT, IN_EFFECT)
    assert cause.responsible == ()
    assert cause.describe() == (
        "all settings that bear on it are in effect or equal (torch.deterministic_algorithms=True, "
        "torch.deterministic_warn_only=False): it is not repeatable by itself"
    )


def test_a_random_operation_is_a_generator_that_is_not_seeded() -> None:
    for operator in ("aten.rand.default", "aten.randn_like.default", "aten.native_dropout.default", "aten.normal_.out"):
        cause = find_cause(varying(operator, "cuda"), IN_EFFECT, IN_EFFECT)
        assert cause.why.startswith("it draws random numbers, from a generator that was not in the same state")
        assert cause.describe() == "no setting governs it: the program itself must be changed"


def test_another_path_is_the_hash_seeds_where_none_is_fixed() -> None:
    difference = first_difference([op(0, "aten.mm.default", "1:a")], [op(0, "aten.exp.default", "1:a")])
    unset = IN_EFFECT | {"PYTHONHASHSEED": "unset", "python.string_hash": "1"}
    cause = find_cause(difference, unset, unset | {"python.string_hash": "2"})
    assert [(found.name, found.state) for found in cause.responsible] == [
        ("python.string_hash", State.DIFFERS),
        ("PYTHONHASHSEED", State.NOT_AS_REQUIRED),
    ]


def test_settings_of_libraries_that_are_not_installed_are_not_blamed() -> None:
    absent = IN_EFFECT | {"version.transformer-engine": "absent", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "unset"}
    cause = find_cause(varying("vendor.norm.default", "cuda"), absent, absent)
    assert cause.responsible == ()


def test_a_setting_without_known_bearing_that_differs_is_still_told() -> None:
    cause = find_cause(
        varying("aten.index_add_.default", "cuda"),
        IN_EFFECT | {"version.torch": "2.13.0"},
        IN_EFFECT | {"version.torch": "2.14.1"},
    )
    assert cause.describe() == (
        "no setting known to bear on it is to blame, but the two runs differ in:\n"
        "  - version.torch was 2.13.0 in the first run and 2.14.1 in the second: another version may sum in another "
        "order; where it differs, compare within rounding"
    )
