"""What this adapter is for, and the revisions that it was tried with; plain data for whatever lists the adapters."""

from __future__ import annotations

DECLARATION = {
    "name": "slime",
    # None of the family is on PyPI: slime there is another project.
    "distribution": None,
    "tried": (),
    "seam": "--rollout-function-path",
    "suppressed": "engines, their GPUs, weight updates, evaluation (--debug-train-only)",
    "page": "frameworks/slime.md",
}
#: Revisions whose own classes were tried, and how; no whole run of them was.
TRIED_FROM_SOURCE = {
    "slime 0.3.1 (624b824a8, 2026-08-21)": "Sample, outputs and data source by rollout function, codec and files",
    "miles (31f1ca961, 2026-08-21)": "Sample by codec and files",
}
