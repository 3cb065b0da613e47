"""Weights that are rounded while the engine plays: which values, that every bit comes back, and what is recorded.

The real models play once, in a process of their own (``rounded_weights_worker``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.errors import ConfigError
from mock_scheduler.recording.step.step_file import decode_step
from pipelines.config.engine import ActorInferConfig, weights_precision_problem
from pipelines.config.loading import load_config
from pipelines.rollout.changed_weights import rounded_weights
from tests.dist.conftest import launch
from tests.pipelines.workers.rounded_weights_worker import CASES, OPTIMIZERS

CONFIGS = Path(__file__).parents[3] / "configs"
# Logits of a few units, summed in another order; recorded ones are float32, whose unit is 4.8e-7 at about -5.
ROUNDING = 1.5e-6
LOGPROB_BOUND = 2e-6  # and over temperature 0.8, by two tensor-parallel ranks

UNIT = 2.0**-7  # of bfloat16 between 1 and 2
VALUES = {
    "exact": (1.0 + UNIT, 1.0 + UNIT),
    "down": (0.1, 0.10009765625),
    "tie to the even one below": (1.0 + UNIT / 2, 1.0),
    "tie to the even one above": (1.0 + 3 * UNIT / 2, 1.0 + 2 * UNIT),
    "just above a tie": (1.0 + UNIT / 2 + 2.0**-23, 1.0 + UNIT),
    "to the next power": (-1.9999, -2.0),
    "too large": (3.4e38, math.inf),
    "too small": (1e-45, 0.0),
    "infinity": (-math.inf, -math.inf),
}


def module_of(*values: torch.Tensor) -> torch.nn.Module:
    """A module whose parameters have these values."""
    module = torch.nn.Module()
    for index, value in enumerate(values):
        module.register_parameter(str(index), torch.nn.Parameter(value, requires_grad=value.is_floating_point()))
    return module


def patterns(tensor: torch.Tensor) -> list[int]:
    return tensor.detach().view(torch.int32).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("value", "expected"), VALUES.values(), ids=VALUES.keys())
def test_a_weight_is_the_nearest_value_in_its_own_type(value: float, expected: float, dtype: torch.dtype) -> None:
    module = module_of(torch.tensor([value], dtype=dtype))
    (parameter,) = module.parameters()
    with rounded_weights([module], torch.bfloat16):
        assert (parameter.dtype, parameter.tolist()) == (dtype, [expected])
    assert parameter.tolist() == torch.tensor([value], dtype=dtype).tolist()


def test_float64_is_rounded_to_float32_first() -> None:
    """Just above a tie of bfloat16, by less than float32 shows: straight to bfloat16 it would be 1 + UNIT."""
    module = module_of(torch.tensor([1.0 + UNIT / 2 + 2.0**-40], dtype=torch.float64))
    with rounded_weights([module], torch.bfloat16):
        assert next(module.parameters()).tolist() == [1.0]


@given(words=st.lists(st.integers(min_value=-(2**31), max_value=2**31 - 1), min_size=1, max_size=40))
def test_every_pattern_of_bits_is_rounded_by_integers_and_comes_back(words: Sequence[int]) -> None:
    """NaNs of any payload, both zeros, infinities and subnormal numbers among them."""
    pattern = torch.tensor(words, dtype=torch.int32)
    module = module_of(pattern.clone().view(torch.float32))
    (parameter,) = module.parameters()
    is_nan = parameter.detach().isnan()
    wide = pattern.long()
    expected = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16 << 16)[~is_nan].int()
    with rounded_weights([module], torch.bfloat16):
        assert patterns(parameter[~is_nan]) == expected.tolist()
        assert bool(parameter[is_nan].isnan().all())
    assert patterns(parameter) == list(words)


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt, GeneratorExit])
def test_every_bit_comes_back_behind_an_error(error: type[BaseException]) -> None:
    words = [0x3F800001, 0x7FC12345, -(2**31), 1]
    module = module_of(torch.tensor(words, dtype=torch.int32).view(torch.float32))
    (parameter,) = module.parameters()

    def play() -> None:
        with rounded_weights([module], torch.bfloat16):
            assert patterns(parameter)[0] == 0x3F800000
            raise error

    with pytest.raises(error):
        play()
    assert patterns(parameter) == words


class Uncopyable(torch.nn.Parameter):
    """No memory is left for its copy."""

    def detach(self) -> torch.Tensor:
        """Fails."""
        raise MemoryError("planted")


def test_weights_that_were_rounded_come_back_where_a_later_one_cannot_be() -> None:
    module = module_of(torch.tensor([0.1]))
    module.register_parameter("late", Uncopyable(torch.tensor([0.1])))
    with pytest.raises(MemoryError, match="planted"), rounded_weights([module], torch.bfloat16):
        raise AssertionError("the block was entered")
    assert next(module.parameters()).tolist() == torch.tensor([0.1]).tolist()


def test_what_shares_storage_with_a_weight_sees_it_rounded_and_restored() -> None:
    """As a gradient buffer's and an optimizer's views do; one weight lies in two chunks, and two in one storage."""
    buffer = torch.tensor([0.1, 0.2, 0.3])
    before = buffer.clone()
    shared = torch.nn.Parameter(buffer[:2])
    first, second = module_of(torch.zeros(1)), module_of(buffer[1:])
    first.register_parameter("shared", shared)
    second.register_parameter("shared", shared)
    with rounded_weights([first, second], torch.bfloat16):
        assert torch.equal(buffer, before.bfloat16().float())
    assert torch.equal(buffer, before)
    assert shared.data_ptr() == buffer.data_ptr()


def test_integers_buffers_and_narrow_weights_are_left_alone() -> None:
    counts, narrow = torch.tensor([16_777_217]), torch.tensor([0.1], dtype=torch.bfloat16)
    module = module_of(counts, narrow)
    module.register_buffer("expert_bias", torch.tensor([0.1]))
    with rounded_weights([module], torch.bfloat16):
        values = [tensor.tolist() for tensor in (*module.parameters(), *module.buffers())]
    assert values == [[16_777_217], narrow.tolist(), torch.tensor([0.1]).tolist()]


def test_a_weight_keeps_gradient_and_graph_leaf() -> None:
    module = module_of(torch.tensor([0.1]))
    (parameter,) = module.parameters()
    parameter.grad = torch.tensor([0.3])
    with rounded_weights([module], torch.bfloat16):
        pass
    assert (parameter.is_leaf, parameter.requires_grad) == (True, True)
    assert torch.equal(parameter.grad, torch.tensor([0.3]))


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which one process has written."""
    folder = tmp_path_factory.mktemp("rounded")
    launch(1, folder, ("tp1",), module="tests.pipelines.workers.rounded_weights_worker")
    return folder


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


