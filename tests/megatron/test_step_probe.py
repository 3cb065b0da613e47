"""What a rank hands to the sink: every value at its row and position, whatever the micro-batches, and the footer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.config.instruments import TraceConfig
from mock_scheduler.config.layout import ParallelConfig
from mock_scheduler.determinism.agreement_rounds import Reduction, Words
from mock_scheduler.errors import ConfigError, TraceError
from mock_scheduler.megatron.probe import step_probe
from mock_scheduler.megatron.probe.interface import TrainingProbe
from mock_scheduler.megatron.probe.state import StatePiece
from mock_scheduler.megatron.probe.step_probe import StepProbe
from mock_scheduler.support.run_output import Clock
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.full.reader import TraceReader, open_trace
from mock_scheduler.trace.selection import TraceSelection, check_patterns, check_trace_ranks
from mock_scheduler.trace.shards import whole
from pipelines.batching.plan import MicroBatch
from pipelines.config.schema import PipelineConfig
from pipelines.debug_dump.build import build_debug_dump
from pipelines.megatron.learner import row_table, show_inputs
from pipelines.megatron.places import OwnBatch, context_columns, own_batch
from pipelines.megatron.process_of_rank import Runtime
from pipelines.observation import StepObservation
from tests.batches import make_batch
from tests.pipelines.step_plans import build_step_plan

HOST = torch.device("cpu")
# make_batch: rows of 3, 4, 5, 6, 3, ... tokens, of which the first two are the prompt.
BATCH = make_batch(4, 2)
LENGTHS = (3, 4, 5, 6, 3, 4, 5, 6)
FIXED = {"micro_batch_size": 2, "global_batch_size": 4}
SHAPES: dict[str, dict[str, object]] = {
    "one row": {"micro_batch_size": 1, "global_batch_size": 4},
    "two rows": FIXED,
    "dynamic": {"batching": "dynamic", "max_tokens_per_micro_batch": 24, "global_batch_size": 4},
    "packing": {"sequence_packing": True, "max_tokens_per_micro_batch": 24, "global_batch_size": 4},
}


def runtime_of(global_rank: int = 0, world_size: int = 1, **places: int) -> Runtime:
    values = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "dp_rank": 0, "dp_size": 1, **places}
    return Runtime(global_rank=global_rank, world_size=world_size, device=HOST, **values)


def micro_batches_of(
    training: dict[str, object], *, count_multiple: int = 1, batch: RolloutBatch = BATCH
) -> list[tuple[MicroBatch, ...]]:
    config = PipelineConfig.model_validate({"exp_name": "x", "sequence_length": 8, "training": training})
    zeros = torch.zeros(int(batch.response_mask.sum()), dtype=torch.float64)
    plan = build_step_plan(batch, zeros, zeros, config.training, count_multiple=count_multiple, dtype=torch.float64)
    return [update.micro_batches for update in plan.updates]


def own_of(updates: list[tuple[MicroBatch, ...]], runtime: Runtime) -> list[OwnBatch]:
    return [own_batch(batch, runtime) for update in updates for batch in update[runtime.dp_rank :: runtime.dp_size]]


def trace_of(**values: object) -> TraceConfig:
    return TraceConfig.model_validate({"level": "full", "kinds": "all", **values})


def number_of(row_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A number that tells row and position: 100 · row + position, as float64."""
    return (100 * row_ids + positions).double()


def start(probe: TrainingProbe, batch: RolloutBatch, batches: list[OwnBatch]) -> None:
    """The step begins as the learner begins it."""
    probe.start_step(row_table(batch), batches, [])
    show_inputs(probe, batches)


def write(folder: Path, training: dict[str, object], runtime: Runtime, *, count_multiple: int = 1) -> None:
    """The trace of one rank in a step whose values tell where they are from."""
    updates = micro_batches_of(training, count_multiple=count_multiple)
    with StepProbe(runtime, folder, step=3, config=trace_of(kinds=["input", "output", "gradient_norm"])) as probe:
        batches = own_of(updates, runtime)
        start(probe, BATCH, batches)
        for number, update in enumerate(updates):
            probe.start_update(number, update)
            for own in own_of([update], runtime):
                values = {"logprobs": number_of(own.batch.row_ids, own.batch.positions).requires_grad_()}
                probe.tokens("output", own, values, update=number, prefix="critic.")
            probe.scalars("gradient_norm", {"grad_norm": 0.1}, update=number)


