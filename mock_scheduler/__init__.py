"""Record a rollout once; replay it under any layout, kernel or batching; prove whether training numerics moved.

Contract: importing this package imports neither torch nor Hydra, so that light commands stay light.
"""

from __future__ import annotations

__version__ = "0.1.0"
