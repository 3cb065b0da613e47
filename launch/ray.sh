#!/usr/bin/env bash
# Run a configuration with its environments in actors of a Ray cluster: launch/ray.sh CONFIG_NAME [a.b=c ...]
#   RAY_ADDRESS=HOST:PORT   uses that cluster; unset, one is started on loopback, and ended with the run
#   RAY_NUM_CPUS=N          CPUs that a started one counts; unset, the machine's
#   VENV=FOLDER             in this checkout, in place of .venv; it needs the extra ray
# Arguments are those of launch/train.sh; the number of actors is train_env_manager.num_env_workers.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup_venv.sh
python="$PWD/${VENV:-.venv}/bin/python"
export RAY_USAGE_STATS_ENABLED=0

if ! "$python" -P -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("ray") is None)'; then
    echo "ray is not installed in $python; $python -m pip install -e '.[ray]'" >&2
    exit 5
fi

# Starts a process that ends with this script, in whatever way that ends.
start_bound() {
    MOCK_SCHEDULER_PARENT_PID=$$ exec "$python" -P -c '
import os, sys
from mock_scheduler.support.processes import end_with_parent
end_with_parent(os.environ)
os.execv(sys.executable, [sys.executable, "-P", "-m", *sys.argv[1:]])' "$@"
}

folder="" head="" run=""
end_all() {
    trap '' TERM INT HUP  # a second one must not leave what the first began to end
    for process in "$run" "$head"; do
        if [[ -n "$process" ]]; then
            kill -TERM "$process" 2>/dev/null || true
            wait "$process" 2>/dev/null || true
        fi
    done
    [[ -z "$folder" ]] || rm -rf "$folder"
}
trap end_all EXIT
trap 'exit 143' TERM
trap 'exit 130' INT
trap 'exit 129' HUP

if [[ -z "${RAY_ADDRESS:-}" ]]; then
    # Sockets are in it, and a socket's path has at most 107 bytes.
    folder="$(mktemp -d /tmp/ray-XXXXXX)"
    # Whoever reaches a cluster runs code in it, so it listens on loopback alone (the variable turns off Ray's other
    # addresses, on Linux too) and asks for a token.
    export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$folder/token"
    (umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$folder/token")
    client_port="$("$python" -P -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
    cpus="${RAY_NUM_CPUS:-$(getconf _NPROCESSORS_ONLN)}"
    start_bound ray.scripts.scripts start --head --block --node-ip-address=127.0.0.1 --port=0 \
        --ray-client-server-port="$client_port" --include-dashboard=false --disable-usage-stats --num-cpus="$cpus" \
        --object-store-memory=100000000 --temp-dir="$folder" >"$folder/head.log" 2>&1 &
    head=$!
    for ((i = 0; i < 600; i++)); do
        [[ -s "$folder/ray_current_cluster" ]] && grep -q "Ray runtime started" "$folder/head.log" && break
        if ! kill -0 "$head" 2>/dev/null; then
            echo "the Ray cluster has not started:" >&2
            tail -n 20 "$folder/head.log" >&2
            exit 5
        fi
        sleep 0.1
    done
    RAY_ADDRESS="$(<"$folder/ray_current_cluster")"
    export RAY_ADDRESS
    echo "a Ray cluster of $cpus CPUs at $RAY_ADDRESS, for this run alone"
fi

code=0
start_bound mock_scheduler.cli launch "$@" ++env_workers.type=ray &
run=$!
wait "$run" || code=$?
run=""
if [[ -n "$head" ]] && ! kill -0 "$head" 2>/dev/null; then
    echo "the Ray cluster of this run has ended by itself; its logs are kept in $folder" >&2
    folder=""
fi
exit "$code"
