#!/usr/bin/env bash
# The gate: format, lint, strict types, import layers, tests.
#   launch/test.sh            the fast tests, a worker for each core and two more
#   launch/test.sh --integrations   instead of all that: the tests with programs of others, in an environment of theirs
#   launch/test.sh --all      and the long proofs (marker "all"), which have the machine to themselves, with a floor of coverage
#   launch/test.sh ARGS...    other arguments go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ "${1:-}" == "--integrations" ]]; then
    exec bash launch/test_integrations.sh "${@:2}"
fi
bash launch/setup_venv.sh
unset PYTHONDONTWRITEBYTECODE  # else each of the processes that tests start compiles the library anew

marker=()
selection=()
for argument in "$@"; do
    if [[ "$argument" == "--all" ]]; then
        if .venv/bin/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
            marker=(-m "not integrations")
        else
            marker=(-m "not gpu and not integrations")
        fi
    else
        selection+=("$argument")
    fi
done

coverage=()
if [[ ${#selection[@]} -eq 0 && ${#marker[@]} -ne 0 ]]; then
    coverage=(--cov --cov-report=term:skip-covered --cov-fail-under=80)
fi
workers=()
if [[ ${#selection[@]} -eq 0 && ${#marker[@]} -eq 0 ]]; then
    # In the order of the files, so that those that start processes do not all come last.
    # Two more than cores, since tests wait for processes that they start.
    workers=(--numprocesses "$(($(getconf _NPROCESSORS_ONLN) + 2))" --maxprocesses 8 --dist loadfile --no-loadscope-reorder)
    export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1  # the workers fill the cores
    # Megatron's import wraps functions for torch's compiler, whose own import is a third of all that a process pays to
    # start; of those functions the tests call integer sums alone. The long proofs have the compiler.
    export TORCHDYNAMO_DISABLE=1
fi

.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/lint-imports

# Types are checked while the tests wait for processes that they start; the answer comes last.
types="$(mktemp)"
trap 'rm -f "$types"' EXIT
.venv/bin/mypy >"$types" 2>&1 &
types_check=$!
# Each worker would compile all modules and rewrite all asserts for itself. What fails here fails there too.
[[ ${#workers[@]} -eq 0 ]] || .venv/bin/python -m pytest --collect-only -qq >/dev/null 2>&1 || true
code=0
.venv/bin/python -m pytest "${marker[@]}" "${workers[@]}" "${coverage[@]}" "${selection[@]}" || code=$?
wait "$types_check" || code=$?
cat "$types"
exit "$code"