@dataclass(frozen=True, kw_only=True)
class Together:
    """Ranks that answer as one would see them: what is gathered is given for all of them in turn."""

    selections: list[TraceSelection]
    global_rank: int = 0
    asked: list[int] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        return len(self.selections)

    def reduce(self, reduction: Reduction) -> Words:
        raise AssertionError(reduction)

    def gather(self, payload: bytes) -> list[bytes]:
        self.asked.append(len(payload))
        found = [item.matched if len(self.asked) == 1 else item.names for item in self.selections]
        answers = [json.dumps(sorted(texts)).encode() for texts in found]
        assert answers[self.global_rank] == payload
        return answers


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[TraceReader]:
    write(tmp_path, FIXED, runtime_of())
    with open_trace(tmp_path) as opened:
        yield opened


def key_of(kind: str, name: str, update: int = 0) -> TraceKey:
    return TraceKey(step=3, update=update, kind=kind, name=name)  # type: ignore[arg-type]


def test_inputs_are_those_of_the_batch_in_its_order(reader: TraceReader) -> None:
    tokens = reader.merge(key_of("input", "tokens"))
    assert tokens.tensor.dtype is torch.int64
    assert tokens.tensor.tolist() == BATCH.tokens.tolist()
    assert tokens.dims == ("token",)
    assert tokens.present is None or bool(tokens.present.all())


def test_the_token_that_predicts_has_what_is_known_of_its_successor(reader: TraceReader) -> None:
    """Row 0 has 3 tokens, of which the last is a response: its second one predicts it."""
    mask = reader.merge(key_of("input", "response_mask")).tensor
    assert mask.dtype is torch.bool
    assert mask[:7].tolist() == [False, True, False, False, True, True, False]
    logprobs = reader.merge(key_of("input", "rollout_logprobs"))
    assert logprobs.tensor.dtype is torch.float32
    assert logprobs.present is not None
    assert logprobs.present.tolist() == mask.tolist()
    assert logprobs.tensor[mask].tolist() == BATCH.rollout_logprobs.tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_values_are_at_their_row_and_position_whatever_the_micro_batches(tmp_path: Path, shape: str) -> None:
    write(tmp_path, SHAPES[shape], runtime_of())
    with open_trace(tmp_path) as reader:
        footer = reader.footer(3)
        assert footer.rows.lengths == LENGTHS
        assert footer.rows.identities == tuple(str(identity) for identity in BATCH.identities)
        assert footer.update_rows == ((0, 1, 2, 3), (4, 5, 6, 7))
        for update, rows in enumerate(footer.update_rows):
            merged = reader.merge(key_of("output", "critic.logprobs", update))
            assert merged.present is not None
            found = {
                footer.rows.find(token): float(merged.tensor[token])
                for token in merged.present.nonzero().flatten().tolist()
            }
            expected = {
                (row, position): 100.0 * row + position for row in rows for position in range(1, LENGTHS[row] - 1)
            }
            assert found == expected


