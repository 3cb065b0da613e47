"""Environments and how they are played: ``custom_envs`` and the environment managers; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag, model_validator

from mock_scheduler.config.base import (
    ConfigSection,
    Decides,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    union_tag,
)
from pipelines.config.engine import GeneratingArgs


class EnvManagerConfig(ConfigSection):
    """Holds the environments: ``num_env_groups`` groups, each of ``group_size`` environments with one seed.

    ``num_env_workers``: workers to step a replica's environments (``env_workers``); 0 steps them in its own process.
    """

    decides: ClassVar = Decides.ROLLOUTS

    # A checkpoint has each group's episodes so far, and their seeds follow from the number of groups.
    num_env_groups: Annotated[PositiveInt, Decides.ROLLOUTS | Decides.STATE] = 16
    """Groups."""
    group_size: Annotated[PositiveInt, Decides.ROLLOUTS | Decides.STATE] = 8
    """Environments of a group, which share a seed."""
    tags: list[str] = Field(default=["FrozenLake"], min_length=1)
    """Keys of ``custom_envs``; groups are shared out over them."""
    num_env_workers: Annotated[NonNegativeInt, Decides.EXECUTION] = 0
    generating_args: GeneratingArgs | None = None
    """``null``: those of ``actor_infer``."""


class EnvWorkersConfig(ConfigSection):
    """The workers that step environments; each manager's ``num_env_workers`` is their number in a replica.

    ``type``: ``process``: of this machine; ``ray``: actors of a Ray cluster, wherever it puts them.
    ``address``: ray: ``HOST:PORT`` of the cluster; ``null``: the one in the variable RAY_ADDRESS.
    ``num_cpus``: ray: CPUs that the cluster keeps for each worker; 0 keeps none.
    ``startup_timeout_s``: ray: how long a worker may take to start, and to find a place.
    """

    # Seeds and identities alone decide rows, wherever and by however many workers they are played.
    decides: ClassVar = Decides.EXECUTION

    type: Literal["process", "ray"] = "process"
    address: str | None = None
    num_cpus: NonNegativeFloat = 1.0
    startup_timeout_s: PositiveInt = 120


def env_workers_problems(workers: EnvWorkersConfig, managers: Mapping[str, EnvManagerConfig]) -> list[str]:
    """Lists keys without effect, and managers without a worker; for a run that samples."""
    if workers.type == "ray":
        return [
            f"{key}.num_env_workers 0 with env_workers.type ray: there would be no actor; set it to 1 or more"
            for key, manager in managers.items()
            if not manager.num_env_workers
        ]
    changed = _changed(workers, ("address", "num_cpus", "startup_timeout_s"))
    return [f"env_workers.{changed} has no effect with env_workers.type process; leave it out"] if changed else []


class FrozenLakeEnvConfig(ConfigSection):
    """Holds Gymnasium's FrozenLake: a fixed map by name, or else random maps of ``size`` with frozen fraction ``p``.

    ``held_out_fraction``: the part of all maps, by their content, for validation alone and never for training; 0 makes
    no difference between the two.
    """

    map_name: Literal["4x4"] | None = "4x4"
    """A fixed map; ``null``: random maps."""
    size: Annotated[int, Field(ge=2, le=8)] = 4
    """Edge of random maps."""
    p: Fraction = 0.8
    """Share of frozen fields of random maps."""
    is_slippery: bool = False
    """Moves may slip to a side."""
    format_penalty: float = -0.01
    """Reward of a turn without an action."""
    held_out_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0

    @model_validator(mode="after")
    def _check_named_map(self) -> FrozenLakeEnvConfig:
        if self.map_name is None:
            return self
        changed = _changed(self, ("size", "p"))
        if changed:
            raise ValueError(
                f"map_name {self.map_name} is a map of its own, on which {changed} would have no effect; set "
                f"map_name: null for random maps of size {self.size}"
            )
        if self.held_out_fraction > 0:
            raise ValueError(
                f"held_out_fraction {self.held_out_fraction} needs random maps, and map_name {self.map_name} is one "
                "map; set map_name: null, or held_out_fraction: 0"
            )
        return self


class SokobanEnvConfig(ConfigSection):
    """Holds seeded, solvable Sokoban puzzles on a board of ``size`` × ``size``, walls around it included.

    Rewards are gym-sokoban's: ``step_penalty`` for every turn, ``box_reward`` for a box that comes to a target, minus
    it for one that leaves it, ``solved_reward`` where all boxes are on targets; ``sparse_reward`` gives 1 for a solved
    puzzle and nothing else. ``format_penalty`` is added for a turn without an action, in any case. ``min_solution`` and
    ``max_solution``: moves of the shortest solution, the least and the most. A board smaller than 5 has no puzzle.
    ``show_walls_around``: tokens for the outer wall, too, though it never changes. ``held_out_fraction``: as of
    FrozenLake.
    """

    size: Annotated[int, Field(ge=5, le=10)] = 6
    """Edge of the board, walls included; at least 5."""
    num_boxes: Annotated[int, Field(ge=1, le=4)] = 1
    """Boxes, and targets."""
    min_solution: PositiveInt = 1
    """Least moves of the shortest solution."""
    max_solution: PositiveInt = 10
    """Most moves of the shortest solution."""
    step_penalty: float = -0.1
    """Reward of every turn."""
    box_reward: float = 1.0
    """Reward of a box that comes to a target; minus it for one that leaves."""
    solved_reward: float = 10.0
    """Reward where all boxes are on targets."""
    sparse_reward: bool = False
    """1 for a solved puzzle, and nothing else."""
    show_walls_around: bool = True
    format_penalty: float = -0.15
    """Added for a turn without an action."""
    held_out_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0

    @model_validator(mode="after")
    def _check_solution(self) -> SokobanEnvConfig:
        if self.min_solution > self.max_solution:
            raise ValueError(f"min_solution {self.min_solution} is larger than max_solution {self.max_solution}")
        return self

    @model_validator(mode="after")
    def _check_rewards(self) -> SokobanEnvConfig:
        changed = _changed(self, ("step_penalty", "box_reward", "solved_reward"))
        if self.sparse_reward and changed:
            raise ValueError(
                f"sparse_reward gives 1 for a solved puzzle and nothing else, so that {changed} would have no effect; "
                "set sparse_reward: false, or leave the other rewards out"
            )
        return self


class ReasoningGymEnvConfig(ConfigSection):
    """A task of reasoning-gym. ``dataset``: its name there; ``dataset_config``: its settings, without seed and size.

    ``system_prompt``: a message before the question. ``answer_tag``: the answer is the last text between
    ``<answer_tag>`` and ``</answer_tag>``; unset, the whole text is. ``held_out_fraction``: the part of all questions,
    by their text, for validation alone.
    """

    dataset: str
    """The task's name in reasoning-gym."""
    dataset_config: dict[str, Any] = Field(default={})
    """The task's settings, without seed and size."""
    system_prompt: str | None = None
    answer_tag: Annotated[str | None, Field(min_length=1)] = None
    held_out_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1


