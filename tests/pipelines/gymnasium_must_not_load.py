"""An entry of an alignment candidate: the pipeline itself, and a failure if it ever loaded gymnasium."""

from __future__ import annotations

import sys

from pipelines.agentic import main

if __name__ == "__main__":
    exit_code = main()
    if any(name == "gymnasium" or name.startswith("gymnasium.") for name in sys.modules):
        sys.exit("gymnasium was imported")
    sys.exit(exit_code)
