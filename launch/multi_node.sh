#!/usr/bin/env bash
# Run one machine's part of a configuration; start it on every machine, with the same endpoint on machine 0:
#   launch/multi_node.sh CONFIG_NAME --nnodes N --node-rank R --rdzv-endpoint HOST:PORT [a.b=c ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
for option in nnodes node-rank rdzv-endpoint; do
    if ! grep -qE -- "--${option}( |=)" <<<"$* "; then
        echo "usage: launch/multi_node.sh CONFIG_NAME --nnodes N --node-rank R --rdzv-endpoint HOST:PORT [a.b=c ...]" >&2
        exit 5
    fi
done
exec bash launch/train.sh "$@"
