#!/usr/bin/env bash
# Write into README and docs what a script can know, or build the site of the same pages.
#   launch/docs.sh                     references that follow from definitions: commands, keys, results, API, settings
#   launch/docs.sh --runs DIR [PAGE…]  and what commands print: the pages' commands run in DIR, for about half an hour
#   launch/docs.sh --check […]         writes nothing; says what would change, and exits with 1 where anything would
#   launch/docs.sh --site DIR          the site, with search, in DIR; a broken link or anchor fails
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup_venv.sh
if [[ "${1:-}" == "--site" ]]; then
    if [[ $# -ne 2 ]]; then
        echo "usage: launch/docs.sh --site DIR" >&2
        exit 5
    fi
    # An environment of its own: the project imports nothing of it.
    wanted="$(sha256sum docs/site/requirements.txt)"
    if [[ ! -f .venv-docs/.requirements.sha256 || "$(<.venv-docs/.requirements.sha256)" != "$wanted" ]]; then
        rm -rf .venv-docs
        .venv/bin/python -m venv .venv-docs
        .venv-docs/bin/python -m pip install --quiet --quiet --disable-pip-version-check -r docs/site/requirements.txt ||
            exit 5
        printf '%s\n' "$wanted" >.venv-docs/.requirements.sha256
    fi
    # Quiet, a process for each core; every warning, such as a link that leads nowhere, is an error.
    exec .venv-docs/bin/python -m sphinx --quiet --fail-on-warning --jobs auto --conf-dir docs/site . "$2"
fi
exec .venv/bin/python -m tests.docs.made "$@"
