#!/usr/bin/env bash
# Make .venv and install the pinned requirements and this project in it. Does nothing where that is done already.
# VENV=FOLDER, in this checkout, is made instead of .venv.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/${VENV:-.venv}"
stamp="$venv/.requirements.sha256"
python="${PYTHON:-python3}"

# What was installed, from which files, and for which folder: a copied or moved .venv is installed anew.
wanted="$(cd "$root" && { sha256sum requirements.txt setup.py && printf '%s\n' "$root"; } | sha256sum)"
if [[ -f "$stamp" && -x "$venv/bin/mock-scheduler" && "$(<"$stamp")" == "$wanted" ]]; then
    exit 0
fi

if [[ ! -x "$venv/bin/python" ]]; then
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "Python 3.11 or newer is needed, found $("$python" --version); set PYTHON=/path/to/python3.11" >&2
        exit 5
    fi
    echo "making $venv"
    "$python" -m venv "$venv" || exit 5
fi

# Twice --quiet: errors only, without what pip says of indexes and locations that it leaves out.
pip=("$venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check)
# pip reads its own settings: PIP_EXTRA_INDEX_URL can name an index of CPU builds of torch, which are far smaller.
echo "installing requirements.txt (a few minutes the first time)"

# pip's own code for a failure, 1, is a verdict here.
"${pip[@]}" -r "$root/requirements.txt" || exit 5
"${pip[@]}" --no-deps --no-build-isolation -e "$root" || exit 5
printf '%s\n' "$wanted" >"$stamp"
