"""An entry of an alignment candidate: the pipeline itself, and a failure if it loaded what only playing needs."""

from __future__ import annotations

import sys

from pipelines.agentic import main

_FORBIDDEN = ("gymnasium", "ray", "reasoning_gym", "tokenizers", "transformers", "pipelines.rollout.engines")

if __name__ == "__main__":
    exit_code = main()
    loaded = sorted(name for name in _FORBIDDEN if any(f"{module}.".startswith(f"{name}.") for module in sys.modules))
    if loaded:
        sys.exit(f"{', '.join(loaded)}: imported")
    sys.exit(exit_code)
