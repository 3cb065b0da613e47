"""What a schema's keys decide is read from the statements at its fields, the nearest first."""

from __future__ import annotations

from typing import Annotated, ClassVar

import pytest
from pydantic import Field

from mock_scheduler.alignment.plan.planned_run import Changes, change_kind, find_changes
from mock_scheduler.config.base import ConfigSection, Decides, effects_of


class Optimizer(ConfigSection):
    decides: ClassVar = Decides.TRAINING

    lr: float = 0.1
    fused: Annotated[bool, Decides.BITS] = False


class Board(ConfigSection):
    size: Annotated[int, Field(gt=0)] = 4


class Room(ConfigSection):
    size: int = 6
    num_boxes: int = 1


class Player(ConfigSection):
    decides: ClassVar = Decides.ROLLOUTS

    board: Board | Room = Board()
    workers: Annotated[int, Decides.EXECUTION] = 0
    optimizer: Optimizer | None = None


class Program(ConfigSection):
    name: Annotated[str, Decides.LABEL] = "run"
    optimizer: Optimizer = Optimizer()
    train: Player = Player()
    val: Annotated[Player, Decides.VALIDATION] = Player()
    boards: Annotated[dict[str, Board], Decides.ROLLOUTS] = Field(default={})
    history: Annotated[list[Board], Decides.NOTHING] = Field(default=[])
    env: Annotated[dict[str, str], Decides.OUTSIDE] = Field(default={})


def test_the_nearest_statement_counts_and_validation_is_added_to_all_inside() -> None:
    rollouts, validation = Decides.ROLLOUTS, Decides.VALIDATION
    assert effects_of(Program).by_key == {
        "name": Decides.LABEL,
        "optimizer.lr": Decides.TRAINING,
        "optimizer.fused": Decides.BITS,
        "train.board.size": rollouts,
        "train.board.num_boxes": rollouts,
        "train.workers": Decides.EXECUTION,
        "train.optimizer": rollouts,
        "train.optimizer.lr": Decides.TRAINING,
        "train.optimizer.fused": Decides.BITS,
        "val.board.size": rollouts | validation,
        "val.board.num_boxes": rollouts | validation,
        "val.workers": Decides.EXECUTION | validation,
        "val.optimizer": rollouts | validation,
        "val.optimizer.lr": Decides.TRAINING | validation,
        "val.optimizer.fused": Decides.BITS | validation,
        "boards": rollouts,
        "boards.*.size": rollouts,
        "history": Decides.NOTHING,
        "history.*.size": Decides.NOTHING,
        "env": Decides.OUTSIDE,
        "env.*": Decides.OUTSIDE,
    }


def test_a_key_that_the_user_chose_has_the_facts_of_its_mapping() -> None:
    effects = effects_of(Program)
    assert effects.of("boards.Big.size") == Decides.ROLLOUTS
    assert effects.of("env.NCCL_ALGO") == Decides.OUTSIDE
    assert effects.of("history.0.size") == Decides.NOTHING


def test_a_key_that_the_schema_has_not_is_refused() -> None:
    with pytest.raises(KeyError, match=r"boards\.Big\.colour is no key of this configuration"):
        effects_of(Program).of("boards.Big.colour")


def test_every_key_without_a_statement_is_named() -> None:
    class Silent(ConfigSection):
        told: Annotated[int, Decides.BITS] = 0
        silent: int = 0
        boards: dict[str, Board] = Field(default={})

    with pytest.raises(TypeError) as caught:
        effects_of(Silent)
    text = "does not state what it decides: write Annotated[..., Decides.X] at its field"
    assert str(caught.value) == f"Silent: silent {text}; boards {text}; boards.*.size {text}"


def test_a_key_of_two_sections_that_say_different_things_is_named() -> None:
    class Unlike(ConfigSection):
        size: Annotated[int, Decides.BITS] = 1

    class Torn(ConfigSection):
        board: Annotated[Board | Unlike, Decides.ROLLOUTS] = Board()

    with pytest.raises(TypeError) as caught:
        effects_of(Torn)
    assert str(caught.value) == (
        "Torn: board.size states Decides.ROLLOUTS in one section and Decides.BITS in another; state one"
    )


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        (Decides.NOTHING, "nothing"),
        (Decides.EXECUTION, "nothing"),
        (Decides.LABEL, "nothing"),
        (Decides.ROLLOUTS | Decides.VALIDATION, "nothing"),
        (Decides.ORDER, "layout"),
        (Decides.ORDER | Decides.BITS, "other"),
        (Decides.ROLLOUTS, "other"),
        (Decides.TRAINING, "other"),
        (Decides.BITS | Decides.STATE, "other"),
        (Decides.OUTSIDE | Decides.LABEL, "other"),
    ],
)
def test_a_change_is_of_the_gravest_kind_that_its_key_may_cause(facts: Decides, kind: str) -> None:
    assert change_kind(facts) == kind


def test_changes_are_sorted_by_kind_and_keys_of_one_side_alone_are_among_them() -> None:
    facts = {"name": Decides.LABEL, "tp": Decides.ORDER, "lr": Decides.TRAINING, "env.A": Decides.OUTSIDE}
    found = find_changes(
        {"name": "a", "tp": 1, "lr": 0.1, "same": 1},
        {"name": "b", "tp": 2, "lr": 0.1, "same": 1, "env.A": "1"},
        facts.__getitem__,
    )
    assert found == Changes(
        neutral=("name",), layout=("tp",), other=("env.A",), has_other_calls=True, has_other_execution=True
    )
    assert found.kind == "other"


@pytest.mark.parametrize(
    ("key", "facts", "has_other_execution"),
    [
        ("parallel.tensor_model_parallel_size", Decides.ORDER, False),
        ("training.use_distributed_optimizer", Decides.ORDER, True),
        ("training.recompute", Decides.EXECUTION, True),
        ("exp_name", Decides.LABEL, False),
    ],
)
def test_a_reference_has_every_key_of_its_candidate_but_the_layouts(
    key: str, facts: Decides, *, has_other_execution: bool
) -> None:
    found = find_changes({key: 1}, {key: 2}, {key: facts}.__getitem__)
    assert (found.has_other_calls, found.has_other_execution) == (facts is not Decides.LABEL, has_other_execution)


@pytest.mark.parametrize(
    ("facts", "has_other_calls"),
    [
        (Decides.LABEL, False),
        (Decides.NOTHING, False),
        (Decides.EXECUTION, True),
        (Decides.ORDER, True),
        (Decides.BITS, True),
    ],
)
def test_a_change_of_how_training_is_executed_may_issue_other_collectives(
    facts: Decides, *, has_other_calls: bool
) -> None:
    found = find_changes({"key": 1, "same": 1}, {"key": 2, "same": 1}, {"key": facts}.__getitem__)
    assert found.has_other_calls is has_other_calls
