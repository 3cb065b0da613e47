"""The fake training of ``tests.command_program``, which says that it starts and may wait: for tests with clusters.

``python held_training.py FOLDER ARGUMENTS...``: each start of a run adds its output folder to ``FOLDER/starts``, and a
run whose folder is named as a file in ``FOLDER/hold`` waits until that file is gone. The rest is the fake training's.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path

from mock_scheduler.config.instruments import RUN_FILE_VARIABLE

folder = Path(sys.argv[1])
name = Path(os.environ[RUN_FILE_VARIABLE]).parent.name
with (folder / "starts").open("a") as file:
    file.write(f"{name}\n")
while (folder / "hold" / name).exists():
    time.sleep(0.05)
sys.argv = ["fake_training.py", *sys.argv[2:]]
runpy.run_module("tests.command_program.fake_training", run_name="__main__")
