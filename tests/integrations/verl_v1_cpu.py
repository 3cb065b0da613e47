"""What trainer V1 needs besides ``verl_cpu``: samples that differ, and state the weights that sampled them.

A worker writes the number of the weights that it takes to a file beside ``VERL_COUNTS``; clients in other processes
read it.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

from verl_cpu import Client, Worker  # beside it


def _version_file() -> Path:
    return Path(os.environ["VERL_COUNTS"]).with_name("version")


_generate: Any = Client.generate
_update_weights: Any = Worker.update_weights


async def generate(self: Any, request_id: str, **options: Any) -> Any:
    version = int(_version_file().read_text(encoding="utf-8"))
    # No two runs, and no two rollouts of a prompt, are alike.
    output = await _generate(self, request_id, **{**options, "priority": random.SystemRandom().randrange(2**31)})
    output.extra_fields.update(dict.fromkeys(("global_steps", "min_global_steps", "max_global_steps"), version))
    return output


async def update_weights(self: Any, weights: Any, **options: Any) -> None:
    await _update_weights(self, weights, **options)
    _version_file().write_text(str(options["global_steps"]), encoding="utf-8")


Client.generate = generate
Worker.update_weights = update_weights
