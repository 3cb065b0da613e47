"""Compares debug dumps step by step: ``python -m mock_scheduler.compare_debug_dumps``, as NexRL documents it."""

from __future__ import annotations

import sys

from mock_scheduler.adapters.nexrl.comparison.command import main as main

if __name__ == "__main__":
    sys.exit(main())
