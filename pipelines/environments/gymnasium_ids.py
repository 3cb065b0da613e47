"""Registers every environment under its gymnasium id, for ``gymnasium.make`` in this process.

Importing this module registers them and imports gymnasium; so does an id with the module's name before it:
``gymnasium.make("pipelines.environments.gymnasium_ids:mock_scheduler/Sokoban-v0", settings=..., max_steps=20)``.
"""

from __future__ import annotations

import gymnasium

from pipelines.environments.kinds import ENVIRONMENT_KINDS

for _kind in ENVIRONMENT_KINDS.values():
    gymnasium.register(id=_kind.gymnasium_id, entry_point=_kind.entry_point)
