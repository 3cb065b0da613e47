"""Prints one recorded episode as a person reads it: the board, the action and its probability, turn by turn.

    python -m pipelines.show_episode RECORDING --config output/run/config.yaml [--mode val] [--step 0] [--row 3]

Without ``--row``, the first episode of the step that was won, or else the first.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from mock_scheduler.batch import RolloutBatch, Termination
from mock_scheduler.config.loading import load_config
from mock_scheduler.errors import ConfigError, MockSchedulerError
from mock_scheduler.recording import RecordingReader
from mock_scheduler.scheduler import RolloutRequest
from pipelines.environments.grid_tokens import GridTokenizer
from pipelines.environments.registry import build_tokenizer


def describe_episode(batch: RolloutBatch, row: int, tokenizer: GridTokenizer) -> Iterator[str]:
    """The lines of one trajectory; raises ``ConfigError`` for a row that the batch does not have."""
    if not 0 <= row < len(batch):
        raise ConfigError(f"row {row} is not in this step; it has rows 0 to {len(batch) - 1}")
    tokens = slice(int(batch.row_offsets[row]), int(batch.row_offsets[row + 1]))
    words = tokenizer.decode(batch.tokens[tokens].tolist())
    is_action = batch.response_mask[tokens].tolist()
    logprobs = iter(batch.rollout_logprobs[batch.response_offsets[row] : batch.response_offsets[row + 1]].tolist())
    rewards = iter(batch.turn_rewards[batch.turn_offsets[row] : batch.turn_offsets[row + 1]].tolist())
    yield f"{batch.identities[row]}  {batch.tags[row]}"
    cells: list[str] = []
    for word, acts in zip(words, is_action, strict=True):
        if acts:
            yield f"    -> {word}  (probability {math.exp(next(logprobs)):.2f}, reward {next(rewards):g})"
        elif ":" in word:
            cells.append(word.split(":", 1)[1])
        elif cells:
            width = math.isqrt(len(cells))
            yield from ("  " + " ".join(cells[start : start + width]) for start in range(0, len(cells), width))
            cells = []
    ending = Termination(int(batch.terminations[row])).name.lower()
    yield f"  {ending}, total reward {float(batch.rewards[row]):g}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one episode; returns the exit code."""
    parser = argparse.ArgumentParser(prog="pipelines.show_episode", description="Print one recorded episode.")
    parser.add_argument("recording", help="the dump_dir of a recorded run")
    parser.add_argument("--config", type=Path, required=True, help="the run's config.yaml")
    parser.add_argument("--mode", choices=("train", "val"), default="train")
    parser.add_argument("--step", type=int, default=0)
    parser.add_argument("--row", type=int, default=None)
    options = parser.parse_args(arguments)
    try:
        config = load_config(options.config.stem, config_path=options.config.parent)
        request = RolloutRequest(
            global_step=options.step, batch_size=config.batch_size(options.mode), mode=options.mode
        )
        batch = RecordingReader(options.recording).load_step(request).batch
        won = (batch.rewards > 0).nonzero().flatten().tolist()
        row = options.row if options.row is not None else (won[0] if won else 0)
        for line in describe_episode(batch, row, build_tokenizer(config)):
            print(line)
    except MockSchedulerError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
