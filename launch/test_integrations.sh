#!/usr/bin/env bash
# The tests with programs that others wrote (tests/integrations), in .venv-integrations: Python 3.12, since the wheel of
# megatron-core that holds megatron.training has no build for an older one. A CUDA build of torch takes 5 GB there,
# TransformerEngine's and Megatron-Bridge's Python 0.2 GB, SkyRL's and AReaL's with what they import 0.9 GB, ms-swift's
# 0.4 GB. megatron/rl is in no wheel: its test runs where $MEGATRON_LM names Megatron-LM's sources. vLLM and TRL have
# .venv-engines, of Python 3.11: 3.4 GB (vLLM alone took 5 minutes). verl has .venv-verl, of Python 3.11: 2.0 GB,
# 5 minutes, and 11 minutes for its test of trainer V0; it takes no transformers that vLLM takes. NeMo-RL is in no wheel:
# where $NEMO_RL_SOURCE names its sources, what it imports has .venv-nemo, of Python 3.11 as well.
#   launch/test.sh --integrations            all of them
#   launch/test.sh --integrations ARGS...    arguments go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The first that is Python 3.12: $PYTHON, python3.12 and python3 on the path, the newest of pyenv.
candidates=("${PYTHON:-}" python3.12 python3)
while read -r found; do
    candidates+=("$found")
done < <(compgen -G "${PYENV_ROOT:-$HOME/.pyenv}/versions/3.12.*/bin/python" | sort --version-sort --reverse)
python=""
for candidate in "${candidates[@]}"; do
    if [[ -n "$candidate" ]] && "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
        python="$candidate"
        break
    fi
done
if [[ -z "$python" ]]; then
    echo "Python 3.12 is needed for the tests with other programs, and none was found: not \$PYTHON (${PYTHON:-not set})," \
        "python3.12 or python3 on the path, nor pyenv's. Set PYTHON=/path/to/python3.12" >&2
    exit 5
fi

VENV=.venv-integrations PYTHON="$python" bash launch/setup_venv.sh

# Apart, since Megatron-core takes a TransformerEngine that it finds for one that has its kernels; without what these
# packages ask for and nothing here imports.
for kind in built text rl swift; do
    packages=".venv-integrations/$kind"
    wanted="$(sha256sum "tests/integrations/${kind}_requirements.txt")"
    if [[ ! -f "$packages/.requirements.sha256" || "$(<"$packages/.requirements.sha256")" != "$wanted" ]]; then
        rm -rf "$packages"
        .venv-integrations/bin/python -m pip install --quiet --quiet --disable-pip-version-check --no-deps \
            --target "$packages" -r "tests/integrations/${kind}_requirements.txt"
        printf '%s\n' "$wanted" >"$packages/.requirements.sha256"
    fi
done

# Ray and submitit are installed with what they need: nothing there takes another way because they are found.
wanted="$(sha256sum tests/integrations/ray_requirements.txt)"
stamp=.venv-integrations/.ray.sha256
if [[ ! -f "$stamp" || "$(<"$stamp")" != "$wanted" ]]; then
    .venv-integrations/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
        -r tests/integrations/ray_requirements.txt
    printf '%s\n' "$wanted" >"$stamp"
fi

# The CPU builds of torch and vLLM are there for Python 3.11 alone. $ENGINE_PYTHON, else as above.
candidates=("${ENGINE_PYTHON:-}" python3.11)
while read -r found; do
    candidates+=("$found")
done < <(compgen -G "${PYENV_ROOT:-$HOME/.pyenv}/versions/3.11.*/bin/python" | sort --version-sort --reverse)
engine_python=""
for candidate in "${candidates[@]}"; do
    if [[ -n "$candidate" ]] && "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
        engine_python="$candidate"
        break
    fi
done

# is_made FOLDER FILES...: it was made for these files, or cannot be made for want of Python 3.11
is_made() {
    [[ -z "$engine_python" ]] && return
    [[ -f "$1/.requirements.sha256" && "$(<"$1/.requirements.sha256")" == "$(sha256sum "${@:2}")" ]]
}

# make FOLDER ARGS...: anew; ARGS go to pip install
make() {
    rm -rf "$1"
    "$engine_python" -m venv "$1"
    "$1/bin/python" -m pip --quiet --quiet --disable-pip-version-check install "${@:2}"
}

requirements=tests/integrations/engine_requirements.txt
if ! is_made .venv-engines "$requirements"; then
    make .venv-engines -r "$requirements"
    # vLLM asks for what is linked to CUDA here.
    .venv-engines/bin/python -m pip --quiet --disable-pip-version-check uninstall --yes torchvision torchaudio torchcodec
    sha256sum "$requirements" >.venv-engines/.requirements.sha256
fi

requirements=tests/integrations/verl_requirements.txt
if ! is_made .venv-verl "$requirements" setup.py; then
    make .venv-verl -r "$requirements" -e . # with this project itself: verl finds plugins among what is installed
    sha256sum "$requirements" setup.py >.venv-verl/.requirements.sha256
fi

requirements=tests/integrations/nemo_rl_requirements.txt
if [[ -n "${NEMO_RL_SOURCE:-}" ]] && ! is_made .venv-nemo "$requirements" setup.py; then
    make .venv-nemo -r "$requirements" -e .
    sha256sum "$requirements" setup.py >.venv-nemo/.requirements.sha256
fi

selection=("$@")
exec .venv-integrations/bin/python -m pytest -m integrations "${selection[@]:-tests/integrations}"
