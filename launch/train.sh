#!/usr/bin/env bash
# Run a configuration on this machine: launch/train.sh CONFIG_NAME [a.b=c ...] [--config-path DIR]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup_venv.sh
exec .venv/bin/mock-scheduler launch "$@"