def test_shares_of_context_parallelism_and_replicas_make_the_whole(tmp_path: Path) -> None:
    """Empty micro-batches, which two replicas need here, give nothing."""
    training = {**FIXED, "micro_batch_size": 4}
    for global_rank in range(4):
        runtime = runtime_of(global_rank, 4, cp_rank=global_rank % 2, cp_size=2, dp_rank=global_rank // 2, dp_size=2)
        write(tmp_path / "split", training, runtime, count_multiple=2)
    write(tmp_path / "whole", training, runtime_of())
    assert context_columns(8, cp_rank=0, cp_size=2).tolist() == [0, 1, 6, 7]
    with open_trace(tmp_path / "split") as split, open_trace(tmp_path / "whole") as whole:
        assert split.keys(3) == whole.keys(3)
        for key in whole.keys(3):
            one, other = split.merge(key), whole.merge(key)
            assert torch.equal(one.tensor, other.tensor), key
            assert (one.present is None) == (other.present is None)
            assert one.present is None or torch.equal(one.present, other.present), key
        assert split.footer(3).ranks == (0, 1, 2, 3)


def test_numbers_of_an_update_are_float64_without_dimensions(reader: TraceReader) -> None:
    merged = reader.merge(key_of("gradient_norm", "grad_norm", 1))
    assert merged.tensor.shape == ()
    assert merged.tensor.dtype is torch.float64
    assert merged.tensor.item() == 0.1


def test_the_footer_says_what_was_selected(tmp_path: Path) -> None:
    config = trace_of(kinds=["input", "random"], patterns=["tok*", "res*"], exclude=["x"], ranks=[1, 0])
    for global_rank in range(2):
        with StepProbe(runtime_of(global_rank, 2), tmp_path, step=0, config=config) as probe:
            start(probe, BATCH, own_of(micro_batches_of(FIXED), runtime_of()))
            torch.rand(3)
            probe.end_step()
            torch.rand(5)
    with open_trace(tmp_path) as reader:
        footer = reader.footer(0)
        assert {key.name for key in reader.keys(0)} == {"tokens", "response_mask"}
    assert (footer.kinds, footer.patterns, footer.exclude) == (("input", "random"), ("tok*", "res*"), ("x",))
    assert footer.ranks == (0, 1)
    assert [(call.operation, call.num_elements) for call in footer.ledgers["random"]] == [("rand", 3)]
    assert set(footer.ledgers) == {"random"}


def test_a_rank_that_is_not_chosen_writes_nothing(tmp_path: Path) -> None:
    runtime = runtime_of(1, 2)
    with StepProbe(runtime, tmp_path, step=0, config=trace_of(ranks=[0])) as probe:
        own = own_of(micro_batches_of(FIXED), runtime)
        start(probe, BATCH, own)
        probe.start_update(0, [own[0].batch])
        probe.tokens("output", own[0], {"logprobs": torch.zeros(2, 8)})
        probe.scalars("loss", {"mean.total_loss": 1.0}, update=0)
    assert probe.selection.names == frozenset()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("level", ["full", "sketch"])
def test_a_step_that_fails_leaves_no_trace_and_no_thread(tmp_path: Path, level: str) -> None:
    def step() -> None:
        with StepProbe(runtime_of(), tmp_path, step=0, config=trace_of(level=level)) as probe:
            start(probe, BATCH, own_of(micro_batches_of(FIXED), runtime_of()))
            raise RuntimeError("out of memory")

    threads = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="out of memory"):
        step()
    for thread in set(threading.enumerate()) - threads:
        thread.join(timeout=20.0)
        assert not thread.is_alive()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    with pytest.raises(TraceError):
        open_trace(tmp_path)
    torch.rand(1)  # no ledger is left on the stack
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