@pytest.mark.parametrize("case", CASES)
def test_recorded_logprobs_are_those_of_a_plain_pass_of_a_model_rounded_by_hand(played: Path, case: str) -> None:
    facts = read(played / f"hand {case}.json")
    assert len(facts["recorded"]) == len(facts["plain"]) >= 24
    assert facts["recorded"] == pytest.approx(facts["plain"], rel=0, abs=ROUNDING)


@pytest.mark.parametrize("case", CASES)
def test_a_batch_is_that_of_a_model_rounded_by_hand_to_the_bit(played: Path, case: str) -> None:
    """Tokens, rewards and log-probabilities, by an engine of the hand-rounded model that rounds nothing."""
    rounding, by_hand = read(played / f"hand {case}.json")["digests"]
    assert rounding == by_hand


@pytest.mark.parametrize("case", CASES)
def test_the_trainers_logprobs_are_those_of_the_unrounded_policy_to_the_bit(played: Path, case: str) -> None:
    """They are far from the recorded ones, by which an engine that forgot to round would be found."""
    facts = read(played / f"hand {case}.json")
    assert facts["bits"] is True
    assert facts["trainer"] == facts["unrounded"]
    assert facts["trainer_by_hand"] == pytest.approx(facts["recorded"], rel=0, abs=ROUNDING)
    mismatch = [abs(one - other) for one, other in zip(facts["trainer"], facts["recorded"], strict=True)]
    assert max(mismatch) > 100 * ROUNDING


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_playing_changes_no_bit_of_training(played: Path, optimizer: str) -> None:
    """Parameters and both of Adam's moments after two steps, beside a learner that played nothing."""
    facts = read(played / f"trained {optimizer}.json")
    assert facts["playing"] == facts["still"]
    assert len(facts["playing"]) % 3 == 0


