"""An entry of an alignment candidate: the pipeline itself, and a failure if it loaded what environments need."""

from __future__ import annotations

import sys

from pipelines.agentic import main

_FORBIDDEN = ("gymnasium", "reasoning_gym", "tokenizers", "transformers")

if __name__ == "__main__":
    exit_code = main()
    loaded = sorted({name.partition(".")[0] for name in sys.modules} & set(_FORBIDDEN))
    if loaded:
        sys.exit(f"{', '.join(loaded)}: imported")
    sys.exit(exit_code)