@pytest.mark.parametrize("fails_when", ["training", "saving"])
def test_a_step_that_failed_leaves_no_part_and_can_be_traced_again(
    tmp_path: Path, fails_when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that were written before stayed: the step was refused as traced already, and never whole."""
    config = trace_of(kinds=["input"], part_bytes=1 << 16)
    batch = make_batch(4, 800)  # tokens, int64: 14,400 · 8 bytes, in several parts
    training: dict[str, object] = {"micro_batch_size": 64, "global_batch_size": 128}

    def step() -> None:
        with StepProbe(runtime_of(), tmp_path, step=0, config=config) as probe:
            start(probe, batch, own_of(micro_batches_of(training, batch=batch), runtime_of()))
            assert probe._sink is not None
            probe._sink._jobs.flush()  # type: ignore[attr-defined]
            assert list(tmp_path.rglob("*.safetensors"))
            if fails_when == "training":
                raise RuntimeError("out of memory")
            monkeypatch.setattr("mock_scheduler.trace.full.files.save_file", refuse)

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises((RuntimeError, TraceError), match=r"out of memory|No space left"):
        step()
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    with StepProbe(runtime_of(), tmp_path, step=0, config=config) as probe:
        start(probe, batch, own_of(micro_batches_of(training, batch=batch), runtime_of()))
    with open_trace(tmp_path) as reader:
        assert torch.equal(reader.merge(TraceKey(step=0, update=0, kind="input", name="tokens")).tensor, batch.tokens)


def test_what_a_probe_computes_is_in_no_log_of_operations(tmp_path: Path) -> None:
    """Its copies and gathers stood in the log that ``trace.operations`` writes, as if the step had made them."""
    names: list[str] = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func: object, types: object, args: Any = (), kwargs: Any = None) -> object:
            names.append(str(func))
            return func(*args, **(kwargs or {}))  # type: ignore[operator]

    own = own_of(micro_batches_of(FIXED), runtime_of())
    values = torch.zeros(own[0].batch.tokens.shape, dtype=torch.float64)
    with StepProbe(runtime_of(), tmp_path, step=0, config=trace_of()) as probe, Log():
        start(probe, BATCH, own)
        probe.tokens("output", own[0], {"logprobs": values})
        probe.scalars("loss", {"mean.total_loss": 1.0}, update=0)
    assert names == []


def test_tracing_takes_seconds_of_its_own(tmp_path: Path) -> None:
    clock = Clock()
    with StepProbe(runtime_of(), tmp_path, step=0, config=trace_of(kinds=["input"]), clock=clock) as probe:
        start(probe, BATCH, own_of(micro_batches_of(FIXED), runtime_of()))
    assert list(clock.total) == ["trace"]
    assert clock.total["trace"] > 0.0


@pytest.mark.parametrize(("ranks", "named"), [([0, 4], "4"), ([9, 5, 3], "9, 5")], ids=["one too many", "several"])
def test_ranks_beyond_the_layout_are_refused_before_anything_is_built(ranks: list[int], named: str) -> None:
    parallel = {"tensor_model_parallel_size": 2, "data_parallel_size": 2}
    config = PipelineConfig.model_validate({"exp_name": "x", "parallel": parallel, "trace": {"ranks": ranks}})
    with pytest.raises(ConfigError) as caught:
        check_trace_ranks(config.trace, config.parallel)
    assert str(caught.value) == (
        f"trace.ranks has {named}, but layout {config.parallel.describe()} has 4 processes: its global ranks are 0 "
        "to 3. Remove them from trace.ranks, or set it to null for all ranks"
    )


def test_ranks_of_the_layout_are_accepted() -> None:
    check_trace_ranks(TraceConfig.model_validate({"ranks": [0]}), ParallelConfig())
    check_trace_ranks(TraceConfig(), ParallelConfig())


def test_a_pattern_may_select_names_of_another_stage_alone() -> None:
    selections = [TraceSelection(trace_of(patterns=["embedding.*", "output_*"])) for _ in range(2)]
    selections[0].wants("gradient", "embedding.weight")
    selections[1].wants("gradient", "output_layer.weight")
    for global_rank in range(2):
        ranks = Together(selections=selections, global_rank=global_rank)
        check_patterns(selections[global_rank], ranks)
        assert len(ranks.asked) == 1


def test_a_pattern_that_selects_nothing_on_any_stage_is_refused_on_all() -> None:
    selections = [TraceSelection(trace_of(patterns=["*", "output_lair.*"])) for _ in range(2)]
    selections[0].wants("gradient", "embedding.weight")
    selections[1].wants("gradient", "output_layer.weight")
    for global_rank in range(2):
        with pytest.raises(TraceError) as caught:
            check_patterns(selections[global_rank], Together(selections=selections, global_rank=global_rank))
        assert str(caught.value) == (
            "trace.patterns do not all select something:\n"
            "  - 'output_lair.*' selects nothing: it matches none of 2 names; the nearest are output_layer.weight\n"
            "Correct or remove them, or add the kind that has such names to trace.kinds"
        )


def test_a_rank_that_writes_nothing_checks_the_same_globs_as_all_others(tmp_path: Path) -> None:
    """It checked ``*``, which no writing rank had matched: it asked for names that nobody sent, and the run hung."""
    config = trace_of(kinds=["input"], patterns=["tok*"], ranks=[0])
    probes = [StepProbe(runtime_of(rank, 2), tmp_path, step=0, config=config) for rank in range(2)]
    for rank, probe in enumerate(probes):
        start(probe, BATCH, own_of(micro_batches_of(FIXED), runtime_of(rank, 2)))
    for rank, probe in enumerate(probes):
        ranks = Together(selections=[one.selection for one in probes], global_rank=rank)
        check_patterns(probe.selection, ranks)
        assert len(ranks.asked) == 1
        probe.save()


def observe(folder: Path, *, steps: str, patterns: list[str], last: int = 4) -> Iterator[int]:
    """Trace two steps of critic warm-up and those after it; yields the step that comes next."""
    values = {
        "exp_name": "x",
        "output_dir": str(folder),
        "max_steps": last,
        "adv_estimator": "gae",
        "sequence_length": 8,
        "critic": {"warmup_steps": 2},
        "training": FIXED,
        "trace": {"level": "full", "kinds": ["input", "output"], "steps": steps, "patterns": patterns},
    }
    config = PipelineConfig.model_validate(values)
    assert config.first_policy_step == 2
    dump = build_debug_dump(config, {}, vocab_size=10)
    observation = StepObservation(config, runtime_of(), OneRank(), dump=dump, clock=Clock())
    for step in range(last):
        with observation.step(step, BATCH) as probe:
            own = own_of(micro_batches_of(FIXED), runtime_of())
            start(probe, BATCH, own)
            if step >= 2:
                probe.tokens("output", own[0], {"logprobs": torch.zeros(own[0].batch.tokens.shape)})
        yield step + 1


class OneRank:
    """A group of one."""

    global_rank, world_size = 0, 1

    def reduce(self, reduction: Reduction) -> Words:
        raise AssertionError(reduction)

    def gather(self, payload: bytes) -> list[bytes]:
        return [payload]


@pytest.mark.parametrize(
    ("steps", "patterns", "num_steps"),
    [("0-3", ["logprops"], 2), ("0-1", ["logprobs"], 0)],
    ids=["misspelt", "before the policy"],
)
def test_globs_are_checked_where_no_later_trace_has_more_names(
    tmp_path: Path, steps: str, patterns: list[str], num_steps: int
) -> None:
    """A run that traced only steps before the policy's first never checked them: its traces were empty, without a word.

    ``num_steps``: that succeed before.
    """
    with pytest.raises(TraceError, match="selects nothing"):
        list(observe(tmp_path, steps=steps, patterns=patterns))
    names = {path.parent.name for path in tmp_path.rglob("*.safetensors")}
    assert names == {f"step_{step:06d}" for step in range(num_steps)}


@pytest.mark.parametrize(("steps", "patterns"), [("0-3", ["logprobs"]), ("0-1", ["tokens"])])
def test_names_that_only_later_steps_have_are_waited_for(tmp_path: Path, steps: str, patterns: list[str]) -> None:
    assert list(observe(tmp_path, steps=steps, patterns=patterns)) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("kinds", "is_last", "expected"),
    [
        (["parameter"], False, {}),
        # What is lost behind the last update shows in no later one.
        (["parameter"], True, {("w.exp_avg", 1): [0.0], ("num_updates", 1): 7.0}),
        (["router"], True, {}),
        (
            ["optimizer", "parameter"],
            False,
            {("w.exp_avg", 0): [5.0], ("num_updates", 0): 7.0, ("w.exp_avg", 1): [0.0], ("num_updates", 1): 7.0},
        ),
    ],
)
def test_moments_are_read_as_late_as_can_be_and_at_the_end_of_a_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kinds: list[str],
    is_last: bool,
    expected: dict[tuple[str, int], object],
) -> None:
    moment = torch.zeros(1)
    adam = SimpleNamespace(state={"w": {"step": torch.tensor(7.0)}}, param_groups=[])
    model: Any = SimpleNamespace(
        prefix="", gather_parameters=lambda: None, optimizers=[SimpleNamespace(is_stub_optimizer=False, optimizer=adam)]
    )

    def read(observed: object, kind: str) -> Iterator[StatePiece]:
        assert observed is model
        name = "w.exp_avg" if kind == "optimizer" else "w"
        yield StatePiece(spec=whole(name, (1,)), tensor=moment, dims=())

    monkeypatch.setattr(step_probe, "read_state", read)
    with StepProbe(runtime_of(), tmp_path, step=3, config=trace_of(kinds=kinds), is_last=is_last) as probe:
        start(probe, BATCH, [])
        for number, update in enumerate(micro_batches_of(FIXED)):
            probe.start_update(number, update)
            moment.fill_(4.0 + number)
            probe.state(model, number, "parameter")
            moment.fill_(5.0 + number)  # behind the update
        moment.zero_()  # behind the step
    with open_trace(tmp_path) as trace:
        found = {key for key in trace.keys(3) if key.kind == "optimizer"}
        assert {(key.name, key.update): trace.merge(key).tensor.tolist() for key in found} == expected