def check_restored(facts: dict[str, Any]) -> None:
    for part in ("played", "failed"):
        assert facts[part]["before"] == facts[part]["after"]
    assert facts["failed"]["during"] != facts["failed"]["before"]


def test_the_engine_restores_every_bit_behind_a_batch_and_behind_an_error(played: Path) -> None:
    check_restored(read(played / "tp1" / "rope" / "rank_0.json"))


@pytest.mark.all
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_two_ranks_play_the_rounded_policy_and_restore_their_shards(
    played: Path, tmp_path_factory: pytest.TempPathFactory, layout: str
) -> None:
    """The model ties its embeddings, of which the last of two stages has a copy."""
    folder = tmp_path_factory.mktemp(layout)
    launch(2, folder, (layout,), module="tests.pipelines.workers.rounded_weights_worker")
    expected, found = rows(played, "tp1"), rows(folder, layout)
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.allclose(found.rollout_logprobs, expected.rollout_logprobs, rtol=0, atol=LOGPROB_BOUND)
    ranks = [read(folder / layout / "rope" / f"rank_{rank}.json") for rank in range(2)]
    for facts in ranks:
        check_restored(facts)
    if layout == "pp2":  # which reorders no sum
        assert {facts["digest"] for facts in ranks} == {expected.digest()}


def rows(folder: Path, layout: str) -> RolloutBatch:
    return decode_step((folder / layout / "rope" / "rows.safetensors").read_bytes())[0]


ROUNDED = ActorInferConfig(weights_precision="bfloat16")
REAL = frozenset({"real"})
REPLAY = ("rollout_mock.enable=true", "rollout_mock.mode=mock")


def problem(
    engine: ActorInferConfig = ROUNDED,
    *,
    precision: str = "float32",
    worker_type: str = "real",
    modes_in_use: frozenset[str] = REAL,
) -> str:
    return weights_precision_problem(engine, precision=precision, worker_type=worker_type, modes_in_use=modes_in_use)


def test_weights_that_are_bfloat16_already_are_refused() -> None:
    expected = (
        "actor_infer.weights_precision bfloat16 would have no effect: with precision bfloat16 the weights have no "
        "other values; set precision to float32 or float64, or leave it out"
    )
    assert problem(precision="bfloat16") == expected
    assert problem(precision="bfloat16", modes_in_use=frozenset({"mock", "real"})) == expected


def test_rollouts_that_are_read_have_no_weights_to_round() -> None:
    assert problem(worker_type="mock") == (
        "actor_infer.weights_precision bfloat16 would have no effect: with rollout_worker.type mock rollouts are read, "
        "and no weights are sampled from; leave it out"
    )


def test_a_replay_has_the_key_of_its_recording_whatever_it_trains_in() -> None:
    assert problem(precision="bfloat16", modes_in_use=frozenset({"mock"})) == ""


def test_wider_weights_and_no_rounding_are_accepted() -> None:
    assert [problem(), problem(precision="float64"), problem(ActorInferConfig(), precision="bfloat16")] == ["", "", ""]


def test_another_precision_is_refused_with_the_one_that_there_is() -> None:
    with pytest.raises(ConfigError, match=r"weights_precision: unknown value 'float16'; known values: bfloat16 "):
        load_config("quickstart", config_path=CONFIGS, overrides=["actor_infer.weights_precision=float16"])


def test_a_configuration_in_which_nothing_would_be_rounded_is_refused_when_it_loads() -> None:
    overrides = ["actor_infer.weights_precision=bfloat16", "precision=bfloat16"]
    with pytest.raises(ConfigError, match=r"weights_precision bfloat16 would have no effect: with precision bfloat16 "):
        load_config("quickstart", config_path=CONFIGS, overrides=overrides)
    replay = load_config("quickstart", config_path=CONFIGS, overrides=[*overrides, *REPLAY])
    assert replay.actor_infer.weights_precision == "bfloat16"