class TextArenaEnvConfig(ConfigSection):
    """Holds a game of textarena for one player. ``game``: its id there; ``game_config``: arguments of its own.

    ``system_prompt``, ``held_out_fraction``: as of reasoning-gym; episodes are held out by their first text, or by
    their seed where that text never differs.
    """

    game: str
    """The game's id in textarena."""
    game_config: dict[str, Any] = Field(default={})
    """Arguments of the game."""
    system_prompt: str | None = None
    held_out_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1

    @property
    def name(self) -> str:
        """Names the game in messages."""
        return self.game


class GymnasiumTextEnvConfig(ConfigSection):
    """Holds an environment of gymnasium with texts as observations and actions.

    ``env_id``: as ``gymnasium.make`` takes it, ``MODULE:NAME`` where a module of the user's registers it;
    ``env_kwargs``: its arguments. The others are as of ``TextArenaEnvConfig``.
    """

    env_id: str
    """As ``gymnasium.make`` takes it; ``MODULE:NAME`` where a module of yours registers it."""
    env_kwargs: dict[str, Any] = Field(default={})
    """Its arguments."""
    system_prompt: str | None = None
    """As of textarena."""
    held_out_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    """As of textarena."""

    @property
    def name(self) -> str:
        """Names the environment in messages."""
        return self.env_id


def _changed(section: ConfigSection, names: Sequence[str]) -> str:
    """Lists the keys that differ from their defaults, as ``size 3, p 0.9``."""
    values = {name: getattr(section, name) for name in names}
    fields = type(section).model_fields
    return ", ".join(f"{name} {value}" for name, value in values.items() if value != fields[name].default)


