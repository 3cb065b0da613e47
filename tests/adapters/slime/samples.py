"""Stand-ins for slime's and miles' classes, after their fields: ``slime/utils/types.py`` of August 2026."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


@dataclass
class SpecInfo:
    spec_accept_token_num: int = 0
    completion_token_num: int = 0


@dataclass
class Sample:
    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: Any = None
    loss_mask: Any = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: Any = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    teacher_log_probs: Any = None

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: SpecInfo = field(default_factory=SpecInfo)

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "status": self.status.value, "spec_info": dict(self.spec_info.__dict__)}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Sample:
        given = {**data, "status": Sample.Status(data["status"]), "spec_info": SpecInfo(**data["spec_info"])}
        known = {name: value for name, value in given.items() if name in Sample.__dataclass_fields__}
        sample = Sample(**known)
        for name, value in given.items():
            if name not in known:
                setattr(sample, name, value)
        return sample


def sample(**fields: Any) -> dict[str, Any]:
    """The fields of a sample of two prompt tokens and three response tokens."""
    given = {
        "group_index": 0,
        "index": 0,
        "tokens": [5, 6, 7, 8, 9],
        "response_length": 3,
        "response": "abc",
        "rollout_log_probs": [-0.1, -0.2, -0.3],
        "reward": 1.0,
        "status": Sample.Status.COMPLETED,
        **fields,
    }
    known = {name: value for name, value in given.items() if name in Sample.__dataclass_fields__}
    made = Sample(**known)
    for name in given.keys() - known.keys():
        setattr(made, name, given[name])
    return made.to_dict()
