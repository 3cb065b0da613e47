"""Shows one recorded trajectory to a person: its prompt, then responses and the environment's answers, in turn.

Contract: prints everything in the row; token ids always, texts where a vocabulary is known. A stretch of
response tokens is a turn where the row has as many turns as stretches; else turns are listed apart from the tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from rich.text import Text

from mock_scheduler.batch import RolloutBatch, Trajectory
from mock_scheduler.batch.columns import Ragged, RowValue
from mock_scheduler.display.console import Console
from mock_scheduler.display.terminal import print_wrapped
from mock_scheduler.errors import RecordingError
from mock_scheduler.recording.inspection.diff_fields import show_value
from mock_scheduler.recording.inspection.vocabulary import Vocabulary
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.support.digests import JSON, canonical_json
from mock_scheduler.support.text import count_of, printable

_NUM_VALUES = 64
_NUMBER = re.compile(r"-?[0-9]{1,18}")
_LOGPROBS = "rollout_logprobs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Consecutive tokens of one origin; ``logprobs``: of a response, ``None`` where none were recorded."""

    is_response: bool
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] | None


def find_row(batch: RolloutBatch, row: str, *, where: str) -> int:
    """Finds the number of a row, given as a number (``-1``: the last), as an identity (``/turn 0`` may be left out),
    or as ``best`` or ``worst``: the first with the highest or lowest reward.

    ``where`` names the step in the ``RecordingError`` for an unknown row.
    """
    if row in ("best", "worst") and len(batch):
        rewards = batch.rewards.tolist()
        return rewards.index(max(rewards) if row == "best" else min(rewards))
    if _NUMBER.fullmatch(row) and -len(batch) <= int(row) < len(batch):
        return int(row) % len(batch)
    names = [str(identity) for identity in batch.identities]
    for name in (row, f"{row}/turn 0"):
        if name in names:
            return names.index(name)
    held = f"rows 0 to {len(batch) - 1}, {printable(names[0])} to {printable(names[-1])}" if names else "no rows"
    raise RecordingError(f"row {row!r} is not in {where}; it holds {held}")


def print_trajectory(
    batch: RolloutBatch, row: int, console: Console, *, where: str, vocabulary: Vocabulary | None
) -> None:
    """Print one row of a batch; ``where`` names its step."""
    trajectory = batch.rows()[row]
    stretches = list(split_stretches(trajectory, has_logprobs=has_logprobs(batch)))
    num_turns, num_response = len(trajectory.turn_rewards), len(trajectory.rollout_logprobs)
    console.print(Text(f"{where}, row {row} of {len(batch)}"), soft_wrap=True)
    tag = f"  {trajectory.tag}" if trajectory.tag else ""
    console.print(Text.assemble((str(trajectory.identity), "bold"), tag), soft_wrap=True)
    console.print(
        f"{trajectory.termination.name.lower()}, reward {show_value(batch.rewards[row])}, "
        f"{count_of(num_turns, 'turn')}, {count_of(len(trajectory.tokens), 'token')}, {num_response} of them sampled",
        highlight=False,
    )
    by_stretch = num_turns == sum(stretch.is_response for stretch in stretches)
    if not by_stretch and num_turns:
        console.print("turns, not told apart in the tokens:")
        for turn in range(num_turns):
            print_wrapped(console, Text(f"turn {turn}  {_describe_turn(trajectory, turn)}"), indent=2)
    responses = 0
    for number, stretch in enumerate(stretches):
        console.print()
        print_wrapped(console, _title(trajectory, stretch, number=number, turn=responses if by_stretch else None))
        responses += stretch.is_response
        _print_tokens(stretch, console, vocabulary)
    _print_extras(trajectory, console)


def trajectory_to_json(batch: RolloutBatch, row: int, *, where: str, vocabulary: Vocabulary | None) -> dict[str, JSON]:
    """Returns one row as JSON values: ``stretches`` of tokens in turn, with ``text`` where a vocabulary is known."""
    trajectory = batch.rows()[row]
    stretches: list[JSON] = [
        {
            "is_response": stretch.is_response,
            "tokens": list(stretch.tokens),
            "logprobs": None if stretch.logprobs is None else list(stretch.logprobs),
            "text": None if vocabulary is None else vocabulary.decode(stretch.tokens),
        }
        for stretch in split_stretches(trajectory, has_logprobs=has_logprobs(batch))
    ]
    return {
        "format_version": 1,
        "where": where,
        "row": row,
        "num_rows": len(batch),
        "identity": str(trajectory.identity),
        "tag": trajectory.tag,
        "termination": trajectory.termination.name.lower(),
        "reward": float(batch.rewards[row]),
        "turn_rewards": [float(reward) for reward in trajectory.turn_rewards],
        "prompt_length": trajectory.prompt_length,
        "stretches": stretches,
    }


