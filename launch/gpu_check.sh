#!/usr/bin/env bash
# Answer on a machine with a GPU, in ten minutes and without a network, what no other machine can: docs/gpu.md.
#   launch/gpu_check.sh [--output FOLDER] [--wheels FOLDER] [--only CHECK,...] [--limit SECONDS]
# Python is $PYTHON, else .venv's, else python3. Exit codes: 0 all held, 1 a check failed, 4 not all was run, 5 bad input.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-}"
if [[ -z "$python" ]]; then
    python=python3
    [[ -x "$root/.venv/bin/python" ]] && python="$root/.venv/bin/python"
fi
if ! command -v "$python" >/dev/null; then
    echo "gpu_check: no Python: $python cannot be run; set PYTHON=/path/to/python3.12, the one that has torch" >&2
    exit 5
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "gpu_check: Python 3.11 or newer is needed, and $python is not: $("$python" --version 2>&1);" \
        "set PYTHON=/path/to/python3.12" >&2
    exit 5
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -P -m benchmarks.gpu_check "$@"