ENV_CONFIGS: Mapping[
    str,
    type[FrozenLakeEnvConfig | SokobanEnvConfig | ReasoningGymEnvConfig | TextArenaEnvConfig | GymnasiumTextEnvConfig],
] = {
    "frozen_lake": FrozenLakeEnvConfig,
    "sokoban": SokobanEnvConfig,
    "reasoning_gym": ReasoningGymEnvConfig,
    "textarena": TextArenaEnvConfig,
    "gymnasium_text": GymnasiumTextEnvConfig,
}

#: The environments that read and write text; the others have boards and actions.
TEXT_ENV_TYPES = frozenset({"reasoning_gym", "textarena", "gymnasium_text"})


#: The environments that know the right answer to their questions, for the supervised start.
ANSWERING_TYPES = frozenset({"reasoning_gym"})


class _SettingsOfType(dict[str, Any]):
    """An ``env_config`` as the user wrote it, with the type it belongs to."""

    env_type: str = ""


def _type_of(settings: Any) -> str | None:  # noqa: ANN401 - whatever the user wrote
    if isinstance(settings, _SettingsOfType):
        return union_tag(settings.env_type)
    return next((union_tag(name) for name, section in ENV_CONFIGS.items() if isinstance(settings, section)), None)


EnvConfig: TypeAlias = Annotated[
    Annotated[FrozenLakeEnvConfig, Tag(union_tag("frozen_lake"))]
    | Annotated[SokobanEnvConfig, Tag(union_tag("sokoban"))]
    | Annotated[ReasoningGymEnvConfig, Tag(union_tag("reasoning_gym"))]
    | Annotated[TextArenaEnvConfig, Tag(union_tag("textarena"))]
    | Annotated[GymnasiumTextEnvConfig, Tag(union_tag("gymnasium_text"))],
    Discriminator(_type_of),
]


class CustomEnvConfig(ConfigSection):
    """Holds one tag of ``custom_envs``: the environment's type, its turn limit and its own settings (by its type)."""

    env_type: Literal["frozen_lake", "sokoban", "reasoning_gym", "textarena", "gymnasium_text"] = "frozen_lake"
    """Kind of environment."""
    max_steps: PositiveInt = 10
    """Most turns of an episode."""
    env_config: EnvConfig = FrozenLakeEnvConfig()

    @model_validator(mode="before")
    @classmethod
    def _read_env_config(cls, values: Any) -> Any:  # noqa: ANN401 - whatever the user wrote
        # Tagged with the named type, so an unknown key is reported as unknown to this type.
        env_type = values.get("env_type", "frozen_lake") if isinstance(values, Mapping) else None
        if env_type not in ENV_CONFIGS:
            return values
        settings = values.get("env_config", {})
        if isinstance(settings, Mapping):
            settings = _SettingsOfType(settings)
            settings.env_type = str(env_type)
        return {**values, "env_config": settings}

    @model_validator(mode="after")
    def _check_settings(self) -> CustomEnvConfig:
        if not isinstance(self.env_config, ENV_CONFIGS[self.env_type]):
            raise ValueError(f"env_config has the settings of another type than env_type {self.env_type}")
        return self


def check_held_out(envs: Mapping[str, CustomEnvConfig], *, train_tags: Sequence[str], val_tags: Sequence[str]) -> None:
    """Refuses a validation on held-out layouts that training may play.

    Raises:
        ValueError: names both tags with their fractions, and the remedy.
    """
    # A layout is held out where its digest is in the lowest held_out_fraction of all, so the layouts held out by a
    # smaller fraction are among the ones of a larger fraction.
    for val_tag in val_tags:
        for train_tag in train_tags:
            trained, validated = envs[train_tag], envs[val_tag]
            ours, theirs = trained.env_config.held_out_fraction, validated.env_config.held_out_fraction
            if trained.env_type == validated.env_type and theirs > ours:
                raise ValueError(
                    f"custom_envs.{val_tag}.env_config.held_out_fraction {theirs} of val_env_manager.tags is larger "
                    f"than {ours}, that of {train_tag} of train_env_manager.tags and of the same env_type "
                    f"{trained.env_type}: training would play some of the layouts that validation calls held out; set "
                    f"both to the same fraction, or that of {val_tag} to 0 to validate on all layouts"
                )