def has_logprobs(batch: RolloutBatch) -> bool:
    """Whether the rollout's logprobs were recorded: a framework's batch may lack them, and then holds zeros here.

    It says so in its meta (``mock_scheduler.adapters.padded``).
    """
    about = batch.meta.get("padded")
    absent = about.get("absent") if isinstance(about, Mapping) else None
    return not (isinstance(absent, Sequence) and _LOGPROBS in absent)


def split_stretches(trajectory: Trajectory, *, has_logprobs: bool = True) -> Iterator[Stretch]:
    """The prompt, where there is one, then response and environment tokens by turns."""
    tokens, length = trajectory.tokens.tolist(), trajectory.prompt_length
    if length:
        yield Stretch(is_response=False, tokens=tuple(tokens[:length]), logprobs=None)
    logprobs = iter(trajectory.rollout_logprobs.tolist())
    rest = zip(trajectory.response_mask.tolist()[length:], tokens[length:], strict=True)
    for is_response, pairs in groupby(rest, key=lambda pair: pair[0]):
        part = tuple(token for _, token in pairs)
        sampled = tuple(next(logprobs) for _ in part) if is_response else ()
        is_known = is_response and has_logprobs
        yield Stretch(is_response=is_response, tokens=part, logprobs=sampled if is_known else None)


def _title(trajectory: Trajectory, stretch: Stretch, *, number: int, turn: int | None) -> Text:
    count = count_of(len(stretch.tokens), "token")
    if not stretch.is_response:
        is_prompt = number == 0 and trajectory.prompt_length
        return Text.assemble(("prompt" if is_prompt else "environment", "bold"), f"  {count}")
    logprob = _describe_logprobs(stretch.logprobs)
    if turn is None:
        return Text.assemble(("response", "bold green"), f"  {count}, {logprob}")
    return Text.assemble((f"turn {turn}", "bold green"), f"  {count}, {logprob}, {_describe_turn(trajectory, turn)}")


def _describe_logprobs(logprobs: Sequence[float] | None) -> str:
    if logprobs is None:
        return "logprobs not recorded"
    total = math.fsum(logprobs)
    return f"logprob {total:.4f} (mean {total / len(logprobs):.4f})"


def _describe_turn(trajectory: Trajectory, turn: int) -> str:
    reward, version = show_value(trajectory.turn_rewards[turn]), int(trajectory.policy_versions[turn])
    return f"reward {reward}, policy version {version}"


def _print_tokens(stretch: Stretch, console: Console, vocabulary: Vocabulary | None) -> None:
    if vocabulary is not None:
        style = "green" if stretch.is_response else ""
        for line in vocabulary.decode(stretch.tokens).split("\n"):
            print_wrapped(console, Text(line, style=style), indent=2)
    print_wrapped(console, Text(" ".join(map(str, stretch.tokens)), style="dim"), indent=2)


def _print_extras(trajectory: Trajectory, console: Console) -> None:
    if trajectory.extras:
        console.print()
        console.print(Text("extras", style="bold"))
    for name, value in trajectory.extras.items():
        print_wrapped(console, Text(f"{name}  {_describe_value(value)}"), indent=2)


def _describe_value(value: RowValue) -> str:
    if not isinstance(value, torch.Tensor | Ragged):
        return canonical_json(value)
    tensor = value.values if isinstance(value, Ragged) else value
    shown = [show_value(element) for element in tensor.reshape(-1)[:_NUM_VALUES]]
    more = " …" if tensor.numel() > _NUM_VALUES else ""
    ragged = "ragged " if isinstance(value, Ragged) else ""
    return f"{ragged}{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}: {' '.join(shown)}{more}"


def recorded_vocabulary(reader: RecordingReader) -> Vocabulary | None:
    """Read the vocabulary in the recording's provenance, if any."""
    value = reader.manifest.provenance.get("vocabulary")
    if not isinstance(value, Mapping | list):
        return None
    return Vocabulary.from_json(value, source=f"provenance 'vocabulary' of {reader.dump_dir}")
